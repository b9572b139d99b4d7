"""Adapter files that are damaged, forged or something else give one clear error, in the engine and in Python."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from bitnet_export import PackedFile, PackedFormatError, random_adapter, random_model
from bitnet_export.packed import records
from bitnet_runtime import Model
from bitnet_runtime.errors import BitnetError
from packed_files import SMALL, fix_checksums, patch, section_start

TINY = SMALL.replace(dim=16, n_layers=1, ffn_dim=16, vocab_size=8)
WORD_47 = 4 * 47


class Files:
    """A model, an adapter of it, and what comes of changed bytes in that."""

    def __init__(self, folder: Path) -> None:
        self.base, self.changed = folder / "base.bitnet", folder / "changed.bitnet"
        random_model(TINY, self.base)
        random_adapter(self.base, folder / "good.bitnet", rank=2, linears=("q", "down"))
        self.good = (folder / "good.bitnet").read_bytes()
        assert self.refused(self.good) == ("", "")

    def refused(self, content: bytes) -> tuple[str, str]:
        """The errors of the engine and of Python for a file; "" if it is accepted."""
        self.changed.write_bytes(content)
        said = ["", ""]
        try:
            with Model.load(self.base, threads=1, adapters=[self.changed]) as model:
                model.generate([1, 2, 3], adapter="changed", max_tokens=2, seed=0)
        except BitnetError as error:
            said[0] = str(error)
        try:
            assert PackedFile(content, adapter=True).weights
        except PackedFormatError as error:
            said[1] = str(error)
        return said[0], said[1]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_what_is_cut_short_or_changed_is_refused(files: Files) -> None:
    good = files.good
    for size in {*range(0, len(good), 37), len(good) - 1}:
        assert all(files.refused(good[:size])), size
    for at in range(0, len(good), 5):
        assert all(files.refused(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])), at


def test_forged_content_is_refused_or_runs(files: Files) -> None:
    """Checksums right, anything else wrong anywhere: an answer or one error."""
    draw = random.Random(0)
    for _ in range(400):
        content = bytearray(files.good)
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(64 if draw.random() < 0.5 else 0, len(content))] = draw.randrange(256)
        files.refused(fix_checksums(bytes(content)))


def test_each_rule_of_an_adapter_alone(files: Files) -> None:
    stacks, tensors = (section_start(files.good, kind) for kind in (records.STACKS, records.TENSORS))
    data = section_start(files.good, records.DATA)
    scales = data + next(iter(PackedFile(files.good, adapter=True).tensors.values())).scale_offset
    cases = {
        "no adapters": (
            patch(files.good, stacks + WORD_47, "I", 0),
            "in none of its stacks|adapters = 0 in each stack",
        ),
        "another rank": (patch(files.good, stacks + WORD_47, "I", 3 | 65 << 16), "2.*3|METADATA"),
        "another role": (patch(files.good, stacks + WORD_47, "I", 2 | 66 << 16), "layers.0.k.adapter_in|METADATA"),
        "another width": (patch(files.good, stacks + 12, "I", 17), "16.*17|METADATA"),
        "another encoding": (patch(files.good, tensors + 9, "B", 1), "F32|size"),
        "a weight": (patch(files.good, tensors + 8, "B", 0), "layers.0.q.weight"),
        "a code": (patch(files.good, data, "B", 0x80), "int8 code is -128"),
        "a scale": (patch(files.good, scales, "I", 0), "a scale is not"),
        "another flag": (patch(files.good, 12, "I", 3), "flags"),
        "no flag": (patch(files.good, 12, "I", 0), "reserved|a model"),
        "reserved bytes": (patch(files.good, 48, "I", 1), "reserved"),
    }
    for name, (content, match) in cases.items():
        for said in files.refused(content):
            assert re.search(match, said), (name, said)
    others = patch(files.good, 28, "Q", 77)  # well formed, of some other model
    engine, reader = files.refused(others)
    assert "belongs to a model with 77 bytes" in engine and not reader
