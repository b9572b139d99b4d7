"""Folders of vision models that are damaged, or that say what we cannot represent: one error that names it."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import hf_vision
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import records
from bitnet_runtime.images.processor import Processor
from hf_models import DIVIDE

ODD = [None, True, -1, 0, 10**30, 1e30, "x", [], {}, [1], {"a": 1}]


PIXELS = "preprocessor_config.json"
SQUARE, MIDDLE = ("stretch", "bicubic"), ("crop", "bicubic")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(SourceError, match=message), open_source(folder) as source:
        for stack, config in enumerate(source.config.stacks):
            for spec in records.expected_tensors(config, stack):
                if not records.ROLES[spec.key.role].startswith("rope_"):
                    source.load(spec.key)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, made once."""
    base = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(name: str) -> Path:
        hf_vision.save(name, base / name)
        return base / name

    return save


@pytest.fixture
def model(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of it, to be damaged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(saved(name), tmp_path / "model"))

    return copied


def edit(folder: Path, at: str, changes: dict[str, Any]) -> None:
    """Change config.json. at: an object in it, "" for the whole; the value None removes a field."""
    config = json.loads((folder / "config.json").read_text())
    part = config[at] if at else config
    part |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del part[name]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "at", "changes", "message"),
    [
        ("siglip", "", {"vision_config": None}, "config.json has no vision_config, which describes a stack of it"),
        ("siglip", "", {"text_config": None}, "config.json has no text_config"),
        ("siglip", "", {"text_config": [1]}, r"text_config is \[1\], expected an object"),
        ("siglip", "", {"quantization_config": {}}, "quantization_config: quant_method is None, expected bitnet"),
        ("siglip", "", {"quantization_config": DIVIDE},
         "modules_to_not_convert does not name text_model.head: quantized it is not supported"),
        ("siglip", "vision_config", {"model_type": "vit"}, "model_type is 'vit', expected siglip_vision_model"),
        ("siglip", "vision_config", {"image_size": [17, 20]}, r"image_size is \[17, 20\], expected pixels"),
        ("siglip", "vision_config", {"image_size": 0}, "image_size is 0, expected pixels of a square's side"),
        ("siglip", "vision_config", {"patch_size": 18}, "patch_size is 18, expected at most image_size = 17"),
        ("siglip", "vision_config", {"image_size": 5}, r"position_embedding.weight has .* calls for \[1, "),
        ("siglip", "vision_config", {"image_size": 12, "patch_size": 4}, r"shape \[36, 3, 5, 5\], .* \[36, 3, 4, 4\]"),
        ("siglip", "vision_config", {"num_channels": 1}, "image_mean is .* expected a number for each of 1 channels"),
        ("siglip", "vision_config", {"num_channels": 4}, "image_mean is .* expected a number for each of 4 channels"),
        ("siglip", "vision_config", {"vision_use_head": False}, "vision.pooling is 'none', expected a pooling"),
        ("siglip", "vision_config", {"vision_use_head": 1}, "vision_use_head is 1, expected true or false"),
        ("siglip", "vision_config", {"hidden_act": "tanh"}, "hidden_act is 'tanh', expected one of"),
        ("siglip", "vision_config", {"num_attention_heads": 5}, "head_dim is missing"),
        ("siglip", "text_config", {"projection_size": 35}, r"head.weight has shape .* calls for \[35, 28\]"),
        ("siglip", "text_config", {"pad_token_id": 101}, "pad_token_id is 101, expected a token below 101"),
        ("clip", "", {"projection_dim": 20}, r"projection.weight has shape \[21, .*calls for \[20, "),
        ("clip", "vision_config", {"layer_norm_eps": "x"}, "vision_config: layer_norm_eps is 'x', expected a number"),
        ("clip", "", {"text_config_dict": 3}, "text_config_dict is 3, expected an object"),
        ("vit", "", {"qkv_bias": 3}, "qkv_bias is 3, expected true or false"),
        ("vit", "", {"patch_size": [5, 4]}, r"patch_size is \[5, 4\], expected pixels of a square's side"),
        ("paligemma", "text_config", {"model_type": "llama"}, "model_type is 'llama', expected gemma or gemma2"),
        ("paligemma", "vision_config", {"model_type": "clip_vision_model"}, "expected siglip_vision_model"),
        ("paligemma", "", {"image_token_index": 101}, "image_token_id is 101, expected 1 to vocab_size - 1 = 100"),
        ("paligemma", "", {"image_token_index": 0}, "image_token_id is 0, expected 1 to"),
        ("paligemma", "", {"image_token_index": None}, "image_token_id is missing"),
        ("paligemma", "", {"projection_dim": 29}, r"linear.weight has shape .* calls for \[29, 36\]"),
        ("paligemma", "", {"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ("paligemma", "text_config", {"hidden_size": 28}, r"has shape \[30\], config.json calls for \[28\]"),
        ("paligemma 2", "text_config", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0, expected"),
    ],
)  # fmt: skip
def test_bad_configurations(
    name: str, at: str, changes: dict[str, Any], message: str, model: Callable[[str], Path]
) -> None:
    folder = model(name)
    edit(folder, at, changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("siglip", "logit_scale", None, "tensor logit_scale is missing, it says how alike"),
        ("siglip", "logit_bias", (2,), r"logit_bias has shape \[2\], expected \[\] or \[1\]"),
        ("siglip", "vision_model.head.probe", (1, 36), r"probe has shape \[1, 36\], .* \[1, 1, 36\]"),
        ("siglip", "vision_model.head.probe", None, "probe is missing, config.json calls for it"),
        ("siglip", "vision_model.head.attention.in_proj_weight", (36, 36), r"calls for \[108, 36\]"),
        ("siglip", "vision_model.head.attention.in_proj_bias", None, "in_proj_bias is missing"),
        ("siglip", "vision_model.embeddings.patch_embedding.weight", (36, 75), r"\[36, 75\], .* \[36, 3, 5, 5\]"),
        ("siglip", "vision_model.embeddings.patch_embedding.weight", (36, 3, 5, 6), r"calls for \[36, 3, 5, 5\]"),
        ("siglip", "text_model.head.bias", None, "head.bias is missing"),
        ("siglip", "more.weight", (3,), "more.weight is there, config.json does not call for it"),
        ("clip", "vision_model.embeddings.class_embedding", (1, 1, 36), r"calls for \[36\]"),
        ("clip", "vision_model.pre_layrnorm.bias", None, "pre_layrnorm.bias is missing"),
        ("clip", "visual_projection.bias", (21,), "visual_projection.bias is there"),
        ("vit", "embeddings.cls_token", (36,), r"cls_token has shape \[36\], config.json calls for \[1, 1, 36\]"),
        ("vit", "embeddings.position_embeddings", (10, 36), r"calls for \[1, 10, 36\]"),
        ("paligemma", "multi_modal_projector.linear.bias", None, "multi_modal_projector.linear.bias is missing"),
        ("paligemma", "vision_tower.head.probe", (1, 1, 36), "head.probe is there, config.json does not call for it"),
    ],
)  # fmt: skip
def test_bad_tensors(
    name: str, tensor: str, shape: tuple[int, ...] | None, message: str, model: Callable[[str], Path]
) -> None:
    folder = model(name)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(tensor, None)
    if shape is not None:
        tensors[tensor] = torch.ones(shape)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, message)


@pytest.mark.parametrize("name", ["siglip", "clip", "vit", "paligemma"])
def test_a_model_within_another_one(name: str, model: Callable[[str], Path]) -> None:
    folder = model(name)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"module.{key}": value for key, value in tensors.items()}, folder / "model.safetensors")
    refused(folder, "is missing, .*; there is module.*: save the model without what it was wrapped in")


def test_a_similarity_beyond_all_floats(model: Callable[[str], Path]) -> None:
    folder = model("clip")
    tensors = load_file(folder / "model.safetensors")
    for value in (1e3, float("nan")):
        save_file(tensors | {"logit_scale": torch.tensor(value)}, folder / "model.safetensors")
        refused(folder, "logit_scale is (1000.0|nan), expected a number from -80 to 80")


# ---- what the folder says of pictures ----


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"size": {"height": 20, "width": 20}}, "size is {'height': 20, 'width': 20}, image_size of config.json is 17"),
        ({"size": {"height": 17, "width": 20}}, "expected the pixels of a square's side"),
        ({"size": {"shortest_edge": 17}}, "size is {'shortest_edge': 17}, the shorter side's, without do_center_crop"),
        ({"size": {"longest_edge": 17}}, "size is {'longest_edge': 17}, expected the pixels"),
        ({"size": "17"}, "size is '17', expected the pixels"),
        ({"size": 20, "crop_size": 17, "do_center_crop": True}, "size is 20, image_size of config.json is 17"),
        ({"crop_size": 16, "do_center_crop": True}, "crop_size is 16, image_size of config.json is 17"),
        ({"resample": 1}, r"resample is 1, expected 2 \(bilinear\) or 3 \(bicubic\)"),
        ({"resample": "3"}, "resample is '3', expected an integer"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is .* expected a number for each of 3 channels"),
        ({"image_mean": [0.5, "x", 0.5]}, "image_mean is 'x', expected a number"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is .* expected numbers above 0"),
        ({"rescale_factor": 0}, "rescale_factor is 0, expected a number above 0"),
        ({"do_pad": True}, "do_pad is true, only pictures that are resized to a square"),
        ({"do_resize": 1}, "do_resize is 1, expected true or false"),
    ],
)
def test_pictures_that_cannot_be_said(said: dict[str, Any], message: str, model: Callable[[str], Path]) -> None:
    folder = model("siglip, vision")
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    refused(folder, message)


OF = {
    "clip, vision": CLIPImageProcessorPil, "siglip, vision": SiglipImageProcessorPil,
    "vit, classes": ViTImageProcessorPil,
}  # fmt: skip


@pytest.mark.parametrize("said", [{"size": 17}, {"size": 17, "do_center_crop": True}, {"do_center_crop": False}, {}])
@pytest.mark.parametrize("name", OF)
def test_a_size_of_one_number_is_as_in_transformers(
    name: str, said: dict[str, Any], model: Callable[[str], Path]
) -> None:
    """The shorter side's, but with the class of a ViT a square's; what does not become a square is refused."""
    folder, picture = model(name), np.random.default_rng(1).integers(0, 256, (40, 61, 3), np.uint8)
    if said.get("do_center_crop", name == "clip, vision"):
        said = said | {"crop_size": {"height": 17, "width": 17}}
    default = {} if "size" in said else {"size": dict.fromkeys(OF[name].size, 17)}  # 224 there
    expected = OF[name](**said, **default)(picture, return_tensors="np")["pixel_values"]
    (folder / PIXELS).write_text(json.dumps(said))
    if expected.shape[2:] != (17, 17):
        refused(folder, 'the shorter side\'s, without do_center_crop, expected {"height": 17, "width": 17}')
        return
    with open_source(folder) as source:
        vision, pictures = source.config, source.generation["pictures"]
    mean, std = (np.float32(x).reshape(3, 1, 1) for x in (vision.pixel_mean, vision.pixel_std))
    found = (Processor(17, **pictures).floats(picture) - mean) / std
    assert np.abs(found - expected[0]).max() < 1e-5  # fp32


@pytest.mark.parametrize(
    ("file", "said", "mean", "std", "pictures"),
    [
        (PIXELS, {"resample": 2}, 0.5, 0.5, ("stretch", "bilinear")),
        (PIXELS, {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}, 0.1, 0.2, SQUARE),
        (PIXELS, {"do_normalize": False}, 0.0, 1.0, SQUARE),
        (PIXELS, {"do_resize": False}, 0.5, 0.5, SQUARE),
        # 0 to 255 less 127.5, by 127.5: pixels from 0 to 1 less 0.5, by 0.5
        (PIXELS, {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}, 0.5, 0.5, SQUARE),
        (PIXELS, {"size": 17, "do_center_crop": True, "crop_size": {"height": 17, "width": 17}}, 0.5, 0.5, MIDDLE),
        (PIXELS, {"size": {"shortest_edge": 17}, "do_center_crop": True}, 0.5, 0.5, MIDDLE),
        ("processor_config.json", {"image_processor": {"image_std": [0.25] * 3}}, 0.5, 0.25, SQUARE),
    ],
)  # fmt: skip
def test_pictures_that_can(
    file: str, said: dict[str, Any], mean: float, std: float, pictures: tuple[str, str], model: Callable[[str], Path]
) -> None:
    folder = model("siglip")
    with open_source(folder) as source:
        assert any("the folder has no preprocessor_config.json" in line for line in source.assumptions)
    (folder / file).write_text(json.dumps(said))
    with open_source(folder) as source:
        vision = source.config.stacks[1]
        assert vision.pixel_mean == pytest.approx((mean,) * 3) and vision.pixel_std == pytest.approx((std,) * 3)
        assert tuple(source.generation["pictures"].values()) == pictures
        assert not any("preprocessor_config" in line for line in source.assumptions)
        assert any("do_resize is false" in line for line in source.assumptions) == ("do_resize" in said)


@pytest.mark.parametrize("name", ["siglip", "clip", "vit", "paligemma 2"])
def test_odd_values_everywhere(name: str, model: Callable[[str], Path]) -> None:
    """For every field: the folder opens, or there is one SourceError."""
    folder = model(name)
    text, outcomes = (folder / "config.json").read_text(), set()
    whole = json.loads(text)
    places = [
        (at, field) for at in ("", "text_config", "vision_config") for field in (whole.get(at, {}) if at else whole)
    ]
    for at, field in places:
        for value in ODD:
            config = json.loads(text)
            (config[at] if at else config)[field] = value
            (folder / "config.json").write_text(json.dumps(config))
            try:
                with open_source(folder):
                    outcomes.add("opened")
            except SourceError as error:
                outcomes.add("refused")
                assert not re.search(r"Traceback|NoneType", str(error))
    assert outcomes == {"opened", "refused"}
