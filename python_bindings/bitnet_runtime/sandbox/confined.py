"""The process that `worker.Worker` starts: it confines itself, then answers one request after the other.

Run as a script with a program and the folders of its libraries. Requests come and replies go over the
socket that is its standard input. It imports only the standard library, and little of that, because
it is started within a user's call.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import sys
from collections.abc import Callable

REQUEST = struct.Struct("<?dQQ")  # whether what it leaves is to stay, seconds of CPU time, bytes of memory, of itself
REPLY = struct.Struct("<cQ")  # how it went, bytes that follow
DONE, FULL, NO_MEMORY = b"D", b"F", b"M"  # FULL: done, and the process has grown; start a new one
GREETING = b"bitnet worker 1\n"

KEPT = 32 << 20  # bytes by which a process may grow for good, beside 16 for each byte of what stays


def main() -> None:
    program, *sys.path[len(sys.path) :] = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    memory = _Memory()
    _confine()
    os.write(0, GREETING)
    _serve(module.answer, memory)


def _serve(answer: Callable[[bytes], bytes], memory: _Memory) -> None:
    start, kept = memory.used(), KEPT
    while header := _read(REQUEST.size):
        stays, seconds, room, size = REQUEST.unpack(header)
        memory.allow(room)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply, how = answer(_read(size)), DONE
        except MemoryError:
            reply, how = b"", NO_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        memory.allow(2 * len(reply) + kept)
        if stays:  # what is large keeps large caches
            start, kept = memory.used(), KEPT + 16 * size
        if how == DONE and memory.used() > start + kept:
            how = FULL
        _write(REPLY.pack(how, len(reply)) + reply)


def _confine() -> None:
    """Nothing but computing: no files, no children; and its end when a timer says so, whatever the parent blocks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        import resource
    except ImportError:
        return
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (0, 0))


class _Memory:
    """The address space of this process."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # not Linux: only time is limited
            self._file = -1

    def used(self) -> int:
        if self._file < 0:
            return 0
        return int(os.pread(self._file, 64, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")

    def allow(self, more: int) -> None:
        if self._file >= 0:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # one that was there stays
            most = self.used() + more
            resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _read(size: int) -> bytes:
    """Exactly so many bytes; empty when the other side is gone."""
    parts = []
    while size and (part := os.read(0, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    if size and parts:
        sys.exit()
    return b"".join(parts)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(0, view) :]


if __name__ == "__main__":
    try:
        main()
    except OSError:  # the other side is gone
        os._exit(1)
