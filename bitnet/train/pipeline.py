"""Keeps a GPU busy: batches are prepared in advance, and results are read after the next step has started.

Batches and results are the same as in a run that waits after each step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bitnet.model import parallel
from bitnet.train import objectives

AHEAD = 1  # steps whose batches are prepared while another one computes


class Work(NamedTuple):
    """The input of one optimizer step in this process."""

    numbers: list[int]  # the first sequence of each forward pass
    batches: list[tuple[Tensor, ...]]
    counted: int  # the targets, or pairs, by which the loss is divided


def work_of(batches: objectives.Batches, begin: int, sequences: int, pinned: bool) -> Work:
    """The work of a step: `sequences` of them from `begin` on, over all processes. pinned: in page-locked memory."""
    first, last = parallel.share(begin, begin + sequences)
    numbers = list(range(first, last, batches.batch))
    made = [batches.sequences(number, min(number + batches.batch, last)) for number in numbers]
    counted = sum(objectives.counted(batches, batch) for batch in made)
    if pinned:
        made = [tuple(tensor.pin_memory() for tensor in batch) for batch in made]
    return Work(numbers, made, counted)


class Ahead:
    """Prepares the work of consecutive steps in its own thread. An error there is raised at its step."""

    def __init__(self, make: Callable[[int], Work], pool: ThreadPoolExecutor) -> None:
        self._make, self._pool = make, pool
        self._waiting: deque[tuple[int, Future[Work]]] = deque()

    @classmethod
    @contextmanager
    def of(cls, make: Callable[[int], Work]) -> Iterator[Self]:
        """make: returns the work of a step, independent of earlier calls. The thread ends with the block."""
        # A single torch thread: otherwise it would start as many as the training thread has.
        pool = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))
        try:
            yield cls(make, pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def take(self, step: int) -> Work:
        """The work of a step; also starts preparing the next ones."""
        if not self._waiting or self._waiting[0][0] != step:
            self._waiting.clear()
            self._begin(step)
        while len(self._waiting) <= AHEAD:
            self._begin(self._waiting[-1][0] + 1)
        return self._waiting.popleft()[1].result()

    def drop(self) -> None:
        """Discard prepared work: the batches have changed."""
        self._waiting.clear()

    def _begin(self, step: int) -> None:
        self._waiting.append((step, self._pool.submit(self._make, step)))


@dataclass
class Made:
    """A step, finished or in flight: its results stay on the device until they are read."""

    weights: Mapping[str, float]  # weights of the terms of the loss
    values: Tensor  # those terms for each forward pass, and the gradient norm before clipping
    rate: float
    amount: dict[str, float]  # λ, if it rises; for the log
    at: dict[str, Any] = field(default_factory=dict)  # step, tokens, seconds
    layers: dict[str, Any] = field(default_factory=dict)  # telemetry of the layers; for the log

    def __post_init__(self) -> None:
        self._there: torch.cuda.Event | None = None
        if self.values.device.type == "cuda":
            self.values = self.values.to("cpu", non_blocking=True)  # copied when this step is done, before the next
            self._there = torch.cuda.Event()
            self._there.record()

    @cached_property
    def read(self) -> tuple[float, float, dict[str, float]]:
        """Loss (nats per token), gradient norm, and terms of the loss, over all processes. Waits for the device."""
        if self._there:
            self._there.synchronize()
        *values, norm = self.values.tolist()
        means = dict.fromkeys(self.weights, 0.0)
        for name, value in zip(itertools.cycle(means), values, strict=False):
            means[name] += value
        means = dict(zip(means, parallel.total(list(means.values())), strict=True))
        return sum(self.weights[name] * mean for name, mean in means.items()), norm, means
