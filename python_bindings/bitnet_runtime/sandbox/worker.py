"""Programs of strangers run in a process of their own, where the system holds their limits.

What a chat template or an expression of a tokenizer costs cannot be told by looking at it, and nothing
inside a Python process ends C code that takes a day or all memory. A process can be limited: the kernel
ends it when its CPU time is up, and refuses it memory, files and children (`confined.py` is its code).
The next call starts another one.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from bitnet_runtime.errors import MissingDependencyError, ThreadError, to_install
from bitnet_runtime.sandbox import confined

MEMORY = 64 << 20  # bytes that a request may take
PATIENCE = 10  # seconds to wait for a second of CPU time, on a machine that is busy with other things
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # of the environment: what Python and the clock need


class WorkerError(Exception):
    """No answer, and why."""


class Worker:
    """A process that answers requests; started when it is needed, again after it ended. Threads take turns."""

    def __init__(self, program: str, libraries: Sequence[str], setup: bytes = b"") -> None:
        """program: the file of a module of this package with `answer(request: bytes) -> bytes` that imports only
        the standard library and `libraries`. setup: the first request of every new process; it may
        take time and memory as a file of its length does."""
        self._program, self._libraries, self._setup = program, libraries, setup
        self._lock, self._busy = threading.RLock(), False
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        _workers.add(self)

    def ask(self, request: bytes, seconds: float = 1.0, memory: int = MEMORY) -> bytes:
        """The answer. Raises WorkerError: more CPU time or memory than given, or a crash; ThreadError: there is no
        process, or it does not run, which is no fault of the program or the request."""
        with self._lock:
            if self._busy:  # a signal handler, within a request of the same thread
                other = Worker(self._program, self._libraries, self._setup)
                try:
                    return other.ask(request, seconds, memory)
                finally:
                    other.close()
            self._busy = True
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                return self._exchange(request, seconds, memory)
            except BaseException:  # Ctrl-C too: the answer it would give is not that to the next request
                self.close()
                raise
            finally:
                self._busy = False

    def close(self) -> None:
        """End the process; the next request starts another."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
        if process is not None:
            process.kill()
            process.wait()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        self.close()
        if not sys.executable or getattr(sys, "frozen", False):
            raise ThreadError(
                f"sys.executable is {sys.executable!r}, expected the path of Python, to start a process with limits"
            )
        folders = dict.fromkeys(map(_folder, self._libraries))
        command = [sys.executable, "-I", "-S", "-X", "utf8", confined.__file__, self._program, *folders]
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        try:
            self._socket, its = socket.socketpair()
            with its:
                self._process = subprocess.Popen(
                    command, stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                    env=environment, start_new_session=True,  # Ctrl-C in the terminal is not for it
                )  # fmt: skip
        except OSError as error:
            raise ThreadError(
                f"a process with limits cannot be started ({error}); sys.executable is {sys.executable}"
            ) from None
        self._socket.settimeout(PATIENCE)
        if self._receive(len(confined.GREETING)) != confined.GREETING:
            raise ThreadError(f"{sys.executable}, which is sys.executable, did not start as Python does")
        if self._setup:
            size = len(self._setup)
            self._exchange(self._setup, 1 + 0.5e-6 * size, MEMORY + 48 * size, stays=True)

    def _exchange(self, request: bytes, seconds: float, memory: int, stays: bool = False) -> bytes:
        assert self._socket is not None
        self._socket.settimeout(PATIENCE * seconds)
        header = confined.REQUEST.pack(stays, seconds, memory, len(request))
        try:
            self._socket.sendall(header + request)
        except OSError:
            raise self._failure(seconds) from None
        reply = self._receive(confined.REPLY.size)
        if len(reply) < confined.REPLY.size:
            raise self._failure(seconds)
        how, size = confined.REPLY.unpack(reply)
        if how == confined.NO_MEMORY:
            raise WorkerError(f"it takes more than {memory >> 20} MB of memory")
        answer = self._receive(size)
        if len(answer) < size:
            raise self._failure(seconds)
        if how == confined.FULL:
            self.close()
        return answer

    def _receive(self, size: int) -> bytes:
        """So many bytes; fewer when the process ended or took too long."""
        assert self._socket is not None
        parts = []
        try:
            while size and (part := self._socket.recv(min(size, 1 << 20))):
                parts.append(part)
                size -= len(part)
        except OSError:
            pass
        return b"".join(parts)

    def _failure(self, seconds: float) -> WorkerError | ThreadError:
        """Why there was no answer."""
        process = self._process
        try:
            status = process.wait(0.1) if process else 0
        except subprocess.TimeoutExpired:
            return ThreadError(
                f"a process with limits gave no answer within {PATIENCE * seconds:.0f} s, and took less than "
                f"{seconds:.1f} s of CPU time: the machine is too busy, or something stopped it; try again later"
            )
        if status == -signal.SIGPROF:
            return WorkerError(f"it takes more than {seconds:.1f} s")
        if status == 0:  # it never ends by itself: somebody else took the status, or SIGCHLD is ignored
            return WorkerError(
                "it ended its process, with a status that is not known: too much time or memory, or a crash"
            )
        return WorkerError(f"it ended its process (status {status}), as too little memory or a crash does")

    def _forget(self) -> None:
        """In a forked child: the process is the parent's."""
        self._lock, self._busy = threading.RLock(), False
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process, nothing to wait for
        self._process = None


def _folder(library: str) -> str:
    """Where a library lies. It goes after the standard library, so that nothing there hides a module of it."""
    try:
        spec = importlib.util.find_spec(library)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"this needs the `{library}` library, which is not installed: {to_install(library)}"
        )
    return os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))


def _forget_all() -> None:
    for worker in list(_workers):
        worker._forget()


def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
