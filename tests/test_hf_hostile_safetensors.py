"""Damaged and hostile safetensors files in Hugging Face folders: one clear error each."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import hf_models
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.source import SourceError
from hf_refused import refused

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def packed():
    return hf_models.llama_packed()


@pytest.fixture
def folder(packed, tmp_path):
    return packed.save(tmp_path / "model")


def header(folder, change):
    """Rewrite the header of model.safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    text = change(json.loads(content[8:end]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"dtype": "F99"}, "dtype 'F99'"),
        ({"dtype": ["F32"]}, "dtype"),
        ({"shape": [-1, 4]}, "expected natural numbers"),
        ({"shape": [True]}, "expected natural numbers"),
        ({"shape": "x"}, "expected natural numbers"),
        ({"shape": [1 << 62, 1 << 62]}, "bytes, its shape"),
        ({"data_offsets": [0, 1 << 62]}, "bytes, its shape"),
        ({"data_offsets": [9, 3]}, "bytes, its shape"),
        ({"data_offsets": [0]}, "expected natural numbers"),
        ({"more": 1}, "expected dtype, shape and data_offsets"),
    ],
    ids=str,
)
def test_bad_lines_of_the_header(folder, lines, message):
    header(folder, lambda h: h | {f"{Q}.weight": h[f"{Q}.weight"] | lines})
    refused(folder, message)


def test_bad_headers(folder):
    content = (folder / "model.safetensors").read_bytes()
    for bad in (b"", b"\1\0\0", struct.pack("<Q", 1 << 60) + content[8:], b"GGUF" + content, b"\0" * 100):
        (folder / "model.safetensors").write_bytes(bad)
        refused(folder, "damaged or not a safetensors file")
    (folder / "model.safetensors").write_bytes(content[:-1])
    refused(folder, "its header calls for")
    (folder / "model.safetensors").write_bytes(content + b"\0")
    refused(folder, "its header calls for")
    (folder / "model.safetensors").write_bytes(content)
    header(folder, lambda h: json.dumps(h).replace("{", '{"__metadata__": {}, "__metadata__": {}, ', 1).encode())
    refused(folder, r"occurs \d times")


def test_overlapping_tensors(folder):
    def overlap(lines):
        lines[f"{Q}.weight"]["data_offsets"] = lines["model.layers.0.self_attn.q_proj.weight"]["data_offsets"]
        return lines

    header(folder, overlap)
    refused(folder, "no holes, no overlap")


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_every_truncation(folder, cut):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * cut // 100])
    refused(folder, "damaged|calls for")


def test_random_bytes_in_the_header(folder):
    """A changed byte of the header is refused, or changes nothing but a name that is skipped."""
    path, random = folder / "model.safetensors", np.random.default_rng(0)
    content = path.read_bytes()
    for _ in range(150):
        changed = bytearray(content)
        changed[random.integers(0, 8 + struct.unpack("<Q", content[:8])[0])] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            with open_source(folder):
                pass
        except SourceError:
            pass
