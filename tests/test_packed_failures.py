"""Writing a packed file in blocks; writing that fails leaves nothing; what the format cannot say is refused."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_export import PackedFile
from bitnet_export.packed import encodings, writer
from bitnet_export.packed.records import Spec
from bitnet_export.packed.replacing import renaming
from bitnet_export.packed.writer import Encoded, write_packed
from packed_files import SMALL, swap, values_of, write_values


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted, ValueError, MemoryError])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "m.bitnet"
    path.write_bytes(b"the old one")
    count = 0

    def source(spec: Spec) -> Encoded:
        nonlocal count
        count += 1
        if count == 9:
            raise error
        return Encoded.f32(values_of(spec))

    with pytest.raises(error):
        write_packed(path, [SMALL], source)
    assert os.listdir(tmp_path) == ["m.bitnet"] and path.read_bytes() == b"the old one"


def test_a_link_stays_one_and_a_private_file_private(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    old, link = tmp_path / "folder" / "old", tmp_path / "link"
    write_values(old, SMALL)
    old.chmod(0o600)
    link.symlink_to(old)
    first = old.stat().st_ino
    write_values(link, SMALL)
    assert link.is_symlink() and old.stat().st_ino != first and old.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in old.parent.iterdir()] == ["old"]


def test_a_name_may_be_as_long_as_any_and_a_longer_one_is_refused_before_writing(tmp_path: Path) -> None:
    write_values(tmp_path / ("x" * 255), SMALL)
    assert [each.name for each in tmp_path.iterdir()] == ["x" * 255]
    too_long = tmp_path / ("x" * 256)
    with pytest.raises(OSError, match="File name too long") as caught, renaming(too_long):
        pytest.fail("begun to write")
    assert caught.value.filename == str(too_long)


def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path: Path) -> None:
    out = tmp_path / "m"
    with pytest.raises(IsADirectoryError) as caught, renaming(out) as temporary:
        temporary.touch()
        out.mkdir()
    assert caught.value.filename == str(out) and os.listdir(tmp_path) == ["m"]


def test_a_failed_check_leaves_nothing(tmp_path: Path) -> None:
    seen: list[Path] = []

    def check(file: Path) -> None:
        assert PackedFile.open(file).configs == (SMALL,)  # complete by now
        seen.append(file)
        raise RuntimeError("no good")

    with pytest.raises(RuntimeError, match="no good"):
        write_values(tmp_path / "m.bitnet", SMALL, check=check)
    assert seen and os.listdir(tmp_path) == []


def test_a_file_is_written_in_aligned_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[int, int]] = []

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            writes.append((self.tell(), memoryview(data).nbytes))
            return super().write(data)

    def opened(path: Path, mode: str, buffering: int) -> io.BufferedWriter:
        return io.BufferedWriter(Raw(path, mode.replace("b", "")), buffering)

    one, blocks, block = tmp_path / "one", tmp_path / "blocks", 1 << 10  # SMALL has tensors above and below it
    write_values(one, SMALL, tokenizer=bytes(3000))
    with monkeypatch.context() as patched:
        patched.setattr(writer, "BLOCK", block)
        patched.setattr("builtins.open", opened)
        write_values(blocks, SMALL, tokenizer=bytes(3000))
    assert blocks.read_bytes() == one.read_bytes()
    starts = range(0, one.stat().st_size, block)
    body, rest = writes[: len(starts)], writes[len(starts) :]
    assert [start for start, _ in body] == list(starts) and {size for _, size in body[:-1]} == {block}
    assert rest[0][0] == 0 and all(start < body[-1][0] for start, _ in rest)  # the header and tables


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        written = 0

        def write(self, data: Any) -> int:
            self.written += memoryview(data).nbytes
            if self.written > 4000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: Full(path, mode.replace("b", "")))
    with pytest.raises(OSError, match=r"no space left while writing .*m\.bitnet; free some") as caught:
        write_values(tmp_path / "m.bitnet", SMALL)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []


def test_a_write_beyond_a_file_size_limit_is_cleaned_up(tmp_path: Path) -> None:
    """The same with a real failing write, in a process of its own."""
    script = """
import resource, signal, sys
from bitnet.presets import PRESETS
from bitnet_export import random_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    random_model(PRESETS["tiny"], sys.argv[1])
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert int(done.stdout) == errno.EFBIG and os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory, expected the name of a file"):
        write_values(tmp_path, SMALL)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; create it first"):
        write_values(tmp_path / "nowhere" / "m.bitnet", SMALL)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file is not a folder, expected one to write into"):
        write_values(tmp_path / "file" / "m.bitnet", SMALL)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "layers.0.q.weight",
            lambda s: Encoded.f32(np.zeros((3, 3))),
            "layers.0.q.weight: 36 bytes, expected 1536 for 16",
        ),
        (
            "final_norm.weight",
            lambda s: Encoded.floats(encodings.F16, np.zeros(24)),
            "final_norm.weight: stored as F16, which",
        ),
        (
            "layers.0.q.weight",
            lambda s: Encoded(
                encodings.TERNARY_2BIT, encodings.SCALE_ROW, np.zeros(128, np.uint8), np.ones(3, np.float32)
            ),
            "layers.0.q.weight: 3 scales, expected 16",
        ),
        (
            "layers.0.q.weight",
            lambda s: Encoded(
                encodings.TERNARY_2BIT, encodings.SCALE_TENSOR, np.zeros(128, np.uint8), np.zeros(1, np.float32)
            ),
            "layers.0.q.weight: a scale is not a normal number above 0",
        ),
        (
            "embedding.weight",
            lambda s: Encoded.floats(encodings.F16, np.full((19, 24), 1e5)),
            "beyond the range of F16",
        ),
        ("final_norm.weight", lambda s: Encoded.f32(np.full(24, np.nan)), "final_norm.weight: a value is NaN"),
    ],
)
def test_what_the_format_cannot_say_is_refused(
    name: str, tensor: Callable[[Spec], Encoded], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_packed(tmp_path / "m", [SMALL], swap(name, tensor))
    assert os.listdir(tmp_path) == []


def test_configurations_the_record_cannot_hold_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"norm_eps": 1e-60}, "norm_eps is 0.0"),
        ({"n_heads": 512, "n_kv_heads": 1, "head_dim": 1024}, "n_heads \\* head_dim is 524288"),
    ):
        with pytest.raises(ValueError, match=message):
            write_values(tmp_path / "m", SMALL.replace(**changes))
    with pytest.raises(ValueError, match="chat template is 262145 bytes"):
        write_values(tmp_path / "m", SMALL, template=bytes(262145))
    assert os.listdir(tmp_path) == []
