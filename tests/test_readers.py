"""Two readers of the packed file, in C and Python, written independently: they agree on every hostile file, every
length and random damage. `make sanitize` runs this with the engine under ASan and UBSan."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest

import packed_files
from bitnet_cli import main
from bitnet_export import PackedFile, PackedFormatError
from bitnet_export.packed import records
from bitnet_runtime import Model, ModelFormatError, NumericError
from bitnet_runtime._native import ffi, lib
from hostile_packed import Hostile, hostile_files
from packed_files import SMALL, fix_checksums, packed_bytes, sketched_bytes

STATUS = dict(ffi.typeof("bn_status").elements)


def engine(file: bytes, path: Path) -> str:
    """The status of bn_model_open; a failure must come with one line that explains it."""
    path.write_bytes(file)
    options = ffi.new("bn_load_options *", {"threads": 1, "no_mmap": len(file) % 2})
    model, detail = ffi.new("bn_model **"), ffi.new("char[]", lib.BN_DETAIL_SIZE)
    status = STATUS[lib.bn_model_open(str(path).encode(), options, model, detail)]
    if status == "BN_OK":
        lib.bn_model_close(model[0])
    else:
        assert model[0] == ffi.NULL
        assert len(ffi.string(detail)) > 10
        assert b"\n" not in ffi.string(detail)
    return status


def accepted(file: bytes) -> bool:
    return not finding(file)


def finding(file: bytes) -> str:
    """The Python reader's error for a file; "" if it is valid."""
    try:
        PackedFile(file)
    except PackedFormatError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", hostile_files(), ids=lambda case: case.name)
def test_status_of_hostile_files(case: Hostile, tmp_path: Path) -> None:
    assert engine(case.file, tmp_path / "file") == case.status
    assert accepted(case.file) == (case.status == "BN_OK")


def test_every_prefix(tmp_path: Path) -> None:
    good = packed_bytes()
    for size in (*range(0, 512), *range(512, len(good), 61), len(good) - 1):
        assert engine(good[:size], tmp_path / "file") in ("BN_ERR_TRUNCATED", "BN_ERR_MAGIC"), size
    assert engine(good, tmp_path / "file") == "BN_OK"


@pytest.mark.parametrize("good", [packed_bytes(), sketched_bytes()], ids=["rows", "sketch"])
def test_random_damage_behind_right_checksums(tmp_path: Path, good: bytes) -> None:
    """Damage that passes the checks only changes numbers: the file opens in both readers and computes."""
    path = tmp_path / "file"
    (metadata,) = (s for s in PackedFile(good).sections if s.kind == records.METADATA)  # opaque to C
    places = [i for i in range(8, len(good)) if not metadata.offset <= i < metadata.offset + metadata.size]
    rng, answers = random.Random(1), set()
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.choice(places)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        file = fix_checksums(bytes(damaged))
        status = engine(file, path)
        answers.add(status)
        if status == "BN_ERR_UNSUPPORTED":  # the format can say more than the engine runs
            continue
        found = finding(file)
        # Another configuration that is good too, or a name that cannot be shown: C reads no METADATA and shows no name.
        if "METADATA config differs" not in found and "'utf-8' codec" not in found:
            assert (not found) == (status == "BN_OK"), (status, found)
        if status == "BN_OK":
            # A scale of 1e38 is a number too, hence NumericError.
            with contextlib.suppress(NumericError), Model.load(path, threads=1) as model, model.session() as session:
                assert len(session.score([1, 2, 3])) == 3
    assert {"BN_OK", "BN_ERR_CODE", "BN_ERR_SECTION", "BN_ERR_TENSOR"} <= answers


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            b'{"generation": {"temperature": 0, "temperature": 1}}',
            "the key 'temperature' occurs 2 times, expected once",
        ),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[]", "is [], expected a JSON object"),
    ],
)
def test_metadata_has_one_rule(
    metadata: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runtime computes with the values that inspect shows, or both refuse the file."""
    path = tmp_path / "m.bitnet"
    path.write_bytes(packed_files.with_section(packed_bytes(), records.METADATA, metadata))
    assert message in finding(path.read_bytes())
    with pytest.raises(ModelFormatError, match=re.escape(message)):
        Model.load(path)
    for words in (["inspect", str(path)], ["generate", str(path), "-p", "x"]):
        assert main(words) == 1
        assert message in capsys.readouterr().err


def test_python_names_the_file_and_the_finding(tmp_path: Path) -> None:
    path = tmp_path / "weights of mine.bitnet"
    path.write_bytes(packed_bytes(SMALL)[:-64])
    with pytest.raises(ModelFormatError, match=r"weights of mine\.bitnet"):
        Model.load(path)
