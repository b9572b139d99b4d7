"""The numeric specification, with numbers worked by hand. All of them are exact in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bitnet import integer_sum, quant, straight_through
from bitnet.bitlinear import BitLinear, project


def test_ternary_codes_round_half_to_even_and_clamp() -> None:
    # mean|W| = (1.5 + 0.5 + 1 + 1) / 4 = 1, so W/γ = W: 1.5 → 2 → 1, 0.5 → 0, -1 → -1, 1 → 1.
    codes, gamma = quant.ternary_codes(tensor([[1.5, 0.5], [-1.0, 1.0]]))
    assert codes.tolist() == [[1, 0], [-1, 1]] and codes.dtype == torch.int8
    assert gamma.tolist() == [1.0]


def test_ternary_codes_of_half_a_step() -> None:
    # γ = 4: ±2/4 = ±0.5 → 0 (to even), 6/4 = 1.5 → 2 → 1, -6/4 → -1.
    codes, gamma = quant.ternary_codes(tensor([[2.0, -2.0, 6.0, -6.0]]))
    assert codes.tolist() == [[0, 0, 1, -1]] and gamma.tolist() == [4.0]


def test_scale_has_a_floor() -> None:
    codes, gamma = quant.ternary_codes(torch.zeros(2, 3))
    assert gamma.tolist() == [pytest.approx(1e-5)] and not codes.any()


def test_scale_scopes() -> None:
    w = tensor([[1.0, -1.0, 2.0, 0.0], [4.0, 4.0, -4.0, 4.0]])
    assert quant.weight_scale(w).tolist() == [2.5]
    assert quant.weight_scale(w, "row").tolist() == [1.0, 4.0]
    wide = torch.cat([torch.full((2, 128), 3.0), torch.full((2, 2), 5.0)], dim=1)
    assert quant.weight_scale(wide, "group").tolist() == [[3.0, 5.0], [3.0, 5.0]]
    assert quant.expand_scale(quant.weight_scale(wide, "group"), 2, 130).equal(wide)
    assert quant.weight_scale(torch.full((1, 3), 0.1), "group").item() == 1638 / 2**14  # 0.1 to 11 bits, as fp16 has
    with pytest.raises(ValueError, match="tensor, row or group"):
        quant.weight_scale(w, "column")


def test_activation_codes() -> None:
    # max = 127, s = 1: 62.5 → 62, 63.5 → 64, -0.5 → 0. max = 254, s = 0.5: 127 → 63.5 → 64.
    q, s = quant.activation_codes(tensor([[127.0, 62.5, 63.5, -0.5], [-254.0, 127.0, 1.0, 3.0]]))
    assert q.tolist() == [[127, 62, 64, 0], [-127, 64, 0, 2]] and q.dtype == torch.int8
    assert s.tolist() == [[1.0], [0.5]]


def test_activation_codes_of_zeros() -> None:
    q, s = quant.activation_codes(torch.zeros(1, 4))
    assert not q.any() and s.isfinite().all()


def test_row_codes() -> None:
    # max = 254, σ = 2: 254 → 127, 1/2 → 0, -3/2 → -2, 5/2 → 2.
    codes, sigma = quant.row_codes(tensor([[254.0, 1.0, -3.0, 5.0], [-127.0, 126.5, 0.0, 1.0]]))
    assert codes.tolist() == [[127, 0, -2, 2], [-127, 126, 0, 1]] and codes.dtype == torch.int8
    assert sigma.tolist() == [2.0, 1.0]


class Divisions(TorchDispatchMode):
    """Notes what divides in each division below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__:
            self.by.append(args[1])
        return func(*args, **(kwargs or {}))


def test_quantizers_divide_by_tensors() -> None:
    """A GPU multiplies by the reciprocal of a number instead: scales would differ from the CPU's in their last bit."""
    w = torch.randn(4, 260)
    with Divisions() as found:
        quant.row_codes(w)
        for scope in ("tensor", "row", "group"):
            straight_through.ternary_linear(w, w, scope=scope, amount=0.5)
            straight_through.ternary_linear(w, w, scope=scope)
    assert len(found.by) > 6 and all(isinstance(by, Tensor) for by in found.by)


def test_scale_of_activations_is_rounded_once() -> None:
    """Like the engine's and numpy's: the reciprocal times 127, rounded twice, differs in a quarter of the rows."""
    x = torch.randn(2000, 3)
    s = quant.activation_codes(x)[1][:, 0].numpy()
    assert (s == np.float32(127) / x.abs().amax(1).numpy()).all()


def test_stored_rows() -> None:
    w = tensor([[254.0, 1.0, -3.0, 5.0]])
    assert quant.stored_rows(w, "int8").tolist() == [[254.0, 0.0, -4.0, 4.0]]
    assert quant.stored_rows(tensor([[1.0 + 2**-12]]), "f16").tolist() == [[1.0]]
    assert quant.stored_rows(w, "f32").equal(w)
    with pytest.raises(ValueError, match="int8, f16 or f32"):
        quant.stored_rows(w, "f8")


def test_ternary_linear_by_hand() -> None:
    # x: s = 127/2; q = (127, -64), for -1·63.5 = -63.5 → -64. W: γ = 2, T = ((1, -1), (0, 1)).
    # Σ = (191, -64), y = Σ · (2 / 63.5).
    x, w = tensor([[2.0, -1.0]]), tensor([[3.0, -3.0], [0.0, 2.0]])
    (y,) = straight_through.ternary_linear(x, w)
    factor = torch.tensor(2.0) / torch.tensor(63.5)
    assert y.equal(tensor([[191.0, -64.0]]) * factor)


def test_gradients_pass_straight_through() -> None:
    # grad_x = g · (γT), grad_W = gᵀ · (q/s), by hand with the numbers above and g = (1, 10).
    x = tensor([[2.0, -1.0]], requires_grad=True)
    w = tensor([[3.0, -3.0], [0.0, 2.0]], requires_grad=True)
    straight_through.ternary_linear(x, w)[0].backward(tensor([[1.0, 10.0]]))
    assert x.grad is not None and x.grad.tolist() == [[2.0, 18.0]]  # 1·2 + 10·0, -1·2 + 10·2
    x_q = tensor([127.0, -64.0]) / 63.5
    assert w.grad is not None and w.grad.equal(torch.stack([x_q, 10 * x_q]))


def test_head_by_hand() -> None:
    # x: s = 1, q = (127, 64). Rows: σ = 2 and 1. Σ = (127·127 + 64·0, 127·0 + 64·127).
    x, w = tensor([[127.0, 63.5]], requires_grad=True), tensor([[254.0, 1.0], [0.0, 127.0]], requires_grad=True)
    y = straight_through.output_logits(x, w, "int8")
    assert y.tolist() == [[16129.0 * 2, 8128.0]]
    y.backward(tensor([[1.0, 1.0]]))
    assert x.grad is not None and x.grad.tolist() == [[254.0, 127.0]]
    assert w.grad is not None and w.grad.tolist() == [[127.0, 64.0], [127.0, 64.0]]


@pytest.mark.parametrize("storage", ["int8", "f16", "f32"])
def test_embedding_rows_are_stored_rows_with_identity_gradient(storage: str) -> None:
    w = torch.randn(5, 8, requires_grad=True)
    tokens = tensor([[1, 3], [3, 0]])
    rows = straight_through.embedding_rows(tokens, w, storage)
    assert rows.shape == (2, 2, 8) and rows.equal(quant.stored_rows(w, storage)[tokens])
    rows.backward(torch.ones_like(rows))
    assert w.grad is not None and w.grad[:, 0].tolist() == [1.0, 1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("storage", ["f16", "f32"])
def test_float_head_multiplies_stored_rows(storage: str) -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8, requires_grad=True)
    y = straight_through.output_logits(x, w, storage)
    assert torch.allclose(y, x @ quant.stored_rows(w, storage).T, rtol=1e-6, atol=1e-5)  # fp32 adds in any order
    y.sum().backward()
    assert w.grad is not None and torch.allclose(w.grad, x.sum(0).expand(5, 8))


def _same_weights(scope: str) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(3)
    return torch.randn(2, 7, 200), [torch.randn(n, 200) for n in (16, 5, 1)]


@pytest.mark.parametrize("scope", ["tensor", "row", "group"])
def test_sharing_the_input_changes_no_bit(scope: str) -> None:
    x, weights = _same_weights(scope)
    together = straight_through.ternary_linear(x, *weights, scope=scope)
    for y, w in zip(together, weights, strict=True):
        assert y.shape == (2, 7, w.shape[0])
        assert y.equal(straight_through.ternary_linear(x, w, scope=scope)[0])


@pytest.mark.parametrize("shape", [(3, 300), (64, 4096), (5, 1)])
def test_scale_is_the_mean_rounded_once_in_any_order(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    w = torch.randn(shape) * 0.02
    shuffled = w.flatten()[torch.randperm(w.numel())].view(shape)
    exact = [math.fsum(row) / shape[1] for row in w.abs().tolist()]
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found += [quant.weight_scale(w), quant.weight_scale(shuffled), quant.weight_scale(w.T.contiguous().T)]
    torch.set_num_threads(1)
    assert all(gamma.equal(found[0]) for gamma in found)
    # a unit of 2⁻³² is rounded, for whole weights of 2⁻⁸ or less, before the mean is
    assert found[0].double().item() == pytest.approx(math.fsum(exact) / shape[0], rel=2**-24, abs=2**-33)
    assert quant.weight_scale(w, "row").tolist() == pytest.approx(exact, rel=2**-24, abs=2**-33)


@pytest.mark.parametrize("scope", ["tensor", "row", "group"])
def test_forward_and_backward_agree_with_float_products(scope: str) -> None:
    x, (w, *_) = _same_weights(scope)
    x, w = x.requires_grad_(), w.requires_grad_()
    codes, gamma = quant.ternary_codes(w, scope)
    q, s = quant.activation_codes(x)
    w_q, x_q = codes * quant.expand_scale(gamma, *codes.shape).double(), q.double() / s
    (y,) = straight_through.ternary_linear(x, w, scope=scope)
    assert torch.allclose(y.double(), x_q @ w_q.T, rtol=1e-5, atol=1e-5)  # fp32 against fp64
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.allclose(x.grad.double(), grad.double() @ w_q, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    grad_w = grad.double().flatten(0, 1).T @ x_q.flatten(0, 1)
    assert torch.allclose(w.grad.double(), grad_w, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 1), (33, 1, 17), (3, 129, 17), (70, 1041, 33), (2, 5000, 3)])
@pytest.mark.parametrize("peak", [1, 127])
@pytest.mark.parametrize("native", [True, False])
def test_integer_sum_is_exact(
    shape: tuple[int, int, int], peak: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(integer_sum, "CPU_INT8_IS_EXACT", False)
    m, k, n = shape
    q = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    codes = torch.randint(-peak, peak + 1, (n, k), dtype=torch.int8)
    q[0], codes[0] = 127, peak  # the largest sum there is
    expected = (q.long() @ codes.long().T).float()
    assert integer_sum.integer_sum(q, codes).equal(expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert integer_sum.integer_sum(q, codes).equal(expected)


def test_autocast_changes_gradients_only() -> None:
    x, (w, *_) = _same_weights("tensor")
    results: list[tuple[Tensor, ...]] = []
    for enabled in (False, True):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (y,) = straight_through.ternary_linear(a, b)
        y.backward(torch.ones_like(y))
        assert a.grad is not None and b.grad is not None and a.grad.dtype == b.grad.dtype == torch.float32
        results.append((y, a.grad, b.grad))
    (y, *grads), (y_bf16, *grads_bf16) = results
    assert y.equal(y_bf16)
    for exact, rounded in zip(grads, grads_bf16, strict=True):
        assert 0 < (exact - rounded).norm() < 2**-7 * exact.norm()  # bf16 keeps 8 bits


@pytest.mark.parametrize(("amount", "precision", "size"), [(1.0, "fp32", 1), (1.0, "bf16", 1), (0.5, "fp32", 4),
                                                           (0.5, "bf16", 2)])  # fmt: skip
def test_bytes_that_are_kept_of_a_weight(amount: float, precision: str, size: int) -> None:
    """docs/several-machines.md counts with them."""
    x, w = torch.randn(3, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == w.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        made = straight_through.ternary_linear(x, w, amount=amount)
    assert made and sum(kept.values()) == size * w.numel()


def test_fp64_activations_meet_the_same_quantizers() -> None:
    x, (w, *_) = _same_weights("tensor")
    (y,) = straight_through.ternary_linear(x, w)
    (y64,) = straight_through.ternary_linear(x.double(), w.double())
    assert y64.dtype == torch.float64 and y64.equal(y.double())


def test_quantizing_twice_keeps_codes_and_shrinks_the_scale() -> None:
    # Why an exporter must never quantize what is ternary already.
    codes, gamma = quant.ternary_codes(torch.randn(64, 64))
    again, shrunk = quant.ternary_codes(codes * gamma)
    assert again.equal(codes)
    assert shrunk.item() == pytest.approx(gamma.item() * codes.abs().float().mean().item(), rel=1e-5)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40),
    st.sampled_from([quant.activation_codes, quant.row_codes]),
)
def test_int8_codes_are_symmetric_and_within_half_a_step(
    values: list[float], quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    x = tensor([values], dtype=torch.float32)
    codes, scale = quantize(x)
    step = 1 / scale.double() if quantize is quant.activation_codes else scale.double()[:, None]
    assert codes.min() >= -127 and codes.max() <= 127
    assert quantize(-x)[0].equal(-codes)
    assert ((codes * step - x).abs() <= step * (0.5 + 1e-4)).all()  # 127 steps of fp32 rounding at most


def test_bitlinear_and_project() -> None:
    torch.manual_seed(0)
    ternary, plain = BitLinear(24, 8, bias=True), torch.nn.Linear(24, 4)
    x = torch.randn(2, 3, 24)
    y = ternary(x)
    assert y.equal(straight_through.ternary_linear(x, ternary.weight)[0] + ternary.bias)
    for found, expected in zip(project(x, ternary, plain, ternary), (y, plain(x), y), strict=True):
        assert found.equal(expected)
