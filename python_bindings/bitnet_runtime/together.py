"""Several answers generated together: the weights are read once for all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from bitnet_runtime.batch import append_batch
from bitnet_runtime.errors import CancelledError, ClosedError
from bitnet_runtime.generation import Stream, finish
from bitnet_runtime.result import Result

IN_FLIGHT = 16  # answers that are generated together, and so the most sessions that are open


def generate_batch(streams: Iterable[Stream]) -> list[Result]:
    """Results of streams that have not begun, computed together: weights are read once for all.

    The next stream is asked for when one of IN_FLIGHT has ended.
    """
    waiting, results = enumerate(streams), dict[int, Result]()
    active: dict[int, Stream] = {}
    try:
        while True:
            for place, stream in itertools.islice(waiting, IN_FLIGHT - len(active)):
                active[place] = stream
                try:
                    if not stream._done:
                        stream.begin()
                except (CancelledError, ClosedError) as error:
                    stream._stop(error)
            if not active:
                return [results[place] for place in sorted(results)]
            going = [stream for stream in active.values() if not stream._done]
            while len(going) == len(active):
                going = _one_token_each(going)
            for place in [place for place, stream in active.items() if stream._done]:
                results[place] = finish(active.pop(place))
    finally:
        for stream in active.values():
            stream.close()


def _one_token_each(streams: list[Stream]) -> list[Stream]:
    """Choose a token in each, more where a grammar leaves no choice, and compute those of answers that go on together;
    returns these."""
    begin = time.perf_counter()
    for stream in streams:
        try:
            stream.pick()
            while stream._drawn and not stream._done:  # what a grammar forces
                stream.pick()
        except (CancelledError, ClosedError) as error:
            stream._stop(error)
    while going := [stream for stream in streams if not stream._done]:
        try:
            for stream in going:
                if len(stream._missing) > 1:
                    stream._session.feed(stream._missing[:-1], keep_logits=False)
                    del stream._missing[:-1]
            append_batch([stream._session for stream in going], [stream._missing[0] for stream in going])
            break
        except (CancelledError, ClosedError):  # of one, and nothing was computed
            stopped = [stream for stream in going if stream._ended or stream._session._cancelled]
            if not stopped:
                raise
            for stream in stopped:
                stream._done = True
    seconds = time.perf_counter() - begin
    for stream in streams:
        stream._seconds += seconds
    return going
