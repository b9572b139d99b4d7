"""Continuous batching: texts join and leave at any time, and the weights are read once for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from bitnet_runtime.answers.result import Piece, Result
from bitnet_runtime.answers.stream import Stream
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.errors import CacheFullError, CancelledError, ClosedError, InvalidParameterError, naming
from bitnet_runtime.handles import Closing
from bitnet_runtime.sessions.input import BLOCK
from bitnet_runtime.sessions.steps import Entry, step_batch

if TYPE_CHECKING:
    from bitnet_runtime.ids import Prompt

IN_FLIGHT = 16  # answers that are generated together, and so the most sessions that are open
MORE = 0.85  # of the time of a pass without prompts they add, so that with what disturbs it is twice as long at most
FEWEST = 2  # tokens of a prompt in a pass: what was read of it is read again for each, however few they are
LEAST = 8  # tokens of a prompt in a pass, so that it comes to an end soon: while it is not known how long they take,
UNNOTICED = 0.005  # and where they take no more seconds than these, however short a pass is without
LATELY = 3  # passes of which the shortest says how long tokens of prompts take: one can be disturbed


class Passes:
    """What a pass computes: of each answer that runs a token and draft tokens behind it; then chunks of prompts, in the
    order in which they are given, as much as lets it take at most twice the time (chunked prefill). How much that is
    falls with how far a prompt has come, as all of it is read again, and not in proportion to the tokens: so it is
    found by trying."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a pass without prompts, by the number of answers
        self._piece = LEAST  # tokens of prompts beside answers
        self._lately: list[float] = []  # seconds that so many took of late

    def run(self, writers: Sequence[Writer], guesses: int = BLOCK) -> Iterator[tuple[Writer, Exception | None]]:
        """One pass over answers that have begun and are not done, or as many as fit the `moment` of all; those that
        had a part in it, and their errors.

        Of several that found no room in the cache one fails, and leaves its own to the others: they are as they were,
        and have another pass. guesses: most draft tokens of each by n-gram lookup.
        """
        going = [writer for writer in writers if not writer.loads]
        left = room = self._room(len(going))
        entries: list[tuple[Writer, Entry]] = []
        for writer in (*going, *(writer for writer in writers if writer.loads)):
            if writer.loads and left < 1:
                break
            try:
                entry = writer.entry(max(1, left), guesses)
                entries.append((writer, entry))
                left -= min(writer.loads, left)
            except Exception as error:
                yield writer, error
        if not entries:
            return
        if left < room:  # what prompts take is measured
            entries[0][1].struct.moment = 0
        try:
            step_batch([entry for _, entry in entries])
        except Exception as error:  # before anything was computed
            yield from ((writer, error) for writer, _ in entries)
            return
        first = entries[0][1]
        self._note(len(going), room - left, first.seconds / max(1, first.passes))
        full = False
        for writer, entry in entries:
            try:
                writer.take(entry)
                yield writer, None
            except CacheFullError as error:
                if not full:
                    yield writer, error
                full = True
            except Exception as error:
                yield writer, error

    def _room(self, going: int) -> int:
        """Tokens of prompts."""
        return self._piece if going else BLOCK

    def _note(self, going: int, tokens: int, seconds: float) -> None:
        if not tokens:
            self._alone[going] = _mean(self._alone.get(going, 0.0), seconds)
        known = [seconds for n, seconds in self._alone.items() if n <= going]
        if not known or tokens != self._piece:
            return
        self._lately.append(max(seconds - max(known), max(known) / BLOCK))
        if len(self._lately) == LATELY:
            token = min(self._lately) / tokens
            least = max(FEWEST, min(LEAST, int(UNNOTICED / token)))
            self._piece = min(BLOCK, 2 * tokens, max(least, int(MORE * max(known) / token)))
            self._lately.clear()


def _mean(known: float, seconds: float) -> float:
    """Of late. What disturbs a measurement makes it longer: so one that is shorter counts more."""
    return known + (seconds - known) / (2 if seconds < known else 8) if known else seconds


class Step(NamedTuple):
    """A piece of a text from one pass. done: `stream.result` is there."""

    stream: Stream
    piece: Piece
    done: bool


class Batch(Closing):
    """Iterator over what its texts become, a `Step` at a time; ends when all are done, and goes on when one is added.

    Made by `Model.batch`. Texts are added at any moment, from any thread, and end early by `Stream.close`, after which
    pieces come that have been computed; a text is what it would be alone. One thread iterates. An error of a text is
    raised, and ends that one, which is `failed` then: the next iteration goes on with the others. Ctrl-C ends all that
    are being computed, as it does a stream.
    """

    def __init__(self, make: Callable[..., Stream], most: int = IN_FLIGHT) -> None:
        """make: of what `add` is given. most: texts that are computed at a time; others wait."""
        self._make, self._most, self._passes = make, most, Passes()
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []  # of those whose prompts load, who had a part in a pass last comes last
        self._steps: deque[Step | tuple[Stream, Exception]] = deque()
        self._closed = False
        self.failed: Stream | None = None

    def add(self, prompt: Prompt, **given: Any) -> Stream:
        """Add a text. Arguments as in `Model.stream`, whose pieces the batch gives: reading it is a StateError."""
        stream = self._make(prompt, **given)
        if not stream._writer.owned and any(
            stream._session is other._session for other in (*self._active, *self._waiting)
        ):
            raise InvalidParameterError(
                "another text of this batch uses this session, expected one for each", "session"
            )
        stream._batched = True
        self._waiting.append(stream)
        if self._closed:  # looked at last, as a thread may close it meanwhile
            self.close()
            raise ClosedError("the batch is closed; make another with Model.batch()")
        return stream

    def __len__(self) -> int:
        """The number of texts that are not done."""
        return len(self._waiting) + len(self._active)

    def __next__(self) -> Step:
        try:
            return self._next()
        except IndexError as error:
            if self._closed:  # in this moment
                raise StopIteration from error
            raise
        except Exception:
            raise
        except BaseException:  # Ctrl-C: sessions may hold tokens of a pass of which their streams do not know
            for stream in self._active:
                stream.close()
            raise

    def _next(self) -> Step:
        while not self._steps:
            self._join()
            if not self._active and not self._steps:
                raise StopIteration
            self._pass()
            if self._closed:  # meanwhile
                self.close()
        step = self._steps.popleft()
        if isinstance(step, Step):
            return step
        self.failed, error = step
        raise error

    def _pass(self) -> None:
        streams = {stream._writer: stream for stream in self._active}
        for writer, error in self._passes.run(list(streams)):
            stream = streams[writer]
            if writer.loads and self._leaves(stream):
                self._active.append(stream)
            self._read(stream, error)

    def _join(self) -> None:
        while self._waiting and len(self._active) < self._most:
            stream = self._waiting.popleft()
            self._active.append(stream)
            error = None
            try:
                if not stream._writer.done:
                    stream._writer.begin()
            except Exception as failed:
                error = failed
            self._read(stream, error)

    def _leaves(self, stream: Stream) -> bool:
        """Whether it was there: whoever closes the batch takes all away."""
        try:
            self._active.remove(stream)
        except ValueError:
            return False
        return True

    def _read(self, stream: Stream, error: Exception | None) -> None:
        """What is there of a text. Its error comes in its turn: the others of a pass have to be read, too."""
        pieces, writer = [], stream._writer
        try:
            if isinstance(error, (CancelledError, ClosedError)):
                stream._stop(error)
            elif error:
                raise error
            while writer.ready and not writer.done:
                pieces.append(writer.pop())
        except Exception as failed:
            self._leaves(stream)
            stream.close()
            self._steps.append((stream, failed))
            return
        if writer.done:
            self._leaves(stream)
            stream.close()
            pieces = pieces or [Piece("", None)]
        last = len(pieces) - 1
        self._steps.extend(Step(stream, piece, writer.done and i == last) for i, piece in enumerate(pieces))

    def close(self) -> None:
        """End all texts. None can be added then."""
        self._closed = True
        for stream in (*self._active, *self._waiting):
            stream.close()
        for rest in (self._active, self._waiting, self._steps):
            rest.clear()

    def __iter__(self) -> Self:
        return self


def generate_batch(texts: Iterable[Callable[[], Stream]]) -> list[Result]:
    """Results of texts that are computed together, each of which makes its stream when one of IN_FLIGHT has ended.

    Once the cache had no room for so many, it is fewer at a time. The one that found none is made anew.
    """
    waiting, most = deque(enumerate(texts)), IN_FLIGHT
    going, results = dict[Stream, tuple[int, Callable[[], Stream]]](), dict[int, Result]()
    with Batch(Stream) as batch:
        while True:
            while waiting and len(batch) < most:
                stream = waiting[0][1]()
                going[stream] = waiting.popleft()
                batch._waiting.append(stream)
            try:
                step = next(batch, None)
            except Exception as error:
                failed = going.pop(batch.failed) if batch.failed in going else None
                if failed and most > 1 and isinstance(error, CacheFullError):
                    most = min(most - 1, max(1, len(going)))
                    waiting.appendleft(failed)
                    error.with_traceback(None)  # whose frames hold the memory that is to be free
                    continue
                with naming(f"prompt {failed[0]}" if failed else ""):
                    raise
            if step is None:
                return [results[place] for place in sorted(results)]
            if step.done:
                assert step.stream.result is not None
                results[going.pop(step.stream)[0]] = step.stream.result
