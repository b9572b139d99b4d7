"""Training from Python: a whole run with `fit`; parts of a loop of one's own with `load` and `save`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.evaluate.loss import check_vocabulary
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import manifest, saving, source_model, start
from bitnet.train.checkpoint import CONFIG, GENERATION, TEMPLATE, TOKENIZER, WEIGHTS, Checkpoint
from bitnet.train.loop import Outcome
from bitnet.train.resolve import Given

AnyPath = str | os.PathLike[str]

_ONE = threading.RLock()
"""Runs of one process share torch's generators, so they are made one after the other."""


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

    Ctrl-C saves and ends it, with `Outcome.signal`; while text is read, and in the last evaluation, it raises
    KeyboardInterrupt. Raises ValueError (TrainingError is one): an option, the data. OSError: a file.
    """
    if options.get("tasks"):
        raise ValueError("tasks are asked by `bitnet train` and `bitnet finetune`, not by fit; leave them out")
    if not isinstance(model or {}, Mapping):
        raise ValueError(f"model is {model!r}, expected a dictionary of options, such as {{'dim': 256}}")
    for name, path in (("config", config), ("branch", branch)):
        if not isinstance(path, str | os.PathLike | None):
            raise ValueError(f"{name} is {path!r:.60}, expected a path")
    given = {name: _plain(name, value) for name, value in options.items()}
    sizes = [f"{name}={_as_word(name, value)}" for name, value in (model or {}).items() if value is not None]
    words = Given(options=given, config=os.fspath(config) if config else None, model=sizes)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _ONE, torch.random.fork_rng(devices):  # a run seeds the generators of the process
        threads = torch.get_num_threads()
        try:
            return start.train(words, read, resume, os.fspath(branch or ""))
        finally:
            torch.set_num_threads(threads)


def _as_word(name: str, value: Any) -> str:
    """An option of the model as `--set` takes it."""
    try:
        return json.dumps(_of_numpy(value))
    except TypeError:
        raise ValueError(f"model has {name} = {value!r:.60}, expected a number, a string, or a list of them") from None


def _plain(name: str, value: Any) -> Any:
    """As the command line would have it."""
    several = isinstance(getattr(Settings(), name, None), list)
    if several and isinstance(value, str | os.PathLike):
        value = [value]
    if several and isinstance(value, list | tuple):
        return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else _of_numpy(value)


def _of_numpy(value: Any) -> Any:
    """A number as Python has it."""
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else value


def load(checkpoint: AnyPath) -> tuple[Transformer, Tokenizer]:
    """Model, in evaluation mode and fp32, and tokenizer of a checkpoint, or of the newest one of a run folder.

    Raises ValueError (CheckpointError): it is missing or damaged.
    """
    saving.put_back(Path(os.path.realpath(checkpoint)))
    found = Checkpoint.open(checkpoint)
    return found.model, found.words


def save(model: Transformer, tokenizer: Tokenizer, folder: AnyPath, like: AnyPath | None = None) -> Path:
    """Write a checkpoint that `bitnet export`, `eval` and `finetune` take. One that is there is replaced once the new
    one is whole on disk.

    like: a checkpoint, or a run, whose chat template, start and end tokens and sampling defaults the new one gets.
    Raises ValueError: model and tokenizer do not belong together, a weight is NaN or infinite, or the folder holds
    something that `save` has not written.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    for name, found, wanted in (("model", model, Transformer), ("tokenizer", tokenizer, Tokenizer)):
        if not isinstance(found, wanted):
            raise ValueError(f"{name} is of {type(found)}, expected {wanted.__module__}.{wanted.__name__}")
    final = Path(os.path.realpath(folder))
    saving.put_back(final)
    if final.exists() and not final.is_dir():
        raise ValueError(f"{folder} is a file, expected the name of a folder to write")
    if final.exists() and (other := _of_others(final)):
        raise ValueError(f"{folder} holds {other}, which `save` has not written; name a new folder")
    if final == Path.cwd():
        raise ValueError(f"{folder} is the folder you are in, which `save` would replace; name one in it")
    source = Checkpoint.open(like) if like is not None else None
    check_vocabulary(tokenizer, model.config, str(folder))
    weights = {name: each.detach().to("cpu", torch.float32, copy=True) for name, each in model.state_dict().items()}
    _check_weights(weights, model.config)
    final.parent.mkdir(parents=True, exist_ok=True)
    texts = {CONFIG: model.config.to_json() + "\n", TOKENIZER: _whole(tokenizer).to_str()}
    texts |= saving.answering(source.template, source.generation) if source else {}
    saving.put(final, {WEIGHTS: weights}, texts)
    return Path(folder)


def _check_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raises ValueError: they could not be read again."""
    with torch.device("meta"):
        expected = Transformer(config).state_dict()
    for name in sorted(weights.keys() | expected.keys()):
        found, wanted = (list(each[name].shape) if name in each else "missing" for each in (weights, expected))
        if found != wanted:
            raise ValueError(f"{name} is {found} in the model and {wanted} in one of its configuration, not saved")
        if not weights[name].isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity, not saved")


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """One that neither cuts texts nor fills them up."""
    words = Tokenizer.from_str(tokenizer.to_str())
    words.no_truncation()
    words.no_padding()
    return words


def _of_others(folder: Path) -> str:
    """What is there and not of an earlier `save`: a checkpoint of a run has more, to go on from. "": nothing."""
    found = {file.name for file in folder.iterdir()}
    ours = {WEIGHTS, CONFIG, TOKENIZER, TEMPLATE, GENERATION, manifest.NAME}
    return min(found - ours if {WEIGHTS, manifest.NAME} <= found else found, default="")
