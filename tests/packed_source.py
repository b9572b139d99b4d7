"""A packed file as a `Source`, so that conversion can be tested without any foreign format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from bitnet.config import ModelConfig
from bitnet_export import PackedFile
from bitnet_export.foreign.source import Floats, Source, Tensor, Ternary
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import Key

ODD = ModelConfig(
    vocab_size=531, dim=40, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=20, ffn_dim=72, max_context=300,
)  # fmt: skip


def source_of(path: Path) -> Source:
    """Ternary tensors unchanged, tables as floats."""
    file = PackedFile.open(path)

    def load(key: Key) -> Tensor:
        record = file.tensors[key]
        if record.encoding in encodings.TERNARY.values():
            scales = file.scales(record).copy()
            return Ternary(
                file.codes(record), scales.reshape(record.rows, -1) if record.scope == encodings.SCALE_GROUP else scales
            )
        values = file.values(record)
        return Floats.of(values if values.shape[0] > 1 else values[0])

    tokenizer = file.section(records.TOKENIZER)
    return Source(
        what="a packed file",
        config=file.configs[0],
        load=load,
        tokenizer=tokenizer,
        template=file.section(records.TEMPLATE),
        generation=json.loads(json.dumps(file.metadata.get("generation", {}))),
    )


def flipped(source: Source, role: str) -> Source:
    """The source with one ternary code of layer 0 changed, or one float of a table."""

    def load(key: Key) -> Tensor:
        tensor = source.load(key)
        if records.ROLES[key.role] != role or key.layer not in (0, records.NONE):
            return tensor
        if isinstance(tensor, Ternary):
            codes = tensor.codes.copy()
            codes[0, 0] = (codes[0, 0] + 2) % 3 - 1
            return Ternary(codes, tensor.scales)
        values = np.array(tensor.all())
        values.reshape(-1)[:8] += 1
        return Floats.of(values)

    return Source(what=source.what, config=source.config, load=load, tokenizer=source.tokenizer)


def assert_same_tensors(back: PackedFile, ours: PackedFile) -> None:
    """Compare a file with the result of its round trip through a Hugging Face folder."""
    assert list(back.tensors) == list(ours.tensors)
    for key, record in ours.tensors.items():
        again = back.tensors[key]
        assert (again.encoding, again.scope) == (record.encoding, record.scope), key.name
        if record.encoding == encodings.TERNARY_2BIT:
            assert np.array_equal(back.codes(again), ours.codes(record)), key.name
            assert back.scales(again).tobytes() == ours.scales(record).tobytes(), key.name
        elif record.encoding.kind == "int8":
            assert np.array_equal(back.codes(again), ours.codes(record)), key.name
            # σ comes back as (127·σ)/127: two roundings.
            assert np.allclose(back.scales(again), ours.scales(record), rtol=2**-22, atol=0), key.name
        elif key.part:  # stored as b/γ, because transformers adds it before it multiplies by γ: two roundings
            assert np.allclose(back.values(again), ours.values(record), rtol=2**-22, atol=0), key.name
        else:
            assert back.values(again).tobytes() == ours.values(record).tobytes(), key.name
