"""Hugging Face folders of models that see images: our model of their tensors, and the engine, are `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hf_vision
from bitnet.model.transformer import Transformer
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.source import Floats, Source
from bitnet_export.packed import records

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

Found = dict[str, torch.Tensor]


def model_of(source: Source) -> Transformer:
    """In torch, with the source's tensors as they are."""
    model = Transformer(source.config.replace(head_format="f32"))
    weights = dict(model.state_dict())
    for stack, config in enumerate(source.config.stacks):
        for spec in records.expected_tensors(config, stack):
            if not records.ROLES[spec.key.role].startswith("rope_"):
                values = source.load(spec.key)
                assert isinstance(values, Floats)
                name = spec.key.name.replace("stacks.1.", "vision.").replace("pool_", "pool.")
                weights[name] = torch.from_numpy(np.ascontiguousarray(values.all())).view_as(weights[name])
    model.load_state_dict(weights)
    return model.eval()


def inputs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels from 0 to 1, and token ids."""
    if name.startswith("paligemma"):
        return hf_vision.pixels_of(4, name), hf_vision.prompts(2, 2, 3, 5)[0]
    return hf_vision.pixels_of(3, name), hf_vision.tokens_of(4, hf_vision.CONTEXT)


def normalized(source: Source, pixels: torch.Tensor) -> torch.Tensor:
    stack = source.config.stacks[-1]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (stack.pixel_mean, stack.pixel_std))
    return (pixels - mean) / std if len(mean) else pixels


@torch.inference_mode()
def ours(model: Transformer, pixels: torch.Tensor, tokens: torch.Tensor) -> Found:
    config, seeing = model.config, model.vision or model
    if config.image_token:
        prefix = torch.full((len(tokens),), 21)
        logits = model(tokens, None, prefix, pixels.unflatten(0, (len(tokens), 2)))
        return {"logits": logits, "features": seeing.features(pixels)}
    found: Found = {}
    if config.stacks[-1].input == "images":
        found |= {"images": seeing.embed(pixels), "states": seeing.hidden(pixels)}
    if config.input == "tokens":
        found["texts"] = model.embed(tokens)
    if model.similarity:
        found["similarity"] = model.similarity(found["images"], found["texts"])
    return found


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", hf_vision.MAKE)
def test_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = hf_vision.save(name, tmp_path / "model")
    pixels, tokens = inputs(name)
    with open_source(tmp_path / "model") as source:
        model, entering = model_of(source), normalized(source, pixels)
    single = hf_vision.result(theirs, name, entering, tokens)
    exact = hf_vision.result(theirs.double(), name, entering.double(), tokens)
    for dtype in (torch.float32, torch.float64):
        found = ours(model.to(dtype), entering.to(dtype), tokens)
        for what, expected in exact.items():
            # Norms and RoPE of Gemma are fp32 in transformers, whatever its weights are.
            floor = apart(single[what], expected)
            assert apart(found[what], expected) <= 4 * floor
