"""Training from Python: a whole run with `fit`; `load` and `save` for your own training loop."""

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
from bitnet.setup import start
from bitnet.setup.given import Given
from bitnet.train import manifest, saving, source_model
from bitnet.train.checkpoint import CONFIG, GENERATION, TEMPLATE, TOKENIZER, WEIGHTS, Checkpoint
from bitnet.train.loop import Outcome

AnyPath = str | os.PathLike[str]

_ONE = threading.RLock()
"""Runs in one process share torch's random generators, so they run one at a time."""


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

    options: those of docs/options.md, such as `data`, `tokens_per_parameter`, `batch_tokens`; instead of a list a
    single path may be given. model: options of the model, such as {"dim": 256}. config: a TOML file with more of both.
    resume: continue from the newest checkpoint of `out`. branch: as `--from`.
    read: opens the models of `source`, `teacher` and `vision`; `bitnet_export.convert.masters.read_start` also opens
    Hugging Face folders.

    Ctrl-C saves and ends the run, with `Outcome.signal` and, if it was finished, `validation`; while text is read, and
    in the last evaluation, it raises KeyboardInterrupt. Raises ValueError (of which TrainingError is one) for options
    and data, OSError for files.
    """
    if options.get("tasks"):
        raise ValueError("tasks are evaluated by `bitnet train` and `bitnet finetune`, not by fit; leave them out")
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
    """The value of an option as the command line would give it."""
    several = isinstance(getattr(Settings(), name, None), list)
    if several and isinstance(value, str | os.PathLike):
        value = [value]
    if several and isinstance(value, list | tuple):
        return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else _of_numpy(value)


def _of_numpy(value: Any) -> Any:
    """A numpy scalar as a Python number."""
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else value


def load(checkpoint: AnyPath) -> tuple[Transformer, Tokenizer]:
    """Model (in evaluation mode, fp32) and tokenizer of a checkpoint, or of the newest one of a run folder.

    Raises ValueError (CheckpointError) if it is missing or damaged.
    """
    saving.put_back(Path(os.path.realpath(checkpoint)))
    found = Checkpoint.open(checkpoint)
    return found.model, found.words


def save(model: Transformer, tokenizer: Tokenizer, folder: AnyPath, like: AnyPath | None = None) -> Path:
    """Write a checkpoint for `bitnet export`, `eval` and `finetune`. An existing one is replaced once the new one is
    complete on disk.

    like: a checkpoint or run whose chat template, start and end tokens and sampling defaults the new one gets.
    Raises ValueError if model and tokenizer do not match, or tokenizer and `like`, a weight is NaN or infinite, or the
    folder holds files that `save` did not write.
    """
    model = getattr(model, "_orig_mod", model)  # the attribute of a compiled model
    for name, found, wanted in (("model", model, Transformer), ("tokenizer", tokenizer, Tokenizer)):
        if not isinstance(found, wanted):
            raise ValueError(f"{name} is of {type(found)}, expected {wanted.__module__}.{wanted.__name__}")
    final = Path(os.path.realpath(folder))
    saving.put_back(final)
    if final.exists() and not final.is_dir():
        raise ValueError(f"{folder} is a file, expected the name of a folder to write")
    if final.exists() and (other := _of_others(final)):
        raise ValueError(f"{folder} holds {other}, which `save` did not write; name a new folder")
    if final == Path.cwd():
        raise ValueError(f"{folder} is the current folder, which `save` would replace; name a folder inside it")
    source = Checkpoint.open(like) if like is not None else None
    check_vocabulary(tokenizer, model.config, str(folder))
    if source:
        _check_marks(source, tokenizer)
    weights = {name: each.detach().to("cpu", torch.float32, copy=True) for name, each in model.state_dict().items()}
    _check_weights(weights, model.config)
    final.parent.mkdir(parents=True, exist_ok=True)
    texts = {CONFIG: model.config.to_json() + "\n", TOKENIZER: _whole(tokenizer).to_str()}
    texts |= saving.answering(source.template, source.generation) if source else {}
    saving.put(final, {WEIGHTS: weights}, texts)
    return Path(folder)


def _check_marks(source: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a start or end token of `source` is not in the tokenizer, or another token there."""
    start, ends = (source.generation.get(name) for name in ("bos_token_id", "eos_token_ids"))
    for token in [*(ends or []), *([] if start is None else [start])]:
        found, wanted = (words.id_to_token(token) for words in (tokenizer, source.words))
        if found != wanted:
            raise ValueError(
                f"token {token} is {wanted!r} in {source.folder}, {found!r} here; give the tokenizer of that run"
            )


def _check_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raises ValueError if the weights could not be read back."""
    with torch.device("meta"):
        expected = Transformer(config).state_dict()
    for name in sorted(weights.keys() | expected.keys()):
        found, wanted = (list(each[name].shape) if name in each else "missing" for each in (weights, expected))
        if found != wanted:
            raise ValueError(f"{name} is {found} in the model and {wanted} in one of its configuration, not saved")
        if not weights[name].isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity, not saved")


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """A copy without truncation and padding."""
    words = Tokenizer.from_str(tokenizer.to_str())
    words.no_truncation()
    words.no_padding()
    return words


def _of_others(folder: Path) -> str:
    """A file in the folder that `save` did not write, such as the optimizer state of a run's checkpoint; "": none."""
    found = {file.name for file in folder.iterdir()}
    ours = {WEIGHTS, CONFIG, TOKENIZER, TEMPLATE, GENERATION, manifest.NAME}
    return min(found - ours if {WEIGHTS, manifest.NAME} <= found else found, default="")
