"""Where the time of training steps on a GPU goes, by torch's profiler, and how often a step waits for the GPU."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import report
import torch
from torch.profiler import ProfilerActivity

QUIET, PROFILED = 5, 3  # steps in which waits are counted, and steps that are profiled

GROUPS = (
    ("attention", "sdpa|flash|fmha|attention"),
    ("products", "scaled_sum|nvjet|gemm|cutlass|xmma|splitK|cublas"),
    ("loss of the head", "softmax|nll_loss|cross_entropy|scatter"),
    ("copies", "^Mem"),
    ("clipping, sums of gradients", "multi_tensor|lpnorm|foreach"),
    ("embedding", "embedding|index"),
    ("norms, quantizers, gates, residuals", ""),
)
"""Groups by kernel name, the first that matches. Kernels of an optimizer's step are identified by when they run."""


class Watch:
    """Called when each step was read: counts synchronizations in some steps, then profiles others."""

    def __init__(self, warm: int) -> None:
        self._warm, self._read = warm, 0
        self.steps = QUIET + PROFILED
        self._noted: list[warnings.WarningMessage] = []
        self._catcher = warnings.catch_warnings(record=True)
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def seen(self) -> None:
        self._read += 1
        if self._read == self._warm:
            noted = self._catcher.__enter__()
            assert noted is not None
            self._noted = noted
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self._read == self._warm + QUIET:
            torch.cuda.set_sync_debug_mode("default")
            self._catcher.__exit__(None, None, None)
            torch.cuda.synchronize()
            self._profiler.start()
        elif self._read == self._warm + QUIET + PROFILED:
            torch.cuda.synchronize()
            self._profiler.stop()

    def summary(self) -> dict[str, Any]:
        waits = [str(each.message) for each in self._noted if "called a synchronizing" in str(each.message)]
        events = [e for e in self._profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
        return {"synchronizations": len(waits), "text": "\n".join([*table(spans), "", *waits])}


Span = tuple[str, float, float]
"""Name, begin and end in microseconds."""


def table(spans: list[Span]) -> list[str]:
    """Groups and kernels with total milliseconds. Annotations of the optimizer are not kernels, but mark its
    kernels."""
    optimizer = [span for span in spans if span[0].startswith("Optimizer.step")]
    kernels = [s for s in spans if not s[0].startswith("Optimizer.") and not s[0].startswith("ProfilerStep")]
    if not kernels:
        return ["no kernel was seen"]
    groups, names, calls = Counter[str](), Counter[str](), Counter[str]()
    for kernel in kernels:
        name, begin, end = kernel
        groups[group_of(kernel, optimizer)] += end - begin
        names[name[:110]] += end - begin
        calls[name[:110]] += 1
    window = max(end for _, _, end in kernels) - min(begin for _, begin, _ in kernels)
    idle = window - busy(kernels)
    rows = [[name, time / 1e3, f"{time / window:.1%}"] for name, time in groups.most_common()]
    rows += [["GPU idle", idle / 1e3, f"{idle / window:.1%}"], ["in all", window / 1e3, ""]]
    head = report.table(["group", f"ms in about {PROFILED} steps", "share of the time"], rows)
    each = [[f"`{name}`", calls[name], time / 1e3] for name, time in names.most_common(40)]
    return [head, "", report.table(["kernel", "calls", "ms"], each)]


def group_of(kernel: Span, optimizer: list[Span]) -> str:
    name, begin, end = kernel
    if any(first <= begin and end <= last for _, first, last in optimizer):
        return "optimizer"
    return next(group for group, pattern in GROUPS if re.search(pattern, name))


def busy(spans: list[Span]) -> float:
    """Time during which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
