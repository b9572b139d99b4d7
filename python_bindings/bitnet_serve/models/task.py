"""What a scheduler runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bitnet_runtime.answers.writer import Writer


class Task:
    """A piece of work for a scheduler. Only its thread calls the methods; any thread may set `cancelled`."""

    cancelled = False
    done = False
    prompt_tokens = completion_tokens = 0  # computed, once it is closed
    request: object = None  # that it belongs to
    client: object = None  # of that request
    turn = 0  # when its latest piece was computed, or it began
    had_turn = False
    seconds: Mapping[str, float] = MappingProxyType({})  # its durations by LATENCIES, once it is closed

    def open(self) -> None:
        """Allocate its memory. Raises ModelTooLargeError: there may be enough when other tasks have ended."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return 0

    @property
    def can_pause(self) -> bool:
        """Whether `pause` may be called."""
        return False

    def pause(self) -> None:
        """Free its memory; `open` allocates it again, and the task goes on from where it was."""
        raise NotImplementedError

    @property
    def writer(self) -> Writer | None:
        """The answer that passes compute; None: `piece` has to be called first."""

    def piece(self, most: int) -> None:
        """Compute the next piece, of about `most` tokens; the last one sets `writer` or `done`."""
        raise NotImplementedError

    def read(self) -> None:
        """Take what a pass computed for the writer; sets `done` at the end."""

    @property
    def waits(self) -> bool:
        """Whether whoever reads it is too far behind."""
        return False

    def fail(self, error: Exception) -> None:
        """End the task with this error."""

    def close(self) -> None:
        """Free its memory, and report its end unless it failed."""
