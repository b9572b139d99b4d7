"""Documents from files, folders and the datasets library, and their two sides."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from bitnet.data import corpus, dataset, finding, tokenizer
from bitnet.data.files import texts_of
from bitnet_export.packed.records import MAGIC


def read(files: Iterable[Path]) -> list[str]:
    return [text for file in files for text in texts_of(file)]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def test_files_folders_and_globs(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "b", "a.md": "a", "sub/c.py": "c", "sub/d.bin": "d", "e.jsonl": '{"text": "e"}\n\n'})
    assert read(finding.files_of([str(tmp_path)])) == ["a", "b", "e", "c"]
    assert read(finding.files_of([f"{tmp_path}/**/*.py", f"{tmp_path}/b.txt", str(tmp_path)])) == [
        "c", "b", "a", "e",
    ]  # fmt: skip


def test_default_is_the_standard_library() -> None:
    files = finding.files_of([])
    assert len(files) > 300 and files == sorted(files) == finding.files_of([])
    names = {part for file in files for part in file.parts[-2:]}
    assert "argparse.py" in names and not names & {"site-packages", "test", "tests", "encodings"}
    texts = read(files)
    assert sum(map(len, texts)) > 5_000_000


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "missing.txt", "no file, folder or glob matches"),
        (
            {},
            ".",
            r"holds no text, expected files ending in .txt, .* or .ndjson, all but .parquet also with .gz or .zst",
        ),
        ({"a.bin": "x"}, ".", "holds no text"),
        ({"a.bin": "x"}, "*", "holds no text"),
        (
            {"a.jsonl": '{"text": "x"}\n{"txt": 1}\n'},
            "a.jsonl",
            r'a.jsonl, line 2: expected an object with a string "text"',
        ),
        ({"a.jsonl": '{"messages": []}'}, "a.jsonl", r"a.jsonl, line 1: this is a conversation .*give it to --chat"),
        ({"a.jsonl": '{"conversations": []}'}, "a.jsonl", r"this is a conversation \(conversations\), expected text"),
        ({"a.jsonl": '{"instruction": "x", "output": "y"}'}, "a.jsonl", "this is a conversation .*or name a --column"),
        ({"a.jsonl": '{"chosen": "x", "rejected": "y"}'}, "a.jsonl", r"is a preference .* --preference"),
        ({"a.jsonl": '{"image": "a", "caption": "x"}'}, "a.jsonl", r"line 1: this is a record of an image.* --vision"),
        ({"a.jsonl": '{"txt": 1}'}, "a.jsonl", r"^[^:]*a.jsonl, line 1: expected an object"),
        ({"a.jsonl": "{"}, "a.jsonl", "a.jsonl, line 1: not JSON"),
        ({"a.jsonl": "[" * 100_000}, "a.jsonl", "a.jsonl, line 1: not JSON"),
        ({"a.jsonl": "9" * 5000}, "a.jsonl", "a.jsonl, line 1: not JSON"),
        ({"a.jsonl": '{"text": "\\ud800"}'}, "a.jsonl", "a.jsonl, line 1: .*half of a surrogate pair"),
    ],
)
def test_bad_sources(tmp_path: Path, files: dict[str, str], source: str, message: str) -> None:
    write(tmp_path, files)
    with pytest.raises(corpus.DataError, match=message):
        read(finding.files_of([str(tmp_path / source)]))


def test_text_that_is_empty(tmp_path: Path) -> None:
    with pytest.raises(corpus.DataError, match="all of the text that was given is empty"):
        dataset.tokenize(["", ""], tokenizer.build("byte", [], 257), tmp_path, "text")
    assert not list(tmp_path.iterdir())


def test_named_files_are_taken_whatever_their_name(tmp_path: Path) -> None:
    write(tmp_path, {"a.rst": "rst", "b.c": "c", "LICENSE": "none", "d.c": "d", "e.h": "h"})

    def texts(*sources: str) -> list[str]:
        return list(corpus.Documents([f"{tmp_path}/{source}" for source in sources]))

    assert texts("") == texts("*") == ["rst"]
    assert texts("LICENSE", "e.h", "") == ["none", "h", "rst"]
    assert texts("*.c") == ["c", "d"]


def test_files_that_are_not_utf8_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "c.txt"):
        (tmp_path / name).write_bytes(b"ab\xff")
    write(tmp_path, {"b.txt": "good"})
    texts = corpus.Documents([str(tmp_path)])
    for _ in range(2):  # each time they are read
        assert list(texts) == ["good"]
        assert texts.left_out == f"2 files were left out, not being UTF-8 text: {tmp_path}/a.txt, {tmp_path}/c.txt"
    (tmp_path / "c.txt").unlink()
    assert list(texts := corpus.Documents([str(tmp_path)])) == ["good"]
    assert texts.left_out == f"1 file was left out, not being UTF-8 text: {tmp_path}/a.txt"
    with pytest.raises(corpus.DataError, match=r"holds no text: 1 file was left out, not being UTF-8 text: .*a\.txt"):
        list(corpus.Documents([str(tmp_path / "a.txt")]))
    (tmp_path / "b.txt").unlink()
    assert not corpus.Documents([]).left_out


def test_ten_files_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"good.txt": "good"})
    for i in range(12):
        (tmp_path / f"{i:02}.txt").write_bytes("schön".encode("utf-16" if i == 3 else "latin-1"))
    assert list(texts := corpus.Documents([str(tmp_path)])) == ["good"]
    assert f"12 files were left out, not being UTF-8 text: {tmp_path}/00.txt, " in texts.left_out
    assert texts.left_out.endswith(f"{tmp_path}/09.txt and 2 others") and texts.left_out.count(".txt") == 10
    assert texts.left_out.count("(UTF-16)") == 1 and f"{tmp_path}/03.txt (UTF-16)" in texts.left_out


def test_compressed_files_of_a_kind_that_is_not_read(tmp_path: Path) -> None:
    for name, content in (("a.txt.bz2", bz2.compress(b"a")), ("b.txt.xz", lzma.compress(b"b"))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            corpus.DataError, match=r"\((bzip2|xz), which is not read; decompress it, or use \.gz or \.zst\)"
        ):
            list(corpus.Documents([str(tmp_path / name)]))


def test_bytes_that_no_text_has(tmp_path: Path) -> None:
    """They are UTF-8, and what has them is the data of a program, or UTF-16 without its mark."""
    write(tmp_path, {"good.txt": "good"})
    for name, content in (("a.bin.txt", b"ab\0c"), ("b.txt", "plain".encode("utf-16-le"))):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"caf\xe9"))
    assert list(texts := corpus.Documents([str(tmp_path)])) == ["good"]
    marked = [f"{tmp_path}/{name}" for name in ("a.bin.txt (NUL bytes)", "b.txt (NUL bytes)", "c.txt.gz")]
    assert texts.left_out == f"3 files were left out, not being UTF-8 text: {', '.join(marked)}"
    with pytest.raises(corpus.DataError, match=r"a\.bin\.txt is not UTF-8 text \(byte 2 is NUL\); convert it or"):
        read([tmp_path / "a.bin.txt"])


def test_what_runs_wrote_is_no_text(tmp_path: Path) -> None:
    log = '{"step": 1, "tokens": 8, "seconds": 0.1, "loss": 5.0}\n'
    write(tmp_path, {"runs/a/step-000001/state.json": "{}", "runs/a/log.jsonl": log, "runs/a/notes.txt": "of the run"})
    write(tmp_path, {"text.txt": "text", "mine/log.jsonl": '{"text": "a log"}'})
    for source in (tmp_path, f"{tmp_path}/**/*.*"):
        found = set(texts := corpus.Documents([str(source)]))
        assert {"text", "a log"} <= found and log not in found
        assert texts.left_out == f"what runs wrote was left out: {tmp_path}/runs/a"
    assert list(corpus.Documents([str(tmp_path / "runs" / "a")])) == ["of the run"]  # as was asked for
    with pytest.raises(corpus.DataError, match=r"log\.jsonl, line 1: this is the log of a run, expected text"):
        list(corpus.Documents([str(tmp_path / "runs" / "a" / "log.jsonl")]))


def test_repetitions_are_counted() -> None:
    said: list[str] = []
    corpus.split([f"text {i % 9}" for i in range(400)] + [""], 0.3, said.append)
    corpus.split(["a", "b", "a"], 0.3, said.append)
    corpus.split(["a", "b", ""], 0.3, said.append)
    assert said == [
        "391 of 400 documents are repetitions and were left out",
        "1 of 3 documents is a repetition and was left out",
    ]


def test_a_packed_model_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "m.bitnet").write_bytes(MAGIC + bytes(100))
    with pytest.raises(corpus.DataError, match=r"m\.bitnet is a packed model, expected text; `bitnet finetune RUN"):
        corpus.Documents([str(tmp_path / "m.bitnet")])


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(corpus.DataError, match=r"a\.txt is not UTF-8 \(byte 2\)"):
        read([tmp_path / "a.txt"])
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    with pytest.raises(corpus.DataError, match=r"b\.jsonl, line 2 is not UTF-8 \(byte 10\)"):
        read([tmp_path / "b.jsonl"])
    (tmp_path / "c.csv").write_bytes(b"text\n" + b"a\n" * 5000 + b"caf\xe9\n")
    for name in ("b.jsonl", "c.csv"):  # some of which had already been read
        with pytest.raises(corpus.DataError, match=rf"{name}.* is not UTF-8"):
            list(corpus.Documents([str(tmp_path / name), __file__]))


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line\u2028{i}"}, ensure_ascii=False) for i in range(5)]
    write(tmp_path, {"a.jsonl": "\r\n".join(lines)})
    assert read([tmp_path / "a.jsonl"]) == [f"line\u2028{i}" for i in range(5)]
    (tmp_path / "a.jsonl").rename(tmp_path / "a.ndjson")
    assert read([tmp_path / "a.ndjson"]) == [*corpus.Documents([str(tmp_path)])] == [f"line\u2028{i}" for i in range(5)]


# ---- the datasets library ----


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two splits, in Parquet files."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "a set"
    folder.mkdir()
    for name, texts in (("train", ["one", "two", ""]), ("test", ["three", None])):
        datasets.Dataset.from_dict({"text": texts, "n": [1] * len(texts)}).to_parquet(folder / f"{name}.parquet")
    return folder


def test_a_dataset_is_a_source(parquet: Path, tmp_path: Path) -> None:
    train, held_out = corpus.split(corpus.Documents([f"hf:{parquet}"]), 0.3)
    assert sorted([*train, *held_out]) in (["one", "two"], ["", "one", "two"])
    write(tmp_path, {"b.txt": "a file"})
    assert list(corpus.Documents([f"hf:{parquet}:train", str(tmp_path / "b.txt")])) == ["a file", "one", "two", ""]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:", "'hf:', expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"),
        ("hf:a:b:c:d", "expected hf:NAME"),
        ("hf:{}:dev", "cannot be read: .*dev"),
        ("hf:{}/none", "cannot be read"),
        ("hf:{}:other:train", "cannot be read: .*other"),
    ],
)
def test_bad_datasets(parquet: Path, source: str, message: str) -> None:
    with pytest.raises(corpus.DataError, match=message):
        list(corpus.Documents([source.format(parquet)]))


def test_the_column_of_a_dataset(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(corpus.DataError, match='row 2: "text" is null, expected a string'):
        list(corpus.Documents([f"hf:{parquet}:test"]))
    write(tmp_path, {"other/train.jsonl": '{"words": "a", "n": 1}'})
    with pytest.raises(corpus.DataError, match="has the columns words, n, expected one named text"):
        corpus.Documents([f"hf:{tmp_path}/other"])


def test_a_stream_that_breaks_off_is_named(parquet: Path, tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "line {i}"}}\n' for i in range(50_000))
    write(tmp_path, {"lines/a.jsonl": lines + '{"text": broken\n', "cut/a.jsonl.gz": ""})
    packed = gzip.compress(lines.encode())
    (tmp_path / "cut" / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    for name, where in (("lines", " after row [0-9,]+"), ("cut", "")):
        source = f"hf-stream:{tmp_path / name}"
        with pytest.raises(corpus.DataError, match=f"'{source}' cannot be read{where}: "):
            list(corpus.Documents([source]))


# ---- two sides ----


def test_split_leaks_nothing_and_does_not_depend_on_order() -> None:
    texts = [f"text {i}" for i in range(2000)]
    train, held_out = map(list, corpus.split([*texts, *texts[:500]], 0.1))
    assert not set(train) & set(held_out) and sorted(train + held_out) == sorted(texts)
    assert 140 < len(held_out) < 260
    again = corpus.split(texts[::-1], 0.1)
    assert (set(again[0]), set(again[1])) == (set(train), set(held_out))


def test_split_of_one_text_cuts_it() -> None:
    text = "".join(map(str, range(1000)))
    for texts in (["short", text, "other"], ["é" + text]):
        train, held_out = corpus.split(texts, 1e-6)
        (end,) = held_out
        assert text.endswith(end) and len(end) == 1
        assert [*train] == [t.removesuffix(end) if len(t) > 5 else t for t in texts]
        for side in (train, held_out):
            assert side.n_bytes == sum(len(t.encode()) for t in side)
            assert side.digests == [hashlib.sha256(t.encode()).digest() for t in side]


@pytest.mark.parametrize(("n", "held"), [(1, 10), (3, 30), (20, 50)])
def test_what_is_cut_off_is_the_share_of_all_texts(n: int, held: int) -> None:
    """Of one text it would be too little. Half of the longest is the most."""
    texts = [*corpus.split([f"{i:0100}" for i in range(100)], 0.1)[0]][:n]  # none of which the hash holds out
    train, held_out = corpus.split(texts, 0.1)
    assert held_out.n_bytes == held and train.n_bytes == 100 * n - held
    assert [len(end) for end in held_out] == [held]


def test_sides_are_read_anew_and_notice_a_change() -> None:
    texts = [f"text {i}" for i in range(100)]
    train, _ = corpus.split(texts, 0.1)
    assert list(train) == list(train) and len(list(train)) == len(train.digests) > 80
    texts.append("one more")
    with pytest.raises(corpus.DataError, match="the data was changed while it was read"):
        list(train)
    texts[texts.index(next(iter(corpus.split(texts, 0.1)[0])))] += " that grew"  # the same number, and a different one
    texts.pop()
    with pytest.raises(corpus.DataError, match="the data was changed while it was read"):
        list(train)


def test_no_text_stays_in_memory(tmp_path: Path) -> None:
    """Twenty megabytes, a tenth of which would be noticed. (Neither numpy nor the tokenizer is asked to count.)"""
    with (tmp_path / "a.jsonl").open("w") as out:
        for i in range(2000):
            out.write(json.dumps({"text": f"{i} " + "sound and fury " * 700}) + "\n")
    tracemalloc.start()
    train, held_out = corpus.split(corpus.Documents([str(tmp_path / "a.jsonl")]), 0.1)
    count = sum(1 for side in (train, held_out) for _ in side)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000 and train.n_bytes + held_out.n_bytes > 20e6 and peak < 2e6


def test_no_text() -> None:
    with pytest.raises(corpus.DataError, match="the data holds no text"):
        corpus.split(["", ""], 0.1)
