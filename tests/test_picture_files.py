"""Pictures with texts in files: every form that is read, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bitnet.data import picture_files, pictures
from bitnet.data.corpus import DataError
from picture_data import halves, lines, table


def read(file: Path) -> list[picture_files.Record]:
    return list(picture_files.read([str(file)]))


def test_one_record_in_every_form(tmp_path: Path) -> None:
    """A line, a row of a table, and a picture with a text beside it: the same record."""
    names = [name for name, _, _ in halves(tmp_path, 3)]
    by_line = lines(tmp_path, "a.jsonl", [{"image": name, "text": "grün, \n blau", "more": 1} for name in names])
    by_row = table(tmp_path, "a.csv", ({"caption": "grün, \n blau", "image": name} for name in names))
    folder = tmp_path / "folder" / "deeper"
    list(halves(folder, 3))
    for i in range(3):
        (folder / f"{i}.txt").write_text("grün, \n blau\n", encoding="utf-8-sig" if i else "utf-8")
    said = [[record[1:3] for record in read(place)] for place in (by_line, by_row, tmp_path / "folder")]
    assert said == [[("", "grün, \n blau")] * 3] * 3
    content = [[record.images[0].read_bytes() for record in read(place)] for place in (by_line, tmp_path / "folder")]
    assert content[0] == content[1] and read(by_row)[2].images == (tmp_path / "2.png",)
    assert [record.where for record in read(by_line)] == [f"{by_line}, line {n}" for n in (1, 2, 3)]


def test_records_of_a_glob(tmp_path: Path) -> None:
    list(halves(tmp_path / "a", 1))
    for name in ("0", "1"):
        lines(tmp_path / "a", f"{name}.jsonl", [{"image": "0.png", "caption": name}])
    assert [record.suffix for record in read(tmp_path / "*" / "[01].jsonl")] == ["0", "1"]
    with pytest.raises(DataError, match=r"none\*\.csv does not exist, expected records"):
        read(tmp_path / "none*.csv")


def test_links_in_a_folder_are_followed_and_hidden_files_are_not_read(tmp_path: Path) -> None:
    """Other systems put `._0.png` beside a picture, and downloads have a `.cache`."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        list(halves(place, 1))
        (place / "0.txt").write_text(place.name, encoding="utf-8")
    (folder / "more").symlink_to(elsewhere)
    (folder / "._0.png").write_bytes(b"")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.jsonl").write_text("{}\n", encoding="utf-8")
    assert [record.suffix for record in read(folder)] == ["folder", "elsewhere"]


def test_tables_may_be_compressed(tmp_path: Path) -> None:
    names = [name for name, _, _ in halves(tmp_path, 2)]
    plain = [
        lines(tmp_path, "a.jsonl", [{"image": name, "text": "x"} for name in names]),
        table(tmp_path, "b.csv", ({"image": name, "caption": "x"} for name in names)),
    ]
    for file, name in zip(plain, ("C.JSONL.GZ", "d.csv.gz"), strict=True):
        (tmp_path / name).write_bytes(gzip.compress(file.read_bytes()))
        assert [each[:3] for each in read(tmp_path / name)] == [each[:3] for each in read(file)]


def test_questions_of_several_pictures_and_of_none(tmp_path: Path) -> None:
    list(halves(tmp_path, 2))
    file = lines(tmp_path, "a.jsonl", [
        {"image": "0.png", "prefix": "left?", "suffix": "red"},
        {"image": "1.png", "question": "left?", "answer": "red"},
        {"images": ["1.png", "0.png"], "prefix": "", "suffix": "both"}, {"prefix": "say yes", "suffix": "yes"},
        {"images": [], "suffix": "nothing"},
    ])  # fmt: skip
    found = [([path.name for path in record.images], *record[1:3]) for record in read(file)]
    assert found == [
        (["0.png"], "left?", "red"), (["1.png"], "left?", "red"), (["1.png", "0.png"], "", "both"),
        ([], "say yes", "yes"), ([], "", "nothing"),
    ]  # fmt: skip
    text = table(tmp_path, "b.csv", iter([{"image": "", "prefix": "say yes", "suffix": "yes"}]))
    assert read(text)[0][:3] == ((), "say yes", "yes")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([1], 'line 2: is no object; expected "image" and "caption", or "image", "prefix" and "suffix"'),
        ({}, "line 2: has nothing; expected"),
        ({"image": "a", "conversations": []}, "line 2: it has 'conversations'; a run learns conversations with --chat"),
        ({"messages": []}, "line 2: it has 'messages'; a run learns conversations with --chat; here expected"),
        ({"image": "0.png"}, "line 2: has 'image' and no text to learn; expected"),
        ({"image": "0.png", "caption": "x", "suffix": "y"}, "line 2: has 'image', 'caption', 'suffix'; expected"),
        ({"image": "0.png", "caption": "x", "prefix": "y"}, "a caption is of one image that nothing is asked of"),
        ({"images": ["0.png", "0.png"], "caption": "x"}, "a caption is of one image"),
        ({"caption": "x"}, "a caption is of one image"),
        ({"image": "0.png", "images": [], "suffix": "y"}, "line 2: has 'image', 'images', 'suffix'; expected"),
        ({"image": 3, "caption": "x"}, "line 2: the images are [3], expected paths"),
        ({"images": 3, "caption": "x"}, "line 2: the images are 3, expected paths"),
        ({"images": None, "caption": "x"}, "line 2: the images are None, expected paths"),
        ({"images": "0.png", "suffix": "x"}, "line 2: the images are '0.png', expected paths"),
        ({"image": "0.png", "caption": 3}, 'line 2: "caption" is 3, expected a text'),
        ({"image": "0.png", "caption": " "}, "\"caption\" is ' ', expected a text that is not empty"),
        ({"image": "0.png", "prefix": None, "suffix": "x"}, '"prefix" is None, expected a text'),
        ({"image": "0.png", "caption": "\ud800"}, '"caption" holds half of a surrogate pair'),
        ({"image": "0.png", "prefix": "\ud800", "suffix": "x"}, '"prefix" holds half of a surrogate pair'),
        ({"image": "0.png", "prefix": "what is <image>?", "suffix": "x"}, '"prefix" spells <image>'),
        ({"image": "none.png", "caption": "x"}, "line 2: there is no file"),
        ({"image": "a\0b", "caption": "x"}, "line 2: there is no file"),
        ({"image": "x" * 5000, "caption": "x"}, "line 2: there is no file"),
        ({"image": "data:image/png;base64," + "A" * 5000, "caption": "x"}, "an image is 'data:image/png;base64,AAA"),
        ({"image": "https://example.org/a.png", "caption": "x"}, "expected a path: keep it in a file"),
        (b"{", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'{"image": ' + b"9" * 5000 + b"}", "line 2: not JSON: Exceeds the limit"),
        (b'{"a": "\xff"}', "line 2 is not UTF-8 (byte 7)"),
    ],
)
def test_bad_records_are_refused(record: Any, said: str, tmp_path: Path) -> None:
    list(halves(tmp_path, 1))
    good = json.dumps({"image": "0.png", "caption": "x"}).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + (record if isinstance(record, bytes) else _json(record)))
    with pytest.raises(DataError) as error:
        read(tmp_path / "a.jsonl")
    assert f"{tmp_path / 'a.jsonl'}, line 2" in str(error.value) and said in str(error.value)


def _json(record: Any) -> bytes:
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"image,caption\n0.png\n", "a.csv, line 2: has 1 cell, expected 2, one for each column of the first line"),
        (b"image,caption\n0.png,x,y,z\n", "a.csv, line 2: has 4 cells, expected 2"),
        (b"image,title\n0.png,x\n", "a.csv, line 2: has 'image', 'title' and no text to learn; expected"),
        (b'image,caption\n0.png,"x\n', "a.csv is not a table of comma-separated values: unexpected end of data"),
        (b"image,caption\n0.png,\xff\n", "a.csv is not UTF-8"),
        (b"", "the data holds no record"),
    ],
)
def test_bad_tables_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    list(halves(tmp_path, 1))
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as error:
        pictures.every(picture_files.read([str(tmp_path / "a.csv")]))
    assert said in str(error.value)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for source, said in (
        ([], "name them with --data"),
        ([str(tmp_path / "none")], "does not exist, expected records"),
        ([str(tmp_path / "a.txt")], "is not a .jsonl file, .csv file or folder"),
        ([str(tmp_path)], "holds no .jsonl file, no .csv file and no picture"),
    ):
        with pytest.raises(DataError, match=said):
            list(picture_files.read(source))
    list(halves(tmp_path, 1))
    with pytest.raises(DataError, match=r"0\.png has no text beside it, expected its caption in 0\.txt"):
        read(tmp_path)
    (tmp_path / "0.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"0\.txt is not UTF-8 \(byte 0\)"):
        read(tmp_path)


def test_a_picture_of_another_format_with_a_caption_is_not_passed_over(tmp_path: Path) -> None:
    for name in ("0.png", "1.heic"):
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).with_suffix(".txt").write_text("a ring")
    for name in ("0.json", "2.heic", "licence.txt"):  # beside a picture, without a caption, and alone
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"1\.heic has a text beside it, expected one of \.png, .*; convert or remove it"
    ):
        list(picture_files.read([str(tmp_path)]))
    (tmp_path / "1.heic").unlink()
    said: list[str] = []
    assert [record.suffix for record in picture_files.read([str(tmp_path)], said.append)] == ["a ring"]
    assert said == [f"{tmp_path}: 2 .txt without a picture beside it, left out; the first is 1.txt"]
