"""Kernels of a training step against torch's operations: the same bits wherever no sum or exponential is involved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet import kernels, quant
from bitnet.integer_sum import scaled_integer_sum
from bitnet.model.attention import bf16_attention
from bitnet.model.head import portion
from bitnet.model.layers import RMSNorm, gated, rotate
from bitnet.straight_through import ternary_linear
from bitnet_runtime import training
from bitnet_runtime._native import ffi
from both_ways import a_step, both_ways, near, same, wide

SHAPES = [(1, 1), (2, 65, 17), (training.ROWS, 16), (3 * training.ROWS + 1, 48), (5, 1100)]
"""Rows of one block and of several, rows of whole vectors and others."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_quantization(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    x = wide(shape).mul_(3)
    x[0] = 0
    x[-1, ..., 0] = 2.5  # s is 50.8, so values of 1/101.6 are halfway
    assert same(both_ways(monkeypatch, quant.activation_codes, x))
    q, s = (y.flatten(0, -2) for y in quant.activation_codes(x))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert same(both_ways(monkeypatch, partial(quant.activation_values, q, s, dtype)))
    codes = torch.randint(-1, 2, (24, max(shape[-1], 2)), dtype=torch.int8)[:, : shape[-1]].contiguous()
    for n, scale in ((24, torch.rand(1)), (24, torch.rand(24)), (2, torch.rand(2))):
        assert same(both_ways(monkeypatch, partial(scaled_integer_sum, q, codes[:n], scale, s)))


@pytest.mark.usefixtures("engine_multiplies")
@pytest.mark.parametrize("m, k, n", [(1, 1, 16), (65, 17, 48), (training.ROWS, 64, 144), (200, 1100, 304)])
def test_product(monkeypatch: pytest.MonkeyPatch, m: int, k: int, n: int) -> None:
    """Of ternary codes, by the engine: blocks of rows and panels, and columns that fill no tile."""
    wider = torch.randint(-127, 128, (m + 1, k + 1), dtype=torch.int8)
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8)
    codes[0] = 1
    wider[-1] = 127  # with codes of 1, the largest sum
    s = torch.rand(m, 1) + 1
    for q in (wider[1:, 1:].contiguous(), wider[1:, 1:], wider.flatten()[1 : 1 + m * k].unflatten(0, (m, k))):
        for scale in (torch.rand(1), torch.rand(n)):
            assert same(both_ways(monkeypatch, partial(scaled_integer_sum, q, codes, scale, s, ternary=True)))


@pytest.mark.parametrize("shape", SHAPES)
def test_partial_quantization(shape: tuple[int, ...]) -> None:
    """The ends are exact. Between them torch fuses a multiplication with an addition: the last bit may differ."""
    x = wide(shape).mul_(3)
    x[-1, ..., 0] = 2.5
    q, s = quant.activation_codes(x)
    for amount in (0.0, 0.25, 0.75, 1.0):
        expected = torch.lerp(x, q / s, amount)
        pair = [kernels.between(x, amount, torch.float32)], [expected]
        assert near(pair, 2**-23) and (0 < amount < 1 or same(pair))
        pair = [kernels.between(x, amount, torch.bfloat16)], [expected.bfloat16()]
        assert near(pair, 2**-8) and (0 < amount < 1 or same(pair))


@pytest.mark.parametrize("shape", [(1, 2), (2, 17), (70, 48), (training.ROWS + 1, 1100)])
@pytest.mark.parametrize("scope", ["tensor", "row", "group"])
def test_weights(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], scope: str) -> None:
    ordinary, fine = torch.randn(shape), (torch.randint(50_000, 90_000, shape) + 0.5) * 2.0**-32  # halves of a unit
    ordinary[0] *= 3
    for w in (ordinary, -fine, ordinary.T.contiguous().T, ordinary.double()):
        assert same(both_ways(monkeypatch, partial(quant.ternary_codes, w, scope)))


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.49]])
    for rounded in (quant.activation_codes(x)[0], kernels.between(x, 1.0, torch.float32)):
        assert rounded.tolist() == [[127, 0, 2, 2, 0, -2, -126, 126]]
    gamma = torch.rand(200) + 0.5
    half, more = gamma / 2, torch.nextafter(gamma / 2, gamma)
    w = torch.stack([half, more, -half, -more], dim=1)
    assert kernels.ternary_codes(w, gamma).tolist() == [[0, 1, 0, -1]] * 200


def test_bf16_is_rounded_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes over scales in a binade. ±127 over every other scale is halfway between two numbers."""
    q = torch.arange(-127, 128, dtype=torch.int8)[None].repeat(256, 1)
    s = 127 / torch.arange(256, 512)[:, None]
    assert same(both_ways(monkeypatch, lambda: quant.activation_values(q, s, torch.bfloat16)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A run that diverges must see it in the loss."""
    nan = torch.tensor([[2**31 - 1]], dtype=torch.int32).view(torch.float32)  # would carry into the sign if rounded
    assert quant.activation_values(torch.ones(1, 1, dtype=torch.int8), nan, torch.bfloat16).isnan()
    x = torch.randn(70, 33)
    x[3, 7] = bad
    q, s = quant.activation_codes(x)
    y = scaled_integer_sum(q, torch.ones(4, 33, dtype=torch.int8), torch.ones(1), s)
    assert not y[3].isfinite().any() and y[[*range(3), *range(4, 70)]].isfinite().all()
    assert not RMSNorm(33, 1e-5)(x)[3, 7].isfinite()
    gate = torch.full((2, 3), float("nan"), requires_grad=True)
    y = gated("relu2", gate, torch.ones(2, 3))
    assert y.isnan().all() and torch.autograd.grad(y.sum(), gate)[0].isnan().all()
    loss, grad = portion(x, torch.randn(5, 33), None, None, torch.zeros(70, dtype=torch.long), 0.0)
    assert not loss.isfinite() and grad[3].isnan().any() and grad[4].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Sums of up to 1,100 squares in another order, by 16 lanes: each rounds to 2⁻²⁴, and errors partly cancel."""
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)

    def work(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(norm, {"weight": weight}, x)
        return y

    for x in (torch.randn(shape), wide(shape)):
        assert near(both_ways(monkeypatch, work, x.requires_grad_(), norm.weight), 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gate(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    gate, up = (wide(shape).requires_grad_() for _ in range(2))
    assert same(both_ways(monkeypatch, lambda gate, up: gated("relu2", gate, up), gate, up))


@pytest.mark.parametrize("half", [1, 3, 16])
@pytest.mark.parametrize("tables", [(), (1, 1), (2, 1)])
def test_rotation(monkeypatch: pytest.MonkeyPatch, half: int, tables: tuple[int, ...]) -> None:
    angle = torch.randn(*tables, half, 70).mT
    by_token, by_value = torch.randn(2, 70, 3, 40).transpose(1, 2), torch.randn(2, 3, 40, 70).mT
    for x in (by_token, by_value):
        assert same(both_ways(monkeypatch, partial(rotate, cos=angle.cos(), sin=angle.sin()), x.requires_grad_()))


@pytest.mark.parametrize(("one", "other"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_inputs_of_two_dtypes(monkeypatch: pytest.MonkeyPatch, one: torch.dtype, other: torch.dtype) -> None:
    x, y = (torch.randn(1, 2, 3, 4, dtype=dtype).requires_grad_() for dtype in (one, other))
    assert same(both_ways(monkeypatch, lambda x, y: gated("relu2", x, y), x, y))
    cos, sin = torch.randn(2, 3, 2, dtype=other)
    assert same(both_ways(monkeypatch, lambda x: rotate(x, cos, sin), x))


@pytest.mark.parametrize("seen", ["causal", "all", "mask", "one for all", "one for each", "long"])
def test_attention(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    """A weight that rounds to bf16 the other way differs by 2⁻⁸ of itself."""
    t = 1 if seen == "long" else 70
    n = {"causal": 70, "all": 70, "long": kernels.MOST_KEYS}.get(seen, 90)
    q, k, v = (torch.randn(2, heads, m, 8).requires_grad_() for heads, m in ((4, t), (2, n), (2, n)))
    mask = None
    if seen not in ("causal", "all"):
        mask = torch.rand(*{"one for all": (1, 1), "one for each": (2, 1)}.get(seen, ()), t, n) < 0.3
        mask[..., 0] = True
    work = partial(bf16_attention, mask=mask, causal=seen in ("causal", "mask"), scale=0.4)
    assert near(both_ways(monkeypatch, work, q, k, v), 2**-8)


def test_scores_in_any_order() -> None:
    scores = torch.randn(2, 9, 3, 7).bfloat16().transpose(1, 2)
    p, expected = (kernels.attention_weights(x, None, False, 1.0) for x in (scores, scores.contiguous()))
    assert p.equal(expected)


def test_attention_to_more_keys_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def noted(scores: Tensor, *_: Any) -> Tensor:
        taken.append(scores.shape[-1])
        return scores

    monkeypatch.setattr(kernels, "attention_weights", noted)
    for n in (kernels.MOST_KEYS, kernels.MOST_KEYS + 1):
        q, k, mask = torch.ones(1, 1, 2, 8), torch.ones(1, 1, n, 8), torch.ones(2, n, dtype=torch.bool)
        bf16_attention(q, k, k, mask, False, 0.4)
    assert taken == [kernels.MOST_KEYS]


@pytest.mark.parametrize("vocabulary", [1, 50, 1025, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy(monkeypatch: pytest.MonkeyPatch, vocabulary: int, dtype: torch.dtype) -> None:
    """fp32: an exponential is off by 2e-7 at most, and the sum of 2,500 by as much. bf16: rounded the other way."""
    x, w = torch.randn(66, 12, dtype=dtype), torch.randn(vocabulary, 12, dtype=dtype)
    targets = torch.randint(-1, vocabulary, (66, 2))[:, 0]
    targets[0], targets[1] = -1, vocabulary - 1
    found, expected = both_ways(monkeypatch, lambda: portion(x, w, None, None, targets, 0.0))
    assert near((found[:1], expected[:1]), 1e-6) and near(
        (found[1:], expected[1:]), 2**-8 if w.dtype != x.float().dtype else 2e-6
    )
    assert not found[1][targets < 0].any() and found[1].dtype == dtype
    z = torch.randn(66, vocabulary)
    rounded, exact = (kernels.cross_entropy(z, targets, to)[1] for to in (torch.bfloat16, torch.float32))
    assert rounded.equal(exact.bfloat16())


@pytest.mark.parametrize("most", [-300.0, 0.0, 300.0])
def test_exponentials(most: float) -> None:
    """Off by 2e-7 of the result, as the sum is. Only differences to the largest score count, in any column."""
    z, targets = most - 86 * torch.rand(50, 50).fill_diagonal_(0), torch.arange(50).roll(1)
    loss, grad = kernels.cross_entropy(z, targets, torch.float32)
    torch.testing.assert_close(loss, F.cross_entropy(z.double(), targets, reduction="none").float(), rtol=5e-7, atol=0)
    grad.scatter_(1, targets[:, None], 0)
    expected = z.double().softmax(-1).float().scatter_(1, targets[:, None], 0)
    torch.testing.assert_close(grad, expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("most", [-300.0, 300.0])
def test_masked_weights_are_0(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    q, k, v = torch.full((1, 1, 9, 8), most / 8), torch.rand(1, 1, 9, 8) + 1, torch.randn(1, 1, 9, 8)
    v[..., 8, :] = 3e38
    seen = torch.ones(9, 9, dtype=torch.bool).tril(-1).logical_or_(torch.eye(9, dtype=torch.bool)[0])
    assert near(both_ways(monkeypatch, lambda: bf16_attention(q, k, v, seen, False, 1.0)), 2**-8)


@pytest.mark.parametrize("amount", [0.5, 1.0])
@pytest.mark.parametrize("precise", [True, False])
def test_a_step(monkeypatch: pytest.MonkeyPatch, amount: float, precise: bool) -> None:
    """A norm's last bit may move a code by one, so gradients differ by more than floats do: 2 % of the largest."""
    work, parameters = a_step(amount, precise)
    found, expected = both_ways(monkeypatch, work, *parameters)
    assert near((found[:1], expected[:1]), 1e-3) and near((found[1:], expected[1:]), 0.02)


@pytest.mark.usefixtures("engine_multiplies")
def test_layers_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose codes are no ternary ones."""
    x, low = torch.randn(70, 40), torch.randn(16, 40)
    weights = [torch.randn(n, 40) for n in (48, 16)]
    learnt = [each.requires_grad_() for each in (x, low, *weights)]
    found, expected = both_ways(monkeypatch, lambda *_: ternary_linear(x, *weights, by_row=[low]), *learnt)
    assert same((found[:3], expected[:3])) and near((found, expected), 1e-6)


@pytest.mark.usefixtures("engine_multiplies")
def test_steps_run_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    used, run = set(), training.Kernels.run

    def noted(self: training.Kernels, name: str, *rest: Any) -> None:
        used.add(name)
        run(self, name, *rest)

    monkeypatch.setattr(training.Kernels, "run", noted)
    for amount, precise in ((0.5, True), (1.0, False)):
        work, parameters = a_step(amount, precise)
        torch.autograd.grad(work(), parameters)
    assert used == set(dir(ffi.new("bn_training_kernels *")))
