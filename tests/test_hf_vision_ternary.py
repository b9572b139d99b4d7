"""Quantized towers, and decoders that see images, as Hugging Face folders: `transformers` computes what the engine
does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ViTModel

import hf_vision
import packed_files
from bitnet.config import TERNARY_LINEARS
from bitnet_export import PackedFile
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.packed import records
from bitnet_export.packed.random_model import random_model
from packed_source import assert_same_tensors
from test_hf_vision import normalized, of_engine

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

END = {"generation": {"eos_token_ids": [hf_vision.END]}}
PARTLY: dict[str, dict[str, Any]] = {
    "paligemma, decoder alone": {"whole": True, "tower": False},
    "paligemma 2, tower alone": {"whole": False, "tower": True},
    "siglip, tower alone": {"whole": False, "tower": True},
    "paligemma, head too": {"head_format": "int8"},
}
"""What is ternary, or has int8 rows, where that is not all of the layers and nothing else."""


def build(name: str, folder: Path, whole: bool = True, tower: bool = True, head_format: str = "f32") -> Path:
    """A random model of this shape. tower: whether a second stack is ternary."""
    hf_vision.save(name, folder / "floats")
    with open_source(folder / "floats") as source:
        config, vision = source.config, source.config.vision
    roles = {True: TERNARY_LINEARS, False: ()}
    vision = vision and vision.replace(ternary=roles[tower], head_format="f32")
    path = folder / "m.bitnet"
    random_model(config.replace(ternary=roles[whole], vision=vision, head_format=head_format), path)
    if config.input == "tokens":
        path.write_bytes(packed_files.with_section(path.read_bytes(), records.METADATA, json.dumps(END).encode()))
    return path


def load(name: str, folder: Path) -> torch.nn.Module:
    kind, more = (
        (ViTModel, {"add_pooling_layer": False}) if name.startswith("vit") else (type(hf_vision.make(name)), {})
    )
    found, said = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **more)
    assert not any(said.values()), said  # no missing, unexpected or mismatched tensor
    return found.eval()


@torch.compiler.set_stance("force_eager")  # transformers unpacks weights in a function that it compiles
def assert_computes_the_same(name: str, path: Path, folder: Path) -> None:
    """The noise floor of quantized models: two correct fp32 programs differ by about 1e-7, until a sum in another order
    puts an activation on the other side of a rounding edge. That may happen for few of the inputs, and changes
    little."""
    pixels, tokens = hf_vision.pixels_of(24, name), hf_vision.tokens_of(24, hf_vision.CONTEXT)
    if name.startswith("paligemma"):
        tokens = hf_vision.prompts(12, 2, 3, 5)[0]
    with open_source(folder) as source:
        entering = normalized(source, pixels)
    theirs = load(name, folder)
    single, ours = hf_vision.result(theirs, name, entering, tokens), of_engine(path, name, pixels, tokens)
    assert ours.keys() <= single.keys() and ours
    for what, found in ours.items():
        distances = (found - single[what]).abs() / single[what].abs().max()
        assert distances.median() <= 1e-6 and distances.max() < 0.1, (what, distances.median(), distances.max())


@pytest.mark.parametrize("case", [*hf_vision.MAKE, *PARTLY])
def test_transformers_computes_the_same(case: str, tmp_path: Path) -> None:
    name = case.split(", ")[0] if case in PARTLY else case
    path = build(name, tmp_path, **PARTLY.get(case, {}))
    assert "quant_method bitnet" in str(write_folder(path, tmp_path / "hf"))
    assert_computes_the_same(name, path, tmp_path / "hf")
    ours = PackedFile.open(path)
    if ours.configs[0].head_format == "f32":  # rows of a random head do not reach 127, as those packed again do
        with open_source(tmp_path / "hf") as source:
            pack_source(source, tmp_path / "back.bitnet", head="f32", linears="f32")
        assert_same_tensors(PackedFile.open(tmp_path / "back.bitnet"), ours)
