"""`bitnet finetune` from folders of SigLIP and PaliGemma: both stacks start with the source's weights, and become
ternary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hf_vision
from bitnet import quant
from bitnet.config import TERNARY_LINEARS
from bitnet.model.images import Images
from bitnet.source_settings import of_source
from bitnet.train import source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.convert.masters import read_start
from bitnet_export.foreign.hf.write import write_folder
from picture_data import DECODER, captions, questions
from test_hf_vision_ternary import assert_computes_the_same
from training import bitnet, losses

torch.set_num_threads(1)

FAST = ("--threads", "1", "--steps", "6", "--batch", "4", "--save-every", "3", "--precision", "fp32",
        "--eval-every", "3", "--validation", "0.2")  # fmt: skip
KINDS = ["siglip, bytes", "paligemma 2, bytes"]


CROPPED = {
    "size": {"shortest_edge": hf_vision.SIZE}, "do_center_crop": True, "crop_size": hf_vision.SIZE, "resample": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def save(name: str, folder: Path) -> torch.nn.Module:
    theirs = hf_vision.save(name, folder)
    hf_vision.bytes_beside(folder)
    return theirs


@pytest.mark.parametrize("name", KINDS)
def test_it_begins_as_it_was(name: str, tmp_path: Path) -> None:
    """With quantizers of weight 0 it computes what transformers computes."""
    theirs = save(name, tmp_path / "model")
    start = read_start(str(tmp_path / "model"))
    assert ("padding" in start.generation) == name.startswith("siglip")
    assert start.generation["pictures"] == {"resize": "stretch", "filter": "bicubic"}
    settings, config = of_source(start.config)
    assert config.vision and config.ternary == config.vision.ternary == TERNARY_LINEARS
    assert settings["quantize_warmup"] == 0.5
    model, inserted = source_model.build(start, config)
    assert inserted == []
    pixels, images = 2 * hf_vision.pixels_of(4, name) - 1, name.startswith("pali")
    tokens = hf_vision.prompts(2, 2, 3, 5)[0] if images else hf_vision.tokens_of(4, hf_vision.CONTEXT)
    tokens[tokens == hf_vision.IMAGE] = 257
    expected = hf_vision.result(theirs, name.removesuffix(", bytes"), pixels, tokens)
    with torch.inference_mode(), model.eval().partly_quantized(0.0):
        shown: Images = pixels.unflatten(0, (2, 2)) if images else pixels
        found = model(tokens, None, torch.full((2,), 21) if images else None, shown)
    wanted = expected["logits"] if images else torch.cat([expected["texts"], expected["images"]])
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())  # fp32, sums in another order


@pytest.mark.parametrize("name", KINDS)
def test_it_becomes_ternary(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "model")
    data = captions(tmp_path / "data", 40) if name.startswith("siglip") else questions(tmp_path / "data", 40)
    objective = ["--objective", "contrastive"] if name.startswith("siglip") else []
    out = tmp_path / "run"
    assert bitnet("finetune", tmp_path / "model", *objective, *FAST, "--data", data, "--out", out) == 0
    checkpoint = Checkpoint.open(out)
    assert checkpoint.config.vision and checkpoint.config.vision.ternary == TERNARY_LINEARS
    assert checkpoint.state["quantized"] == 1.0 and len(losses(out)) > 3
    weights = checkpoint.model.state_dict()
    codes = quant.ternary_codes(weights["vision.layers.1.q.weight"])[0]
    assert set(codes.unique().tolist()) == {-1, 0, 1}
    assert bitnet("export", out, tmp_path / "m.bitnet") == 0  # which verifies it
    first = read_start(str(tmp_path / "model")).weights
    moved = [key for key, value in first.items() if not torch.equal(weights[key], value)]
    assert any(key.startswith("vision.layers.0.") for key in moved) and "vision.patch.weight" in moved
    write_folder(tmp_path / "m.bitnet", tmp_path / "back")
    if name == "siglip, bytes":  # of the other `test_hf_vision_ternary.py` knows no image token
        assert_computes_the_same("siglip", tmp_path / "m.bitnet", tmp_path / "back")


def test_what_sees_alone_has_nothing_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_vision.save("siglip, vision", tmp_path / "model")
    data = captions(tmp_path / "data", 10)
    assert bitnet("finetune", tmp_path / "model", "--data", data, "--out", tmp_path / "run") == 1
    said = "it sees images and reads no text, so there is nothing to learn with it alone; give it to a run with --v"
    assert said in capsys.readouterr().err


# ---- the stack that sees, of a folder ----

SEES = ["siglip", "siglip, vision", "clip", "clip, vision, projected", "vit, classes", "paligemma"]


@pytest.mark.parametrize("name", SEES)
def test_a_decoder_begins_with_a_published_tower(name: str, tmp_path: Path) -> None:
    """`--vision FOLDER`: before the first step the vision stack computes what transformers does; then it becomes
    ternary."""
    theirs = hf_vision.save(name, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    data, out = questions(tmp_path / "data", 40), tmp_path / "run"
    decoder = [
        *DECODER[:-2],
        "--vision",
        tmp_path / "model",
        "--context",
        "48",
        "--set",
        "max_context=64",
        *FAST,
        "--keep",
        "9",
    ]
    assert bitnet("train", *decoder, "--data", data, "--out", out) == 0
    begun, learnt = (Checkpoint.open(out / f"step-00000{step}") for step in (0, 6))
    assert learnt.config.vision and learnt.config.vision.ternary == TERNARY_LINEARS
    assert learnt.config.vision.pooling == "none" and learnt.config.vision.class_token == ("cl" in name)
    assert learnt.generation["pictures"] == {"resize": "crop", "filter": "bilinear"}
    assert begun.state["quantized"] < 0.2 and learnt.state["quantized"] == 1.0  # of step 1, and of the last
    pixels = 2 * hf_vision.pixels_of(3, name) - 1
    with torch.inference_mode(), begun.model.partly_quantized(0.0):
        assert begun.model.vision
        found = begun.model.vision.hidden(pixels)
        expected = hf_vision.states(theirs, name, pixels)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())  # fp32, sums in another order
    with torch.inference_mode():
        assert not torch.allclose(begun.model.vision.hidden(pixels), expected, rtol=0.01)  # it is to be quantized
    codes = quant.ternary_codes(learnt.model.state_dict()["vision.layers.1.up.weight"])[0]
    assert set(codes.unique().tolist()) == {-1, 0, 1}
    assert bitnet("export", out, tmp_path / "m.bitnet") == 0  # which verifies it
