"""Wrong tensors of Hugging Face folders: missing, of another shape, not finite, ternary in part."""

from __future__ import annotations

import pytest
import torch

import hf_models
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.hf.read import open_folder
from bitnet_export.foreign.source import SourceError
from hf_refused import edit_tensors, refused

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def packed():
    return hf_models.llama_packed()


@pytest.fixture
def folder(packed, tmp_path):
    return packed.save(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{Q}.weight", None, "q_proj.weight is missing"),
        (f"{Q}.weight_scale", None, "its scale .*weight_scale is missing"),
        (f"{Q}.weight", torch.zeros((25, 96), dtype=torch.uint8),
         r"has shape \[25, 96\], config.json calls for \[24, 96\]"),
        (f"{Q}.weight", torch.full((24, 96), 255, dtype=torch.uint8), "a code is 3"),
        (f"{Q}.weight", torch.zeros(96, 96, dtype=torch.int8), "dtype I8"),
        (f"{Q}.weight", torch.zeros(96, 96, dtype=torch.int64), "dtype I64"),
        (f"{Q}.weight", torch.zeros(96, 96).to(torch.float8_e4m3fn), "dtype F8_E4M3, expected F32, F16, BF16 or F64"),
        (f"{Q}.weight", torch.randn(96, 96), "has a weight_scale, but its values are not ternary"),
        (f"{Q}.weight_scale", torch.ones(96), r"has shape \[96\], expected \[\] or \[1\]"),
        (f"{Q}.weight_scale", torch.zeros(1), "is 0.0, expected a finite number above 0"),
        (f"{Q}.weight_scale", -torch.ones(1), "expected a finite number above 0"),
        (f"{Q}.weight_scale", torch.tensor([torch.nan]), "expected a finite number above 0"),
        (f"{Q}.weight_scale", torch.tensor([1e-45]), "expected a finite number above 0"),
        (f"{Q}.weight_scale", torch.ones(1, dtype=torch.uint8), "dtype U8"),
        (f"{Q}.lora_A.weight", torch.ones(8, 96), "lora_A.weight is there, config.json does not call for it"),
        (f"{Q}.bias", torch.ones(96), "q_proj.bias is there, config.json does not call for it"),
        ("model.norm.weight", torch.full((96,), torch.nan), "NaN or infinity"),
        ("model.embed_tokens.weight", torch.full((301, 96), torch.inf), "NaN or infinity"),
        ("model.embed_tokens.weight", torch.ones(300, 96), r"has shape \[300, 96\], config.json calls for \[301, 96\]"),
        (f"{Q}.rms_norm.weight", torch.ones(96), "rms_norm.weight is there"),
        ("model.layers.0.self_attn.q_proj.rms_norm.weight", torch.ones(96), "projections q have a norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_bad_tensors(folder, name, value, message):
    edit_tensors(folder, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    refused(folder, message)


def test_names_of_a_model_that_was_wrapped(folder):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"_orig_mod.{name}"] = tensors.pop(name)

    edit_tensors(folder, wrap)
    refused(folder, "layernorm.weight is missing, .* there is _orig_mod.model.layers.0.input_layernorm.weight")


def test_tensors_of_older_programs_are_skipped(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    with open_source(folder) as source:
        pack_source(source, folder.parent / "out.bitnet")


def test_ternary_in_the_first_layer_only(tmp_path):
    model = hf_models.trilm()
    model.tensors[f"{Q}.weight"][3, 4] = 0.1234
    refused(model.save(tmp_path / "model"), "is not ternary, that of the first layer is")


def test_one_value_of_the_first_layer_makes_floats_of_a_role_and_is_said(tmp_path):
    model = hf_models.trilm()
    with open_source(model.save(tmp_path / "whole")) as source:
        assert not any("not ternary" in line for line in source.assumptions)
    model.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 0.5
    with open_source(model.save(tmp_path / "model")) as source:
        assert "up" not in source.config.ternary and "down" in source.config.ternary
        said = "model.layers.0.mlp.up_proj is not ternary: these projections stay floats in every layer"
        assert any(line.startswith(said) for line in source.assumptions)


def test_the_first_layer_that_is_not_all_zero_tells(tmp_path):
    """A matrix of zeros is neither ternary nor float."""
    model = hf_models.trilm("row")
    for name, tensor in model.tensors.items():
        if name.startswith("model.layers.0.") and "_proj" in name:
            tensor.zero_()
    folder = model.save(tmp_path / "model")
    with open_source(folder) as source:
        assert len(source.config.ternary) == 7 and source.config.weight_scale == "row"
        assert not any("not ternary" in line for line in source.assumptions)
        pack_source(source, tmp_path / "out.bitnet")
    with pytest.raises(SourceError, match="ternary already"), open_folder(folder, floats=True):
        pass


def test_the_scale_of_a_head_that_is_the_embedding(tmp_path):
    """transformers multiplies logits by it; 1 changes nothing."""
    model = hf_models.bitnet_packed()
    assert model.config["tie_word_embeddings"]
    model.tensors["lm_head.weight_scale"] = torch.ones(1)
    with open_source(model.save(tmp_path / "one")) as source:
        pack_source(source, tmp_path / "out.bitnet")
    for value, message in ((torch.full((1,), 3.0), "is 3.0, expected 1"), (torch.ones(2), r"shape \[2\], expected")):
        model.tensors["lm_head.weight_scale"] = value
        refused(model.save(tmp_path / f"{value.numel()}"), f"lm_head.weight_scale .*{message}")


def test_masters_with_nan(tmp_path):
    model = hf_models.falcon_masters()
    model.tensors[f"{Q}.weight"][3, 4] = torch.nan
    refused(model.save(tmp_path / "model"), "q_proj.weight holds NaN or infinity")
