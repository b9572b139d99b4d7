"""Presets by size, the learning rates of parameter groups, and the utilization of a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.settings import PRESET_SETTINGS, Settings
from bitnet.setup import resolve
from bitnet.setup.given import Given
from bitnet.sizes import SIZES
from bitnet.train import flops, loop
from bitnet.train.horizon import Horizon
from bitnet.train.progress import Progress
from bitnet.train.run import Run
from training import TINY, bitnet

torch.set_num_threads(1)


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_by_size_has_that_many_parameters(name: str) -> None:
    config, training = PRESETS[name], PRESET_SETTINGS[name]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(config).parameters())
    assert parameters == pytest.approx(SIZES[name], rel=0.06)
    assert config.dim % (256 if config.dim >= 1024 else 64) == 0 and config.dim == config.n_heads * config.head_dim
    assert training["batch_tokens"] % (training["batch"] * config.max_context) == 0
    smaller = [other for other in SIZES if SIZES[other] < SIZES[name]]
    assert all(PRESETS[other].dim < config.dim and PRESET_SETTINGS[other]["lr"] >= training["lr"] for other in smaller)


def test_other_budgets_take_the_place_of_those_of_a_size() -> None:
    settings, config = resolve.resolve(Given(options={"preset": "10m"}))
    assert settings.budget == ("tokens_per_parameter", 20.0) and config == PRESETS["10m"]
    settings, _ = resolve.resolve(Given(options={"preset": "10m", "steps": 7, "accumulate": 2}))
    assert settings.budget == ("steps", 7) and settings.batch_tokens == 0


@pytest.mark.parametrize("wanted", [0.0, 0.001])
def test_embeddings_and_gains_may_have_their_own_rate(
    wanted: float, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, rates = loop.update, []

    def noted(run: loop.Run) -> Any:
        made = update(run)
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        return made

    monkeypatch.setattr(loop, "update", noted)
    argv = [*TINY[:-1], "10", "--lr", "0.004", "--embedding-lr", wanted, "--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *argv) == 0
    for matrices, others in rates:
        assert others == pytest.approx(matrices * ((wanted or 0.004) / 0.004))
    assert max(rates)[0] == pytest.approx(0.004)


# ---- of the peak ----


@pytest.mark.parametrize("change", [{}, {"n_kv_heads": 1}, {"ffn": "plain"}, {"tie_embeddings": False}])
def test_operations_of_a_token_are_those_that_torch_counts(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full precision. torch counts attention with all tokens, also masked ones, and the gradient of a norm's gain as
    a product: 0.1 %. It does not count oneDNN's products."""
    monkeypatch.setattr("bitnet.float_product.HAS_BOTH", False)
    config = PRESETS["1m"].replace(ternary=(), head_format="f32", max_context=64, mask="bidirectional", **change)
    model = Transformer(config)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # of others it counts nothing
        model(tokens).sum().backward()
    assert flops.of_token(model, 64) == pytest.approx(counter.get_total_flops() / tokens.numel(), rel=2e-3)
    attention = flops.of_token(model, 64) - flops.of_token(model, 0)
    causal = Transformer(config.replace(mask="causal"))
    assert flops.of_token(causal, 64) - flops.of_token(causal, 0) == attention / 2


def test_of_experts_those_that_a_token_takes_count() -> None:
    with torch.device("meta"):
        one, some = (Transformer(PRESETS[name]) for name in ("thinker", "thinker-moe"))
    feed_forward = 6 * 4 * 3 * 256 * 1024
    router = 6 * 4 * 256 * 8
    assert flops.of_token(some, 0) == flops.of_token(one, 0) + feed_forward + router


def test_frozen_weights_have_no_gradients_to_count() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["tiny"])
    whole, n = flops.of_token(model, 0), sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    n += model.config.vocab_size * model.config.dim
    model.requires_grad_(False)
    assert whole == 6 * n and flops.of_token(model, 0) == 4 * n


def test_a_share_of_the_peak_is_not_given_where_operations_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "peak", lambda *_: 1e12)
    found = {}
    for name, config in {"plain": PRESETS["tiny"], "draft": PRESETS["tiny"].with_draft()}.items():
        with torch.device("meta"):
            model = Transformer(config)
        data = SimpleNamespace(batches=SimpleNamespace(context=64))
        run = SimpleNamespace(settings=Settings(device="cuda"), model=model, data=data)
        found[name] = Run.of_peak.fget(run)  # type: ignore[attr-defined]
    assert found["plain"] > 0 == found["draft"]


@pytest.mark.parametrize(
    ("name", "rate"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
     ("NVIDIA L40S", 362e12), ("NVIDIA RTX A4000", 0.0), ("NVIDIA A10", 0.0),
     ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0.0), ("NVIDIA GeForce RTX 4090", 165e12),
     ("NVIDIA GeForce RTX 4090 Laptop GPU", 0.0), ("NVIDIA GeForce RTX 4090 D", 0.0)],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert flops.peak("cuda", "bf16") == rate and flops.peak("cpu", "bf16") == flops.peak("cuda", "fp32") == 0
    state = {"step": 0, "tokens": 0, "seconds": 0.0}
    shown = [Progress(Horizon(2000, 0.0, 100), state, of_peak) for of_peak in (1e-3, 0.0)]
    state |= {"step": 10, "tokens": 1000, "seconds": 2.0}
    assert [each.speed for each in shown] == ["500 tokens/s, 50.0% of the peak", "500 tokens/s"]
