"""Loss of a model on text: nats per token, bits per byte, perplexity.

A checkpoint is evaluated in torch, a packed file in the engine, on the same windows of the same
tokens. torch is imported only for a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet.data import corpus, dataset
from bitnet.data.dialogues import Dialogues
from bitnet.data.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from torch import Tensor

    from bitnet.data import views
    from bitnet.model.transformer import Transformer
    from bitnet_runtime import Model, Session


T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    nats_per_token: float
    bits_per_byte: float  # does not depend on the tokenizer
    perplexity: float  # per token
    tokens: int  # predicted tokens
    standard_error: float | None = 0.0  # of nats_per_token, for the whole text; None: one window of several

    @classmethod
    def of(cls, sums: Sequence[float], windows: int, bytes_per_token: float) -> Result:
        """sums: `spread` of the evaluated windows. windows: how many there are in all."""
        n, total, counted, squares, products, counts = sums
        nats, error = total / counted, None if n == 1 < windows else 0.0
        if 1 < n < windows:  # of a ratio of two means, sampled without replacement
            around = max(0.0, squares - 2 * nats * products + nats**2 * counts)
            error = math.sqrt(around * n / (n - 1) * (1 - n / windows)) / counted
        return cls(nats, *_bits_and_perplexity(nats, bytes_per_token), int(counted), error)

    def __str__(self) -> str:
        return f"{self.nats_per_token:.4f} nats/token, {self.bits_per_byte:.4f} bits/byte"

    @property
    def details(self) -> str:
        """What the short form leaves out, as every result has it: how much was counted, and figures beside it."""
        error = f"± {self.standard_error:.4f} nats, " if self.standard_error else ""  # of a part of the text
        return f"{error}perplexity {self.perplexity:.2f}, {self.tokens:,} tokens"


def _bits_and_perplexity(nats: float, bytes_per_token: float) -> tuple[float, float]:
    """Bits per byte and perplexity. Bits are 0 for targets without bytes: the ends of empty answers."""
    return nats / math.log(2) / bytes_per_token if bytes_per_token else 0.0, math.exp(min(nats, 700.0))


def spread(nats: Sequence[float], counted: Sequence[int]) -> list[float]:
    """The sums for `Result.of`, from each window's loss and counted tokens; they are additive."""
    x, n = np.array(nats), np.array(counted, np.float64)
    return [float(value) for value in (len(x), x.sum(), n.sum(), x @ x, x @ n, n @ n)]


@dataclass(frozen=True, kw_only=True)
class BySource(Result):
    """Result on a mixture: the mean, weighted by source."""

    sources: dict[str, float]  # nats per token of each

    @classmethod
    def mean(cls, found: Mapping[str, Result], n_bytes: Mapping[str, float], weights: Mapping[str, float]) -> Self:
        """found, n_bytes (bytes per token): by source."""
        of_each = {name: result.nats_per_token for name, result in found.items()}
        nats, bytes_each = (sum(weights[name] * of[name] for name in found) for of in (of_each, n_bytes))
        errors = {name: result.standard_error for name, result in found.items()}
        known = [weights[name] * error for name, error in errors.items() if error is not None]
        error = math.hypot(*known) if len(known) == len(errors) else None
        n_tokens = sum(result.tokens for result in found.values())
        return cls(nats, *_bits_and_perplexity(nats, bytes_each), n_tokens, error, sources=of_each)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {nats:.4f}" for name, nats in self.sources.items())
        return f"{super().__str__()} ({each})"


@dataclass(frozen=True)
class Hidden:
    """Result on the masked tokens of a bidirectional model."""

    nats_per_token: float
    accuracy: float  # share of tokens that the model ranks first
    tokens: int  # masked tokens

    def __str__(self) -> str:
        return f"{self.nats_per_token:.4f} nats/masked token, {self.accuracy:.1%} right"

    @property
    def details(self) -> str:
        return f"{self.tokens:,} masked tokens"


# ---- windows ----


@dataclass(frozen=True)
class Overlapping:
    """Windows of text that start every `stride` tokens, and of which only new tokens count.

    So after the first window every counted token has at least context − stride tokens before it.
    With stride = context they are the windows of `data.Tokens`.
    """

    text: dataset.Tokens
    stride: int

    @property
    def n_tokens(self) -> int:
        return self.text.n_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.text.bytes_per_token

    def windows(self, context: int) -> int:
        """The number of windows of `context` inputs, each with its next token."""
        return max(0, (self.n_tokens - 1 - context) // self.stride + 1)

    def new(self, index: int, context: int) -> int:
        """How many of the window's last targets count."""
        return self.stride if index else context

    def row(self, index: int, context: int) -> NDArray[np.int64]:
        """The window's inputs and their next token: (context + 1,)."""
        first = index * self.stride
        return self.text.ids[first : first + context + 1].astype(np.int64)

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (IGNORED where another window counts them), int64 (len(indices), context) each."""
        import torch

        block = torch.from_numpy(np.stack([self.row(i, context) for i in indices]))
        targets = block[:, 1:].clone()
        for target, i in zip(targets, indices, strict=True):
            target[: context - self.new(i, context)] = dataset.IGNORED
        return block[:, :-1], targets


def overlapping(text: T, stride: int) -> T | Overlapping:
    """Text whose windows start every `stride` tokens; 0, or data that are no plain text: as they are."""
    return Overlapping(text, stride) if stride and isinstance(text, dataset.Tokens) else text


def chosen_windows(n: int, wanted: int) -> list[int]:
    """`wanted` of n windows, evenly spaced; 0: all."""
    wanted = min(n, wanted) or n
    return [i * n // wanted for i in range(wanted)]


def _within(limit: int, context: int, stride: int) -> int:
    """The number of windows with `limit` counted tokens, at least one; 0: all. In the first window all count."""
    return 1 + max(0, limit - context) // stride if limit else 0


def too_short(n_tokens: int, context: int) -> corpus.DataError:
    return corpus.DataError(
        f"the text has {n_tokens:,} tokens, one window needs {context + 1:,}, or of conversations an answer "
        "within them; give more text, or another --context"
    )


# ---- in torch ----


def evaluate(
    model: Transformer,
    tokens: dataset.Tokens | Dialogues | Overlapping | views.ViewedTokens,
    context: int,
    batch: int = 16,
    limit: int = 0,
) -> Result | Hidden:
    """Mean loss on text, on the answers of conversations, or on the targets of a view, over windows of `context`.

    If `limit` > 0 tokens are too few for all windows, evenly spaced ones are used.

    Always in fp32 and without autocast: the loss that the engine will have.
    """
    import torch

    from bitnet.data import views
    from bitnet.model import parallel

    device = model.device
    n = tokens.windows(context)
    if n < 1:
        raise too_short(tokens.n_tokens, context)
    each = tokens.stride if isinstance(tokens, Overlapping) else context
    chosen = chosen_windows(n, _within(limit, context, each))
    sums, right = np.zeros(6), 0
    hidden = isinstance(tokens, views.ViewedTokens) and isinstance(tokens.view, views.Masking)
    with torch.no_grad(), model.evaluating():
        for i, counts in parallel.dealt(math.ceil(len(chosen) / batch)):
            rows = tokens.window(chosen[i * batch : (i + 1) * batch], context)
            inputs, targets, *documents = (t.to(device) for t in rows)
            # as in training, without all logits in memory at once
            log_p, likeliest = model(inputs, *documents, targets_BT=targets, each=True)
            if counts:
                counted = (targets != dataset.IGNORED).sum(1)
                sums += spread((-log_p).double().sum(1).tolist(), counted.tolist())
                right += int(likeliest.sum())
    *found, n_right = parallel.total([*sums.tolist(), right])
    if hidden:
        return Hidden(found[1] / found[2], n_right / found[2], int(found[2]))
    return Result.of(found, n, tokens.bytes_per_token)


def check_vocabulary(tokens: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raises ValueError if token ids would not fit the model."""
    if (size := vocabulary_size(tokens)) > config.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer needs {size:,} tokens, the model has {config.vocab_size:,}; "
            "they do not belong together"
        )


# ---- in the engine ----


def log_probabilities(logits: NDArray[np.float32], targets: Sequence[int]) -> NDArray[np.float64]:
    """Natural log of the probability of targets[i] under row i of (n, vocab_size) logits, summed in fp64: (n,)."""
    rows = logits.astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    found: NDArray[np.float64] = rows[np.arange(len(rows)), np.asarray(targets)] - np.log(np.exp(rows).sum(1))
    return found


def evaluate_packed(
    model: Model, text: Overlapping, context: int, limit: int = 0, adapter: str | None = None
) -> Result:
    """`evaluate` for a packed file: the same windows, computed by the engine. adapter: as in Model.generate."""
    from bitnet_runtime.abilities import require_head

    require_head(model)
    n = text.windows(context)
    if n < 1:
        raise too_short(text.n_tokens, context)
    chosen = chosen_windows(n, _within(limit, context, text.stride))
    counted = [text.new(i, context) for i in chosen]
    with model.session(n_ctx=context, adapter=adapter) as session:
        rows = zip(chosen, counted, strict=True)
        nats = [-_score(session, text.row(i, context).tolist(), new) for i, new in rows]
    return Result.of(spread(nats, counted), n, text.bytes_per_token)


def _score(session: Session, row: list[int], new: int) -> float:
    """Log-probability of the last `new` tokens of a row, which is one token longer than the session."""
    before = len(row) - new
    session.reset()
    session.feed(row[:before])
    middle = session.score(row[before:-1]) if new > 1 else []
    logits = session.logits
    assert logits is not None  # there are logits after a feed
    return math.fsum(middle) + float(log_probabilities(logits[None], row[-1:])[0])
