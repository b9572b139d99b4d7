"""This machine: what the engine can use, and the limits its speed is compared with."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import InvalidParameterError, check, shown

MEBI = 1 << 20


def version() -> str:
    """Version of the engine."""
    return str(ffi.string(lib.bn_version()).decode())


def available_isas() -> list[str]:
    """Instruction set tiers that this build has and this CPU runs, best first."""
    names: list[str] = []
    while (name := lib.bn_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


def unknown_isa(what: str, isa: object) -> InvalidParameterError:
    """The error for a name that is none of `available_isas`. what: the parameter or variable that has it."""
    return InvalidParameterError(f"{what} is {shown(isa)}, expected one of {', '.join(available_isas())}", what)


def default_threads() -> int:
    """Threads used unless told otherwise: physical cores within affinity and cgroup quota."""
    return int(lib.bn_default_threads())


def read_bandwidth(threads: int) -> float:
    """Gigabytes (1e9) a second that `threads` threads read from memory."""
    out = ffi.new("double *")
    check(lib.bn_measure_read_bandwidth(threads, buffer_bytes(), out))
    return float(out[0])


def int8_peak(isa: str, threads: int) -> float:
    """Multiply-adds (1e9) a second of the tier's int8 dot product."""
    out = ffi.new("double *")
    check(lib.bn_measure_int8_peak(isa.encode(), threads, out))
    return float(out[0])


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()  # ru_maxrss would begin with our parent's peak
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def huge_share(path: str, areas: Path = Path("/proc/self/smaps")) -> float | None:
    """Share of a mapped file's resident bytes that are in huge pages of 2 MB or more; None: not told, or not mapped."""
    try:
        text = areas.read_text(errors="replace")
    except OSError:
        return None
    name, resident, huge = os.path.realpath(path), 0, 0
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE):
        head, _, facts = area.partition("\n")
        if head.endswith(f" {name}"):
            sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", facts, re.MULTILINE))
            resident += int(sizes["Rss"])
            huge += int(sizes.get("FilePmdMapped", 0)) + int(sizes.get("ShmemPmdMapped", 0))
    return huge / resident if resident else None


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def buffer_bytes() -> int:
    """Bytes to stream so that no cache holds them: 4 x the last-level cache, 256 MiB to 2 GiB."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": MEBI, "G": 1 << 30}
    texts = [size.read_text().strip() for size in sizes]
    cache = max((int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=0)
    return min(max(4 * cache, 256 * MEBI), 2048 * MEBI)
