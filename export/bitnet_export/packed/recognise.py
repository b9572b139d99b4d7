"""Guesses from its first bytes what a file that is not a packed model is."""

from __future__ import annotations

import re

PROBE = 512  # bytes that `recognise` looks at

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (rb"GGUF", "a GGUF file; bitnet convert makes a packed file of it"),
    (rb"(?s).{4}\x00{4}\{", "a safetensors file; bitnet convert makes a packed file of the folder it is in"),
    (rb"PK\x03\x04", "a zip archive, such as a torch checkpoint"),
    (rb"\x80[\x02-\x05]", "a Python pickle"),
    (rb"\x1f\x8b", "a gzip archive; unpack it first"),
    (rb"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (rb"version https://git-lfs", "a Git LFS pointer; fetch the real file with: git lfs pull"),
    (rb"\x08[\x01-\x20]\x12", "an ONNX model"),
    (rb"\x93NUMPY", "a NumPy array"),
    (rb"\x89HDF", "an HDF5 file"),
    (rb"(?i)\s*<(!doctype|html|\?xml|head|body)", "a web page; the download got a page instead of the file"),
    (rb"\s*[{\[]", "a JSON file"),
    (rb"\x00{16}", "a file of zeros, as an interrupted download leaves"),
)


def recognise(head: bytes) -> str | None:
    """A phrase such as "a NumPy array" for the first bytes of a file, or None."""
    if not head:
        return "an empty file"
    for pattern, phrase in _SIGNATURES:
        if re.match(pattern, head):
            return phrase
    return None
