"""Products of floats by either library, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet import float_product

NEAR = {"rtol": 1e-5, "atol": 1e-5}  # 32 products of about 1, each sum rounded to 2⁻²⁴ of itself


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def matrices(rows: int, columns: int) -> list[Tensor]:
    """In different memory layouts: by rows, by columns, as part of wider rows, and one row repeated."""
    wide = torch.randn(rows, columns + 3)
    return [wide[:, :columns].clone(), wide.mT[:columns].clone().mT, wide[:, 1 : columns + 1],
            torch.randn(1, columns).expand(rows, columns)]  # fmt: skip


@pytest.mark.parametrize("both", [True, False])
def test_products_of_all_shapes(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_product, "HAS_BOTH", both and float_product.HAS_BOTH)
    for m, k, n in itertools.product((0, 1, 17), (0, 1, 32), (0, 1, 16)):
        for a, b in itertools.product(matrices(m, k), matrices(k, n)):
            onto = torch.randn(m, n)
            expected = a.double() @ b.double()
            assert torch.allclose(float_product.product(a, b).double(), expected, **NEAR)
            expected += onto
            assert torch.allclose(float_product.product(a, b, onto).double(), expected, **NEAR)


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 0, 32), (2, 5, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_its_gradients(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = torch.randn(shape), torch.randn(7, 32), torch.randn(7)
    leaves = [x, w, *[b][:bias]]
    found, expected = [], []
    for linear, dtype, results in ((float_product.linear, torch.float32, found), (F.linear, torch.float64, expected)):
        own = [leaf.to(dtype).detach().requires_grad_() for leaf in leaves]
        y = linear(*own)
        results += [y, *torch.autograd.grad(y.square().sum(), own)]
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == e.shape
        assert torch.allclose(a.double(), e, rtol=1e-4, atol=1e-3)  # of squares of about 32, and sums of them


def test_what_is_frozen_has_no_gradient() -> None:
    x, w = torch.randn(4, 32), torch.randn(7, 32, requires_grad=True)
    float_product.linear(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    float_product.linear(x.requires_grad_(), w.detach()).sum().backward()
    assert x.grad is not None


def test_autocast_and_fp64_are_torchs_own() -> None:
    x, w = torch.randn(4, 32), torch.randn(7, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert float_product.linear(x, w).equal(F.linear(x, w))
    assert float_product.linear(x.double(), w.double()).equal(F.linear(x.double(), w.double()))


@pytest.mark.skipif(not float_product.HAS_BOTH, reason="torch has one library here")
def test_what_is_compiled_is_the_same() -> None:
    """As a call that inductor leaves unchanged: it accepts oneDNN's own only for constants."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(graph.code)
        return graph

    for function, weight in ((float_product.product, torch.randn(32, 7)), (float_product.linear, torch.randn(7, 32))):
        x = torch.randn(4, 32)
        assert torch.compile(function, backend=backend)(x, weight).equal(function(x, weight))
    assert len(seen) == 2 and all("bitnet.product" in code and "mkldnn" not in code for code in seen)
