"""Continuous batching: one thread for each model owns its batch, which tasks join and leave between passes.

A pass computes a token of every answer that runs, draft tokens behind it, and a chunk of the prompts that load
(`bitnet_runtime.answers.together.Passes`). So an answer never waits for more than a chunk, and nobody for a whole
prompt of another. Clients share the places (`bitnet_serve.models.shares`), and nobody can take the whole queue.
What a task gets does not depend on its company: the engine gives the same bits.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from bitnet_runtime.answers.together import Passes
from bitnet_runtime.errors import BitnetError, CancelledError, ModelTooLargeError
from bitnet_serve.histogram import LATENCIES, Histogram
from bitnet_serve.models import shares
from bitnet_serve.models.sessions import FullError, NeverError
from bitnet_serve.models.task import Task

PIECE = 32  # tokens of a piece computed by itself, while other answers wait for their next token
PIECE_ALONE = 128  # the same when none waits
PATIENCE = 4  # least seconds until a refused client asks again: a refusal takes 0.4 ms from those being served
RESTING = 0.02  # seconds to sleep when every answer waits for its reader, or for memory

log = logging.getLogger("bitnet_serve")


class OverloadedError(Exception):
    """No place in the queue. `seconds`: when to ask again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Scheduler:
    """Runs tasks of one model. `places`: tasks that run at a time; `queue`: requests that may wait."""

    def __init__(self, places: int, queue: int, name: str) -> None:
        self._places, self._most_requests = places, places + queue
        self._wake = threading.Condition()
        self._queue: deque[Task] = deque()
        self._running: list[Task] = []  # oldest first
        self._full_with: list[Task] | None = None  # running tasks beside which none of the queue had a place
        self._passes = Passes()
        self._chores: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._requests: Counter[object] = Counter()  # of each client
        self._turn = 0
        self._new_had_turn = False  # the latest turn was the first of its task
        self._closing = False
        self._retry = 0.0  # when to try again to allocate memory; at once when a running task has ended
        self._seconds = 1.0  # running mean of the duration of requests
        self.finished = self.cancelled = self.failed = self.refused = 0  # tasks; and requests
        self.prompt_tokens = self.completion_tokens = 0
        self.latencies = {name: Histogram() for name in LATENCIES}
        self._thread = threading.Thread(target=self._run, name=f"scheduler of {name}", daemon=True)
        self._thread.start()

    # ---- any thread ----

    def enter(self, client: object = None) -> Callable[[], None]:
        """Take a place for a request, before its prompt is read; returns a function that gives it back.

        Raises OverloadedError at once when there is none. Besides the queue there are as many places as tasks that
        run at a time. They are kept for clients with fewer requests than free places, so nobody takes the whole queue.
        """
        with self._wake:
            requests = self.requests
            free = self._most_requests + self._places - requests
            if free <= self._places and self._requests[client] >= free:
                self.refused += 1
                wait = math.ceil(self._seconds * requests / self._places)
                raise OverloadedError(
                    f"{requests} requests are running or waiting, which is the limit; try again later",
                    min(max(wait, PATIENCE), 120),
                )
            self._requests[client] += 1
        begin = time.monotonic()

        def leave() -> None:
            with self._wake:
                self._requests -= Counter((client,))  # drops those who have none
                self._seconds += (time.monotonic() - begin - self._seconds) / 8

        return leave

    def submit(self, tasks: Sequence[Task], client: object = None) -> None:
        """Run these tasks of one request."""
        request = object()
        for task in tasks:
            task.request, task.client = request, client
        with self._wake:
            if self._closing:
                raise OverloadedError("the server is shutting down", 5)
            self._queue.extend(tasks)
            self._full_with = None
            self._wake.notify()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Stop these tasks after the token or piece that is being computed."""
        with self._wake:
            for task in tasks:
                task.cancelled = True
            self._wake.notify()

    def at_rest(self, work: Callable[[], None]) -> None:
        """Do this in the scheduler's thread once no task is left, and wait for it."""
        done: Future[None] = Future()
        with self._wake:
            alive = not self._closing
            if alive:
                self._chores.append((done, work))
                self._wake.notify()
        if alive:
            done.result()
        else:
            self._thread.join()
            work()

    def close(self) -> None:
        """Stop all tasks, and the thread."""
        with self._wake:
            self._closing = True
            for task in (*self._queue, *self._running):
                task.cancelled = True
            self._wake.notify()
        self._thread.join()

    @property
    def lives(self) -> bool:
        """Whether its thread does; a mistake of the server may end it, and then nobody is answered."""
        return self._thread.is_alive()

    @property
    def requests(self) -> int:
        """Requests that have a place."""
        with self._wake:
            return self._requests.total()

    @property
    def load(self) -> tuple[int, int]:
        """Tasks that run, and that wait."""
        return len(self._running), len(self._queue)

    # ---- its thread ----

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._running or self._chores or self._closing):
                    self._wake.wait()
                if self._closing and not (self._queue or self._running or self._chores):
                    return
            self._leave()
            self._join()
            if self._chores and not (self._running or self._queue):
                self._do(*self._chores.popleft())
            if not self._round() and (self._running or self._queue):
                with self._wake:
                    self._wake.wait(RESTING)

    @staticmethod
    def _do(done: Future[None], work: Callable[[], None]) -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def _leave(self) -> None:
        """Drop the tasks that nobody wants any more."""
        with self._wake:
            left = [task for task in self._queue if task.cancelled]
            if left:
                self._queue = deque(task for task in self._queue if not task.cancelled)
        for task in [*left, *(task for task in self._running if task.cancelled)]:
            self._end(task)

    def _join(self) -> None:
        """Begin with those that wait, as far as there are places and memory."""
        while self._queue and time.monotonic() >= self._retry:
            with self._wake:
                active = self._active
                if active == self._full_with:
                    return
                task = shares.next_of(self._queue, self._running, active, self._places)
                if task is None:
                    self._full_with = active
                    return
                self._queue.remove(task)
                self._running.append(task)
                task.turn = self._turn
            try:
                self._open(task)
                if task.done:
                    self._end(task)
            except ModelTooLargeError as error:
                alone = len(self._running) == 1
                if isinstance(error, NeverError) or (alone and not isinstance(error, FullError)):
                    self._fail(task, error)
                    continue
                with self._wake:
                    self._running.remove(task)
                    self._queue.appendleft(task)
                self._retry = time.monotonic() + RESTING
                return
            except Exception as error:
                self._fail(task, error)

    def _open(self, task: Task) -> None:
        """Others pause for it, if it has no memory and they have more than their share."""
        try:
            task.open()
        except FullError as error:
            others = shares.giving_way(self._running, task.client, error.size, error.lacks)
            if not others:
                raise
            for other in others:
                other.pause()
            with self._wake:
                self._running = [each for each in self._running if each not in others]
                self._queue.extendleft(others)
            task.open()

    @property
    def _active(self) -> list[Task]:
        """Those that run. One that waits for its reader takes no place: whoever does not read keeps nobody else from
        an answer."""
        return [task for task in self._running if not task.waits]

    def _round(self) -> bool:
        """A piece, and a pass; False: there was nothing to do."""
        tasks = shares.with_places(self._active, self._places)
        going = [task for task in tasks if task.writer and not task.writer.loads]
        coming = [task for task in tasks if task.writer is None or task.writer.loads]
        coming = shares.in_turn(coming, new_first=not self._new_had_turn)
        if alone := bool(coming) and coming[0].writer is None:
            task, most = coming[0], PIECE if going else PIECE_ALONE
            self._take_turn(task)
            self._do_part(task, functools.partial(task.piece, most))
            coming = []  # they have the next turn
        by = {task.writer: task for task in (*going, *coming) if task.writer}
        guesses = PIECE // max(1, len(going)) if len(by) > 1 else PIECE_ALONE  # for each: the others wait for them
        for writer, error in self._passes.run(list(by), guesses):
            task = by[writer]
            if task in coming:
                self._take_turn(task)
            if error:
                self._fail(task, error)
            else:
                self._do_part(task, task.read)
        return bool(by or alone)

    def _take_turn(self, task: Task) -> None:
        self._turn += 1
        self._new_had_turn = not task.had_turn
        task.turn, task.had_turn = self._turn, True

    def _do_part(self, task: Task, part: Callable[[], None]) -> None:
        """Of its work, which may be the last or fail."""
        try:
            part()
        except Exception as error:
            self._fail(task, error)
        else:
            if task.done:
                self._end(task)

    def _fail(self, task: Task, error: Exception) -> None:
        if not isinstance(error, BitnetError):
            log.exception("a mistake of the server")
        if not isinstance(error, CancelledError):
            self.failed += 1
            task.fail(error)
        self._end(task)

    def _end(self, task: Task) -> None:
        self.cancelled += task.cancelled
        self.finished += 1
        with self._wake:  # whoever sees nothing run finds it counted
            if task in self._running:
                self._running.remove(task)
                self._queue = deque(sorted(self._queue, key=lambda each: each.client == task.client))  # now the last
                self._full_with = None
        try:
            task.close()
        except Exception:
            log.exception("a mistake of the server")
        self._retry = 0.0
        self.prompt_tokens += task.prompt_tokens
        self.completion_tokens += task.completion_tokens
        for name, seconds in task.seconds.items():
            self.latencies[name].add(seconds)
