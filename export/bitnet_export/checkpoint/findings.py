"""The reports of `bitnet export` and `bitnet convert` on a file that passed (`verify`, `verify_source`)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
"""log p of the targets (`scoring`), text after text; without a head the numbers of the vectors."""


@dataclass(frozen=True)
class Agreement:
    """Log-probabilities of the same tokens by the engine and by torch, in nats a token.

    Of a model without a head: the numbers of the texts' vectors of length 1; the loss is then minus their mean.
    """

    windows: int  # texts
    tokens: int  # of all texts
    median: float  # of |engine - torch|
    mean: float
    worst: float
    floor_median: float  # of |torch fp64 - torch fp32|
    floor_mean: float
    loss_torch: float
    loss_engine: float
    loss_error: float  # standard error of loss_engine - loss_torch
    vectors: bool = False

    @classmethod
    def of(
        cls, engine: Scores, torch32: Scores, torch64: Scores, shape: tuple[int, ...], *, vectors: bool = False
    ) -> Self:
        """torch64 may cover only the first windows. shape: windows, and tokens of each."""
        engine, torch32, torch64 = engine.ravel(), torch32.ravel(), torch64.ravel()
        difference, floor = engine - torch32, np.abs(torch64 - torch32[: len(torch64)])
        return cls(
            windows=shape[0],
            tokens=shape[0] * shape[1],
            median=float(np.median(np.abs(difference))),
            mean=float(np.abs(difference).mean()),
            worst=float(np.abs(difference).max()),
            floor_median=float(np.median(floor)),
            floor_mean=float(floor.mean()),
            loss_torch=float(-torch32.mean()),
            loss_engine=float(-engine.mean()),
            loss_error=float(difference.std() / math.sqrt(difference.size)),
            vectors=vectors,
        )

    @property
    def what(self) -> str:
        return "vectors" if self.vectors else "log-probabilities"

    @property
    def length(self) -> int:
        """Tokens of each text."""
        return self.tokens // self.windows

    @property
    def apart(self) -> str:
        return f"{self.what} differ by {self.median:.1e} (median), {self.worst:.1e} at worst"


@dataclass(frozen=True)
class HeadCost:
    """What storing embedding and head in another format than trained does to the loss, in nats a token."""

    stored: str  # "int8", "f16" or "f32"
    trained: str  # or "published"
    loss: float  # of torch on the long text, as stored
    loss_trained: float  # on the same text, as trained
    cost: float  # loss - loss_trained; exactly 0 when stored as trained
    cost_error: float  # standard error of cost
    median: float  # of |scores as stored - scores as trained|: for vectors, of which the loss says nothing
    worst: float

    @classmethod
    def of(cls, stored: str, trained: str, scores: Scores, scores_trained: Scores) -> Self:
        worse = scores_trained - scores
        return cls(
            stored=stored,
            trained=trained,
            loss=float(-scores.mean()),
            loss_trained=float(-scores_trained.mean()),
            cost=float(worse.mean()),
            cost_error=float(worse.std() / math.sqrt(worse.size)),
            median=float(np.median(np.abs(worse))),
            worst=float(np.abs(worse).max()),
        )

    def told(self, vectors: bool) -> str:
        """vectors: the scores are their numbers."""
        if self.stored == self.trained:
            return f"{self.stored}, as trained"
        if self.trained == "published" and (self.stored == "ternary" or self.worst == 0):
            return f"{self.stored}, as published"
        origin = "" if self.trained == "published" else f", trained as {self.trained}"
        if vectors:
            return f"{self.stored}{origin}: vectors move by {self.median:.1e} (median), {self.worst:.1e} at worst"
        return (
            f"{self.stored}{origin}: loss {self.loss:.6f} instead of {self.loss_trained:.6f}, "
            f"cost {self.cost:+.1e} ± {self.cost_error:.0e}"
        )


@dataclass(frozen=True)
class ZeroInputs:
    """For each layer, the share of the inputs of `down` that are exactly zero on the long text."""

    before: tuple[float, ...]  # as the activation function and the norm leave them
    after: tuple[float, ...]  # quantized to int8; as before where `down` is not ternary

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> ZeroInputs:
        """From the counts (3, n_layers) of `sparsity.counting_zero_inputs`."""
        return cls(*map(tuple, (counts[:2] / counts[2]).tolist()))

    def __str__(self) -> str:
        low, high, mean = min(self.after), max(self.after), sum(self.after) / len(self.after)
        before = sum(self.before) / len(self.before)
        return (
            f"of down: {100 * mean:.1f} % are zero after quantization, by layer {100 * low:.1f} to {100 * high:.1f} %; "
            f"{100 * before:.1f} % before"
        )


@dataclass(frozen=True)
class Report:
    """What `bitnet export` prints."""

    checkpoint: str
    quantized: float  # how much of every quantizer counted when it was saved; below 1 the run was not at its end
    parameters: int
    file_bytes: int
    fp16_bytes: int
    bits_per_weight: float
    ternary_weights: int
    ternary_bits_per_weight: float
    zero_fraction: tuple[float, ...]  # of each layer's ternary weights
    tensors_equal: int
    text: str  # where the compared tokens come from
    asked: str  # what of them is compared: "tokens", "tokens behind a prefix", "masked tokens" or "vectors of texts"
    short: Agreement
    long: Agreement
    images: Agreement | None  # of a model with a vision stack: image vectors, scaled to length 1
    draft: Agreement | None  # of a model with a draft: log p of its draft tokens
    head: HeadCost
    zero_inputs: ZeroInputs
    sparse: bool  # up and down are stored in lines, of which the engine reads only relevant ones
    adapter_bytes: int = 0  # of a separate adapter; all else describes the model with it

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        zeros = " ".join(f"{100 * z:.1f}" for z in self.zero_fraction)
        long, short = self.long, self.short
        unfinished = (
            f"unfinished saved when quantizers counted {100 * self.quantized:.0f} %, of which the file has 100 %: "
            "let the run end, with bitnet train --resume --out RUN"
        )
        adapter = f"adapter    {self.adapter_bytes / 1e6:.2f} MB; of the model with it:"
        asked = f", of {self.asked}" * (self.asked != "tokens")
        loss = [
            f"loss       {long.loss_torch:.6f} in torch, {long.loss_engine:.6f} in the engine, "
            f"difference {long.loss_engine - long.loss_torch:+.1e}{asked}",
            f"head       {self.head.told(long.vectors)}",
        ]
        return "\n".join(
            [
                *([unfinished] if self.quantized < 1 else []),
                *([adapter] if self.adapter_bytes else []),
                f"size       {self.file_bytes / 1e6:.2f} MB, {self.bits_per_weight:.2f} bits a weight, counting "
                f"those that are not ternary; fp16 has {self.fp16_bytes / 1e6:.2f} MB, "
                f"{self.fp16_bytes / self.file_bytes:.1f} times as much",
                f"zeros      {zeros} % of the ternary weights, by layer",
                f"weights    all {self.ternary_weights:,} ternary codes, {self.ternary_bits_per_weight:.2f} bits each, "
                f"and the scales equal training's ({self.tensors_equal} tensors)",
                f"prompts    {short.windows} of {short.length} tokens: {short.apart}",
                f"text       {long.tokens:,} tokens of {self.text}: {long.mean:.1e} on average, {long.worst:.1e} at "
                f"worst, which is rounding: torch in fp32 and in fp64 differ by {long.floor_mean:.1e} on average",
                *([] if long.vectors else loss),
                *([] if self.images is None else [_of_images(self.images)]),
                *([] if self.draft is None else [_of_draft(self.draft)]),
                f"inputs     {self.zero_inputs}" + ("; the engine leaves them out" if self.sparse else ""),
            ]
        )


def _of_images(found: Agreement) -> str:
    return (
        f"images     {found.windows} of {found.length} patches: numbers of their vectors differ by "
        f"{found.mean:.1e} on average, {found.worst:.1e} at worst, which is rounding: "
        f"torch in fp32 and in fp64 differ by {found.floor_mean:.1e} on average"
    )


def _of_draft(found: Agreement) -> str:
    return f"draft      {found.windows} chains of {found.length} draft tokens: {found.apart}"


@dataclass(frozen=True)
class Checked:
    """The findings of `verify_source` on a converted model. For an embedding model they concern its vectors."""

    text: str
    tensors_equal: int
    ternary_weights: int
    short: Agreement
    long: Agreement
    noise: float  # mean difference in the long text when the embedding is 1e-5 off
    head: HeadCost  # for vectors: what storing linear layers and embedding in this format does to their numbers
    floats: str = ""  # encoding of linear layers that are not ternary
    images: Agreement | None = None  # of a vision stack beside that of text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        short, long = self.short, self.long
        weights = f"all {self.ternary_weights:,} ternary codes and their scales equal the source's, as do the other"
        if not self.ternary_weights:
            weights = f"nothing is ternary, linear layers are {self.floats}; all equal the source's as stored, the"
        return "\n".join(
            [
                f"weights    {weights} tensors of the layers ({self.tensors_equal} tensors)",
                f"prompts    {short.windows} of {short.length} tokens: {short.apart}",
                f"text       {long.tokens:,} tokens of {self.text}: {long.mean:.1e} on average, {long.worst:.1e} at "
                f"worst, which is rounding: torch in fp32 and in fp64 differ by {long.floor_mean:.1e} on average, with "
                f"noise of 1e-5 on the embedding by {self.noise:.1e}",
                *([] if self.images is None else [_of_images(self.images)]),
                f"{'head  ' if self.ternary_weights else 'stored'}     {self.head.told(long.vectors)}",
            ]
        )
