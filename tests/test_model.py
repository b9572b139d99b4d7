"""The decoder compared with an independent one in numpy, and its invariants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.model.layers import rotate
from bitnet.model.positions import rope_frequencies, rope_tables
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from decoder_reference import numpy_hidden, numpy_logits

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

SMALL = ModelConfig(
    vocab_size=61, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80, max_context=64,
)  # fmt: skip


def seeded(config: ModelConfig) -> Transformer:
    """Random weights, and gains and biases that are not 1 and 0."""
    torch.manual_seed(7)
    model = Transformer(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


GEMMA: dict[str, Any] = {  # what the Gemma family adds up to
    "post_norm": True, "qk_norm": True, "sub_norm": False, "linear_norm": True, "activation": "gelu", "n_layers": 3,
    "embedding_scale": 6.9, "attention_scale": 0.2, "sliding_window": 3, "global_every": 2, "rope_theta": 1e6,
    "rope_local_theta": 100.0,
}  # fmt: skip


ORIGINAL: dict[str, Any] = {  # the transformer of 2017
    "norm": "layer", "norm_bias": True, "pre_norm": False, "residual_norm": True, "sub_norm": False,
    "final_norm": False, "ffn": "plain", "activation": "relu", "position": "sinusoidal", "embedding_scale": 6.9,
    "n_kv_heads": 4, "qkv_bias": True, "o_bias": True, "ffn_bias": True, "head_bias": True, "tie_embeddings": False,
}  # fmt: skip
GPT2 = ORIGINAL | {"pre_norm": True, "residual_norm": False, "final_norm": True, "activation": "gelu",
                   "position": "learned", "tie_embeddings": True, "head_bias": False}  # fmt: skip
BERT = ORIGINAL | {"mask": "bidirectional", "embedding_norm": True, "activation": "gelu_erf", "position": "learned",
                   "tie_embeddings": True}  # fmt: skip
EXPERTS: dict[str, Any] = {"n_experts": 5, "experts_per_token": 2, "activation": "silu"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "silu", "sub_norm": False, "tie_embeddings": False},
        {"qk_norm": True, "n_kv_heads": 4, "rope_theta": 500_000.0, "attention_scale": 0.1},
        {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "n_kv_heads": 1},
        {"embedding_scale": 7.0, "residual_scale": 0.5, "logit_softcap": 0.3},
        {"linear_norm": True, "qk_norm": True, "activation": "silu", "sub_norm": False},
        {"linear_norm": True, "pre_norm": False},
        {"post_norm": True, "pre_norm": False, "activation": "gelu", "sub_norm": False},
        {"sliding_window": 3, "activation": "relu"},
        GEMMA,
        {"ffn": "plain", "activation": "gelu"},
        ORIGINAL,
        GPT2,
        BERT,
        {"norm": "layer", "sub_norm": True, "linear_norm": True, "qk_norm": True, "position": "none"},
        {"norm_bias": True, "attention_softcap": 0.7, "head_bias": True, "final_norm": False},
        {"mask": "prefix", "sliding_window": 4, "n_layers": 3, "global_every": 3},
        {"mask": "bidirectional", "sliding_window": 2, "head_format": "ternary"},
        EXPERTS,
        EXPERTS | {"normalize_routing": False, "linear_norm": True, "ffn": "plain", "ffn_bias": True},
    ],
    ids=["default", "silu", "qk-norm", "biases", "scales", "linear-norm", "no-pre-norm", "post-norm", "window",
         "gemma", "plain", "original", "gpt2", "bert", "layer-norms", "softcap", "prefix", "local-encoder",
         "experts", "plain-experts"],
)  # fmt: skip
def test_agrees_with_numpy(changes: dict[str, Any]) -> None:
    config = SMALL.replace(**changes)
    model = seeded(config)
    weights = {name: t.double().numpy() for name, t in model.state_dict().items()}
    prompts, prefixes = torch.randint(0, 61, (8, 5)), torch.arange(8) % 6
    pairs = zip(prompts.tolist(), prefixes.tolist(), strict=True)
    expected = np.stack([numpy_logits(config, weights, prompt, prefix) for prompt, prefix in pairs])
    with torch.no_grad():
        in_fp32 = model(prompts, prefix_B=prefixes).double().numpy()
        in_fp64 = model.double()(prompts, prefix_B=prefixes).numpy()
    size = np.abs(expected).max()
    for found, rounding in ((in_fp64, 1e-6), (in_fp32, 1e-5)):  # fp64 keeps the fp32 rounding of each product
        worst = np.abs(found - expected).max(axis=(1, 2)) / size
        # In a rare prompt an activation falls on the other side of a rounding edge.
        assert np.median(worst) < rounding and worst.max() < 0.02


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_embeddings_agree_with_numpy(pooling: str) -> None:
    config = SMALL.replace(**GEMMA, has_head=False, pooling=pooling)
    model = seeded(config).double()
    weights = {name: t.double().numpy() for name, t in model.state_dict().items()}
    prompts = torch.randint(0, 61, (8, 7))
    hidden = np.stack([numpy_hidden(config, weights, prompt) for prompt in prompts.tolist()])
    vector = {"last": hidden[:, -1], "mean": hidden.mean(1), "first": hidden[:, 0]}[pooling]
    vector = vector / np.sqrt((vector**2).sum(-1, keepdims=True))
    with torch.no_grad():
        found = model.embed(prompts).numpy()
        assert np.array_equal(found, model.embed(prompts, pooling).numpy())
        other = model.embed(prompts, "mean" if pooling == "last" else "last").numpy()
    worst = np.abs(found - vector).max(axis=1)
    assert np.median(worst) < 1e-6 and worst.max() < 0.02  # as in test_agrees_with_numpy
    assert np.abs(other - found).max() > 0.01
    assert np.array_equal(found, model(prompts).detach().numpy())
    with pytest.raises(ValueError, match="pooling is 'none'"):
        seeded(SMALL).embed(prompts)


def test_parameter_names_are_the_roles_of_the_packed_file() -> None:
    model = Transformer(SMALL.replace(qk_norm=True, tie_embeddings=False, n_layers=1))
    attention = ["attn_norm", "q", "k", "v", "q_norm", "k_norm", "attn_sub_norm", "o"]
    roles = [*attention, "ffn_norm", "gate", "up", "ffn_sub_norm", "down"]
    names = ["embedding.weight", *(f"layers.0.{role}.weight" for role in roles), "final_norm.weight", "head.weight"]
    assert list(model.state_dict()) == names
    assert "head.weight" not in Transformer(SMALL).state_dict()


def test_a_token_does_not_see_the_future() -> None:
    model = seeded(SMALL)
    tokens = torch.randint(0, 61, (2, 20))
    other = tokens.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 61
    with torch.no_grad():
        before, after = model(tokens), model(other)
    assert before[:, :12].equal(after[:, :12])
    assert not before[:, 12:].equal(after[:, 12:])


def test_positions_are_relative() -> None:
    config = SMALL.replace(rope_dim=12)
    frequencies = rope_frequencies(config).double()
    q, k = torch.randn(16).double(), torch.randn(16).double()

    def score(i: int, j: int) -> float:
        turned = [rotate(x, (n * frequencies).cos(), (n * frequencies).sin()) for x, n in ((q, i), (k, j))]
        assert turned[0][12:].equal(q[12:])  # past rope_dim nothing turns
        return float(turned[0] @ turned[1])

    assert score(3, 1) == pytest.approx(score(40, 38), abs=1e-12)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)


def test_positions_may_begin_with_1() -> None:
    like = torch.empty(1)
    later, usual = (rope_tables(SMALL.replace(first_position=first), 9 - first, like) for first in (1, 0))
    assert all(a.equal(b[1:]) for a, b in zip(later, usual, strict=True))


def test_rotations_are_fp32_or_finer() -> None:
    """Under autocast the input of a stack of images, or of a draft, may be bf16: too coarse for an angle."""
    coarse, usual, fine = (
        rope_tables(SMALL, 9, torch.zeros((), dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    for a, b, c in zip(coarse, usual, fine, strict=True):
        assert a.dtype == b.dtype == torch.float32 and a.equal(b) and c.dtype == torch.float64


def test_rope_frequencies_by_hand() -> None:
    config = SMALL.replace(head_dim=4, rope_dim=4, rope_theta=10_000.0)
    assert rope_frequencies(config).tolist() == [1.0, pytest.approx(0.01)]
    linear = rope_frequencies(config.replace(rope_scaling="linear", rope_factor=4.0))
    assert linear.tolist() == [0.25, pytest.approx(0.0025)]
    assert rope_frequencies(config).dtype == torch.float32


def test_llama3_scaling_by_hand() -> None:
    # Turns over the original context of 2π·10: pair 0 (frequency 1) 10, pair 1 (0.25) 2.5, pair 2 (0.0625) 0.625.
    # Bounds 1 and 4: pair 0 is kept, pair 2 interpolated (/8), pair 1 half-way: keep = (2.5 - 1) / 3 = 0.5.
    config = SMALL.replace(
        head_dim=6, rope_dim=6, rope_theta=64.0, rope_scaling="llama3", rope_factor=8.0, rope_original_context=63
    )
    turns = [63 / (2 * math.pi) * f for f in (1.0, 0.25, 0.0625)]
    keep = (turns[1] - 1) / 3
    assert rope_frequencies(config).tolist() == pytest.approx(
        [1.0, 0.25 * keep + 0.25 / 8 * (1 - keep), 0.0625 / 8], rel=1e-6
    )


def test_yarn_scaling_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    config = PRESETS["bitnet-2b4t"].replace(rope_scaling="yarn", rope_factor=4.0, rope_original_context=4096)
    ratio = rope_frequencies(config.replace(rope_scaling="none")) / rope_frequencies(config)
    turns = 4096 / (2 * math.pi) * rope_frequencies(config.replace(rope_scaling="none"))
    assert torch.allclose(ratio[turns > 32 * 1.3], torch.ones(()))  # a pair of margin for floor and ceil
    assert torch.allclose(ratio[turns < 1 / 1.3], torch.full((), 4.0))
    assert (ratio.diff() >= -1e-6).all()


FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
LATER = ("adapter",)
OF_IMAGES = ("out_dim", "image", "patch", "pixel", "channels", "class_token", "similarity", "projector")
OF_IMAGES += ("vision", "draft")
"""Tested in test_vision_model.py, and in test_draft_model.py."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"has_head": False, "input": "draft"}, "input = 'draft'"),
        ({"ternary": ["k"], "adapter_rank": 2, "adapters": ["q"]}, "adapters of q, which is not ternary"),
    ],
)
def test_what_is_not_computed_yet_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"this is not computed yet: {said}"):
        Transformer(SMALL.replace(**changes))


def test_a_part_that_is_quantized_is_a_share() -> None:
    model = Transformer(SMALL)
    with pytest.raises(ValueError, match=r"^amount is 3, expected 0 to 1$"), model.partly_quantized(3):
        pass


def test_every_option_is_used() -> None:
    """Changing any field changes the model: nothing is ignored in silence."""
    # a label, a limit, what the caller gives or not, a kind tested with its numbers, what is only in training,
    # and what moves roundings alone
    elsewhere = {"name", "max_context", "input", "rope_scaling", "dropout", "first_position"}
    elsewhere |= {
        field for field in FIELDS if field.startswith((*LATER, *OF_IMAGES))
    }  # the latter: test_vision_model.py
    needs: dict[str, dict[str, Any]] = {
        "global_every": {"sliding_window": 5, "rope_local_theta": 100.0},
        "rope_local_theta": {"sliding_window": 5, "global_every": 2},
        "pooling": {"has_head": False, "pooling": "last"},
        "normalize_routing": {"n_experts": 4, "experts_per_token": 2},
    }
    needs_scaling = {"rope_factor": "linear", "rope_original_context": "llama3", "rope_low_freq_factor": "llama3",
                     "rope_high_freq_factor": "llama3", "rope_beta_fast": "yarn", "rope_beta_slow": "yarn"}  # fmt: skip
    other: dict[str, Any] = {
        "ternary": ["q"], "weight_scale": "row", "head_format": "f16", "activation": "silu", "mask": "bidirectional",
        "norm": "layer", "ffn": "plain", "position": "none", "pooling": "mean",
        "experts_per_token": None,
    }  # fmt: skip
    tokens = torch.arange(40).reshape(1, 40)
    for field in dataclasses.fields(ModelConfig):
        if field.name in elsewhere or other.get(field.name, 0) is None:
            continue
        base = SMALL.replace(**needs.get(field.name, {}))
        if field.name in needs_scaling:
            base = SMALL.replace(
                rope_scaling=needs_scaling[field.name], rope_factor=4.0, rope_theta=10.0,
                rope_original_context=500 if needs_scaling[field.name] == "yarn" else 30,
            )  # fmt: skip
        value = getattr(base, field.name)
        value = other.get(field.name, not value if isinstance(value, bool) else value * 2 or 2)
        changes = {field.name: value}
        changes |= {"experts_per_token": 1} if field.name == "n_experts" else {}
        changes |= {"rope_dim": 8} if field.name == "rope_dim" else {}
        changed = base.replace(**changes)
        with torch.no_grad():
            models = seeded(base), seeded(changed)
            before, after = (
                m(tokens) if m.config.has_head else m.embed(tokens, m.config.pooling.replace("none", "last"))
                for m in models
            )
        assert before.shape != after.shape or not before.equal(after), field.name


def test_context_overflow() -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit the context of 64"):
        seeded(SMALL)(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("n_texts, n_tokens", [(0, 5), (2, 0)])
def test_nothing_gives_nothing(n_texts: int, n_tokens: int) -> None:
    nothing, model = torch.zeros(n_texts, n_tokens, dtype=torch.long), seeded(SMALL)
    assert model(nothing).shape == (n_texts, n_tokens, SMALL.vocab_size)
    assert model(nothing, targets_BT=nothing) == 0
    for pooling in ("last", "mean", "first"):
        if n_tokens:
            assert model.embed(nothing, pooling).shape == (0, SMALL.dim)
        else:
            with pytest.raises(ValueError, match="the texts have no tokens, expected at least one in each"):
                model.embed(nothing, pooling)


def test_the_mean_loss_is_of_the_targets_that_count() -> None:
    torch.manual_seed(0)
    model, block = Transformer(SMALL), torch.randint(0, 61, (2, 17))
    inputs, targets = block[:, :-1], block[:, 1:].clone()
    targets[:, :10] = -100
    logits = model(inputs).flatten(0, 1)
    torch.testing.assert_close(model.loss(inputs, targets), F.cross_entropy(logits, targets.flatten()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"head_format": "f16", "tie_embeddings": False, "weight_scale": "group"}, GEMMA, ORIGINAL, GPT2, EXPERTS,
     {"head_format": "ternary", "attention_softcap": 5.0}],
)  # fmt: skip
def test_learns_one_batch_by_heart(precision: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL.replace(**changes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    block = torch.randint(0, 61, (2, 17))
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(block[:, :-1], block[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * math.log(61)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_second_derivative_is_refused() -> None:
    """Kernels compute the first alone: without a word, that of a penalty on gradients would lack terms."""
    model = Transformer(SMALL)
    block = torch.randint(0, 61, (2, 17))
    loss = model.loss(block[:, :-1], block[:, 1:])
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()
