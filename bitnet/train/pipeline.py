"""What keeps a GPU busy: batches are there before they are wanted, and results are read after the next step is begun.

The order of the batches and every value that is read are those of a run that waits.
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

AHEAD = 1  # steps whose batches lie ready while another one computes


class Work(NamedTuple):
    """What one optimizer step of this process computes with."""

    numbers: list[int]  # the first sequence of each forward pass
    batches: list[tuple[Tensor, ...]]
    counted: int  # the targets, or pairs, by which the loss is divided


def work_of(batches: objectives.Batches, begin: int, sequences: int, pinned: bool) -> Work:
    """That of a step: so many sequences in all processes, from `begin` on. pinned: where a GPU copies from alone."""
    first, last = parallel.share(begin, begin + sequences)
    numbers = list(range(first, last, batches.batch))
    made = [batches.sequences(number, min(number + batches.batch, last)) for number in numbers]
    counted = sum(objectives.counted(batches, batch) for batch in made)
    if pinned:
        made = [tuple(tensor.pin_memory() for tensor in batch) for batch in made]
    return Work(numbers, made, counted)


class Ahead:
    """The work of one step after another, made in a thread of its own. What fails there is raised at its step."""

    def __init__(self, make: Callable[[int], Work], pool: ThreadPoolExecutor) -> None:
        self._make, self._pool = make, pool
        self._waiting: deque[tuple[int, Future[Work]]] = deque()

    @classmethod
    @contextmanager
    def of(cls, make: Callable[[int], Work]) -> Iterator[Self]:
        """make: the work of a step, whatever was asked before. The thread ends with the block."""
        # One thread of torch: it would otherwise get as many of its own as the one that trains has.
        pool = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))
        try:
            yield cls(make, pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def take(self, step: int) -> Work:
        """The work of a step; that of the next ones is begun."""
        if not self._waiting or self._waiting[0][0] != step:
            self._waiting.clear()
            self._begin(step)
        while len(self._waiting) <= AHEAD:
            self._begin(self._waiting[-1][0] + 1)
        return self._waiting.popleft()[1].result()

    def drop(self) -> None:
        """Forget what lies ready: the batches have changed."""
        self._waiting.clear()

    def _begin(self, step: int) -> None:
        self._waiting.append((step, self._pool.submit(self._make, step)))


@dataclass
class Made:
    """A step, made or on its way: what it computed is on the device until it is read."""

    weights: Mapping[str, float]  # of the terms of the loss
    values: Tensor  # those terms of each forward pass, and the norm of the gradient before clipping
    rate: float
    amount: dict[str, float]  # λ, where it rises; for the log
    at: dict[str, Any] = field(default_factory=dict)  # step, tokens, seconds
    layers: dict[str, Any] = field(default_factory=dict)  # what was seen of them; for the log

    def __post_init__(self) -> None:
        self._there: torch.cuda.Event | None = None
        if self.values.device.type == "cuda":
            self.values = self.values.to("cpu", non_blocking=True)  # when this step is done, not the next
            self._there = torch.cuda.Event()
            self._there.record()

    @cached_property
    def read(self) -> tuple[float, float, dict[str, float]]:
        """Loss (nats per token), norm, and the terms of the loss, of all processes together. Waits for the device."""
        if self._there:
            self._there.synchronize()
        *values, norm = self.values.tolist()
        means = dict.fromkeys(self.weights, 0.0)
        for name, value in zip(itertools.cycle(means), values, strict=False):
            means[name] += value
        means = dict(zip(means, parallel.total(list(means.values())), strict=True))
        return sum(self.weights[name] * mean for name, mean in means.items()), norm, means
