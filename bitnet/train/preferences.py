"""`bitnet finetune --preference`: a model learns which of two answers is preferred (DPO, arXiv 2305.18290).

    reward = β · (log p of an answer − its log p before training)                in nats
    loss   = −log σ(reward of the chosen answer − reward of the rejected one)    nats per pair

The log-probabilities before training, the reference, are computed once and stored in the run folder, so no second
model is in memory. The file name is a hash of weights and pairs. Terms of the loss, and metrics: `WEIGHTS`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet import process
from bitnet.config import ModelConfig
from bitnet.data import corpus, finding, packing, preferences, tokenizer
from bitnet.data.dialogues import Encoder, with_template
from bitnet.data.preferences import Preference, Preferences
from bitnet.evaluate.loss import chosen_windows
from bitnet.model import compiler, parallel
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say

WEIGHTS = {"preference": 1.0, "margin": 0.0, "accuracy": 0.0, "chosen": 0.0}
"""The loss; and metrics: reward of the chosen answer minus that of the rejected one, how often that is positive (a tie
counts half), and the reward of the chosen answer, which falls when both become less likely."""


@dataclass(frozen=True)
class Preferred:
    """Results on held-out pairs."""

    nats_per_pair: float  # log 2 before training
    margin: float
    accuracy: float
    chosen: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.nats_per_pair:.4f} nats/pair, margin {self.margin:.3f} (chosen {self.chosen:+.3f}), "
            f"{self.accuracy:.1%} preferred rightly"
        )

    @property
    def details(self) -> str:
        return f"{self.pairs:,} pairs"


def check(settings: Settings, config: ModelConfig) -> None:
    """Raises TrainingError if the model cannot be trained on preferences."""
    causal = config.has_head and config.mask == "causal" and config.input == "tokens" and not config.vision
    problems = [
        (not causal, "this model is not a text-only decoder"),
        (causal and not config.ternary, "the source is a full-precision model; bitnet finetune without --preference "
         "makes it ternary"),
        (settings.objective != "next", f"--objective is {settings.objective}"),
    ]  # fmt: skip
    for wrong, found in problems:
        if wrong:
            raise TrainingError(f"--preference is for a ternary model of the next token, and {found}")


# ---- data ----


def read(
    settings: Settings, words: Tokenizer, template: str | None, generation: dict[str, Any], context: int
) -> tuple[str | None, dict[str, Any], packing.Batches[Preferences], Preferences]:
    """Chat template, generation defaults, training batches and held-out pairs."""
    sides = preferences.split(preferences.read(finding.files_of(settings.preference)), settings.validation, say)
    template, generation, spelling = _spelling(sides[0] + sides[1], words, template, generation)
    seen, held_out = (_made(side, spelling, context) for side in sides)
    if not held_out.windows(context):
        raise corpus.DataError(f"no held-out pair fits --context {context:,}; raise it, or --validation")
    return template, generation, packing.Batches(seen, settings.batch, context, settings.seed), held_out


def _spelling(
    said: list[Preference], words: Tokenizer, template: str | None, generation: dict[str, Any]
) -> tuple[str | None, dict[str, Any], preferences.Spelling]:
    encoder = None
    if any(not isinstance(each.chosen, str) for each in said):
        template, generation = with_template(words, template, generation)
        encoder = Encoder(words, template, generation)
    first, end = tokenizer.separator(words, generation), tokenizer.end_token(words, generation)
    return template, generation, preferences.Spelling(words, first, end, encoder)


def _made(side: list[Preference], spelling: preferences.Spelling, context: int) -> Preferences:
    made = Preferences(side, spelling)
    if long := made.too_long(context):
        say(f"{long:,} of {len(made.pairs):,} pairs are longer than {context:,} tokens and left out; see --context")
    return made


def of_checkpoint(
    settings: Settings, words: Tokenizer, template: str | None, generation: dict[str, Any], state: dict[str, Any],
    folder: Path, context: int,
) -> Preferences:  # fmt: skip
    """The held-out pairs of a run, with their reference."""
    said = preferences.split(preferences.read(finding.files_of(settings.preference)), settings.validation)
    side = Preferences(said[1], _spelling(said[0] + said[1], words, template, generation)[2])
    if not side.windows(context):
        raise corpus.DataError(f"no held-out pair fits --context {context:,}; raise it")
    side.reference = _kept(folder / Path(str(state["reference"]["validation"])).name, side, context)
    return side


# ---- the reference ----


def refer(
    first: Callable[[], Transformer], seen: object, held_out: object, settings: Settings, context: int,
    before: dict[str, Any],
) -> dict[str, str]:  # fmt: skip
    """Give both sides their reference: log-probabilities of the model before its first step, computed or stored.

    first: returns that model; for a resumed run its source, read again if a file was lost.

    The training side is computed in the precision of the run, the held-out side in fp32, as in evaluations. before:
    the state of a resumed run. Returns the file names. All processes call it.
    """
    assert isinstance(seen, Preferences) and isinstance(held_out, Preferences)
    sides = {"train": seen, "validation": held_out}
    bf16 = torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16")
    files: dict[str, str] = before.get("reference", {})
    lost = parallel.from_first(lambda: any(not (settings.run_folder / file).is_file() for file in files.values()))
    if lost or not files:
        model = first()
        made = {name: _file_of(model, side, name, settings, context) for name, side in sides.items()}
        if files and made != files:
            raise TrainingError(
                f"{settings.run_folder} has lost the reference of the model before training, and {settings.source}, "
                "--context or --precision have changed since; start another run with --out"
            )
        files = made
    for name, side in sides.items():
        file = settings.run_folder / files[name]
        if not parallel.from_first(file.is_file):
            say(f"{file.parent}: computing the reference of {len(side.pairs):,} {name} pairs before training")
            found = _reference(model, side, context, settings.batch, bf16 if name == "train" else nullcontext())
            if parallel.is_first():
                _keep(file, found)
            parallel.wait_for_first()
        side.reference = _kept(file, side, context).to(settings.device)
    return files


def _file_of(model: Transformer, side: Preferences, name: str, settings: Settings, context: int) -> str:
    recipe = hashlib.sha256(f"{side.digest} {context} {settings.precision} {model.config.to_json()}".encode())
    for key, tensor in sorted(model.state_dict().items()):
        recipe.update(key.encode() + parallel.whole(tensor).detach().cpu().contiguous().numpy().tobytes())
    return f"{name}-{recipe.hexdigest()[:16]}.reference"


def _reference(
    model: Transformer, side: Preferences, context: int, batch: int, autocast: AbstractContextManager[Any]
) -> NDArray[np.float32]:
    """Log-probabilities (n, 2); NaN for pairs that do not fit the context."""
    n, sums = side.windows(context), torch.zeros(len(side.pairs), 2)
    with torch.no_grad(), compiler.eagerly(), model.evaluating():
        for i, counts in parallel.dealt(math.ceil(n / batch)):
            rows = [t.to(model.device) for t in side.window(range(i * batch, min(n, (i + 1) * batch)), context)]
            with autocast:
                pairs, said = _said(model, *rows)
            sums.index_add_(0, pairs.cpu(), said.cpu() * counts)
    found = np.array(parallel.total(sums.flatten().tolist()), np.float32).reshape(-1, 2)
    found[list(set(range(len(found))) - {i for row in side.rows(context) for i in row})] = np.nan
    return found


def _keep(file: Path, found: NDArray[np.float32]) -> None:
    """Write the numbers, and their SHA-256."""
    with process.written(file) as out:
        out.write(found.tobytes() + hashlib.sha256(found.tobytes()).digest())


def _kept(file: Path, side: Preferences, context: int) -> Tensor:
    try:
        kept = file.read_bytes()
    except FileNotFoundError:
        raise TrainingError(
            f"{file}, the reference of the model before training, is missing; resume the run to compute it again"
        ) from None
    numbers, digest = kept[:-32], kept[-32:]
    if len(numbers) != 8 * len(side.pairs) or hashlib.sha256(numbers).digest() != digest:
        raise TrainingError(f"{file} is damaged; remove it, and it is computed again when the run is resumed")
    found = torch.frombuffer(bytearray(numbers), dtype=torch.float32).reshape(-1, 2)
    if bool(found[[i for row in side.rows(context) for i in row]].isnan().any()):
        raise TrainingError(f"{file} has no numbers for the longest pairs; resume with the --context that the run had")
    return found


# ---- the loss ----


ROW = 2**32  # larger than any pair number


def _places(documents: Tensor) -> Tensor:
    """For each token a number for its pair and row, as a batch of a small set repeats rows; -1 for padding."""
    rows = torch.arange(len(documents), device=documents.device)[:, None] % (len(documents) // 2)
    return torch.where(documents < 0, documents, rows * ROW + documents)


def _said(forward: nn.Module, inputs: Tensor, targets: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the pairs in a batch, and the log-probabilities of their answers (n, 2)."""
    logs_BT = forward(inputs, documents, targets_BT=targets, each=True)[0]
    half = len(inputs) // 2
    places, of_BT = _places(documents).unique(return_inverse=True)
    sides = [
        torch.zeros(len(places), device=logs.device, dtype=logs.dtype).scatter_add(0, of.flatten(), logs.flatten())
        for of, logs in zip(of_BT.split(half), logs_BT.split(half), strict=True)
    ]
    here = places >= 0
    return places[here] % ROW, torch.stack(sides, -1)[here]


def terms(
    forward: nn.Module, reference: Tensor, beta: float, inputs: Tensor, targets: Tensor, documents: Tensor
) -> dict[str, Tensor]:
    """Sums over the pairs, named as in `WEIGHTS`."""
    pairs, said = _said(forward, inputs, targets, documents)
    rewards = beta * (said - reference[pairs])
    margin = rewards[:, 0] - rewards[:, 1]
    values = -F.logsigmoid(margin), margin, (margin.sign() + 1) / 2, rewards[:, 0]
    return {name: value.sum() for name, value in zip(WEIGHTS, values, strict=True)}


def counted(documents: Tensor) -> int:
    """How many pairs a batch has."""
    return int((_places(documents).unique() >= 0).sum())


def evaluate(model: Transformer, side: Preferences, beta: float, context: int, batch: int, limit: int = 0) -> Preferred:
    """Evaluate on held-out pairs, in fp32; limit: tokens, 0 for all."""
    rows = chosen_windows(side.windows(context), limit and max(1, limit // side.tokens_each(context)))
    found, n = dict.fromkeys(WEIGHTS, 0.0), 0
    with torch.no_grad(), model.evaluating():
        for i, counts in parallel.dealt(math.ceil(len(rows) / batch)):
            inputs, targets, documents = side.window(rows[i * batch : (i + 1) * batch], context)
            seen = [tensor.to(model.device) for tensor in (inputs, targets, documents)]
            sums = terms(model, side.reference.to(model.device), beta, *seen)
            if counts:
                n += counted(documents)
                found = {name: found[name] + float(value) for name, value in sums.items()}
    *sums_of_all, pairs = parallel.total([*found.values(), n])
    loss, margin, accuracy, chosen = (value / pairs for value in sums_of_all)
    return Preferred(loss, margin, accuracy, chosen, int(pairs))
