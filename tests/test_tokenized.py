"""Folders of token ids: runs on them learn what runs on their text learn, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import bitnet_cli
from bitnet import process
from bitnet.data import tokenized, tokenizer
from bitnet.data.corpus import DataError
from bitnet.process import sha256

TINY = {"dim": 16, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 24, "max_context": 16}
MODEL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
SHORT = ["--batch", "4", "--steps", "4", "--threads", "1", "--layers-every", "0", "--json"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(150):
        (folder / f"{i}.txt").write_text(f"Document {i} says that {i} and {i} are {i + i}. " * 8, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ids(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    assert bitnet_cli.main(["tokenize", str(folder), "--data", str(text), "--vocab-size", "300"]) == 0
    return folder


def train(out: Path, data: Path, *more: str) -> int:
    words = ["train", "--data", str(data), "--out", str(out), "--set", "vocab_size=300"]
    return bitnet_cli.main([*words, *MODEL, *SHORT, *more])


def test_runs_learn_the_same(text: Path, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit, also after a resume; and evaluations of either text are the same."""
    figures = []
    for name, data in (("text", text), ("ids", ids)):
        capsys.readouterr()
        assert train(tmp_path / name, data) == 0
        figures.append(json.loads(capsys.readouterr().out)["validation"])
    assert figures[0] == figures[1]
    assert not [*(tmp_path / "ids").glob("*.bin")] and len([*(tmp_path / "text").glob("*.bin")]) == 2
    assert bitnet_cli.main(["train", "--resume", "--out", str(tmp_path / "ids"), "--steps", "6"]) == 0
    capsys.readouterr()
    assert bitnet_cli.main(["eval", str(tmp_path / "text"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert bitnet_cli.main(["eval", str(tmp_path / "text"), "--data", str(ids), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected


def test_a_packed_model_is_measured_on_them(
    text: Path, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", ids) == 0
    packed = str(tmp_path / "m.bitnet")
    assert bitnet_cli.main(["export", str(tmp_path / "run"), packed]) == 0
    said = capsys.readouterr().err
    assert "validation text and" in said and "cannot be read" not in said  # which is short
    assert bitnet_cli.main(["eval", packed, "--data", str(ids), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert bitnet_cli.main(["eval", str(tmp_path / "run"), "--data", str(ids), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert found["tokens"] == expected["tokens"] and found["bits_per_byte"] == pytest.approx(
        expected["bits_per_byte"], rel=1e-3  # an int8 head, and a cache of fp16
    )  # fmt: skip
    for source in (packed, str(tmp_path / "run")):
        assert bitnet_cli.main(["eval", source, "--data", str(ids), "--column", "content"]) == 1
        assert "holds token ids, which have no --column" in capsys.readouterr().err
        assert bitnet_cli.main(["eval", source, "--column", "content"]) == 1
        assert "--column has no effect without --data" in capsys.readouterr().err
    other = tmp_path / "other"
    assert bitnet_cli.main(["tokenize", str(other), "--data", str(text), "--tokenizer", "byte"]) == 0
    assert bitnet_cli.main(["eval", packed, "--data", str(other)]) == 1
    assert "token ids of another tokenizer than the model's" in capsys.readouterr().err


def test_what_does_not_fit(text: Path, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert bitnet_cli.main(["tokenize", str(other), "--data", str(text), "--tokenizer", "byte"]) == 0
    assert train(tmp_path / "run", ids, "--tokenizer", str(other / "tokenizer.json")) == 1
    assert "token ids of another tokenizer than the model's; give the text itself" in capsys.readouterr().err
    for option, value, said in (
        ("--validation", "0.2", f"{ids} holds out 0.05 of its documents, and --validation is 0.2; leave that out"),
        ("--column", "content", f"{ids} holds token ids, which have no --column; leave that out, or give the text"),
    ):
        assert train(tmp_path / "run", ids, option, value) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert train(tmp_path / "run", ids, "--tokenizer", "byte") == 1
    assert f"{ids} holds token ids of a tokenizer of its own, and --tokenizer byte asks" in capsys.readouterr().err
    assert train(tmp_path / "run", ids, "--set", "vocab_size=600") == 1
    assert f"{ids} holds token ids of a vocabulary of 300, and vocab_size is 600;" in capsys.readouterr().err
    mix = tmp_path / "mix.toml"
    mix.write_text(f"sources.ids.data = [{json.dumps(str(ids))}]\n[[stages]]\nweights = {{ ids = 1 }}\n")
    words = ["train", "--mixture", str(mix), *MODEL, *SHORT, "--out", str(tmp_path / "run"), "--tokenizer"]
    assert bitnet_cli.main([*words, "char"]) == 1
    assert f"{ids} holds token ids of a tokenizer of its own, and --tokenizer char asks" in capsys.readouterr().err
    assert bitnet_cli.main([*words, "bpe"]) == 0  # it is that
    little = tmp_path / "little"
    assert bitnet_cli.main(["tokenize", str(little), "--data", str(text), "--vocab-size", "9000"]) == 0
    assert train(tmp_path / "less", little, "--set", "vocab_size=9000") == 0  # which the text was too little for
    assert bitnet_cli.main(["tokenize", str(other), "--data", str(text)]) == 1
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), "--validation", "2"]) == 1
    assert "--validation is 2.0, expected" in capsys.readouterr().err
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), "--tokenizer", "words"]) == 1
    assert "tokenizer is 'words', which is not a file, expected" in capsys.readouterr().err


def test_tokens_to_fill_in_the_middle(
    text: Path, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, fim = tmp_path / "fim", ("--fim", "0.5")
    assert bitnet_cli.main(["tokenize", str(made), "--data", str(text), "--vocab-size", "300", "--fim"]) == 0
    assert train(tmp_path / "run", made, *fim) == 0
    assert train(tmp_path / "other", ids, *fim) == 1
    assert "the tokenizer lacks tokens to fill in the middle" in capsys.readouterr().err
    given = ["--tokenizer", str(made / "tokenizer.json"), "--fim"]
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), *given]) == 2
    assert "--fim is for a new tokenizer" in capsys.readouterr().err
    given[2:] = ["--vocab-size", "600"]
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), *given]) == 2
    assert "--vocab-size is for a new tokenizer" in capsys.readouterr().err


def test_damaged_folders(ids: Path, tmp_path: Path) -> None:
    """A folder that is not one of token ids, or has changed, is named."""
    assert tokenized.named([str(ids)]) == ids and tokenized.named([str(tmp_path)]) is None
    with pytest.raises(DataError, match="cannot be mixed"):
        tokenized.named([str(ids), str(tmp_path)])
    with pytest.raises(DataError, match="is no folder of token ids"):
        tokenized.read(tmp_path, "train")
    with pytest.raises(DataError, match="names no token ids for report"):
        tokenized.read(ids, "report")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ids.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (train_ids,) = copy.glob("train-*.bin")
    raw = train_ids.read_bytes()
    train_ids.write_bytes(raw[:-2] + b"\xff\xff")
    with pytest.raises(DataError, match="is damaged"):
        tokenized.read(copy, "train")
    contents = json.loads((copy / tokenized.CONTENTS).read_text())
    side = contents["train"]
    sides = [{"file": "x"}, 3, side | {"n_bytes": 0}, side | {"n_bytes": float("inf")}, side | {"dtype": "int8"}]
    for wrong in ("[]", "{", "[" * 99_999, *(json.dumps(contents | {"train": each}) for each in sides)):
        (copy / tokenized.CONTENTS).write_text(wrong)
        with pytest.raises(DataError, match=re.escape(str(copy))):
            tokenized.read(copy, "train")
    for n_bytes, dtype in ((0, "uint16"), (7, "uint16"), (6, "uint32")):
        train_ids.write_bytes(raw[:n_bytes])
        side |= {"sha256": sha256(train_ids), "dtype": dtype}
        (copy / tokenized.CONTENTS).write_text(json.dumps({"train": side}))
        with pytest.raises(DataError, match=f"has {n_bytes} bytes, expected token ids of type {dtype}"):
            tokenized.read(copy, "train")


def test_documents_begin_as_the_tokenizer_says(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the token that tokenizer_config.json names; a model with another one refuses the folder."""
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    file.write_text(tokenizer.build("byte", [], 257).to_str().replace(tokenizer.END, "<s>"))
    ids, words = tmp_path / "ids", ["tokenize", str(tmp_path / "ids"), "--data", str(text), "--tokenizer", str(file)]
    assert bitnet_cli.main(words) == 1
    assert "put a tokenizer_config.json" in capsys.readouterr().err and not ids.exists()
    config.write_text('{"bos_token": "a", "eos_token": "<s>"}')
    assert bitnet_cli.main(words) == 0
    made, (train_ids,) = tokenized.read(ids, "train")
    assert train_ids.ids[0] == made.token_to_id("a") and 0 not in train_ids.ids
    assert train(tmp_path / "run", ids, "--tokenizer", str(file), "--set", "vocab_size=257") == 0
    config.write_text('{"bos_token": "<s>"}')
    assert train(tmp_path / "other", ids, "--tokenizer", str(file), "--set", "vocab_size=257") == 1
    assert f"has token {made.token_to_id('a')} before every document, and the model 0" in capsys.readouterr().err


def test_one_process_makes_a_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one is refused; one that is interrupted, wherever, leaves nothing that is taken for a folder of ids."""
    words = ["tokenize", str(tmp_path / "ids"), "--data", str(text), "--tokenizer", "byte"]
    (tmp_path / "ids").mkdir()
    with process.locked(tmp_path / "ids"):
        assert bitnet_cli.main(words) == 1
    assert "is writing to" in capsys.readouterr().err
    rename, left = Path.rename, iter(range(5))

    def interrupted(self: Path, target: Path) -> Path:
        if next(left) == 4:  # the files of ids and documents have their names, the one that says what is where has not
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert bitnet_cli.main(words) == 130
        patch.setattr(process, "flush", lambda _: interrupted(tmp_path, tmp_path))
        left = iter([4])
        assert bitnet_cli.main(["tokenize", str(tmp_path / "new" / "ids"), *words[2:]]) == 130
    assert not (tmp_path / "new").exists()
    assert not {file.name for file in (tmp_path / "ids").iterdir()} - {"lock"}
    assert bitnet_cli.main(words) == 0 and tokenized.read(tmp_path / "ids", "train", "validation")
