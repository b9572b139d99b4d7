"""What is no picture gives one clear error, whatever its bytes are."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bitnet_runtime import ImageError, MissingDependencyError
from bitnet_runtime.images import files as image_files
from bitnet_runtime.images.processor import Processor
from picture_data import encoded, noise, smooth

S = 20


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """A file that claims to have this many pixels."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(body)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


# ---- what is refused ----


def arrays() -> dict[str, tuple[Any, str]]:
    bad = np.full((S, S, 3), 0.5, np.float32)
    bad[3, 4, 1] = np.nan
    return {
        "NaN": (bad, "from nan to nan, expected finite ones from 0 to 1"),
        "infinity": (np.full((S, S), np.inf), "from inf to inf"),
        "beyond 1": (noise(S, S) * 1.0, "expected finite ones from 0 to 1; divide by 255"),
        "below 0": (np.full((S, S), -0.5), "from -0.5 to -0.5"),
        "channels first": (noise(3, S, S), r"\(3, 20, 20\), .* puts the channels last"),
        "two channels": (noise(S, S, 2), r"\(20, 20, 2\), expected \(height, width\)"),
        "five dimensions": (noise(1, 1, S, S, 3)[0], r"\(1, 20, 20, 3\)"),
        "one dimension": (noise(S), r"\(20,\)"),
        "no dimension": (np.array(3, np.uint8), r"shape \(\)"),
        "empty": (noise(0, S, 3), "20 × 0 pixels, expected at least 1 × 1"),
        "int64": (np.zeros((S, S), np.int64), "an array of int64, expected uint8, or float"),
        "bool": (np.zeros((S, S), bool), "an array of bool"),
        "complex": (np.zeros((S, S), complex), "an array of complex128"),
        "object": (np.array([[None]]), "an array of object"),
        "text": (np.array([["a"]]), "an array of <U1"),
        "bomb": (np.broadcast_to(np.uint8(1), (10**5, 10**5)), "100,000 × 100,000 pixels, expected at most 50,331,648"),
        "a number": (7, "^7, expected the name of a file"),
        "nothing": (None, "^None, expected"),
    }


@pytest.mark.parametrize("name", arrays())
def test_arrays_that_are_no_pictures_are_refused(name: str) -> None:
    array, message = arrays()[name]
    with pytest.raises(ImageError, match=message):
        Processor(S).floats(array)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"
BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes, expected a picture: PNG"),
    "text": (b"hello, world", "begins with b'hello, world', expected a picture"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "begins with b'<svg xmlns="),
    "pdf": (b"%PDF-1.7\n", "begins with b'%PDF"),
    "eps": (EPS, "begins with b'%!PS-Adobe"),
    "dos eps": (b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS, "begins with"),
    "ico": (b"\0\0\1\0" + bytes(60), "begins with"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(60), "it is HEIC or AVIF, expected a picture: PNG"),
    "avif": (b"\0\0\0\x20ftypavif" + bytes(60), "it is HEIC or AVIF, expected"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "it is damaged or cut short"),
    "wave sound": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(20), "begins with b'RIFF"),
    "words of a bitmap": (b"BMW is a car, and no bitmap", "or another kind of file; expected one of PNG|damaged"),
    "words of a TIFF": (b"II like pictures", "begins with b'II like pictures', expected a picture"),
    "no width": (png(0, 5), "0 × 5 pixels|damaged"),
    "bomb": (png(9_000, 9_000), "9,000 × 9,000 pixels, expected at most 50,331,648"),
    "great bomb": (png(60_000, 60_000), r"3600000000 pixels\) exceeds limit of .* pixels; make it smaller first"),
    "long": (png(70_000, 1, bytes(70_001)), "70,000 × 1 pixels, expected at most .* and 65,536 on a side"),
    "no data": (png(30, 30), "damaged or cut short"),
    "ppm bomb": (b"P6 9000 9000 255\n", "9,000 × 9,000 pixels"),
    "ppm of nothing": (b"P6 0 3 255\n", "."),
    "gif bomb": (b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0) + b"\x3b", "."),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_picture_are_refused(name: str, tmp_path: Path) -> None:
    data, message = BYTES[name]
    path = tmp_path / "bad.png"
    path.write_bytes(data)
    for form, named in ((data, f"a picture of {len(data):,} bytes"), (path, str(path))):
        with pytest.raises(ImageError, match=message) as caught:
            Processor(S).floats(form)
        assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_file_cut_short_is_refused(format: str) -> None:
    data = encoded(smooth(30, 30), format)
    for end in {0, 1, 4, 10, 20, len(data) // 2, len(data) * 3 // 4}:
        with pytest.raises(ImageError):
            Processor(S).floats(data[:end])


def test_paths_that_are_no_files_and_urls_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused = {
        tmp_path: "it is a folder",
        tmp_path / "none.png": "No such file",
        tmp_path / "fifo": "not a regular file",
        "/dev/zero": "not a regular file",
        "a\0b": "null byte",
        "x" * 5000: "too long",
        "": "^a picture without a name: No such file",
        "https://example.org/cat.png": "a URL, expected a file, .* nothing is fetched",
        "file:///etc/passwd": "a URL",
        "data:image/png,abc": "expected data:image/png;base64",
        "data:image/png;base64,a§": "its base64 is broken",
        "data:image/png;base64,": "it has 0 bytes",
    }
    for source, message in refused.items():
        with pytest.raises(ImageError, match=message) as caught:
            Processor(S).floats(source)
        assert len(str(caught.value)) < 500
    before = len(os.listdir("/proc/self/fd"))
    for source in refused:
        with pytest.raises(ImageError):
            Processor(S).floats(source)
    assert len(os.listdir("/proc/self/fd")) == before


def test_sizes_of_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(noise(S, S, 3), "BMP")
    monkeypatch.setattr(image_files, "MOST_BYTES", len(data) - 1)
    for source in (data, "data:;base64," + base64.b64encode(data).decode()):
        with pytest.raises(ImageError, match=r"bytes, expected a picture|characters, expected"):
            Processor(S).floats(source)


def test_limits_are_those_asked_for_and_no_long_picture_grows_by_cropping() -> None:
    with pytest.raises(ImageError, match="20 × 20 pixels, expected at most 399"):
        Processor(S, most_pixels=399).floats(encoded(noise(S, S, 3), "PNG"))
    assert Processor(S, most_pixels=400).floats(encoded(noise(S, S, 3), "PNG")).shape == (3, S, S)
    long = Image.new("L", (60_000, 1))
    assert Processor(S).bytes(long).shape == (3, S, S)
    with pytest.raises(ImageError, match="60,000 × 1 pixels, too long for a middle of 224 × 224"):
        Processor(224, resize="crop").bytes(long)


def test_faults_of_what_was_decoded_name_the_file(tmp_path: Path) -> None:
    floats, long = tmp_path / "floats.tif", tmp_path / "long.png"
    Image.fromarray(noise(S, S) * np.float32(1)).save(floats)
    Image.new("L", (60_000, 1)).save(long)
    with pytest.raises(ImageError, match=f"^{floats}: an array with numbers from "):
        Processor(S).floats(floats)
    with pytest.raises(ImageError, match=f"^{long}: 60,000 × 1 pixels, too long"):
        Processor(224, resize="crop").batch([long])


MEMORY = """
import sys
from bitnet_runtime.images.processor import Processor
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
small, large = sys.argv[1:]
Processor(20).floats(small)
before = peak()
Processor(20).floats(large)
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["palette", "turned", "floats", "alpha", "progressive"])
def test_a_large_picture_is_in_memory_twice_at_most(kind: str, tmp_path: Path) -> None:
    """As Pillow decoded it, and before it is resized: 4 bytes per pixel each. Or the decoder has 8 bytes beside it: its
    numbers of four channels, 16 bits each."""
    exif = Image.Exif()
    exif[0x112] = 6
    mode, format, options = {
        "palette": ("P", "PNG", {"transparency": 0}),
        "turned": ("RGB", "JPEG", {"exif": exif}),
        "floats": ("F", "TIFF", {"compression": "tiff_adobe_deflate"}),
        "alpha": ("RGBA", "PNG", {}),
        "progressive": ("CMYK", "JPEG", {"progressive": True, "subsampling": 0}),
    }[kind]
    for side in (100, 3_000):
        (tmp_path / str(side)).write_bytes(encoded(Image.new(mode, (side, side)), format, **options))
    words = [sys.executable, "-c", MEMORY, tmp_path / "100", tmp_path / "3000"]
    environment = os.environ | {"PYTHONPATH": str(Path(image_files.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) / 3_000**2 < (13 if kind == "progressive" else 10), "bytes for a pixel"


def test_an_eps_that_pillow_opened_starts_no_program() -> None:
    with pytest.raises(ImageError, match="EPS, expected one of PNG"):
        Processor(S).floats(Image.open(io.BytesIO(EPS)))
    closed = Image.open(io.BytesIO(encoded(noise(S, S, 3), "PNG")))
    closed.close()
    with pytest.raises(ImageError, match="an image of Pillow: it is damaged"):
        Processor(S).floats(closed)


def test_what_is_open_and_no_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(noise(S, S, 3), "PNG"))
    closed = io.BytesIO(b"x")
    closed.close()
    with (tmp_path / "a.png").open(encoding="utf-8") as wrong:
        for source, said in (
            (io.StringIO("x"), 'gives "?.x.*expected bytes: open it with "rb"'), (closed, "cannot be read: .* closed"),
            (wrong, "cannot be read: .*utf-8.*; expected a file open for bytes"), (io.BytesIO(), "it has 0 bytes"),
        ):  # fmt: skip
            with pytest.raises(ImageError, match=said):
                Processor(S).floats(source)  # type: ignore[arg-type]


def test_tensors_that_are_no_picture() -> None:
    for tensor, said in (
        (torch.zeros(3, S, S), r"of a tensor \.permute\(1, 2, 0\), puts the channels last"),
        (torch.zeros(S, S, 3, dtype=torch.bfloat16), "a Tensor that is no array: .*BFloat16"),
        (torch.zeros(S, S, 3, requires_grad=True), "a Tensor that is no array: .*detach"),
        (torch.zeros(S, S, 3, device="meta"), "a Tensor that is no array: "),
    ):
        with pytest.raises(ImageError, match=said):
            Processor(S).floats(tensor)


@pytest.mark.parametrize(
    "options", [{"channels": 2}, {"resize": "pad"}, {"filter": "nearest"}, {"size": 0}, {"size": -1}, {"size": 2.5}]
)
def test_a_processor_refuses_words_it_does_not_know(options: Any) -> None:
    with pytest.raises(ImageError, match=f"{next(iter(options))} is .*, expected"):
        Processor(**{"size": S} | options)


# ---- anything at all ----


SOURCES = [
    encoded(smooth(9, 14), "PNG"),
    encoded(smooth(9, 14), "JPEG"),
    encoded(smooth(9, 14), "GIF"),
    encoded(smooth(9, 14), "TIFF", compression="tiff_lzw"),
    encoded(smooth(9, 14), "WEBP"),
    encoded(smooth(9, 14), "BMP"),
    encoded(smooth(9, 14), "PPM"),
]


@settings(max_examples=250)
@given(st.data())
def test_changed_bytes_give_a_picture_or_an_image_error(data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from(SOURCES)))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(changed) - 1), st.integers(0, 255)), max_size=6)
    ):
        changed[place] = value
    cut = bytes(changed[: data.draw(st.integers(0, len(changed)))]) if data.draw(st.booleans()) else bytes(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            made = Processor(S, most_pixels=10_000).floats(cut)
        except ImageError as error:
            assert "\n" not in str(error)
        else:
            assert made.shape == (3, S, S) and made.min() >= 0 and made.max() <= 1


def test_warnings_stay_inside_and_filters_come_back_from_many_threads() -> None:
    palette = Image.fromarray(noise(S, S)).convert("P")
    palette.info["transparency"] = bytes(range(256))  # which Pillow warns of
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=Processor(S).floats, args=(palette,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not caught and warnings.filters == before


@pytest.mark.parametrize("locked", [False, True])
def test_a_child_has_the_filters_that_another_thread_had_taken(locked: bool) -> None:
    """From a thread that was decoding, or about to, when the process forked."""
    inside, done = threading.Event(), threading.Event()

    def decode() -> None:
        with image_files._quiet, image_files._quiet._lock if locked else contextlib.nullcontext():
            inside.set()
            done.wait(60)

    thread, before = threading.Thread(target=decode), warnings.filters[:]
    thread.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)  # it waits for no lock
            Processor(S).floats(encoded(Image.new("RGB", (5, 5)), "PNG"))
            code = warnings.filters != before
        finally:
            os._exit(code)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert warnings.filters == before


def test_without_pillow_arrays_of_the_right_size_work_and_files_say_what_to_install() -> None:
    program = """
import sys
sys.modules["PIL"] = None
import numpy as np
from bitnet_runtime import MissingDependencyError
from bitnet_runtime.images.processor import Processor
assert Processor(4).floats(np.zeros((4, 4, 4), np.uint8)).max() == 1
for picture in (b"abc", "a.png", np.zeros((5, 4), np.uint8)):
    try:
        Processor(4).floats(picture)
    except MissingDependencyError as error:
        assert "pip install 'pillow>=11'" in str(error), error
    else:
        raise SystemExit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(image_files.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert issubclass(MissingDependencyError, RuntimeError)
