"""Texts in compressed files, tables and datasets; what is damaged is one error that names the file and the row."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

import bitnet_cli
from bitnet.data import corpus, files, finding, hub
from bitnet.data.corpus import DataError
from bitnet.setup import resolve
from bitnet.setup.given import Given

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {i}: " + "grüße 世界 " * (i % 7) for i in range(300)]


def lines(texts: list[Any], column: str = "text") -> bytes:
    return b"".join(json.dumps({"n": i, column: text}).encode() + b"\n" for i, text in enumerate(texts))


def zstd(raw: bytes) -> bytes:
    return bytes(pyarrow.compress(raw, "zstd", asbytes=True))


def table(file: Path, texts: Any, column: str = "text", rows: int = 100) -> Path:
    parquet.write_table(pyarrow.table({"n": range(len(texts)), column: texts}), file, row_group_size=rows)
    return file


def read(file: Path, column: str = "text") -> list[str]:
    return list(files.texts_of(file, column))


def test_every_kind_of_file_has_the_same_texts(tmp_path: Path) -> None:
    raw = lines(TEXTS)
    for name, content in {
        "a.jsonl": raw,
        "b.jsonl.gz": gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]),  # as two, put one behind the other
        "c.jsonl.zst": zstd(raw[:5000]) + zstd(raw[5000:]),
        "d.txt.gz": gzip.compress(TEXTS[5].encode()),
        "e.md.zst": zstd(TEXTS[6].encode()),
        "f.py": TEXTS[4].encode(),
        "g.csv.gz": b"no text",
    }.items():
        (tmp_path / name).write_bytes(content)
    table(tmp_path / "h.parquet", TEXTS)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "h.parquet"):
        assert read(tmp_path / name) == TEXTS
    assert list(corpus.Documents([str(tmp_path)])) == [*3 * TEXTS, TEXTS[5], TEXTS[6], TEXTS[4], *TEXTS]
    assert list(corpus.Documents([f"{tmp_path}/*.zst"])) == [*TEXTS, TEXTS[6]]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), "dictionary"])
def test_columns(tmp_path: Path, kind: Any) -> None:
    kind = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) if kind == "dictionary" else kind
    table(tmp_path / "a.parquet", pyarrow.array(TEXTS, pyarrow.string()).cast(kind), "content")
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS, "content"))
    assert list(corpus.Documents([str(tmp_path)], "content")) == 2 * TEXTS
    for name in ("a.parquet", "b.jsonl"):
        with pytest.raises(DataError, match=rf"{name}.* name another with --column"):
            read(tmp_path / name)
    with pytest.raises(DataError, match=r"a\.parquet: column n holds int64, expected strings"):
        read(tmp_path / "a.parquet", "n")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.zst", "a.txt.gz"])
def test_damage_is_one_error(tmp_path: Path, name: str) -> None:
    """Cut off anywhere, or with another byte anywhere: what was written, or an error that names the file."""
    file, shuffled = tmp_path / name, random.Random(0)
    texts = ["".join(shuffled.choices("abcdefgh ", k=200)) for _ in range(30)]  # which compress little
    content = "".join(texts).encode() if ".txt" in name else lines(texts)
    if name == "a.parquet":
        table(file, texts)
    else:
        file.write_bytes(gzip.compress(content, mtime=0) if name.endswith("gz") else zstd(content))
    raw = file.read_bytes()
    for place in sorted(shuffled.sample(range(1, len(raw)), 60)):
        for damaged in (raw[:place], raw[:place] + bytes([raw[place] ^ 0x55]) + raw[place + 1 :]):
            file.write_bytes(damaged)
            try:
                read(file)
            except DataError as error:
                assert name in str(error)
            else:
                assert len(damaged) == len(raw), f"cut off at byte {place} of {len(raw)}, and read as whole"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("5", "a number"), ("null", "null"), ("[]", "an array"), ("{}", "an object"), ("true", "a boolean"),
    ],
)  # fmt: skip
def test_values_are_called_as_json_calls_them(value: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"text": {value}}}\n')
    with pytest.raises(DataError, match=f'"text" is {name}, expected a string; leave such rows out'):
        read(tmp_path / "t.jsonl")


def test_rows_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path / "null.parquet", [*TEXTS, None, "x"])
    with pytest.raises(DataError, match=r'null\.parquet, row 301: "text" is null, expected a string; leave such rows'):
        read(tmp_path / "null.parquet")
    wrong = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    table(tmp_path / "wrong.parquet", wrong)
    with pytest.raises(DataError, match=r"wrong\.parquet, row 2 is not UTF-8 \(byte 0\)"):
        read(tmp_path / "wrong.parquet")
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(lines(["a", 3])))
    with pytest.raises(DataError, match=r'a\.jsonl\.zst, line 2: "text" is a number, expected a string'):
        read(tmp_path / "a.jsonl.zst")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "\xff"}\n'))
    with pytest.raises(DataError, match=r"b\.jsonl\.gz, line 2 is not UTF-8 \(byte 10\)"):
        list(corpus.Documents([str(tmp_path / "b.jsonl.gz")]))
    monkeypatch.setattr(files, "MOST", 1000)
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(lines(["a", "b" * 1000])))
    table(tmp_path / "d.parquet", ["a", "b" * 1001])
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"b" * 1001))
    for name, where in (("c.jsonl.zst", ", line 2"), ("d.parquet", ", row 2"), ("e.txt.gz", "")):
        with pytest.raises(DataError, match=rf"{re.escape(name)}{where}: more than 1,000 bytes; cut it"):
            read(tmp_path / name)


def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """50 MB of text in each, of which at most a tenth is there at once, in Arrow."""
    text = "0123456789" * 500
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(lines([text] * 10_000)))
    table(tmp_path / "b.parquet", [f"{i}{text}" for i in range(10_000)], rows=200)
    for name in ("a.jsonl.zst", "b.parquet"):
        before = pyarrow.total_allocated_bytes()
        most = max(pyarrow.total_allocated_bytes() - before for _ in files.texts_of(tmp_path / name))
        assert most < 5_000_000, name


# ---- the datasets library ----


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "a set"
    one = datasets.Dataset.from_dict({"content": TEXTS, "n": [1] * len(TEXTS)})
    one.to_parquet(folder / "train.parquet")
    one.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": one, "test": one.select(range(3))}).save_to_disk(folder / "splits")
    return folder


def test_datasets_on_disk_and_as_streams(dataset: Path) -> None:
    import datasets

    for source in ("hf:{}", "hf:{}:train", "hf-stream:{}", "hf:{}/saved", "hf:{}/splits"):
        assert list(corpus.Documents([source.format(dataset)], "content")) == TEXTS, source
    stream = corpus.Documents([f"hf-stream:{dataset}"], "content")
    train, held_out = corpus.split(stream, 0.1)
    assert sorted([*train, *held_out]) == sorted({text for text in TEXTS if text})
    assert list(corpus.Documents([f"hf:{dataset}/splits:test"], "content")) == TEXTS[:3]
    for source in ("hf:{}:train[1:3]", "hf:{}:default:train[1:3]"):
        assert list(corpus.Documents([source.format(dataset)], "content")) == TEXTS[1:3]
    (dataset / "other.txt").write_bytes(b"\xff\xfea\x00")
    texts = corpus.Documents([str(dataset / "other.txt"), f"hf:{dataset}"], "content")
    assert list(texts) == TEXTS and "other.txt (UTF-16)" in texts.left_out
    saved = datasets.Dataset.from_dict({"content": TEXTS}, split="train")
    saved.save_to_disk(dataset / "train alone")
    assert list(corpus.Documents([f"hf:{dataset}/train alone"], "content")) == TEXTS
    with pytest.raises(DataError, match="it is the split train alone, expected test"):
        corpus.Documents([f"hf:{dataset}/train alone:test"], "content")
    with pytest.raises(DataError, match="it has the splits train, test, expected dev"):
        corpus.Documents([f"hf:{dataset}/splits:dev"], "content")
    for source in ("hf:{}", "hf-stream:{}", "hf:{}/saved"):
        with pytest.raises(DataError, match="has the columns content, n, expected one named text; name another with"):
            corpus.Documents([source.format(dataset)])
    with pytest.raises(DataError, match="expected hf-stream:NAME, hf-stream:NAME:SPLIT"):
        hub.rows_of("hf-stream::train", "text")


def test_a_source_is_kept_with_its_kind(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dataset.parent)
    assert finding.absolute("hf-stream:a set:train") == f"hf-stream:{dataset}:train"
    assert finding.absolute("hf:of/others") == "hf:of/others" and finding.absolute("a set") == str(dataset)


def test_paths_of_a_mixture_are_seen_from_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is missing there, and not where we are."""
    (tmp_path / "mixtures").mkdir()
    (tmp_path / "text").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert finding.absolute("text", tmp_path / "mixtures") == str(tmp_path / "mixtures" / "text")
    assert finding.absolute("hf:of/others", tmp_path) == "hf:of/others"


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / "b.JSONL").write_text('{"text": "two"}\n')
    (tmp_path / "c.MD.GZ").write_bytes(gzip.compress(b"three"))
    assert list(corpus.Documents([str(tmp_path)])) == ["one", "two", "three"]


def test_an_option_of_several_may_be_given_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 300)
    argv = ["--tokenizer", "byte", "--validation", "0.5", "--json", "--data", str(tmp_path / "a.txt")]
    counts = []
    for more in ([], ["--data", str(tmp_path / "b.txt")]):
        assert bitnet_cli.main(["tokenize", str(tmp_path / f"ids{len(more)}"), *argv, *more]) == 0
        made = json.loads(capsys.readouterr().out)
        counts.append(sum(made[side]["bytes"] for side in ("train", "validation")))
    assert counts[1] == 2 * counts[0]


def test_commands_take_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path / "a.parquet", TEXTS, "content")
    words = ["tokenize", str(tmp_path / "ids"), "--data", str(tmp_path / "a.parquet"), "--tokenizer", "byte", "--json"]
    assert bitnet_cli.main(words) == 1
    assert "expected one named text; name another with --column" in capsys.readouterr().err
    assert bitnet_cli.main([*words, "--column", "content"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["train"]["bytes"] + made["validation"]["bytes"] == sum(len(text.encode()) for text in TEXTS)


def test_what_of_a_folder_is_read(tmp_path: Path) -> None:
    """Links are followed, once; what is hidden, and other people's packages, is not looked at; the rest is named."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (data / ".git", data / "env" / "lib", elsewhere):
        place.mkdir(parents=True)
    named = [data / name for name in (".git/a.md", ".b.md", "env/lib/c.py", "e.md")]
    for file in (*named, elsewhere / "d.txt"):
        file.write_text(file.name, "utf-8")
    (data / "env" / "pyvenv.cfg").touch()
    (data / "f.html").touch()
    (data / "g").touch()
    (data / "link").symlink_to(elsewhere)
    (data / "again").symlink_to(data)
    (data / "nowhere").symlink_to(tmp_path / "gone.txt")
    os.mkfifo(data / "pipe.txt")
    texts = corpus.Documents([str(data)])
    assert sorted(texts) == ["d.txt", "e.md"]
    assert texts.left_out == "3 files of other kinds were left out: no suffix, .html"
    (data / "h.txt").write_text("h.txt", "utf-8")
    assert list(corpus.Documents([str(data / "*.txt")])) == ["h.txt"]
    assert list(corpus.Documents([str(data / ".b.md")])) == [".b.md"]  # that someone named


def test_a_line_that_is_no_object_is_shown(tmp_path: Path) -> None:
    """A whole array in a line, say, as of a .json file."""
    file = tmp_path / "a.jsonl"
    file.write_text('[{"text": "a"}, {"text": "b"}]\n')
    with pytest.raises(corpus.DataError, match=r'expected an object with a string "text", found \[\{"text": "a"\}, '):
        list(corpus.Documents([str(file)]))


def test_a_table_that_is_named(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"two\nlines, and a comma"\r\n2,more\r\n3,\r\n')
    assert list(corpus.Documents([str(table)])) == ["two\nlines, and a comma", "more", ""]
    assert list(corpus.Documents([str(table)], "id")) == ["1", "2", "3"]
    table.with_name("s.csv").write_text("id,text,text\n1,a,b\n")
    with pytest.raises(
        corpus.DataError, match=r"s\.csv has several columns named text, expected one; rename the others"
    ):
        list(corpus.Documents([str(table.with_name("s.csv"))]))
    assert list(corpus.Documents([str(table.with_name("s.csv"))], "id")) == ["1"]
    with pytest.raises(corpus.DataError, match=r't.csv, line 2: expected an object with a string "no", found id, text'):
        list(corpus.Documents([str(table)], "no"))
    table.write_text('text,id\n\n"a\nb",1\n\n"c\n\nd"\n')
    with pytest.raises(corpus.DataError, match=r"t\.csv, line 6: has 1 cell, expected 2"):  # where the row begins
        list(corpus.Documents([str(table)]))
    table.write_text('text\n"a', "utf-8")
    with pytest.raises(corpus.DataError, match="is not a table of comma-separated values"):
        list(corpus.Documents([str(table)]))


def test_marks_of_windows_and_lines_that_are_cut_off(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b')
    with pytest.raises(corpus.DataError, match="line 2: not JSON: Unterminated string starting at character 10"):
        list(corpus.Documents([str(lines)]))
    for name, data in (("b.txt", b"\xef\xbb\xbfa"), ("b.csv", b"\xef\xbb\xbftext\r\na\r\n")):
        (tmp_path / name).write_bytes(data)
        assert list(corpus.Documents([str(tmp_path / name)])) == ["a"]
    config = tmp_path / "c.toml"
    config.write_bytes(b'\xef\xbb\xbfpreset = "tiny"\n[train]\ndata = "a"\n')
    with pytest.raises(ValueError, match=r"""data is 'a', expected a list, such as \["a"\]"""):
        resolve.resolve(Given(options={}, config=str(config)))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_a_compressed_file_of_no_bytes_is_cut_off(name: str, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text", "utf-8")
    (tmp_path / name).touch()
    with pytest.raises(corpus.DataError, match=f"{name} is damaged or cut off: it has 0 bytes"):
        list(corpus.Documents([str(tmp_path)]))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_disk_that_fails_is_no_damaged_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_bounded", read)
    (tmp_path / name).write_bytes(b"text")
    with pytest.raises(OSError, match="Input/output error"):
        list(corpus.Documents([str(tmp_path / name)]))


def test_a_tar_archive_is_not_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n", "utf-8")
    for name in ("sources.tar", "sources.tar.gz"):
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as tar:
            tar.add(tmp_path / "a.py", "a.py")
        with pytest.raises(corpus.DataError, match=f"{name} is a tar archive, expected text; unpack it"):
            list(corpus.Documents([str(tmp_path / name)]))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for name in (tmp_path / "pipe.txt", "/dev/null"):
        with pytest.raises(
            corpus.DataError, match="is a pipe or a device, expected a file, as text is read several times"
        ):
            corpus.Documents([str(name)])


def test_globs_end_where_links_lead_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = {"a.txt": "a", "in/b.txt": "b", "in/[c]/d/c.txt": "c", "in/.hidden/e.txt": "e"}
    for name, text in write.items():
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(text, "utf-8")
    for name in ("again", "in/around", "in/over"):
        (tmp_path / "x" / name).symlink_to(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    for pattern, found in (
        ("x/**/*.txt", "abc"), ("**/*.txt", "abc"), ("x/**", "abc"), ("x/**/in/**/*.txt", "abc"), ("x/in/*.txt", "b"),
        (f"{tmp_path}/x/**/b.*", "b"), ("x/**/none", ""),
    ):  # fmt: skip
        assert finding.absolute(pattern) == (str(tmp_path / pattern) if found else pattern)
        if found:
            texts = [file.read_text("utf-8") for file in finding.files_of([pattern])]
            assert "".join(sorted(texts)) == found
