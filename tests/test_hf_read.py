"""Published Hugging Face folders: the same codes, scales and logits as transformers has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

import hf_models
from bitnet.model.positions import rope_frequencies
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.packed import encodings, records
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLE, Key
from bitnet_runtime import Model

FAMILIES = {
    "BitNet, packed": hf_models.bitnet_packed,
    "BitNet, masters": hf_models.bitnet_masters,
    "1bitLLM": hf_models.one_bit_llm,
    "Llama, packed": lambda: hf_models.llama_packed(head_dim=40),
    "Llama, packed, biases": lambda: hf_models.llama_packed(attention_bias=True, mlp_bias=True),
    "Llama, packed, norms inside": lambda: hf_models.llama_packed(1e-5),
    "Llama, packed, down in floats": lambda: hf_models.llama_packed(left=("down_proj",)),
    "Mistral, packed, a window": hf_models.mistral_packed,
    "Falcon-E, masters": hf_models.falcon_masters,
    "TriLM": hf_models.trilm,
    "TriLM, a scale a row": lambda: hf_models.trilm("row"),
    "Qwen2, packed, biases": hf_models.qwen2_packed,
    "Bonsai": hf_models.bonsai,
    "Bonsai, untied": lambda: hf_models.bonsai(tied=False),
    "embeddings, Qwen3": lambda: hf_models.embedding("qwen3"),
    "embeddings, Gemma3": lambda: hf_models.embedding("gemma3"),
}
TEXT = 600


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def converted(request, tmp_path_factory):
    """A model and the packed file of the folder it was saved in."""
    torch.set_num_threads(1)
    model, folder = request.param(), tmp_path_factory.mktemp("hf")
    with open_source(model.save(folder / "model")) as source:
        pack_source(source, folder / "model.bitnet", head="f32")
    return model, folder / "model.bitnet"


def test_codes_and_scales(converted):
    """All of them, in the packed file."""
    model, path = converted
    file = PackedFile.open(path)
    places = {f"layers.{layer}.{name}": Key(0, layer, ROLE[role], NONE, 0)
              for layer in range(3) for role, name in hf_models.PROJECTIONS.items()}  # fmt: skip
    places |= {"embed_tokens": Key(0, NONE, ROLE["embedding"], NONE, 0), "lm_head": Key(0, NONE, ROLE["head"], NONE, 0)}
    for module, (codes, scales) in model.ternary.items():
        record = file.tensors[places[module.removeprefix("model.")]]
        assert np.array_equal(file.codes(record), codes), module
        assert np.array_equal(file.scales(record).reshape(scales.shape), scales), module
    ternary = [record for record in file.tensors.values() if record.encoding in encodings.TERNARY.values()]
    assert len(ternary) == len(model.ternary)


def is_decoder(model):
    return "ForCausalLM" in model.config["architectures"][0]


def reference(model, tokens, dtype=torch.float32, noise=0):
    """Logits (n, T, vocabulary), or for an embedding model one vector of length 1 per text."""
    out = model.forward(tokens, dtype, noise)
    return out if is_decoder(model) else out[:, -1] / np.linalg.norm(out[:, -1], axis=-1, keepdims=True)


def engine(model, path, tokens):
    """The same from the engine."""
    with Model.load(path, kv_type="f32") as loaded:
        if not is_decoder(model):
            return loaded.embed(tokens.tolist()).astype(np.float64)
        rows = []
        for text in tokens.tolist():
            with loaded.session(n_ctx=len(text)) as session:
                rows.append(session.append(text, "all"))
    return np.array(rows, np.float64)


def test_short_prompts(converted):
    """Many, so that the median is one of prompts without an activation at a rounding edge."""
    model, path = converted
    tokens = np.random.default_rng(0).integers(0, 301, (24, 7))
    expected = reference(model, tokens)
    apart = np.abs(engine(model, path, tokens) - expected)
    # Design, the noise floor: two correct fp32 programs differ by about 1e-6 of the largest value until one
    # activation falls on the other side of an edge; logits here reach 30.
    assert np.median(apart) <= 1e-5
    assert np.median(apart.reshape(len(tokens), -1).max(1)) <= 1e-5 * max(1.0, np.abs(expected).max())


def test_long_text(converted):
    """As far from the reference as the reference in fp32 is from itself in fp64, or with noise in the last place.

    A long text is apart by what a few activations on the other side of an edge do: the distance of
    one pair of correct programs varies severalfold, so it is taken of several.
    """
    model, path = converted
    tokens = np.random.default_rng(1).integers(0, 301, (2 if is_decoder(model) else 6, 520))
    fp32 = reference(model, tokens)
    others = [reference(model, tokens, torch.float64), *(reference(model, tokens, noise=seed) for seed in (1, 2, 3))]
    floor = [float(np.abs(other - fp32).mean()) for other in others]
    found = float(np.abs(engine(model, path, tokens) - fp32).mean())
    assert found <= 1.5 * max(floor)


def test_round_trip(converted, tmp_path):
    """From our file to Hugging Face and back: every value, every scale, the configuration."""
    model, path = converted
    if not is_decoder(model):
        pytest.skip("transformers has no class for a norm before every projection of a backbone")
    write_folder(path, tmp_path / "folder")
    with open_source(tmp_path / "folder") as source:
        pack_source(source, tmp_path / "again.bitnet", head="f32")
    first, again = PackedFile.open(path), PackedFile.open(tmp_path / "again.bitnet")
    assert again.configs == first.configs and list(again.tensors) == list(first.tensors)
    for key, record in first.tensors.items():
        found, expected = again.values(again.tensors[key]), first.values(record)
        if key.part == 0:
            assert np.array_equal(found, expected), key.name
        else:  # stored divided by the scale, which costs an fp32 rounding and the way back another
            np.testing.assert_allclose(found, expected, rtol=2 * 2.0**-24)


ROPE = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, everything": {
        "factor": 5.0, "original_max_position_embeddings": 128, "beta_fast": 24.0, "beta_slow": 2.0,
        "mscale": 0.7, "mscale_all_dim": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling(kind, old, tmp_path):
    """The frequencies of transformers, whether version 5 or an earlier one wrote the folder."""
    given = {"rope_type": kind.split(",")[0], **ROPE[kind]}
    model = hf_models.llama_packed(head_dim=40, rope_parameters={"rope_theta": 10_000.0, **given})
    if old:
        del model.config["rope_parameters"]
        given["type"] = given.pop("rope_type")
        model.config |= {"rope_theta": 10_000.0, "rope_scaling": given}
    with open_source(model.save(tmp_path / "model")) as source:
        config = source.config
    rotary = model.model.model.rotary_emb
    # Theirs is computed in fp32, with up to eight roundings for the mean of two frequencies (llama3, yarn).
    np.testing.assert_allclose(rope_frequencies(config).numpy(), rotary.inv_freq.numpy(), rtol=8 * 2.0**-23)
    assert config.rope_attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_what_comes_with_the_weights(tmp_path):
    """Tokenizer, template and generation defaults under our names; shards make no difference."""
    model = hf_models.bitnet_packed()
    folder = model.save(tmp_path / "model", shards=3)
    tokenizer = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)}, [])).to_str()
    (folder / "tokenizer.json").write_text(tokenizer)
    templates = [{"name": "tools", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 1 }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    defaults = {"eos_token_id": [3, 4], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    with open_source(folder) as source:
        assert source.tokenizer == tokenizer.encode() and source.template == b"{{ 1 }}"
        assert source.generation == {
            "eos_token_ids": [3, 4], "temperature": 0.6, "top_p": 0.9, "repeat_penalty": 1.1,
            "repeat_last_n": -1,  # transformers counts all tokens
        }  # fmt: skip
        pack_source(source, tmp_path / "three.bitnet")
    with open_source(model.save(tmp_path / "one")) as source:
        weights = {spec.key: spec for spec in records.expected_tensors(source.config)}
        pack_source(source, tmp_path / "one.bitnet")
    one, three = PackedFile.open(tmp_path / "one.bitnet"), PackedFile.open(tmp_path / "three.bitnet")
    for key in weights:
        assert np.array_equal(one.values(one.tensors[key]), three.values(three.tensors[key])), key.name
    with Model.load(tmp_path / "three.bitnet") as loaded:
        assert loaded.end_tokens == {3, 4} and loaded.defaults.temperature == 0.6


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_where_transformers_would_quantize_twice_it_is_said(mode, tmp_path):
    model = hf_models.trilm()
    model.config["quantization_config"] = hf_models.MULTIPLY | {"quantization_mode": mode}
    linear = model.model.model.layers[0].mlp.down_proj
    inputs = torch.randn(1, linear.in_features, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        once, twice = linear(inputs), hf_models.auto(linear, linear.weight, None)(inputs)
    assert float(twice.norm()) < 0.9 * float(once.norm())
    with open_source(model.save(tmp_path / "model")) as source:
        assert any("transformers quantizes them again" in line for line in source.assumptions) == (mode == "online")


def test_ternary_floats_are_not_quantized_twice(tmp_path):
    """Also in a model that declares bitnet: mean|W| of ternary values is smaller than their scale."""
    model = hf_models.trilm()
    model.config["quantization_config"] = hf_models.DIVIDE
    with open_source(model.save(tmp_path / "model")) as source:
        assert "ternary already" in source.what
        for layer in range(3):
            found = source.load(Key(0, layer, ROLE["down"], NONE, 0))
            codes, scales = model.ternary[f"model.layers.{layer}.mlp.down_proj"]
            assert np.array_equal(found.codes, codes) and np.array_equal(found.scales, scales)
