"""Training from Python: a whole run with `fit`; parts of a loop of one's own with `load` and `save`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bitnet.evaluate.loss import check_vocabulary
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import manifest, saving, source_model, start
from bitnet.train.checkpoint import CONFIG, GENERATION, TEMPLATE, TOKENIZER, WEIGHTS, Checkpoint
from bitnet.train.loop import Outcome
from bitnet.train.resolve import Given

AnyPath = str | os.PathLike[str]


def fit(
    *,
    model: Mapping[str, Any] | None = None,
    config: AnyPath | None = None,
    resume: bool = False,
    branch: AnyPath = "",
    read: start.Read = source_model.read_checkpoint,
    **options: Any,
) -> Outcome:
    """A run of `bitnet train`, or with `source` of `bitnet finetune`: the same files, the same bits.

    options: those of docs/options.md, such as `data`, `tokens_per_parameter`, `batch_tokens`; a path may stand for a
    list of one. model: options of the model, such as {"dim": 256}. config: a TOML file with more of both.
    resume: go on from the newest checkpoint of `out`. branch: as `--from`.
    read: opens what `source`, `teacher` and `vision` name; `bitnet_export.convert.masters.read_start` those of Hugging
    Face, too.

    Ctrl-C saves and ends it, with `Outcome.signal`. Raises ValueError (TrainingError is one): an option, the data.
    """
    given = {name: _plain(name, value) for name, value in options.items()}
    sizes = [f"{name}={json.dumps(value)}" for name, value in (model or {}).items()]
    words = Given(options=given, config=os.fspath(config) if config else None, model=sizes)
    return start.train(words, read, resume, os.fspath(branch))


def _plain(name: str, value: Any) -> Any:
    """As the command line would have it."""
    several = isinstance(getattr(Settings(), name, None), list)
    if several and isinstance(value, str | os.PathLike):
        value = [value]
    if several and isinstance(value, list | tuple):
        return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def load(checkpoint: AnyPath) -> tuple[Transformer, Tokenizer]:
    """Model, in evaluation mode and fp32, and tokenizer of a checkpoint, or of the newest one of a run folder.

    Raises ValueError (CheckpointError): it is missing or damaged.
    """
    found = Checkpoint.open(checkpoint)
    return found.model, found.words


def save(model: Transformer, tokenizer: Tokenizer, folder: AnyPath, like: AnyPath | None = None) -> Path:
    """Write a checkpoint that `bitnet export`, `eval` and `finetune` take. One that is there is replaced once the new
    one is whole on disk.

    like: a checkpoint, or a run, whose chat template, start and end tokens and sampling defaults the new one gets.
    Raises ValueError: the tokenizer has more tokens than the model, a weight is NaN or infinite, or the folder holds
    something else.
    """
    final = Path(os.path.abspath(folder))
    if final.exists() and not _replaceable(final):
        raise ValueError(f"{folder} holds something else than `save` writes; name a new folder")
    source = Checkpoint.open(like) if like is not None else None
    check_vocabulary(tokenizer, model.config, str(folder))
    weights = {name: tensor.detach().to("cpu") for name, tensor in model.state_dict().items()}
    if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{broken[0]} holds NaN or infinity, not saved")
    final.parent.mkdir(parents=True, exist_ok=True)
    texts = {CONFIG: model.config.to_json() + "\n", TOKENIZER: tokenizer.to_str()}
    texts |= saving.answering(source.template, source.generation) if source else {}
    saving.put(final, {WEIGHTS: weights}, texts)
    return Path(folder)


def _replaceable(folder: Path) -> bool:
    """Whether all that is there is of an earlier `save`: a checkpoint of a run has more, to go on from."""
    ours = {WEIGHTS, CONFIG, TOKENIZER, TEMPLATE, GENERATION, manifest.NAME}
    return folder.is_dir() and {file.name for file in folder.iterdir()} <= ours
