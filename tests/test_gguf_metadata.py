"""What a GGUF file says besides its weights: configuration, tokenizer, defaults of sampling, scaling of RoPE."""

import json

import numpy as np
import pytest
import torch

import gguf_models as models
from bitnet.model.positions import rope_frequencies
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.source import SourceError
from bitnet_runtime.tokenizer.text import byte_level_alphabet
from gguf_models import F32, I2_S
from test_gguf_read import small


def test_the_source_says_what_it_is(tmp_path):
    _, source = small(tmp_path, "bitnet-b1.58")
    assert source.what == "GGUF 3, bitnet-b1.58, F16, one scale per tensor"
    assert source.provenance == {"source": "m.gguf", "format": "GGUF 3", "architecture": "bitnet-b1.58"}
    config = source.config
    assert (config.dim, config.n_heads, config.n_kv_heads, config.head_dim, config.ffn_dim) == (78, 3, 1, 26, 130)
    assert (config.vocab_size, config.max_context, config.rope_theta, config.n_layers) == (131, 1024, 5e5, 3)
    assert config.activation == "relu2" and config.sub_norm and not config.qk_norm and config.tie_embeddings
    assert config.norm_eps == np.float32(1e-5)


def test_i2_s_names_its_assumption(tmp_path):
    made = models.example(tmp_path / "m.gguf", "bitnet-b1.58", I2_S, unit=128)
    with open_source(made.path) as source:
        assert any("layout of x86" in line and "ARM" in line for line in source.assumptions)


@pytest.mark.parametrize(
    ("arch", "metadata", "activation"),
    [
        ("bitnet", {}, "silu"),
        ("bitnet", {"bitnet.hidden_activation": "relu2"}, "relu2"),
        ("bitnet", {"bitnet.hidden_activation": "silu", "tokenizer.ggml.model": "gpt2"}, "silu"),
        ("bitnet-b1.58", {}, "relu2"),
        ("llama", {"llama.hidden_activation": "relu2"}, "relu2"),
        ("qwen3", {}, "silu"),
    ],
)
def test_activation(arch, metadata, activation, tmp_path):
    _, source = small(tmp_path, arch, **metadata)
    assert source.config.activation == activation
    assert any("hidden_activation" in line for line in source.assumptions) == (arch != "qwen3" and not metadata)


def test_activation_of_2b4t_from_llama_cpp(tmp_path):
    """It has the architecture of SiLU models, and was written without a key for a while."""
    _, source = small(tmp_path, "bitnet", **{"tokenizer.ggml.model": "gpt2"})
    assert source.config.activation == "relu2"
    assert any("hidden_activation: relu2" in line for line in source.assumptions)


def test_keys_that_are_not_known_are_named(tmp_path):
    """Those of other architectures, and of later versions; not those without effect."""
    keys = {"llama.attention.output_scale": 0.5, "llama.expert_used_count": 0, "llama.vocab_size": 131, "a.b": 3}
    _, source = small(tmp_path, **keys)
    found = [line for line in source.assumptions if "not known" in line]
    assert found == ["llama.attention.output_scale = 0.5 is not known here and was ignored"]
    _, source = small(tmp_path, **{f"llama.key_{i}": i for i in range(1, 24)})
    found = [line for line in source.assumptions if "not known" in line]
    assert found[0] == "llama.key_1 = 1 is not known here and was ignored"
    assert len(found) == 21 and found[-1] == "3 more keys are not known here and were ignored"


TOKENIZER = {
    "model": "gpt2", "pre": "llama-bpe", "tokens": [*byte_level_alphabet()[:128], "ab", "<s>", "</s>"],
    "merges": ["a b"], "token_type": [1] * 129 + [3, 3], "eos_token_id": 130,
}  # fmt: skip


def test_the_tokenizer_comes_along(tmp_path):
    made, source = small(tmp_path, **{"tokenizer.chat_template": "{{ messages }}"})
    assert source.tokenizer is None and any("no tokenizer" in line for line in source.assumptions)
    made.metadata |= {f"tokenizer.ggml.{key}": value for key, value in TOKENIZER.items()}
    made.write()
    with open_source(made.path) as source:
        assert json.loads(source.tokenizer)["model"]["type"] == "BPE"
        assert source.template == b"{{ messages }}" and source.generation["eos_token_ids"] == [130]
    made.metadata["tokenizer.chat_template"] = "{{ messages }"
    made.write()
    with open_source(made.path) as source:
        assert source.template is None and any("is left out, it is broken" in line for line in source.assumptions)


@pytest.mark.parametrize(("template", "used"), [("d", "the one named default is used, not"), (None, "none is used:")])
def test_other_chat_templates_are_named(template, used, tmp_path):
    given = {".tool_use": "t", ".rag": "r"} | ({"": template} if template else {})
    words = {f"ggml.{name}": value for name, value in TOKENIZER.items()}
    words |= {f"chat_template{name}": text for name, text in given.items()}
    _, source = small(tmp_path, **{f"tokenizer.{name}": value for name, value in words.items()})
    assert source.template == (template and template.encode())
    assert any("several chat templates" in line and f"{used} rag, tool_use" in line for line in source.assumptions)


def test_sampling_defaults_come_along(tmp_path):
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 7.0, "penalty_last_n": 32, "mirostat": 0}
    _, source = small(tmp_path, **{f"general.sampling.{name}": value for name, value in given.items()})
    assert source.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repeat_last_n": 32}
    assert any("general.sampling.min_p was left out: min_p is 7" in line for line in source.assumptions)
    assert not any("mirostat" in line for line in source.assumptions)
    _, source = small(tmp_path, **{"general.sampling.mirostat": 2, "general.sampling.xtc_probability": 0.5})
    for found in ("mirostat = 2", "xtc_probability = 0.5"):
        assert f"general.sampling.{found} was left out: there is no such option here" in source.assumptions


# ---- RoPE ----


def llama3_factors(theta, dim, factor, low, high, context):
    """As llama.cpp's converter computes the tensor rope_freqs.weight, in fp32."""
    frequencies = 1 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    factors = []
    for frequency in frequencies:
        length = 2 * np.pi / frequency
        if length < context / high:
            factors.append(1)
        elif length > context / low:
            factors.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(("factor", "context"), [(8, 8192), (32, 8192), (4, 1024), (8, 32), (8, 1000), (2, 131072)])
def test_llama3_scaling_is_found_in_its_factors(factor, context, tmp_path):
    made, _ = small(tmp_path, head_dim=64)
    factors = llama3_factors(5e5, 64, factor, 1, 4, context)
    made.tensors["rope_freqs.weight"] = (F32, (32,), factors.tobytes())
    made.write()
    with open_source(made.path) as source:
        config = source.config
    assert (config.rope_scaling, config.rope_factor, config.rope_original_context) == ("llama3", factor, context)
    plain = rope_frequencies(config.replace(rope_scaling="none"))
    # The converter's fp32 against fp64 rounded once: ten roundings of 6e-8.
    assert np.allclose(rope_frequencies(config), plain / torch.from_numpy(factors), rtol=1e-6, atol=0)


@pytest.mark.parametrize("wrong", [[1.0, 2.0] * 16, [0.0] * 32, [float("nan")] * 32])
def test_other_factors_are_refused(wrong, tmp_path):
    made, _ = small(tmp_path, head_dim=64)
    made.tensors["rope_freqs.weight"] = (F32, (32,), np.float32(wrong).tobytes())
    made.write()
    with pytest.raises(SourceError, match="does not hold the factors"), open_source(made.path):
        pass


@pytest.mark.parametrize(
    ("keys", "hf"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 256},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),  # context_length
    ],
)
def test_rope_scaling(keys, hf, tmp_path):
    """The table of frequencies and the factor of attention are those of transformers."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made, source = small(tmp_path, "qwen3", head_dim=64, **{f"qwen3.rope.{k}": v for k, v in keys.items()})
    config = transformers.Qwen3Config(**made.hf, rope_scaling={**hf, "rope_theta": 5e5})
    expected, attention = ROPE_INIT_FUNCTIONS[hf["rope_type"]](config, "cpu")
    assert np.allclose(rope_frequencies(source.config), expected, rtol=1e-6, atol=0)  # fp32 there, fp64 here
    assert source.config.rope_attention_factor == pytest.approx(attention)
