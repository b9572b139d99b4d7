"""Tokenizers, documents, the split, token files, batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bitnet import data, tokenizer

TEXTS = ["def main(argv):\n    return 0  # nothing\n" * 20, "Grüße, 世界 🌍\r\n\tpassé 1234567\n" * 20]
MADE = {kind: tokenizer.build(kind, TEXTS, 300) for kind in tokenizer.KINDS}


def encode(t: Tokenizer, text: str) -> list[int]:
    return list(t.encode(text, add_special_tokens=False).ids)


# ---- tokenizers ----


@pytest.mark.parametrize("kind", tokenizer.KINDS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(kind: str, text: str) -> None:
    ids = encode(MADE[kind], text)
    assert MADE[kind].decode(ids, skip_special_tokens=False) == text
    assert tokenizer.END_ID not in ids


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_end_token(kind: str, tmp_path: Path) -> None:
    made = MADE[kind]
    assert made.token_to_id(tokenizer.END) == tokenizer.END_ID == 0
    assert sorted(made.get_vocab().values()) == list(range(made.get_vocab_size()))
    text = f"a{tokenizer.END}b"
    file = tmp_path / "tokenizer.json"
    file.write_text(made.to_str(), encoding="utf-8")
    for t in (made, tokenizer.load(file)):
        assert 0 not in encode(t, text) and t.decode(encode(t, text)) == text  # typed by a user, it is plain text
        assert t.decode([0, *encode(t, "x")], skip_special_tokens=True) == "x"


def test_sizes() -> None:
    assert {kind: t.get_vocab_size() for kind, t in MADE.items()} == {
        "bpe": 300, "byte": 257, "char": min(300, 257 + len(set("".join(TEXTS)))),
    }  # fmt: skip
    lengths = {kind: len(encode(t, TEXTS[0])) for kind, t in MADE.items()}
    assert lengths["bpe"] < lengths["char"] == lengths["byte"] == len(TEXTS[0])
    assert len(encode(MADE["char"], "é")) == 1 and len(encode(MADE["byte"], "é")) == 2


def test_char_keeps_the_commonest() -> None:
    t = tokenizer.build("char", ["aaab" * 5 + "c"], 259)
    assert t.get_vocab_size() == 259 and t.id_to_token(257) == "a" and t.id_to_token(258) == "b"
    assert encode(t, "abc") == [257, 258, 1 + ord("c")]


def test_tokenizers_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected bpe, byte, char or a tokenizer"):
        tokenizer.build("word", TEXTS, 300)
    with pytest.raises(ValueError, match="vocab_size is 256, expected at least 257"):
        tokenizer.build("bpe", TEXTS, 256)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        tokenizer.load(tmp_path / "t.json")


# ---- documents ----


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def test_files_folders_and_globs(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "b", "a.md": "a", "sub/c.py": "c", "sub/d.bin": "d", "e.jsonl": '{"text": "e"}\n\n'})
    assert list(data.documents(data.files_of([str(tmp_path)]))) == ["a", "b", "e", "c"]
    assert list(data.documents(data.files_of([f"{tmp_path}/**/*.py", f"{tmp_path}/b.txt", str(tmp_path)]))) == [
        "c", "b", "a", "e",
    ]  # fmt: skip


def test_default_is_the_standard_library() -> None:
    files = data.files_of([])
    assert len(files) > 300 and files == sorted(files) == data.files_of([])
    names = {part for file in files for part in file.parts[-2:]}
    assert "argparse.py" in names and not names & {"site-packages", "test", "tests", "encodings"}
    texts = list(data.documents(files))
    assert sum(map(len, texts)) > 5_000_000


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "missing.txt", "no file, folder or glob matches"),
        ({}, ".", "holds no text, expected files ending in .txt"),
        ({"a.bin": "x"}, "a.bin", "holds no text"),
        (
            {"a.jsonl": '{"text": "x"}\n{"txt": 1}\n'},
            "a.jsonl",
            r'a.jsonl, line 2: expected an object with a string "text"',
        ),
        ({"a.jsonl": "{"}, "a.jsonl", "a.jsonl, line 1: not JSON"),
    ],
)
def test_bad_sources(tmp_path: Path, files: dict[str, str], source: str, message: str) -> None:
    write(tmp_path, files)
    with pytest.raises(data.DataError, match=message):
        list(data.documents(data.files_of([str(tmp_path / source)])))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(data.DataError, match=r"a\.txt is not UTF-8 \(byte 2\)"):
        list(data.documents([tmp_path / "a.txt"]))


def test_split_leaks_nothing_and_does_not_depend_on_order() -> None:
    texts = [f"text {i}" for i in range(2000)]
    train, held_out = data.split([*texts, *texts[:500]], 0.1)
    assert not set(train) & set(held_out) and sorted(train + held_out) == sorted(texts)
    assert 140 < len(held_out) < 260
    again = data.split(reversed(texts), 0.1)
    assert (set(again[0]), set(again[1])) == (set(train), set(held_out))


def test_split_of_one_text_cuts_it() -> None:
    text = "".join(map(str, range(1000)))
    train, held_out = data.split([text], 0.1)
    assert train[0] + held_out[0] == text and len(held_out[0]) == pytest.approx(len(text) * 0.1, abs=1)


def test_no_text() -> None:
    with pytest.raises(data.DataError, match="the data holds no text"):
        data.split(["", ""], 0.1)


# ---- token files and batches ----


def test_tokenize_writes_once_and_maps(tmp_path: Path) -> None:
    tokens = data.tokenize(TEXTS, MADE["bpe"], tmp_path, "train")
    assert tokens.ids.dtype == np.uint16 and tokens.n_bytes == sum(len(t.encode()) for t in TEXTS)
    assert tokens.ids.tolist() == [0, *encode(MADE["bpe"], TEXTS[0]), 0, *encode(MADE["bpe"], TEXTS[1])]
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    assert data.tokenize(TEXTS, MADE["bpe"], tmp_path, "train").digest == tokens.digest
    assert file.stat().st_mtime_ns == before
    assert data.tokenize(TEXTS, MADE["byte"], tmp_path, "train").digest != tokens.digest


def counting(n: int) -> data.Tokens:
    return data.Tokens(np.arange(n, dtype=np.uint32), n, "")


def test_batches_visit_every_window_once_an_epoch() -> None:
    batches = data.Batches(counting(1000), batch=4, context=10, seed=1)
    assert batches.per_epoch == 24
    for epoch in range(2):
        starts = []
        for i in range(24):
            inputs, targets = batches[epoch * 24 + i]
            assert inputs.shape == targets.shape == (4, 10) and inputs.dtype == torch.int64
            assert (targets == inputs + 1).all()
            starts += inputs[:, 0].tolist()
        assert len(set(starts)) == 96 and len({s % 10 for s in starts}) == 1


def test_a_batch_is_a_function_of_seed_and_index() -> None:
    one, two = (data.Batches(counting(1000), 4, 10, seed=1) for _ in range(2))
    in_order = [one[i][0] for i in range(60)]
    assert two[50][0].equal(in_order[50]) and two[7][0].equal(in_order[7])
    other = data.Batches(counting(1000), 4, 10, seed=2)
    assert not all(other[i][0].equal(in_order[i]) for i in range(5))


def test_too_little_text_for_a_batch() -> None:
    assert data.Batches(counting(51), 4, 10, 0).per_epoch == 1
    with pytest.raises(data.DataError, match="has 50 tokens, one batch of 4 × 10 needs 51"):
        data.Batches(counting(50), 4, 10, 0)


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line\u2028{i}"}, ensure_ascii=False) for i in range(5)]
    write(tmp_path, {"a.jsonl": "\r\n".join(lines)})
    assert list(data.documents([tmp_path / "a.jsonl"])) == [f"line\u2028{i}" for i in range(5)]
