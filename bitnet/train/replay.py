"""On a GPU the passes of a small model take less time than launching their kernels one by one. With --compile they are
recorded once, as a CUDA graph, and replayed with each batch: the same kernels on the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bitnet.config import ModelConfig
from bitnet.settings import Settings

Terms = dict[str, Tensor]
Passes = Callable[[Sequence[Tensor], float | Tensor, float | Tensor], Terms]
"""Forward and backward pass of a batch on the device: the batch, the divisor of its summed losses, and λ. Gradients
accumulate in the parameters; returns the terms of the loss."""


def possible(settings: Settings, config: ModelConfig, sequences: int, processes: int) -> bool:
    """Whether a step of so many sequences can be a CUDA graph: expert routing and dropout need the CPU, teachers and
    images vary in shape, a draft counts its draft tokens, several processes wait for each other, and a
    smaller last pass would have both shapes recorded again in every step."""
    others = (
        config.n_experts or config.dropout or config.vision or config.draft or settings.distilled or settings.preference
    )
    plain = not others and config.has_head
    alike = sequences < settings.batch or sequences % settings.batch == 0
    return settings.device == "cuda" and settings.compile and plain and alike and processes == 1


class Replay:
    """The passes of batches, recorded for the shapes of the newest batch and for whether λ is 1."""

    def __init__(self, passes: Passes, parameters: Sequence[nn.Parameter]) -> None:
        self._passes, self._parameters = passes, [p for p in parameters if p.requires_grad]
        self._key: object = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor] = []
        self._terms: Terms = {}

    def __call__(self, batch: Sequence[Tensor], counted: float, amount: float) -> Terms:
        """Like the passes themselves, but the next call overwrites the terms. batch: on any device."""
        key = amount == 1, *((tensor.shape, tensor.dtype) for tensor in batch)
        if key != self._key:
            self._record(batch, counted, amount)
            self._key = key
        for there, tensor in zip(self._batch, batch, strict=True):
            there.copy_(tensor, non_blocking=True)
        self._counted.fill_(counted)
        if isinstance(self._amount, Tensor):
            self._amount.fill_(amount)
        before = [p.grad.clone() for p in self._parameters if p.grad is not None]
        assert self._graph
        self._graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        if before:
            torch._foreach_add_(self._gradients, before)
        return self._terms

    def _record(self, batch: Sequence[Tensor], counted: float, amount: float) -> None:
        device = self._parameters[0].device
        self._graph, self._gradients, self._terms = None, [], {}  # frees their memory for the new ones
        before = [p.grad for p in self._parameters]
        self._batch = [tensor.to(device) for tensor in batch]
        self._counted = torch.full((), counted, device=device, dtype=torch.float32)
        self._amount = 1.0 if amount == 1 else torch.full((), amount, device=device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # warm-up: compiles, and libraries allocate workspaces
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # another thread pins batches
            self._terms = self._run()
        self._gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(self._gradients) == len(self._parameters), "a parameter had no part in the loss"
        for p, gradient in zip(self._parameters, before, strict=True):
            p.grad = gradient

    def _run(self) -> Terms:
        for p in self._parameters:
            p.grad = None
        return self._passes(self._batch, self._counted, self._amount)
