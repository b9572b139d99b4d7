"""Kernels of a training step against torch's operations: the same bits wherever no sum or exponential is involved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bitnet import kernels, quant
from bitnet.config import ModelConfig
from bitnet.integer_sum import scaled_integer_sum
from bitnet.model.attention import bf16_attention
from bitnet.model.head import portion
from bitnet.model.layers import RMSNorm, gated, rotate
from bitnet.model.transformer import Transformer
from bitnet_runtime import training

SHAPES = [(1, 1), (2, 65, 17), (training.ROWS, 16), (3 * training.ROWS + 1, 48), (5, 1100)]
"""Rows of one block and of several, rows of whole vectors and others."""

Results = list[Tensor]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, work: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[Results, Results]:
    """Outputs of work(*inputs), and their gradients where inputs require them: by kernels and by torch.

    The kernels give the same bits in one thread and in three.
    """

    def results() -> Results:
        made = work(*inputs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        learns = [x for x in inputs if x.requires_grad]
        if not learns:
            return outputs
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(y.shape, generator=generator) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, learns, grads)]

    found = []
    for n in (1, 3):
        torch.set_num_threads(n)
        found.append(results())
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "possible", lambda *_, **__: False)
        return found[0], results()


def same(pair: tuple[Results, Results]) -> bool:
    return all(a.equal(b) and a.dtype == b.dtype for a, b in zip(*pair, strict=True))


def near(pair: tuple[Results, Results], share: float) -> bool:
    """Whether no value differs by more than this share of the largest."""
    return all((a - b).abs().max() <= share * b.abs().max() and a.dtype == b.dtype for a, b in zip(*pair, strict=True))


def test_they_run_here() -> None:
    """Or all tests of this file would compare torch with itself."""
    assert kernels.possible(torch.ones(1), torch.nn.Parameter(torch.ones(1)))


class Subclass(torch.Tensor):
    """Whose memory may not be where it says, like that of a sharded tensor."""


def test_where_they_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones(1)
    refused = [one.double(), one.bfloat16(), one[:0], one.as_subclass(Subclass), one.to("meta")]
    for x in refused:
        assert not kernels.possible(one, x)
    assert kernels.possible(one.bfloat16(), dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not kernels.possible(one)
    monkeypatch.setattr(kernels, "_kernels", lambda: None)  # as on macOS
    assert not kernels.possible(one)
    assert quant.activation_codes(one)[0].item() == 127


@pytest.mark.parametrize("shape", SHAPES)
def test_quantization(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 3
    x[0] = 0
    x[-1, ..., 0] = 2.5  # s is 50.8, so values of 1/101.6 are halfway
    assert same(both_ways(monkeypatch, quant.activation_codes, x))
    q, s = (y.flatten(0, -2) for y in quant.activation_codes(x))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert same(both_ways(monkeypatch, lambda: quant.activation_values(q, s, dtype)))  # noqa: B023
    codes = torch.randint(-1, 2, (24, max(shape[-1], 2)), dtype=torch.int8)[:, : shape[-1]].contiguous()
    for scale in (torch.rand(1), torch.rand(24)):
        assert same(both_ways(monkeypatch, lambda: scaled_integer_sum(q, codes, scale, s)))  # noqa: B023


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.49]])
    assert quant.activation_codes(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126, 126]]


def test_bf16_is_rounded_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes over all scales in a binade and a half."""
    q = torch.arange(-127, 128, dtype=torch.int8)[None].repeat(384, 1)
    s = torch.linspace(1, 2.5, 384)[:, None]
    assert same(both_ways(monkeypatch, lambda: quant.activation_values(q, s, torch.bfloat16)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A run that diverges must see it in the loss."""
    x = torch.randn(70, 33)
    x[3, 7] = bad
    q, s = quant.activation_codes(x)
    y = scaled_integer_sum(q, torch.ones(4, 33, dtype=torch.int8), torch.ones(1), s)
    assert not y[3].isfinite().any() and y[[*range(3), *range(4, 70)]].isfinite().all()
    assert not RMSNorm(33, 1e-5)(x)[3, 7].isfinite()
    assert gated("relu2", torch.full((2, 3), float("nan")), torch.ones(2, 3)).isnan().all()
    loss, grad = portion(x, torch.randn(5, 33), None, None, torch.zeros(70, dtype=torch.long), 0.0)
    assert not loss.isfinite() and grad[3].isnan().any() and grad[4].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Sums of up to 1,100 squares in another order, by 16 lanes: each rounds to 2⁻²⁴, and errors partly cancel."""
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)

    def work(x: Tensor, weight: Tensor) -> Tensor:
        norm.weight = weight  # type: ignore[assignment]
        y: Tensor = norm(x)
        return y

    wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]  # not contiguous
    for x in (torch.randn(shape), wide):
        assert near(both_ways(monkeypatch, work, x.requires_grad_(), norm.weight), 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gate(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    gate, up = (torch.randn(shape).requires_grad_() for _ in range(2))
    assert same(both_ways(monkeypatch, lambda gate, up: gated("relu2", gate, up), gate, up))


@pytest.mark.parametrize("half", [1, 3, 16])
@pytest.mark.parametrize("tables", [(70,), (2, 1, 70)])
def test_rotation(monkeypatch: pytest.MonkeyPatch, half: int, tables: tuple[int, ...]) -> None:
    angle = torch.randn(*tables, half)
    by_token, by_value = torch.randn(2, 70, 3, 40).transpose(1, 2), torch.randn(2, 3, 40, 70).mT
    for x in (by_token, by_value):
        work = lambda x: rotate(x, angle.cos(), angle.sin())  # noqa: E731
        assert same(both_ways(monkeypatch, work, x.requires_grad_()))


@pytest.mark.parametrize("seen", ["causal", "all", "mask", "a mask for each", "long"])
def test_attention(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    """A weight that rounds to bf16 the other way differs by 2⁻⁸ of itself."""
    t = 1 if seen == "long" else 70
    n = {"causal": 70, "all": 70, "long": kernels.MOST_KEYS}.get(seen, 90)
    q, k, v = (torch.randn(2, heads, m, 8).requires_grad_() for heads, m in ((4, t), (2, n), (2, n)))
    mask = None
    if seen not in ("causal", "all"):
        mask = torch.rand(*((2, 1) if seen == "a mask for each" else ()), t, n) < 0.3
        mask[..., 0] = True
    work = lambda q, k, v: bf16_attention(q, k, v, mask, seen == "causal", 0.4)  # noqa: E731
    assert near(both_ways(monkeypatch, work, q, k, v), 2**-8)


def test_attention_to_more_keys_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, kernels.MOST_KEYS + 1, 8)
    mask = torch.ones(2, kernels.MOST_KEYS + 1, dtype=torch.bool)
    assert same(both_ways(monkeypatch, lambda: bf16_attention(q, k, k, mask, False, 0.4)))


@pytest.mark.parametrize("vocabulary", [1, 50, 1025, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(monkeypatch: pytest.MonkeyPatch, vocabulary: int, dtype: torch.dtype) -> None:
    """fp32: an exponential is off by 2e-7 at most, and the sum of 2,500 by as much. bf16: rounded the other way."""
    x, w = torch.randn(66, 12, dtype=dtype), torch.randn(vocabulary, 12, dtype=dtype)
    targets = torch.randint(-1, vocabulary, (66,))
    targets[0], targets[1] = -1, vocabulary - 1
    found, expected = both_ways(monkeypatch, lambda: portion(x, w, None, None, targets, 0.0))
    assert near((found[:1], expected[:1]), 1e-6) and near(
        (found[1:], expected[1:]), 2**-8 if w.dtype != x.float().dtype else 2e-6
    )
    assert not found[1][targets < 0].any() and found[1].dtype == dtype


@pytest.mark.parametrize("amount", [0.5, 1.0])
@pytest.mark.parametrize("precise", [True, False])
def test_a_step(monkeypatch: pytest.MonkeyPatch, amount: float, precise: bool) -> None:
    """A norm's last bit may move a code by one, so gradients differ by more than floats do: 2 % of the largest."""
    config = ModelConfig(
        vocab_size=90, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, max_context=80
    )
    model, tokens = Transformer(config), torch.randint(0, 90, (2, 81))

    def work(*_: Tensor) -> Tensor:
        with model.partly_quantized(amount), torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            return model.loss(tokens[:, :-1], tokens[:, 1:])

    found, expected = both_ways(monkeypatch, work, *model.parameters())
    assert near((found[:1], expected[:1]), 1e-3) and near((found[1:], expected[1:]), 0.02)


def test_what_torch_makes_by_default_does_not_matter() -> None:
    """Kernels write fp32 into memory that is made for them, and read it from masks."""
    x, angle = torch.randn(2, 4, 70, 8), torch.randn(70, 4)
    rows, targets = x.flatten(0, -2), torch.zeros(560, dtype=torch.long)
    mask, norm = torch.ones(70, 70, dtype=torch.bool).tril(), RMSNorm(8, 1e-5)

    def results() -> Results:
        return [
            *quant.activation_codes(x),
            *quant.ternary_codes(rows),
            rotate(x, angle.cos(), angle.sin()),
            *portion(rows, rows[:9], None, None, targets, 0.0),
            bf16_attention(x, x, x, mask, False, 0.4),
            *torch.autograd.grad(norm(x), norm.weight, x),
        ]

    expected = results()
    torch.set_default_dtype(torch.float64)
    try:
        assert same((results(), expected))
    finally:
        torch.set_default_dtype(torch.float32)


def works_on_other_sizes() -> dict[str, Callable[[], Tensor]]:
    """Operands of other sizes than the kernels' loops, which torch broadcasts or refuses."""
    x, table, keys = torch.randn(2, 3, 7, 8), torch.randn(7, 4), torch.randn(2, 3, 9, 8)
    norm, strided, repeated = RMSNorm(8, 1e-5), RMSNorm(8, 1e-5), RMSNorm(8, 1e-5)
    strided.weight = torch.nn.Parameter(torch.randn(16)[::2])
    repeated.weight = torch.nn.Parameter(torch.randn(1).expand(8))

    def attention(mask: Tensor) -> Callable[[], Tensor]:
        return lambda: bf16_attention(x, keys, keys, mask, False, 0.4)

    def turned(table: Tensor) -> Callable[[], Tensor]:
        return lambda: rotate(x, table, table)

    def scaled(scale: Tensor, s: Tensor) -> Callable[[], Tensor]:
        codes = torch.ones(6, 9, dtype=torch.int8)
        return lambda: scaled_integer_sum(codes, codes, scale, s)

    return {
        "a norm of another width": lambda: norm(torch.randn(2, 16)),
        "a norm with a stride": lambda: strided(x),
        "a norm of one number": lambda: repeated(x),
        "one row to gate": lambda: gated("relu2", x[:, :, :1], x),
        "one row of gates": lambda: gated("relu2", x, x[:1]),
        "gates of another width": lambda: gated("relu2", x[..., :5], x),
        "one row of a table": turned(table[:1]),
        "too short a table": turned(table[:6]),
        "too wide a table": turned(torch.randn(7, 5)),
        "one table": turned(torch.randn(1, 1, 7, 4)),
        "too few tables": turned(torch.randn(3, 1, 7, 4)),
        "padding": attention(torch.arange(9) < torch.tensor([4, 7])[:, None, None, None]),
        "padding, shared": attention(torch.arange(9)[None] < 5),
        "a mask for more tokens": attention(torch.ones(8, 9, dtype=torch.bool)),
        "scales with a stride": scaled(torch.rand(12)[::2], torch.rand(12, 1)[::2]),
        "too few scales": scaled(torch.rand(4), torch.rand(6, 1)),
        "one scale of inputs": scaled(torch.rand(6), torch.rand(1, 1)),
        "fewer keys": lambda: bf16_attention(keys, x, x, None, True, 0.4),
        "more keys": lambda: bf16_attention(x, keys, keys, None, True, 0.4),
    }


@pytest.mark.parametrize("case", works_on_other_sizes())
def test_other_sizes(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Kernels know no sizes but those that they are told: they would read and write past the operands' ends."""
    work = works_on_other_sizes()[case]
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "possible", lambda *_, **__: False)
        try:
            expected = work()
        except RuntimeError:
            expected = None
    if expected is None:
        with pytest.raises(RuntimeError, match="size"):
            work()
    else:
        assert near(([work()], [expected]), 2**-8)


def test_targets_without_a_logit() -> None:
    """A kernel would read past the logits' end."""
    with pytest.raises(IndexError, match="index 5, expected less than the vocabulary's size, 5"):
        portion(torch.randn(3, 8), torch.randn(5, 8), None, None, torch.tensor([0, 4, 5]), 0.0)


def test_targets_in_int32() -> None:
    """Which a kernel would take for half as many in int64."""
    x, w, targets = torch.randn(90, 8), torch.randn(5, 8), torch.randint(-1, 5, (90,))
    found, expected = (portion(x, w, None, None, each, 0.0) for each in (targets.int(), targets))
    assert same((list(found), list(expected)))
