"""Operations of a training step on a CPU that torch computes in several passes over memory: in one, by C kernels of the
engine (`runtime_c/src/kernels/training.h`, which defines the results). They run in torch's own threads.

A kernel is used where `possible` says so. Everywhere else torch's operations are: on a GPU, in a compiled layer, and
where the engine is compared with torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet_runtime import training
from bitnet_runtime.training import MOST_KEYS as MOST_KEYS

FLOATS = (torch.float32, torch.bfloat16)
ALIGNED = 64  # bytes, to which torch aligns what it allocates, and `linear` needs its inputs


@functools.cache
def _kernels() -> training.Kernels | None:
    """None where torch's OpenMP has no function to share work among its threads, as on macOS."""
    try:
        share_work = ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libtorch_cpu.so"))).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return training.Kernels(ctypes.cast(share_work, ctypes.c_void_p).value or 0)


def check() -> None:
    """Raises ValueError if BITNET_ISA names no instruction set of this machine: to be called before other work."""
    _kernels()


_wanted = ContextVar("wanted", default=True)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """A context in which torch computes alone in this thread, as it should where the engine is compared with it."""
    before = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(before)


def _in_memory(x: Tensor) -> bool:
    """Whether x is a tensor of this CPU, and no wrapper of one that torch transforms or shards."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._is_functional_tensor(x)
    )


def possible(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether these, all of this dtype and not empty, can be given to kernels."""
    return (
        not torch.compiler.is_compiling()
        and _wanted.get()
        and torch._C._get_tracing_state() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # as make_fx traces
        and all(_in_memory(x) and x.dtype == dtype and x.numel() > 0 for x in tensors)
        and _kernels() is not None
    )


def _all() -> training.Kernels:
    """The kernels, where they are `possible`."""
    kernels = _kernels()
    assert kernels is not None
    return kernels


def _run(name: str, rows: int, *members: Any) -> None:
    """members: those of the kernel's struct; of a tensor, its address is given."""
    values = (training.address(x.data_ptr()) if isinstance(x, Tensor) else x for x in members)
    _all().run(name, rows, torch.get_num_threads(), *values)


def _floating(y: Tensor) -> tuple[Any, Any]:
    """`bn_floating`"""
    pointer = training.address(y.data_ptr())
    return (pointer, training.NULL) if y.dtype == torch.float32 else (training.NULL, pointer)


def _of_rows(x: Tensor, b: int, t: int, n: int) -> tuple[Tensor, int]:
    """What all sequences share, (T, N), or (B, 1, T, N), as kernels read it, and floats from one sequence to the next.

    Raises RuntimeError, as torch does, if x has other sizes, but for 1.
    """
    x = (x.expand(t, n) if x.dim() == 2 else x.expand(-1 if len(x) == 1 else b, 1, t, n)).contiguous()
    return x, t * n if x.dim() > 2 and len(x) > 1 else 0


def activation_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """`bitnet.quant.activation_codes`, the same bits."""
    x = x.contiguous()
    q, s = torch.empty_like(x, dtype=torch.int8), x.new_empty(*x.shape[:-1], 1)
    _run("codes", s.numel(), q, s, x, x.shape[-1])
    return q, s


def between(x: Tensor, amount: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x + λ·(q/s − x), q and s as above, rounded to fp32 or bf16: x itself at λ = 0, q/s at λ = 1. amount: λ, ()."""
    x, amount = x.contiguous(), torch.as_tensor(amount, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x, dtype=dtype)
    _run("between", x.numel() // x.shape[-1], _floating(y), x, x.shape[-1], amount)
    return y


def magnitudes(w: Tensor) -> Tensor:
    """Σ |w| of each row, in multiples of 2⁻³², exact: fp64 (N,)."""
    sums = w.new_empty(len(w), dtype=torch.float64)
    _run("magnitudes", len(w), sums, w.contiguous(), w.shape[1])
    return sums


def ternary_codes(w: Tensor, gamma: Tensor) -> Tensor:
    """clamp(round(w/γ), -1, 1) as int8 (N, K), the same bits as torch. gamma: (1,) or (N,)."""
    codes = w.new_empty(w.shape, dtype=torch.int8)
    _run("ternary", len(w), codes, w.contiguous(), gamma, gamma.numel() > 1, w.shape[1])
    return codes


def values(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """q / s, rounded to fp32 or bf16: the same bits as torch. q: int8 (M, K), s: (M, 1)."""
    q, s = q.contiguous(), s.expand(len(q), 1).contiguous()
    y = torch.empty_like(q, dtype=dtype)
    _run("values", len(q), _floating(y), q, s, q.shape[1])
    return y


FEW = 256
"""Rows of fewer inputs, for which it does not pay to pack the weights."""


def _has_product() -> bool:
    kernels = _kernels()
    return kernels is not None and kernels.product != training.NULL


# What torch.compiler.assume_constant_result does, after it has loaded the compiler, which takes a second. A torch that
# names it otherwise fails tests/test_compiler.py.
_has_product._dynamo_marked_constant = True  # type: ignore[attr-defined]


def multiplies(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor) -> bool:
    """Whether `linear` takes these, and is faster than torch. It is in a compiled layer, too."""
    if len(q) < FEW or len(codes) % training.OUTPUTS or not _has_product():
        return False
    if torch.compiler.is_compiling():
        return q.device.type == "cpu" and q.numel() > 0 and codes.numel() > 0
    return possible(scale, s) and possible(q, codes, dtype=torch.int8)


def _linear(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor) -> Tensor:
    (rows, k), n, each = q.shape, len(codes), len(scale) > 1
    if codes.shape[1] != k:
        raise RuntimeError(f"inputs have size {k}, expected that of a row of codes, {codes.shape[1]}")
    scale, s = scale.expand(n if each else 1), s.expand(rows, 1)
    if k % training.COLUMNS or q.data_ptr() % ALIGNED or not q.is_contiguous():
        q = F.pad(q, (0, -k % training.COLUMNS)).contiguous()  # copies, even if there is nothing to add
    tiles, y = codes.new_empty(n * q.shape[1] // 4, dtype=torch.uint8), s.new_empty(rows, n)
    _run("tiles", n, tiles, codes.contiguous(), k)
    _run("linear", rows, _all().product, y, tiles, q, q.shape[1], scale.contiguous(), each, s.contiguous(), n)
    return y


_traced = torch.library.custom_op("bitnet::ternary_linear", _linear, mutates_args=(), device_types="cpu")
_traced.register_fake(lambda q, codes, scale, s: s.new_empty(len(q), len(codes)))


def linear(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor) -> Tensor:
    """(Σ q·c)·(scale / s) of ternary codes, as the engine multiplies them: the same bits as torch.

    q: int8 (M, K), codes: int8 (N, K), scale: (1,) or (N,), s: (M, 1). Returns fp32 (M, N).

    Raises RuntimeError, as torch does, if sizes differ.
    """
    y: Tensor = (_traced if torch.compiler.is_compiling() else _linear)(q, codes, scale, s)
    return y


def scaled(sums: Tensor, scale: Tensor, s: Tensor) -> Tensor:
    """sums · (scale / s): the same bits as torch. sums: int32 (M, N), which the result replaces in memory,
    scale: (1,) or (N,), s: (M, 1)."""
    y, each = sums.view(torch.float32), len(scale) > 1
    scale, s = scale.expand(y.shape[1] if each else 1).contiguous(), s.expand(len(y), 1).contiguous()
    _run("scaled", len(y), y, scale, each, s, y.shape[1])
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x·r·w with r = 1/sqrt(mean(x²) + eps) over the last dimension."""
    x, n = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    _run("norm", x.numel() // n, y, x, weight.expand(n).contiguous(), n, eps)
    return y


def norm_back(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of `norm` by x and by the weight, the latter summed in an order that is always the same."""
    grad, x, n = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows, of_x = x.numel() // n, torch.empty_like(x)
    of_weight = x.new_empty(-(-rows // training.ROWS), n)
    _run("norm_back", rows, of_x, of_weight, grad, x, weight.expand(n).contiguous(), n, eps)
    return of_x, of_weight.sum(0)


def squared_relu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate)² · up: the same bits as torch."""
    gate, up = (x.contiguous() for x in torch.broadcast_tensors(gate, up))
    y = torch.empty_like(gate)
    _run("gate", y.numel() // y.shape[-1], y, gate, up, y.shape[-1])
    return y


def squared_relu_gate_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = (x.contiguous() for x in torch.broadcast_tensors(grad, gate, up))
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _run("gate_back", gate.numel() // gate.shape[-1], of_gate, of_up, grad, gate, up, gate.shape[-1])
    return of_gate, of_up


def rotated(x_BHTE: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """RoPE or its inverse: the same bits as torch. cos, sin: (T, half) or (B, 1, T, half)."""
    x = x_BHTE if x_BHTE.stride(-1) == 1 else x_BHTE.contiguous()
    b, h, t, e = x.shape
    half, y = cos.shape[-1], x.new_empty(b, h, t, e)
    (cos, stride), (sin, _) = (_of_rows(table, b, t, half) for table in (cos, sin))
    _run("rotated", b * h * t, y, x, x.stride()[:3], cos, sin, stride, h, t, e, half, inverse)
    return y


def attention_weights(scores_BHTN: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(scale·scores + bias) in bf16, of scores in bf16. bias: fp32 (T, N) or (B, 1, T, N); without one, token t
    sees columns 0 to t where causal, else all."""
    b, h, t, n = scores_BHTN.shape
    scores, p = scores_BHTN.contiguous(), torch.empty_like(scores_BHTN, memory_format=torch.contiguous_format)
    seen, stride = (training.NULL, 0) if bias is None else _of_rows(bias, b, t, n)
    _run("softmax", b * h * t, p, scores, seen, stride, h, t, n, scale, causal)
    return p


def cross_entropy(z_NV: Tensor, targets_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of each row, in nats, and its gradient by z in fp32 or bf16; both 0 where the target is negative.

    Raises IndexError if a target has no column.
    """
    z_NV, targets_N = z_NV.contiguous(), targets_N.long().contiguous()
    largest = int(targets_N.numpy().max())  # a step asks torch for no value, as that would wait for a GPU
    if largest >= z_NV.shape[1]:
        raise IndexError(f"a target has index {largest}, expected less than the vocabulary's size, {z_NV.shape[1]}")
    loss_N, grad_NV = z_NV.new_empty(len(z_NV)), torch.empty_like(z_NV, dtype=dtype)
    _run("entropy", len(z_NV), _floating(grad_NV), loss_N, z_NV, targets_N, z_NV.shape[1])
    return loss_N, grad_NV
