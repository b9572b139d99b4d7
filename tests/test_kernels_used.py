"""Where kernels of a training step are used, and operands of other kinds and sizes than they take."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import bitnet_cli
from bitnet import kernels, quant
from bitnet.bitlinear import BitLinear
from bitnet.integer_sum import scaled_integer_sum
from bitnet.model.attention import bf16_attention
from bitnet.model.head import portion
from bitnet.model.layers import RMSNorm, gated, rotate
from bitnet_runtime import available_isas, training
from both_ways import Results, a_step, near, same


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
    with kernels.unused():
        assert not kernels.possible(one)
    assert kernels.possible(one)
    monkeypatch.setattr(kernels, "_kernels", lambda: None)  # as on macOS
    assert not kernels.possible(one)
    for amount in (0.5, 1.0):
        work, parameters = a_step(amount, precise=False)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(work(), parameters))


def test_where_the_engine_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its panels have 16 rows, and for few rows, or by scalar code, it is slower than torch."""
    q, codes = torch.ones(300, 8, dtype=torch.int8), torch.ones(32, 8, dtype=torch.int8)
    scale, s, found = torch.ones(1), torch.ones(300, 1), kernels._kernels.__wrapped__
    monkeypatch.setenv("BITNET_ISA", available_isas()[-2])  # AVX2 or NEON
    ours = found()
    monkeypatch.setattr(kernels, "_kernels", lambda: ours)
    assert kernels.multiplies(q, codes, scale, s) and not kernels.multiplies(q[:9], codes, scale, s[:9])
    assert not kernels.multiplies(q, codes[:24], scale, s) and not kernels.multiplies(q.float(), codes, scale, s)
    monkeypatch.setenv("BITNET_ISA", "scalar")
    scalar = found()
    monkeypatch.setattr(kernels, "_kernels", lambda: scalar)
    assert kernels.possible(scale) and not kernels.multiplies(q, codes, scale, s)
    assert scaled_integer_sum(q, codes, scale, s, ternary=True).tolist() == [[8.0] * 32] * 300
    monkeypatch.setenv("BITNET_ISA", "abacus")
    with pytest.raises(ValueError, match=r"BITNET_ISA is 'abacus', expected one of .*scalar"):
        found()


def test_an_unknown_instruction_set_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before text is read, and checkpoints are set aside for a longer run."""
    monkeypatch.setenv("BITNET_ISA", "abacus")
    monkeypatch.setattr(kernels, "_kernels", kernels._kernels.__wrapped__)
    assert bitnet_cli.main(["train", "--preset", "tiny", "--out", str(tmp_path / "run")]) == 1
    assert re.fullmatch(r"bitnet: error: BITNET_ISA is 'abacus', expected one of .*scalar\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_torch_is_asked_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, pointer, number = [], ctypes.c_void_p, ctypes.c_uint

    def team(work: int, data: int, threads: int, flags: int) -> None:
        asked.append((threads, flags))
        ctypes.CFUNCTYPE(None, pointer)(work)(data)

    function = ctypes.CFUNCTYPE(None, pointer, pointer, number, number)(team)
    ours = training.Kernels(ctypes.cast(function, pointer).value or 0)
    monkeypatch.setattr(kernels, "_kernels", lambda: ours)
    torch.set_num_threads(3)
    q, _ = quant.activation_codes(torch.ones(training.ROWS + 1, 1))
    assert asked == [(3, 0)] and q.flatten().tolist() == [127] * (training.ROWS + 1)


def test_without_threads_of_torch_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = kernels._kernels.__wrapped__
    assert found() is not None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__path__", [str(tmp_path)])
        assert found() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # a library without the function
    assert found() is None


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

    q, s = torch.randint(-127, 128, (32, 24), dtype=torch.int8)[:, :16], torch.rand(32, 1)

    def attention(mask: Tensor) -> Callable[[], Tensor]:
        return lambda: bf16_attention(x, keys, keys, mask, False, 0.4)

    def turned(table: Tensor) -> Callable[[], Tensor]:
        return lambda: rotate(x, table, table)

    def scaled(scale: Tensor, s: Tensor) -> Callable[[], Tensor]:
        codes = torch.ones(6, 9, dtype=torch.int8)
        return lambda: scaled_integer_sum(codes, codes, scale, s)

    def multiplied(scale: Tensor, s: Tensor, k: int = 9) -> Callable[[], Tensor]:
        q, codes = torch.ones(6, k, dtype=torch.int8), (torch.arange(144).reshape(9, 16) % 3 - 1).to(torch.int8).T
        return lambda: scaled_integer_sum(q, codes, scale, s, ternary=True)

    def values(q: Tensor, s: Tensor) -> Callable[[], Tensor]:
        return lambda: quant.activation_values(q, s, torch.float32)

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
        "a product with strides": multiplied(torch.rand(32)[::2], torch.rand(12, 1)[::2]),
        "a product with too few scales": multiplied(torch.rand(4), torch.rand(6, 1)),
        "a product with one scale of inputs": multiplied(torch.rand(16), torch.rand(1, 1)),
        "a product with too few scales of inputs": multiplied(torch.rand(16), torch.rand(4, 1)),
        "a product of other columns": multiplied(torch.rand(16), torch.rand(6, 1), 8),
        "a product of one column": lambda: scaled_integer_sum(q[:, :6], q[:, :1], torch.rand(1), s, ternary=True),
        "codes in another order": values(q.T, s[:16]),
        "codes with a stride": values(q[:, ::2], torch.rand(48, 1)[::2]),
        "one scale of codes": values(q, s[:1]),
        "fewer keys": lambda: bf16_attention(keys, x, x, None, True, 0.4),
        "more keys": lambda: bf16_attention(x, keys, keys, None, True, 0.4),
    }


@pytest.mark.usefixtures("engine_multiplies")
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


def test_tensors_without_memory_are_left_to_torch() -> None:
    """Those that torch transforms or traces."""
    layer, x = BitLinear(16, 8).requires_grad_(False), torch.randn(4, 16)
    codes = list(quant.activation_codes(x))
    for transform in (torch.func.functionalize, torch.func.vmap):
        assert same((list(transform(quant.activation_codes)(x)), codes))
    assert torch.jit.trace(layer, x, check_trace=False)(2 * x).equal(layer(2 * x))
    assert make_fx(layer)(x)(3 * x).equal(layer(3 * x))


def test_targets_without_a_logit() -> None:
    """A kernel would read past the logits' end."""
    with pytest.raises(IndexError, match="index 5, expected less than the vocabulary's size, 5"):
        portion(torch.randn(3, 8), torch.randn(5, 8), None, None, torch.tensor([0, 4, 5]), 0.0)


def test_targets_in_int32() -> None:
    """Which a kernel would take for half as many in int64."""
    x, w, targets = torch.randn(90, 8), torch.randn(5, 8), torch.randint(-1, 5, (90,))
    found, expected = (portion(x, w, None, None, each, 0.0) for each in (targets.int(), targets))
    assert same((list(found), list(expected)))
