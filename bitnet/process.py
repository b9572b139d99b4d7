"""Process-level services of a training run: signal handling, a locked folder, memory reuse."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Self, TypeVar

T = TypeVar("T")

ECHO = 0.5  # seconds


class Interruption:
    """A context in which the first Ctrl-C, SIGTERM, or SIGHUP of a closed terminal is only recorded, in `signal`. A
    second Ctrl-C acts at once, unless it is an echo of the first, from a program that forwards a signal which the
    terminal also sent. Outside the main thread nothing is recorded: Python handles signals only there."""

    def __init__(self, said: str = "saving after this step or evaluation; Ctrl-C again stops at once, unsaved") -> None:
        """said: what the first Ctrl-C prints; "": nothing."""
        self.signal, self.said = 0, said

    def __enter__(self) -> Self:
        signals = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
        if signals and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` leaves it
            signals.append(signal.SIGHUP)
        self._before = {s: signal.signal(s, self._note) for s in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """To be called between parts of long work. Raises InterruptedError if a signal was recorded."""
        if self.signal:
            raise InterruptedError("a signal arrived, and the run is to stop")

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal, noted = number, time.monotonic()
        if number == signal.SIGHUP:
            unheard()
        if number == signal.SIGINT and self.said:
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, f"\n{self.said}\n".encode())

        def again(number: int, frame: FrameType | None) -> None:
            if time.monotonic() - noted > ECHO:
                signal.default_int_handler(number, frame)

        signal.signal(signal.SIGINT, again)


def interruptible(work: Callable[[], T]) -> T:
    """The result of C code that may wait for long. It is called in a thread, because Python handles no signal before
    such a call returns. A signal whose handler raises leaves the thread behind."""
    made: Future[T] = Future()

    def call() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    while not made.done():
        wait([made], ECHO)  # not for ever: a signal that comes just before is heard after the wait
    return made.result()


def unheard() -> None:
    """Redirect stderr, which nobody reads any more, to the null device, so that writing to it does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """A context in which nothing is written to stderr, by C code neither."""
    sys.stderr.flush()
    kept = os.dup(2)
    unheard()
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@dataclass
class Claim:
    """A run folder that is ours; `begun`: the run has something in it to resume from."""

    begun: bool = False


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[Claim]:
    """Create and lock the folder. If the block fails before the run has begun, new files in it are removed."""
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file, expected a run folder")
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    claim = Claim()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            with contextlib.suppress(OSError):  # a folder that may be traversed, but not read
                flush(each.parent)
        with locked(folder) as before:
            try:
                yield claim
            except BaseException:
                for path in () if claim.begun else set(folder.iterdir()) - before:
                    if path.is_file():  # folders may be checkpoints, which must not be removed by mistake
                        path.unlink()
                raise
    finally:
        for each in () if claim.begun else missing:
            with contextlib.suppress(OSError):  # it is not empty
                each.rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[set[Path]]:
    """Refuse a second run in the same folder. The lock ends with the process, whatever ends it.

    Yields the previous content of the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        yield set(folder.iterdir())
        return
    file = folder / "lock"
    ours = set() if file.exists() else {file}
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another run is writing to {folder}; wait for it, or name another folder") from None
        yield set(folder.iterdir()) - ours


def flush(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written(file: Path) -> Iterator[BinaryIO]:
    """An open file that gets its name when the block is done and all of it is on disk; nothing is left if it fails."""
    partial = file.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def is_locked(folder: Path) -> bool:
    """Whether a run is writing to this folder now. A run that starts in the same microsecond would be refused."""
    try:
        import fcntl

        with (folder / "lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows; no lock file, or one that may not be read
        pass
    return False


def keep_freed_memory() -> None:
    """Ask glibc to reuse large blocks instead of returning them to the kernel.

    Every pass allocates the same activations; getting zeroed pages again made a training step take up to twice
    as long, and an export a fifth longer. This has to be called before other threads exist, such as those of
    parallel.joined.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
