"""Our Muon compared with torch's, which orthogonalizes one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitnet.train.muon import Muon, orthogonal

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
