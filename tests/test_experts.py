"""Mixtures of experts in the engine: the results of torch, and the same bits however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import PackedFile, random_model
from bitnet_export.checkpoint import sparsity
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.packed import records
from bitnet_runtime import Model, NumericError, available_isas
from bitnet_runtime.embedding import embed_batch
from runtime_models import append_together

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

SMALL = ModelConfig(
    vocab_size=67, dim=36, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=10, ffn_dim=51, max_context=96,
    n_experts=5, experts_per_token=2, activation="silu", head_format="f32",
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain": {"ffn": "plain", "activation": "gelu", "ffn_bias": True, "sub_norm": False, "n_experts": 3},
    "biases-post-norm": {"ffn_bias": True, "post_norm": True, "residual_scale": 0.7, "experts_per_token": 3},
    "linear-norm": {"linear_norm": True, "activation": "relu2", "n_experts": 7},
    "linear-norm-plain": {"linear_norm": True, "ffn": "plain", "pre_norm": False, "activation": "relu"},
    "layer-norm": {"norm": "layer", "norm_bias": True, "linear_norm": True, "activation": "gelu_erf"},
    "residual-norm": {"norm": "layer", "norm_bias": True, "residual_norm": True, "pre_norm": False, "ffn_bias": True},
    "groups": {"weight_scale": "group", "dim": 140, "ffn_dim": 150},
    "rows": {"weight_scale": "row", "n_experts": 19, "experts_per_token": 5},  # two panels of routers
    "shares-as-they-are": {"normalize_routing": False, "experts_per_token": 3},
    "all": {"n_experts": 4, "experts_per_token": 4},
    "one": {"n_experts": 1, "experts_per_token": 1},
    "mixed": {"ternary": ("q", "k", "v", "o", "up")},
    "mixed-gate": {"ternary": ("q", "k", "v", "o", "gate", "down")},
}
STORED: dict[str, dict[str, Any]] = {
    "two-bits": {}, "five-trits": {"encoding": "1.6"}, "lines": {"sparse": True},
}  # fmt: skip


def can_be(name: str, stored: str) -> bool:
    """Neither five trits nor lines have scales of groups, and lines are ternary."""
    form = SMALL.replace(**FORMS[name])
    return stored == "two-bits" or (
        form.weight_scale != "group" and (stored == "five-trits" or {"up", "down"} <= set(form.ternary))
    )


def seeded(config: ModelConfig, seed: int = 5) -> Transformer:
    """Weights, gains and biases drawn; the router's so that experts are told apart."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(std=0.3)
            elif "router" in name:
                parameter.normal_(std=0.5)
    return model


def packed(model: Transformer, folder: Path, **stored: Any) -> Path:
    (folder / "c").mkdir(parents=True)
    save_file(model.state_dict(), folder / "c" / "model.safetensors")
    (folder / "c" / "config.json").write_text(model.config.to_json())
    pack_checkpoint(Checkpoint.open(folder / "c"), folder / "m.bitnet", **stored)
    return folder / "m.bitnet"


def log_probabilities(model: Transformer, texts: torch.Tensor, dtype: torch.dtype) -> NDArray[np.float64]:
    with torch.no_grad():
        found: NDArray[np.float64] = model.to(dtype)(texts).double().log_softmax(-1).numpy()
    return found


def engine_log_probabilities(path: Path, texts: torch.Tensor, **load: Any) -> NDArray[np.float64]:
    rows = []
    with Model.load(path, kv_type="f32", **load) as engine, engine.session() as session:
        for text in texts.tolist():
            session.reset()
            rows.append(session.append(text, "all"))
    found: NDArray[np.float64] = torch.from_numpy(np.stack(rows)).double().log_softmax(-1).numpy()
    return found


def draw(*shape: int, vocab_size: int = SMALL.vocab_size) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(2))


# ---- what torch computes ----


@pytest.mark.parametrize("name", FORMS)
def test_float_experts_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """There are no rounding edges, so every logit is compared. A tie between routes would show; none is closer than
    1e-5."""
    config = SMALL.replace(**FORMS[name] | {"ternary": (), "weight_scale": "tensor"})
    model, texts = seeded(config), draw(3, 40)
    path = packed(model, tmp_path)
    expected = log_probabilities(model, texts, torch.float64)
    found = engine_log_probabilities(path, texts)
    # fp32: layers of sums of about 50 terms (140: groups), each rounded to 6e-8 of values up to 10
    assert np.abs(found - expected).max() < 2e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("name", "stored"), [(name, how) for how in STORED for name in FORMS if can_be(name, how)])
def test_ternary_experts_are_those_of_torch(
    name: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design, the noise floor: fp32 programs agree to 1e-6 until an activation changes its code, or a row its
    expert because two routes are nearly as good. Torch in fp32 and in fp64 differ in the same way."""
    config = SMALL.replace(**FORMS[name])
    model = seeded(config)
    monkeypatch.setattr(sparsity, "require_zeros", lambda *_: None)  # versions before wrote such files
    path = packed(model, tmp_path, **STORED[stored])
    short, long = draw(60, 6), draw(4, 96)
    for texts, middle in ((short, np.median), (long, np.mean)):
        of32, of64 = (log_probabilities(model, texts, dtype) for dtype in (torch.float32, torch.float64))
        found = engine_log_probabilities(path, texts)
        distance, floor = middle(np.abs(found - of32)), middle(np.abs(of64 - of32))
        assert distance < 1e-5 + 1.5 * floor


# ---- the same bits ----


def logits_of(path: Path, texts: list[list[int]], cut: int, **load: Any) -> NDArray[np.float32]:
    rows = []
    with Model.load(path, **load) as engine, engine.session() as session:
        for text in texts:
            session.reset()
            rows += [session.append(text[at : at + cut], "all") for at in range(0, len(text), cut)]
    return np.concatenate(rows)


@pytest.mark.parametrize("name", FORMS)
def test_same_bits_on_every_tier_and_in_every_cut(name: str, tmp_path: Path) -> None:
    path = packed(seeded(SMALL.replace(**FORMS[name])), tmp_path)
    texts = draw(2, 77).tolist()
    expected = logits_of(path, texts, 77, isa="scalar", threads=1)
    for isa in available_isas():
        for threads, cut in ((1, 77), (2, 77), (2, 1), (3, 13), (2, 40)):
            found = logits_of(path, texts, cut, isa=isa, threads=threads)
            assert np.array_equal(found, expected), (isa, threads, cut)


def test_same_bits_through_tables(tmp_path: Path) -> None:
    """Wide enough, and rows enough, for tables of sums; of one expert, of few, of most; and how many rows an expert
    has depends on the texts."""
    config = SMALL.replace(dim=320, n_heads=5, head_dim=64, ffn_dim=700, n_experts=3, max_context=300, n_layers=2)
    random_model(config, tmp_path / "m")
    texts = [draw(300).tolist(), [7] * 150]
    expected = [logits_of(tmp_path / "m", [text], 3, threads=1) for text in texts]
    for isa in available_isas():
        if isa == "scalar":
            continue
        for threads, cut in ((1, 128), (2, 128), (2, 70), (4, 300)):
            for text, rows in zip(texts, expected, strict=True):
                assert np.array_equal(logits_of(tmp_path / "m", [text], cut, isa=isa, threads=threads), rows)


def test_a_row_is_the_same_whoever_is_beside_it(tmp_path: Path) -> None:
    path = packed(seeded(SMALL), tmp_path)
    tokens = draw(8, 12)
    with Model.load(path, threads=2) as engine:
        alone = []
        for text in tokens.tolist():
            with engine.session() as session:
                alone.append([session.append([token], "all")[0] for token in text])
        for order in (range(8), (5, 2, 7, 0), (3,)):
            sessions = [engine.session() for _ in order]
            for at in range(12):
                append_together(sessions, tokens[list(order), at].tolist())
                for session, text in zip(sessions, order, strict=True):
                    assert session.logits is not None
                    assert np.array_equal(session.logits, alone[text][at])
            for session in sessions:
                session.close()


def test_vectors_of_texts_are_the_same_alone_and_together(tmp_path: Path) -> None:
    path = packed(seeded(SMALL.replace(has_head=False, pooling="mean")), tmp_path)
    texts = [text[: 3 + 5 * i] for i, text in enumerate(draw(5, 40).tolist())]
    with Model.load(path, threads=2) as engine:
        sessions = [engine.session() for _ in texts]
        together = embed_batch(sessions, texts, "mean")
        for session in sessions:
            session.close()
        alone = []
        for text in texts:
            with engine.session() as session:
                alone.append(session.embed(text, "mean"))
    assert np.array_equal(together, np.stack(alone))


def test_more_slots_than_fit_at_once(tmp_path: Path) -> None:
    """A row takes so many experts that rows go through the mixture some at a time: of 40 rows 13, 13, 13, 1."""
    config = SMALL.replace(dim=16, ffn_dim=16, n_experts=300, experts_per_token=300, n_layers=1)
    random_model(config, tmp_path / "m")
    text = draw(40).tolist()
    expected = logits_of(tmp_path / "m", [text], 1, threads=1)
    assert np.array_equal(logits_of(tmp_path / "m", [text], 40, threads=2), expected)


# ---- routes ----


def test_of_equal_routes_the_first_is_taken(tmp_path: Path) -> None:
    """A router of zeros makes every p equal: experts 0 and 1 are taken, half of each."""
    model = seeded(SMALL.replace(ternary=()))
    with torch.no_grad():
        for layer in model.layers:
            layer.get_parameter("router.weight").zero_()
            for expert in range(2, 5):
                layer.get_parameter(f"experts.{expert}.down.weight").fill_(100.0)
    texts = draw(2, 9)
    expected = log_probabilities(model, texts, torch.float64)
    found = engine_log_probabilities(packed(model.float(), tmp_path), texts)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_a_router_that_overflows_is_an_error(tmp_path: Path) -> None:
    model = seeded(SMALL)
    with torch.no_grad():
        model.layers[1].get_parameter("router.weight").fill_(3e38)
    with Model.load(packed(model, tmp_path), threads=2) as engine, engine.session() as session:
        for text in ([5], [5, 6, 7, 8]):
            with pytest.raises(NumericError):
                session.append(text)


# ---- what it says of itself ----


def test_a_token_costs_what_its_experts_do(tmp_path: Path) -> None:
    path = packed(seeded(SMALL), tmp_path)
    file = PackedFile.open(path)
    macs = read = all_weights = 0.0
    for key, record in file.tensors.items():
        role, size = records.ROLES[key.role], record.size + record.scale_size
        share = 2 / 5 if key.expert != records.NONE else 1
        if record.encoding.ternary and key.part == 0:
            all_weights += record.rows * record.cols
            macs += share * record.rows * record.cols
            read += share * size
        elif role in ("router", "embedding") and key.part == 0:
            read += size
    with Model.load(path) as engine:
        info = engine.info
    assert info.ternary_weights == all_weights
    assert info.macs_per_token == pytest.approx(macs)
    assert info.bytes_per_token == pytest.approx(read)
