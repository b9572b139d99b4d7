"""Hugging Face folders of models that see images: our model of their tensors, and the engine, are `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPTextConfig, SiglipConfig, SiglipVisionConfig, ViTConfig, ViTModel

import hf_vision
from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet_export import PackedFile
from bitnet_export.convert.incoming import convert, open_source, pack_source
from bitnet_export.foreign.hf.configuration import model_config
from bitnet_export.foreign.hf.families import family_of
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.onnx import write_onnx
from bitnet_export.foreign.source import Floats, Source
from bitnet_export.packed import records
from bitnet_export.packed.random_model import random_model
from bitnet_runtime import Model
from packed_files import with_generation

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

Found = dict[str, torch.Tensor]


def model_of(source: Source) -> Transformer:
    """Our model in torch, with the source's tensors unchanged."""
    model = Transformer(source.config.replace(head_format="f32"))
    weights = dict(model.state_dict())
    for stack, config in enumerate(source.config.stacks):
        for spec in records.expected_tensors(config, stack):
            if not records.ROLES[spec.key.role].startswith("rope_"):
                values = source.load(spec.key)
                assert isinstance(values, Floats)
                name = spec.key.parameter(source.config.stacks)
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


def assert_same(theirs: torch.nn.Module, name: str, folder: Path) -> None:
    pixels, tokens = inputs(name)
    with open_source(folder) as source:
        model, entering = model_of(source), normalized(source, pixels)
    single = hf_vision.result(theirs, name, entering, tokens)
    exact = hf_vision.result(theirs.double(), name, entering.double(), tokens)
    for dtype in (torch.float32, torch.float64):
        found = ours(model.to(dtype), entering.to(dtype), tokens)
        assert found.keys() >= exact.keys()
        for what, expected in exact.items():
            # The noise floor. Norms and RoPE of Gemma are fp32 in transformers, whatever its weights are, and
            # of quick GELU the factor is in our weights, rounded once more.
            rounded = dtype == torch.float32 or name.startswith("paligemma") or '"quick_gelu"' in config_of(folder)
            limit = 4 * apart(single[what], expected) if rounded else 1e-14
            assert apart(found[what], expected) <= limit, (what, dtype)


def config_of(folder: Path) -> str:
    return (folder / "config.json").read_text()


@pytest.mark.parametrize("name", hf_vision.MAKE)
def test_what_transformers_computes(name: str, tmp_path: Path) -> None:
    assert_same(hf_vision.save(name, tmp_path / "model"), name, tmp_path / "model")


# ---- how folders were published ----


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("paligemma 2", {"vision_tower.": "vision_tower.vision_model."}),
        ("siglip, vision", {"": "vision_model."}),
        ("clip, text", {"": "text_model."}),
    ],
)
def test_names_of_other_programs(name: str, published: dict[str, str], tmp_path: Path) -> None:
    theirs = hf_vision.save(name, tmp_path / "model")

    def renamed(tensor: str) -> str:
        return next(
            (new + tensor.removeprefix(old) for old, new in published.items() if tensor.startswith(old)), tensor
        )

    edit_tensors(tmp_path / "model", lambda tensors: {renamed(key): value for key, value in tensors.items()})
    assert_same(theirs, name, tmp_path / "model")


def test_names_as_transformers_has_them_in_memory(tmp_path: Path) -> None:
    theirs = hf_vision.save("paligemma", tmp_path / "model", save_original_format=False)
    assert_same(theirs, "paligemma", tmp_path / "model")


def test_the_older_objects_of_clip_count(tmp_path: Path) -> None:
    """As LAION published them: what text_config says is wrong."""
    theirs = hf_vision.save("clip", tmp_path / "model")
    said = json.loads(config_of(tmp_path / "model"))
    older = {f"{part}_config_dict": said[f"{part}_config"] for part in ("text", "vision")}
    newer = {f"{part}_config": said[f"{part}_config"] | {"num_hidden_layers": 1} for part in ("text", "vision")}
    edit(tmp_path / "model", **older, **newer)
    assert_same(theirs, "clip", tmp_path / "model")
    edit(
        tmp_path / "model",
        **dict.fromkeys(older),
        **{f"{part}_config": older[f"{part}_config_dict"] for part in ("text", "vision")},
    )
    assert_same(theirs.float(), "clip", tmp_path / "model")


@pytest.mark.parametrize(
    ("architecture", "theirs"),
    [
        ("SiglipModel", SiglipConfig), ("CLIPModel", CLIPConfig), ("SiglipVisionModel", SiglipVisionConfig),
        ("CLIPTextModel", CLIPTextConfig), ("ViTModel", ViTConfig),
    ],
)  # fmt: skip
def test_what_a_folder_need_not_say(architecture: str, theirs: Any) -> None:
    """Published configurations contain only what differs from the defaults, sometimes nothing."""
    parts = (
        {}
        if architecture.endswith(("VisionModel", "TextModel", "ViTModel"))
        else {"text_config": {}, "vision_config": {}}
    )
    short = parts | {"architectures": [architecture]}
    full = json.loads(theirs().to_json_string(use_diff=False)) | {"architectures": [architecture]}

    def models(values: dict[str, Any]) -> list[ModelConfig]:
        family = family_of(values, "x")[1]
        found = []
        for each in filter(None, (family, family.vision)):
            pixels = {"pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3} if "image_size" in each.reads else {}
            found.append(
                model_config(each.described(values, "x"), {**each.fixed, **pixels, "has_head": False}, each.parts)
            )
        return found

    assert models(short) == models(full)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads(config_of(folder)) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / "model.safetensors")


# ---- the engine ----


@pytest.mark.parametrize("name", hf_vision.MAKE)
def test_the_engine_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    """On the way, `convert` compares it with torch on its own images and texts."""
    theirs = hf_vision.save(name, tmp_path / "model")
    report = convert(tmp_path / "model", tmp_path / "m.bitnet", head="f32", linears="f32", tokens=64)
    assert "nothing is ternary, linear layers are F32" in str(report)
    says_so = any("quick GELU becomes SiLU" in line for line in report.assumptions)
    assert says_so == ('"quick_gelu"' in config_of(tmp_path / "model"))
    assert (report.checked.images is not None) == (len(PackedFile.open(tmp_path / "m.bitnet").configs) == 2)
    pixels, tokens = inputs(name)
    with open_source(tmp_path / "model") as source:
        entering = normalized(source, pixels)
    single = hf_vision.result(theirs, name, entering, tokens)
    exact = hf_vision.result(theirs.double(), name, entering.double(), tokens)
    for what, found in of_engine(tmp_path / "m.bitnet", name, pixels, tokens).items():
        assert apart(found, exact[what]) <= 6 * apart(single[what], exact[what]), what  # the noise floor


def of_engine(path: Path, name: str, pixels: torch.Tensor, tokens: torch.Tensor) -> Found:
    found: dict[str, Any] = {}
    pictures = list(pixels.permute(0, 2, 3, 1).numpy())
    with Model.load(path, kv_type="f32") as model:
        if name.startswith("paligemma"):
            found = {"features": model.encode_image(pictures), "logits": []}
            shown = found["features"].reshape(len(tokens), -1, 30)
            for text, seen in zip(tokens.tolist(), shown, strict=True):
                prefix = [-1 if token == hf_vision.IMAGE else token for token in text[:21]]
                with model.session() as session:
                    rows = session.append_prefix(prefix, seen, logits="all"), session.append(text[21:], "all")
                found["logits"].append(np.concatenate(rows))
        else:
            if hf_vision.sees(name):
                found["images"] = model.embed_images(pictures)
            if name in ("siglip, vision", "vit"):
                found["states"] = model.encode_image(pictures)
            if hf_vision.reads(name):
                found["texts"] = model.embed(tokens.tolist())
            if hf_vision.sees(name) and hf_vision.reads(name):
                info = model.image
                assert info
                found["similarity"] = found["images"] @ found["texts"].T * info.similarity_scale + info.similarity_bias
    return {what: torch.from_numpy(np.array(values)) for what, values in found.items()}


@pytest.mark.parametrize(("name", "linears"), [("siglip", "f16"), ("siglip", "int8"), ("paligemma 2", "int8")])
def test_smaller_linears(name: str, linears: str, tmp_path: Path) -> None:
    hf_vision.save(name, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "m.bitnet", linears=linears, tokens=128)
    stored = {
        (record.key.stack, records.ROLES[record.key.role]): record.encoding.name
        for record in PackedFile.open(tmp_path / "m.bitnet").tensors.values()
        if record.key.part == 0
    }
    layers = {"f16": "F16", "int8": "INT8_ROWS"}[linears]
    assert stored[0, "q"] == stored[1, "down"] == layers
    assert stored[1, "patch"] == stored[1, "position"] == "F32"
    assert stored[1, "pool_q" if name == "siglip" else "projector"] == ("F16" if name == "siglip" else "F32")


@pytest.mark.parametrize(
    ("side", "says"),
    [("right", {"padding_side": "right"}), ("right", {}), ("left", {"tokenizer_class": "Siglip2Tokenizer"})],
)
def test_texts_are_filled_up_and_pictures_made_as_the_folder_says(
    side: str, says: dict[str, str], tmp_path: Path
) -> None:
    """A SigLIP learned from texts of one length and attends to the padding; a SigLIP 2 has the padding in front."""
    theirs = hf_vision.save("siglip, bytes", tmp_path / "model")
    words = tokenizer.build("byte", [], 257)
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    said = {"pad_token": tokenizer.END} | says
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({"resample": 2}))
    convert(tmp_path / "model", tmp_path / "m.bitnet", head="f32", linears="f32", tokens=64)
    text = "a cat"
    ids = words.encode(text).ids
    fill = [tokenizer.END_ID] * (hf_vision.CONTEXT - len(ids))
    filled = torch.tensor([fill + ids if side == "left" else ids + fill])
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(theirs.get_text_features(filled).pooler_output, dim=-1).numpy()
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as model:
        assert model.processor.filter == "bilinear" and model.processor.resize == "stretch"
        assert np.abs(model.embed(text) - expected).max() < 1e-6  # of length 1, fp32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("token", [5, tokenizer.END_ID])
def test_texts_are_filled_up_alike_after_a_round_trip(side: str, token: int, tmp_path: Path) -> None:
    """With a special token, and with one that only config.json names: in the tokenizer it is a letter."""
    hf_vision.save("siglip, bytes", tmp_path / "model")
    hf_vision.bytes_beside(tmp_path / "model")
    said = {"padding_side": side} | ({"pad_token": tokenizer.END} if token == tokenizer.END_ID else {})
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said))
    text_config = json.loads(config_of(tmp_path / "model"))["text_config"]
    edit(tmp_path / "model", text_config=text_config | {"pad_token_id": token})
    for source, out in (("model", "m.bitnet"), ("again", "back.bitnet")):
        with open_source(tmp_path / source) as opened:
            pack_source(opened, tmp_path / out, head="f32", linears="f32")
        if source == "model":
            write_folder(tmp_path / "m.bitnet", tmp_path / "again")
            write_onnx(tmp_path / "m.bitnet", tmp_path / "onnx")
    padding = {"length": hf_vision.CONTEXT, "token_id": token, "side": side}
    for file in ("m.bitnet", "back.bitnet"):
        assert PackedFile.open(tmp_path / file).metadata["generation"]["padding"] == padding
    with Model.load(tmp_path / "m.bitnet") as first, Model.load(tmp_path / "back.bitnet") as second:
        assert np.array_equal(first.embed("a \5 cat"), second.embed("a \5 cat"))
    for folder in (tmp_path / "again", tmp_path / "onnx"):
        words = json.loads((folder / "tokenizer_config.json").read_text())
        assert words["padding_side"] == side and ("pad_token" in words) == (token == tokenizer.END_ID)
    assert json.loads(config_of(tmp_path / "onnx"))["pad_token_id"] == token
    with_generation(tmp_path / "m.bitnet", tmp_path / "odd.bitnet", padding=padding | {"side": "middle"})
    with pytest.raises(ValueError, match=r"`padding` in the metadata is .*middle"):
        write_folder(tmp_path / "odd.bitnet", tmp_path / "hf")


# ---- out again ----


@pytest.mark.parametrize("name", hf_vision.MAKE)
def test_out_again(name: str, tmp_path: Path) -> None:
    """From transformers to a packed file and back: transformers loads every tensor, and computes the same."""
    theirs = hf_vision.save(name, tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        pack_source(source, tmp_path / "m.bitnet", head="f32", linears="f32")
        pixels, tokens = inputs(name)
        entering = normalized(source, pixels)
    write_folder(tmp_path / "m.bitnet", tmp_path / "again")
    attention = {"attn_implementation": theirs.config._attn_implementation}
    kind, more = (ViTModel, {"add_pooling_layer": False}) if name.startswith("vit") else (type(theirs), {})
    again, loading = kind.from_pretrained(tmp_path / "again", output_loading_info=True, **attention, **more)
    assert not any(loading.values()), loading
    expected = hf_vision.result(theirs, name, entering, tokens)
    for what, found in hf_vision.result(again.eval(), name, entering, tokens).items():
        assert apart(found, expected[what]) < 1e-6, what  # gains of Gemma are 1 + weight, rounded in fp32
    assert_same(again.float(), name, tmp_path / "again")


def test_what_no_class_computes_is_refused_by_name(tmp_path: Path) -> None:
    """A model with norms of its own, a partly ternary one, and one that does not say where texts end."""
    hf_vision.save("clip", tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        config = source.config
    random_model(PRESETS["siglip-tiny"], tmp_path / "tiny.bitnet")
    random_model(config.replace(ternary=("q", "up")), tmp_path / "some.bitnet")
    random_model(config, tmp_path / "endless.bitnet")
    random_model(config.replace(vision=None), tmp_path / "text.bitnet")
    random_model(config.replace(vision=None, ternary=("q", "up")), tmp_path / "some_text.bitnet")
    for file, message in (
        ("tiny.bitnet", "the nearest is SiglipModel: text: .*pooling is 'mean', it computes 'last'"),
        ("some.bitnet", "text: some matrices of its layers are quantized, only all or none can be written"),
        ("endless.bitnet", "the nearest is CLIPModel: the file names no end token"),
        ("text.bitnet", "the nearest is CLIPTextModelWithProjection: the file names no end token"),
        ("some_text.bitnet", "CLIPTextModelWithProjection: .*some matrices of its layers are quantized, only all"),
    ):
        with pytest.raises(ValueError, match=message):
            write_folder(tmp_path / file, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
