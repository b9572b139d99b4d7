"""Full-precision Hugging Face folders of every family: our model of their tensors is that of `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import hf_families
from bitnet.model.transformer import Transformer
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.hf.configuration import windows
from bitnet_export.foreign.hf.families import FAMILIES
from bitnet_export.foreign.source import Floats, Source, SourceError
from bitnet_export.packed import records

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work


def model_of(source: Source) -> Transformer:
    """Our model in torch, with the source's tensors unchanged."""
    model = Transformer(source.config.replace(head_format="f32"))
    weights = {}
    for spec in records.expected_tensors(source.config):
        if not records.ROLES[spec.key.role].startswith("rope_"):
            values = source.load(spec.key)
            assert isinstance(values, Floats)
            array = np.ascontiguousarray(values.all())
            assert array.size == spec.rows * spec.cols
            weights[spec.key.name] = torch.from_numpy(array)
    model.load_state_dict(weights)
    return model.eval()


def assert_same(theirs: torch.nn.Module, folder: Path) -> None:
    with open_source(folder) as source:
        ours = model_of(source)
    tokens = hf_families.tokens_of(4, 40)
    expected = hf_families.result(theirs, tokens)
    with torch.inference_mode():
        found = ours(tokens) if ours.config.has_head else ours.hidden(tokens)
    # fp32 sums of up to a hundred products in another order.
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", hf_families.MAKE)
def test_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = hf_families.save(name, tmp_path / "model")
    assert_same(theirs, tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        assert source.config.ternary == () and source.what.endswith("full-precision model: nothing of it is ternary")
        assert source.config.has_head != hf_families.is_encoder(name)
        assert not any("is not known here" in line for line in source.assumptions)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12}

GEMMA3_ROPE = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"use_sliding_window": True, "sliding_window": 5}),
        ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3}),
        ("llama", {"hidden_activation": "relu"}),
        ("llama", {"is_causal": False}),
        ("gpt2", {"is_causal": False}),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 30}),
        ("gemma", {"sliding_window": 5, "use_sliding_window": True}),
        ("gemma2", {"sliding_window_pattern": 3, "layer_types": None}),
        ("gemma3", {"sliding_window": None, "rms_norm_eps": None, "sliding_window_pattern": 3, "layer_types": None}),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 300.0}),
        ("gemma3", {"rope_parameters": GEMMA3_ROPE, "rope_theta": 300.0, "rope_local_base_freq": 50.0}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("mixtral", {"max_window_layers": 28, "use_sliding_window": False}),
        ("mixtral", {"norm_topk_prob": False}),
        ("mixtral", {"layer_types": ["full_attention"] * 3, "sliding_window_pattern": 2}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ],
    ids=str,
)
def test_fields_count_where_transformers_reads_them(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """A field that one family reads is ignored by another."""
    hf_families.save(name, tmp_path)
    edit(tmp_path, **fields)
    plain = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if "moe" in name else {})
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, **plain).eval(), tmp_path)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, Qwen3MoeConfig])
def test_the_window_of_a_qwen_is_off_unless_it_is_switched_on(kind: type[PretrainedConfig]) -> None:
    values = {"sliding_window": 5, "num_hidden_layers": 2, "max_window_layers": 0}
    family = FAMILIES[kind.__name__.replace("Config", "ForCausalLM")]
    for said, window in (({}, None), ({"use_sliding_window": True}, 5)):
        assert kind(**values, **said).sliding_window == window
        assert windows(family.described(values | said, "config.json"))["sliding_window"] == (window or 0)


@pytest.mark.parametrize("another", [False, True])
def test_a_head_beside_tied_embeddings(another: bool, tmp_path: Path) -> None:
    """A head that differs is used, as in transformers 5."""
    hf_families.save("llama", tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    if not another:
        edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[table].clone()})
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval(), tmp_path)
    with open_source(tmp_path) as source:
        assert source.config.tie_embeddings == (not another)
        said = "the head is lm_head.weight, not the embedding: tie_word_embeddings is not followed"
        assert (said in source.assumptions) == another


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_tied_head_without_the_embedding(name: str, tmp_path: Path) -> None:
    """As `save_model` of safetensors writes it, and transformers reads it."""
    theirs = hf_families.make(name)
    theirs.config.tie_word_embeddings = True
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path)
    save_model(theirs, str(tmp_path / "model.safetensors"))
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    assert_same(type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval(), tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(SourceError, match=r"(embed_tokens|wte).weight is missing, config.json calls for it"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_as_transformers_has_them_in_memory(name: str, tmp_path: Path) -> None:
    theirs = hf_families.save(name, tmp_path / "model", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model" / "model.safetensors")
    assert_same(theirs, tmp_path / "model")


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "qwen3_moe", "gpt2", "bert", "roberta"])
def test_model_type_alone(name: str, tmp_path: Path) -> None:
    theirs = hf_families.save(name, tmp_path / "model")
    edit(tmp_path / "model", architectures=None)
    assert_same(theirs, tmp_path / "model")
    edit(tmp_path / "model", model_type="mamba")
    with pytest.raises(SourceError, match=r"model_type is 'mamba', without architectures; expected bitnet, llama"):
        read(tmp_path / "model")


def test_a_backbone_without_the_prefix_of_the_whole(tmp_path: Path) -> None:
    """As the weights of gpt2 were published, with the mask buffers of older versions."""
    theirs = hf_families.save("gpt2", tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = {"h.0.attn.bias": torch.ones(1, 1, 50, 50), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        return {name.removeprefix("transformer."): value for name, value in tensors.items()} | more

    edit_tensors(tmp_path / "model", change)
    assert_same(theirs, tmp_path / "model")


def test_norms_of_the_first_bert(tmp_path: Path) -> None:
    """Published with gamma and beta, before torch had a LayerNorm."""
    theirs = hf_families.save("bert", tmp_path / "model")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for new, name in old.items():
            tensors = {key.replace(new, name): value for key, value in tensors.items()}
        return tensors | {"embeddings.position_ids": torch.arange(50)}

    edit_tensors(tmp_path / "model", change)
    assert_same(theirs, tmp_path / "model")


def test_gelu_of_the_first_gemma(tmp_path: Path) -> None:
    """config.json said gelu, the model was trained with the other: transformers corrects it."""
    theirs = hf_families.save("gemma", tmp_path / "model")
    edit(tmp_path / "model", hidden_act="gelu")
    assert_same(theirs, tmp_path / "model")


def test_the_scale_of_an_embedding_is_of_the_type_of_the_weights(tmp_path: Path) -> None:
    for dtype, expected in ((torch.float32, np.float32(6.0)), (torch.bfloat16, 6.0)):
        hf_families.make("gemma", dtype).to(dtype).save_pretrained(tmp_path / str(dtype))
        with open_source(tmp_path / str(dtype)) as source:
            assert source.config.embedding_scale == expected
    from bitnet_export.foreign.hf.shards import rounded

    for value in (3072**0.5, 2304**0.5, 1.00390625, 1.01171875):
        assert rounded(value, "BF16") == torch.tensor(value).bfloat16().item()
        assert rounded(value, "F16") == torch.tensor(value).half().item()
        assert rounded(value, "F32") == torch.tensor(value).item()


def test_heads_that_cannot_be_said_are_left_out_and_named(tmp_path: Path) -> None:
    for name, tensor in (("bert, masked", "cls.predictions.bias"), ("roberta, masked", "lm_head.bias")):
        hf_families.save(name, tmp_path / name)
        with open_source(tmp_path / name) as source:
            assert any(f"such as {tensor}: the encoder alone is taken" in line for line in source.assumptions)
            assert any("the mean of its tokens'" in line for line in source.assumptions)
            assert source.config.pooling == "mean" and source.config.mask == "bidirectional"


# ---- what is refused ----


def read(folder: Path) -> None:
    with open_source(folder) as source:
        for spec in records.expected_tensors(source.config):
            if not records.ROLES[spec.key.role].startswith("rope_"):
                source.load(spec.key)


def edit(folder: Path, **changes: Any) -> None:
    """None removes a field, ... makes it null."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {k: v for k, v in config.items() if v is not None or k not in changes}
    (folder / "config.json").write_text(json.dumps({k: None if v is ... else v for k, v in kept.items()}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, expected 1 to num_local_experts = 5"),
        ("mixtral", {"num_local_experts": 0}, "expected 1 to num_local_experts = 0"),
        ("mixtral", {"num_local_experts": 6}, r"experts.5.w1.weight is missing|has shape \[5, 36\]"),
        ("mixtral", {"num_local_experts": 4}, r"has shape \[5, 36\], config.json calls for \[4, 36\]"),
        ("mixtral", {"num_experts": 4}, "num_experts and num_local_experts differ"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 changes the computation"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] changes the computation"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ("qwen3_moe", {"architectures": ["Qwen2MoeForCausalLM"]}, "an expert that every token takes"),
        ("qwen3_moe", {"architectures": ["OlmoeForCausalLM"]}, "norms of queries and keys are of all heads"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0, expected a number above 0"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attention_softcap is -1.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("llama", {"is_causal": 0}, "is_causal is 0, expected true or false"),
        ("mistral", {"is_causal": False}, "is_causal is false and layers have a window"),
        ("llama", {"rope_parameters": GEMMA3_ROPE}, "of its own for full_attention, sliding_attention, expected one"),
        (
            "llama",
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": -10 / math.log(4.0)}},
            "expected at least 0",
        ),
        ("gemma3", {"layer_types": None, "sliding_window": ...}, "sliding_window is null, expected an integer"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gpt2", {"n_head": 5}, "head_dim is missing"),
        ("gpt2", {"n_head": "3"}, "n_head is '3', expected an integer"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh', expected one of"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"n_positions": 49}, r"wpe.weight has shape \[50, 36\], config.json calls for \[49, 36\]"),
        ("bert", {"is_decoder": True}, "is_decoder = True changes the computation"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"layer_norm_eps": "x"}, "layer_norm_eps is 'x', expected a number"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "expected one of"),
        ("roberta", {"pad_token_id": 60}, "positions begin at pad_token_id . 1 = 61, of max_position_embeddings = 50"),
        ("roberta", {"pad_token_id": -3}, "positions begin at pad_token_id . 1 = -2"),
    ],
)
def test_bad_configurations(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    hf_families.save(name, tmp_path / "model")
    edit(tmp_path / "model", **changes)
    with pytest.raises(SourceError, match=message):
        read(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", None, "gate.weight is missing"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.4.w2.weight", None, "experts.4.w2.weight is missing"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.5.w2.weight", (36, 52), "experts.5.w2.weight is there"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", (36, 52), r"calls for \[52, 36\]"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", None, "c_attn.weight is missing"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (108, 36), r"calls for \[36, 108\]"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (36, 107), r"calls for \[36, 108\]"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", (36,), r"calls for \[108\]"),
        ("gpt2", "transformer.wpe.weight", None, "wpe.weight is missing"),
        ("bert", "embeddings.token_type_embeddings.weight", None, "token_type_embeddings.weight is missing"),
        ("bert", "embeddings.token_type_embeddings.weight", (0, 36), r"\[0, 36\], expected rows of 36"),
        ("bert", "embeddings.token_type_embeddings.weight", (2, 35), r"\[2, 35\], expected rows of 36"),
        ("bert", "embeddings.LayerNorm.weight", None, "embeddings.LayerNorm.weight is missing"),
        ("bert", "encoder.layer.1.attention.output.LayerNorm.bias", (1, 36), r"calls for \[36\]"),
        ("bert", "lm_head.bias", (301,), "lm_head.bias is there, config.json does not call for it"),
        ("roberta", "embeddings.position_embeddings.weight", (45, 36), r"calls for \[50, 36\]"),
    ],
)  # fmt: skip
def test_bad_tensors(name: str, tensor: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path) -> None:
    hf_families.save(name, tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {key: value for key, value in tensors.items() if key != tensor}
        return rest if shape is None else rest | {tensor: torch.ones(shape)}

    edit_tensors(tmp_path / "model", change)
    with pytest.raises(SourceError, match=message):
        read(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 104, 36), r"calls for \[5, 104, 36\]"),
        ("model.layers.0.mlp.experts.gate_up_proj", (520, 36), r"calls for \[5, 104, 36\]"),
        ("model.layers.1.mlp.experts.down_proj", None, "down_proj is missing"),
    ],
)
def test_bad_stacks_of_experts(name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path) -> None:
    hf_families.save("mixtral", tmp_path / "model", save_original_format=False)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {key: value for key, value in tensors.items() if key != name}
        return rest if shape is None else rest | {name: torch.ones(shape)}

    edit_tensors(tmp_path / "model", change)
    with pytest.raises(SourceError, match=message):
        read(tmp_path / "model")


ODD = [None, True, -1, 0, 10**30, 1e30, 1e-30, "x", [], {}, [1], {"a": 1}]


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "qwen3_moe", "gpt2", "bert", "roberta"])
def test_odd_values_everywhere(name: str, tmp_path: Path) -> None:
    """For every field: the folder opens, or there is one SourceError."""
    hf_families.save(name, tmp_path / "model")
    config, outcomes = json.loads((tmp_path / "model" / "config.json").read_text()), set()
    for field in config:
        for value in ODD:
            (tmp_path / "model" / "config.json").write_text(json.dumps(config | {field: value}))
            try:
                with open_source(tmp_path / "model"):
                    outcomes.add("opened")
            except SourceError:
                outcomes.add("refused")
    assert outcomes == {"opened", "refused"}
