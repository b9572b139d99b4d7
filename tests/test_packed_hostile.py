"""Files that are damaged, forged or something else: the Python reader refuses each with one exception."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packed_files
from bitnet_export import PackedFile, PackedFormatError
from bitnet_export.packed import records
from hostile_packed import Hostile, foreign_files, hostile_files
from packed_files import SEEING, SMALL, fix_checksums, packed_bytes


def refused(file: bytes) -> str:
    with pytest.raises(PackedFormatError) as caught:
        PackedFile(file)
    return str(caught.value)


@pytest.mark.parametrize("case", hostile_files(), ids=lambda case: case.name)
def test_hostile_files(case: Hostile) -> None:
    if case.status == "BN_OK":
        PackedFile(case.file)
    else:
        why = refused(case.file)
        assert len(why) > 15 and (case.status != "BN_ERR_CONFIG" or why.startswith(("stack ", "is an adapter, ")))


def test_every_prefix_is_refused() -> None:
    good = packed_bytes()
    for size in range(len(good)):
        refused(good[:size])


def test_every_changed_byte_is_refused() -> None:
    good = packed_bytes()
    for at in range(len(good)):
        for bits in (0x01, 0x80, 0xFF):
            refused(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])


@given(st.lists(st.tuples(st.integers(0, len(packed_bytes()) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_forged_files_are_refused_or_read_as_they_are(changes: list[tuple[int, int]]) -> None:
    """Checksums right, content wrong anywhere: an answer or PackedFormatError, nothing else."""
    file = bytearray(packed_bytes())
    for at, value in changes:
        file[at] = value
    try:
        read = PackedFile(fix_checksums(bytes(file)))
    except PackedFormatError:
        return
    for record in read.tensors.values():
        assert read.values(record).shape == (record.rows, record.cols)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    refused(content)
    refused(records.MAGIC + content)


def test_foreign_files_are_named() -> None:
    expected = {
        "gguf": "a GGUF file", "gguf, other endian": "a GGUF file", "safetensors": "a safetensors file",
        "zip": "a zip archive, such as a torch checkpoint", "pickle": "a Python pickle", "gzip": "a gzip archive",
        "lfs pointer": "git lfs pull", "onnx": "an ONNX model", "html": "a web page", "json": "a JSON file",
        "zeros": "a file of zeros", "text": "begins with 68 65 6c 6c 6f",
    }  # fmt: skip
    for name, content in foreign_files().items():
        message = refused(content)
        assert expected[name] in message and "expected a packed bitnet file" in message


def test_a_file_of_another_version_says_what_to_do() -> None:
    for version, remedy in ((2, "export or convert the model again"), (4, "use a newer bitnet-edge")):
        message = refused(packed_files.patch(packed_bytes(), 8, "I", version))
        assert message == f"format version is {version}, this program reads 3; {remedy}"


def test_files_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(PackedFormatError, match="is a directory"):
        PackedFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackedFormatError, match="not a regular file"):
        PackedFile.open(tmp_path / "pipe")
    with pytest.raises(PackedFormatError, match="not a regular file"):
        PackedFile.open("/dev/zero")
    (tmp_path / "empty").touch()
    with pytest.raises(PackedFormatError, match="is empty"):
        PackedFile.open(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        PackedFile.open(tmp_path / "missing")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"\xff\xfe", "METADATA is not good JSON"),
        (b"{", "METADATA is not good JSON"),
        (b"[1]", "METADATA is [1], expected a JSON object"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs 2 times, expected once"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[" * 200_000, "METADATA is not good JSON"),
        (b'{"config": 5}', "METADATA config"),
        (b'{"config": ["x"]}', "METADATA config"),
        (b'{"config": []}', "METADATA config: expected a list of 1"),
        (json.dumps({"config": [SMALL.to_dict()] * 2}).encode(), "METADATA config: expected a list of 1"),
        (b'{"config": [{"dim": 8}]}', "model option 'vocab_size' is missing"),
        (json.dumps({"config": [SMALL.to_dict() | {"ffn_dim": 21}]}).encode(), "differs from the STACKS"),
        (json.dumps({"config": [SMALL.to_dict() | {"tie_embeddings": "x"}]}).encode(), "METADATA config"),
        (json.dumps({"config": [SMALL.to_dict() | {"norm_eps": "x"}]}).encode(), "METADATA config"),
        (json.dumps({"config": [SMALL.to_dict() | {"name": "\ud800"}]}).encode(), "METADATA config"),
        (json.dumps({"config": [SEEING.to_dict()]}).encode(), "a record holds one stack"),
        (json.dumps({"config": [SMALL.to_dict() | {"vision": 7}]}).encode(), "vision is 7, expected a table"),
        (b'{"config": [' + b'{"vision": ' * 900 + b"1" + b"}" * 900 + b"]}", "METADATA config: model option 'vocab_s"),
        (
            json.dumps({"config": [SMALL.to_dict() | {"vision": {"vision": {"vision": {}}}}]}).encode(),
            "vision.vision is given, expected none",
        ),
    ],
)
def test_bad_metadata_is_refused(metadata: bytes, message: str) -> None:
    assert message in refused(packed_files.with_section(packed_bytes(), records.METADATA, metadata))


def test_metadata_of_a_newer_writer_is_read() -> None:
    newer = {"config": [SMALL.to_dict() | {"brand_new": 1}], "also_new": [1, 2]}
    file = packed_files.with_section(packed_bytes(), records.METADATA, json.dumps(newer).encode())
    assert PackedFile(file).configs == (SMALL,)


def test_names_that_are_not_utf8_are_refused() -> None:
    start = packed_files.section_start(packed_bytes(), records.STACKS)
    assert "stack 0" in refused(packed_files.patch(packed_bytes(), start + 192, "4s", b"\xff\xfea\0"))


def test_huge_numbers_cost_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in hostile_files():
        if case.status != "BN_OK":
            refused(case.file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 65_536  # kB
