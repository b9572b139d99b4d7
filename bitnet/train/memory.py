"""How much memory a run may still take, and whether it ran out."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

GROUP = Path("/sys/fs/cgroup")  # the control group of this process, as seen in a container

EXHAUSTED = "allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
"""Words of errors without a type of their own: of a CPU; of pinned memory and CUDA graphs; of cuBLAS."""


def ran_out(error: Exception) -> bool:
    """Whether an error of torch, numpy or Python says that memory ran out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in EXHAUSTED)
    )


def available() -> tuple[float, str]:
    """Bytes that this process may still allocate, and the name of the limit."""
    limits = [(math.inf, "nothing known")]
    if sys.platform != "linux":
        return limits[0]
    import resource

    fields = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    if "MemAvailable" in fields:
        machine = 1024 * (int(fields["MemAvailable"]) + int(fields.get("SwapFree", "0")))
        limits.append((machine, "the memory of this machine"))
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits.append((max(0, most - used), "the limit on address space (ulimit -v)"))
    if (left := _left_of_group(GROUP)) is not None:
        limits.append((left, "the memory limit of the control group (container)"))
    return min(limits)


def _left_of_group(group: Path) -> int | None:
    """Bytes left under a control group's limit; None without one. File cache counts as free: the kernel reclaims it."""
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        return max(0, int(limit) - max(0, int(used) - cached)) if limit.isdecimal() else None
    except (OSError, ValueError, KeyError):
        return None
