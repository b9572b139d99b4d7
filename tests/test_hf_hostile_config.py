"""Wrong and unusual config.json files of Hugging Face folders: one clear error each, or the values of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hf_models
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed.records import NONE, ROLE, Key
from hf_refused import edit, edit_tensors, refused


@pytest.fixture(scope="module")
def packed():
    return hf_models.llama_packed()


@pytest.fixture
def folder(packed, tmp_path):
    return packed.save(tmp_path / "model")


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is .*Mamba.*, expected one of"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of strings"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 2}}, "quant_method is 'gptq', expected bitnet"),
        ({"quantization_config": {}}, "quant_method is None"),
        ({"quantization_config": []}, "expected an object"),
        ({"quantization_config": None}, "it would say multiply or divide"),
        ({"quantization_config": hf_models.DIVIDE | {"linear_class": "other"}}, "linear_class is 'other'"),
        ({"quantization_config": hf_models.DIVIDE | {"modules_to_not_convert": ["layers.*"]}}, "names, not patterns"),
        ({"quantization_config": hf_models.DIVIDE | {"use_rms_norm": True}}, "none have a norm"),
        ({"quantization_config": hf_models.DIVIDE | {"modules_to_not_convert": ["model.layers.0"]}},
         "in all layers or in none"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"hidden_act": ["silu"]}, "hidden_act is"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "96"}, "expected an integer"),
        ({"hidden_size": 10**30}, "hidden_size is|head_dim is"),
        ({"head_dim": 10**400}, "head_dim is 10{79}, expected an integer of 64 bits"),
        ({"max_position_embeddings": -(10**400), "rope_parameters": YARN}, "-10{78}, expected an integer of 64 bits"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 2}, "num_attention_heads is 3, expected a multiple of num_key_value_heads"),
        ({"vocab_size": 300}, r"config.json calls for \[300, 96\]"),
        ({"rms_norm_eps": -1}, "config.json: rms_norm_eps is"),
        ({"rms_norm_eps": True}, "expected a number"),
        ({"attention_bias": True}, "bias is missing"),
        ({"attention_bias": 1}, "expected true or false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "of type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "expected at least 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns 0.5 of a head"),
        ({"rope_parameters": 5}, "expected an object"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor must be above 0 and below"),
        ({"rope_parameters": YARN | {"truncate": False}}, "truncate = False, only true is supported"),
        ({"rope_parameters": YARN | {"beta_fast": 0.0}}, "yarn wants beta_fast and beta_slow above 0"),
        ({"intermediate_size": 98}, "is packed, but the configuration calls for 98 rows, not a multiple of 4"),
        ({"quantization_config": hf_models.DIVIDE | {"modules_to_not_convert": ["model"]}}, "has dtype U8, expected"),
        ({"quantization_config": hf_models.ONLINE | {"modules_to_not_convert": ["x"]}}, "does not name lm_head"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_configurations(folder, changes, message):
    edit(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("kinds", "window", "message"),
    [
        (["full_attention", "sliding_attention", "full_attention"], 8, "expected full_attention in every n-th layer"),
        (["full_attention", "linear_attention", "full_attention"], None, "layer_types is"),
        (["sliding_attention"] * 3, None, "sliding_window is missing"),
        (["full_attention"] * 2, None, "layer_types is"),
    ],
)
def test_bad_kinds_of_layers(kinds, window, message, tmp_path):
    model = hf_models.qwen2_packed()
    model.config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    refused(model.save(tmp_path / "model"), message)


ODD = [None, True, -1, 0, 10**30, 1e30, 1e-30, "x", [], {}, [1], {"a": 1}, {"full_attention": 3, "rope_type": {}}]


@pytest.mark.parametrize(
    "make", [hf_models.llama_packed, hf_models.qwen2_packed, lambda: hf_models.embedding("gemma3")]
)
def test_odd_values_everywhere(make, tmp_path):
    """For every field: the folder opens, or there is one SourceError."""
    model, outcomes = make(), set()
    folder = model.save(tmp_path / "model")
    names = [*model.config, "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window"]
    for name in names:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(model.config | {name: value}))
            try:
                with open_source(folder):
                    outcomes.add("opened")
            except SourceError:
                outcomes.add("refused")
    assert outcomes == {"opened", "refused"}


def test_windows_from_a_layer_on(tmp_path):
    model = hf_models.qwen2_packed()
    model.config |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    for first, found in ((0, (8, 0)), (3, (0, 0))):
        model.config["max_window_layers"] = first
        with open_source(model.save(tmp_path / f"from {first}")) as source:
            assert (source.config.sliding_window, source.config.global_every) == found


def test_embedding_models(tmp_path):
    """The pooling is described in a folder of its own; norms before projections come in one of two ways."""
    model = hf_models.embedding("gemma3")
    folder = model.save(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    for modes, found in (({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"), ({}, "last")):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        with open_source(folder) as source:
            assert source.config.pooling == found
            assert any(line.endswith("the others with 1 + weight") for line in source.assumptions)
    for modes in (["mean_tokens", "cls_token"], ["max_tokens"]):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True for mode in modes}))
        refused(folder, r"1_Pooling/config.json: .*, expected one of pooling_mode_lasttoken")
    (folder / "1_Pooling" / "config.json").unlink()
    local = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    edit(folder, rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": local})
    refused(folder, "RoPE of layers with a window is scaled")
    names = [name for name in model.tensors if name.endswith(".norm.weight") and "layers" in name]
    model.tensors |= {name.replace(".norm.", ".rms_norm."): model.tensors.pop(name) for name in names}
    refused(model.save(tmp_path / "other"), "rms_norm are there, but not use_rms_norm in quantization_config")
    model.config["quantization_config"] = hf_models.ONLINE | {"use_rms_norm": True, "rms_norm_eps": 0.25}
    refused(model.save(tmp_path / "eps"), "that of quantization_config is 0.25")


def test_a_packed_table(packed, folder):
    """An embedding of four codes per byte is ternary, like the projections."""
    edit(folder, vocab_size=304, tie_word_embeddings=True)

    def change(tensors):
        del tensors["lm_head.weight"]
        codes = torch.randint(0, 3, (4, 76, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        tensors["model.embed_tokens.weight"] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
        tensors["model.embed_tokens.weight_scale"] = torch.full((1,), 4.0)
        change.codes = codes.reshape(304, 96).numpy().astype(np.int8) - 1

    edit_tensors(folder, change)
    with open_source(folder) as source:
        assert source.config.head_format == "ternary"
        found = source.load(Key(0, NONE, ROLE["embedding"], NONE, 0))
    assert np.array_equal(found.codes, change.codes) and found.scales == [0.25]


def test_the_scale_of_codes_that_are_not_packed_counts(folder):
    """As floats, whose own unit counts too."""
    q = Key(0, 0, ROLE["q"], NONE, 0)
    with open_source(folder) as source:
        packed = source.load(q)

    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.from_numpy(packed.codes * np.float32(0.5))

    edit_tensors(folder, change)
    with open_source(folder) as source:
        found = source.load(q)
    assert np.array_equal(found.codes, packed.codes) and found.scales == packed.scales / 2
