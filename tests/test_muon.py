"""Our Muon compared with torch's, which orthogonalizes one matrix at a time; and which parameters it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import optimizers
from bitnet.train.muon import SIZE, Muon, orthogonal
from bitnet.train.schedule import Place

SHAPES = [(48, 32), (48, 32), (32, 48), (16, 16), (48, 32), (1, 8)]


@pytest.mark.parametrize("precise", [False, True])
def test_steps_are_those_of_torch(precise: bool) -> None:
    """Both round to bf16 (2⁻⁹) in each of fifteen products, and stacked ones add in another order. The polynomial's
    slope, up to 3.4 a step, makes that some percent of a singular value, whose place near 1 is arbitrary anyway."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    first = Muon([{"params": ours, "lr": 0.02, "weight_decay": 0.1}], precise)
    second = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before = [p.detach().clone() for p in ours]
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            q.data.copy_(p.data)
        first.step()
        second.step()
        for p, q, was in zip(ours, theirs, before, strict=True):
            assert (p - q).norm() <= 0.05 * (q - was).norm()
        for p, q in zip(ours, theirs, strict=True):
            assert first.state[p]["momentum_buffer"].allclose(second.state[q]["momentum_buffer"])


def test_what_has_no_gradient_stays() -> None:
    still, moved = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.eye(4))
    optimizer = Muon([{"params": [still, moved], "lr": 0.1, "weight_decay": 0.5}])
    moved.grad = torch.eye(4)
    optimizer.step()
    assert still.equal(torch.ones(4, 4)) and still not in optimizer.state and not moved.equal(torch.eye(4))


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in [(20, 50), (3, 50, 20)]:
        values = torch.linalg.svdvals(orthogonal(torch.randn(*shape)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_a_matrix_without_a_gradient_stays() -> None:
    """As of an expert that no token of the step took: its old momentum, normalized, would be a step of full size."""
    torch.manual_seed(0)
    alone, taken = (nn.Parameter(torch.zeros(8, 8)) for _ in range(2))
    muon = Muon([{"params": [alone, taken], "lr": 0.1}], precise=True)
    for factor in (1.0, 0.0, 1.0):
        alone.grad, taken.grad = factor * torch.randn(8, 8), torch.randn(8, 8)
        before = [p.detach().clone() for p in (alone, taken)]
        muon.step()
        assert torch.equal(alone, before[0]) == (factor == 0) and not torch.equal(taken, before[1])


def test_precise_steps_are_those_of_fp32() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(16, 16))
    p.grad = torch.randn(16, 16)
    Muon([{"params": [p], "lr": 1 / (SIZE * 4)}], precise=True).step()
    torch.testing.assert_close(p.detach(), -orthogonal(p.grad), rtol=0, atol=1e-4)  # bf16 is off by 0.01


@pytest.mark.parametrize("n", [1, 3])
def test_only_the_products_are_in_bf16(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Alone or in a stack: a step is not rounded again when the rate multiplies it."""
    torch.manual_seed(0)
    made = []

    def noted(x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        made.append(orthogonal(x))
        return made[-1]

    monkeypatch.setattr("bitnet.train.muon.orthogonal", noted)
    matrices = [nn.Parameter(torch.zeros(16, 8)) for _ in range(n)]
    for p in matrices:
        p.grad = torch.randn(16, 8)
    Muon([{"params": matrices, "lr": 0.3}]).step()
    assert torch.stack([p.detach() for p in matrices]).equal(-made[0].view(n, 16, 8).float() * (SIZE * 4 * 0.3))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_only_matrices_of_layers_decay(optimizer: str) -> None:
    """Those of the draft, too. All else has the learning rate of embeddings."""
    settings = Settings(optimizer=optimizer, lr=0.01, embedding_lr=0.03, weight_decay=0.5)
    config = ModelConfig(vocab_size=30, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24,
                         max_context=8)  # fmt: skip
    model = Transformer(config.with_draft())
    built = optimizers.build(model, settings)
    optimizers.set_rates(built, settings, Place(0.2, 0.2))
    found = {p: (group["lr"], group["weight_decay"]) for group in built.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        decays = p.dim() == 2 and name.startswith(("layers.", "draft."))
        assert found.pop(p) == (pytest.approx(0.01 if decays else 0.03), 0.5 if decays else 0.0), name
    assert not found
