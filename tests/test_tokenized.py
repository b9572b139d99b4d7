"""Folders of token ids: runs on one learn what runs on its text learn, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bitnet_cli
from bitnet.data import tokenized
from bitnet.data.corpus import DataError

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
    """To the last bit; so does one that goes on, and an evaluation of either text is the same."""
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


def test_what_does_not_fit(text: Path, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert bitnet_cli.main(["tokenize", str(other), "--data", str(text), "--tokenizer", "byte"]) == 0
    assert train(tmp_path / "run", ids, "--tokenizer", str(other / "tokenizer.json")) == 1
    assert "token ids of another tokenizer than the model's; give the text itself" in capsys.readouterr().err
    assert bitnet_cli.main(["tokenize", str(other), "--data", str(text)]) == 1
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), "--validation", "2"]) == 1
    assert "validation is 2.0, expected" in capsys.readouterr().err
    assert bitnet_cli.main(["tokenize", str(tmp_path / "x"), "--data", str(text), "--tokenizer", "words"]) == 1
    assert "tokenizer is 'words', expected" in capsys.readouterr().err


def test_damaged_folders(ids: Path, tmp_path: Path) -> None:
    """What is no such folder, or not what it was, is named."""
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
    for wrong in ("[]", "{", json.dumps({"train": {"file": "x"}}), json.dumps(contents | {"train": 3})):
        (copy / tokenized.CONTENTS).write_text(wrong)
        with pytest.raises(DataError):
            tokenized.read(copy, "train")
