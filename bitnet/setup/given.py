"""What a user asks of a run: flags, and the file of --config, which may be the JSON configuration of a Thinker."""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bitnet.config import BOOLEANS, WITHIN, ModelConfig
from bitnet.data import tokenizer
from bitnet.data.finding import absolute
from bitnet.other_names import placed
from bitnet.settings import ALTERNATIVES, SOURCES, Settings, flag_of
from bitnet.setup import thinker
from bitnet_runtime.errors import did_you_mean

PATHS = (*SOURCES, "tokenizer", "source", "teacher", "vision")
"""Options that a run keeps as absolute paths, so that it can be resumed from any folder."""

VISION = "vision"
"""The option that is a model of its own: `--set vision.dim=64`, `[model.vision]`."""


TABLES = {
    table: {f.name for f in dataclasses.fields(options)}
    for table, options in (("train", Settings), ("model", ModelConfig))
}
"""The options of each table of a file."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user asks of a run."""

    options: Mapping[str, Any]  # of training, by name; None: not given
    config: str | None = None  # a TOML file with more of them, or the JSON of a Thinker
    model: Sequence[str] = ()  # options of the model, NAME=VALUE each

    @cached_property
    def file(self) -> dict[str, Any]:
        """What `config` says: read once, as it may be a pipe."""
        return _read(self.config) if self.config else {}


def run_folder(given: Given) -> Path:
    """The folder of the run. Raises ValueError: nothing names it."""
    train = options_of(given)[0]
    if not train.get("out") and "source" in given.options and not given.options["source"]:
        raise ValueError("--resume without SRC needs the run; name its folder with --out")
    source = {"source": train["source"], "quantize_warmup": 0.0} if "source" in train else {}
    return Settings.from_dict({name: train[name] for name in ("out", "preset") if name in train} | source).run_folder


@contextlib.contextmanager
def naming_file(given: Given) -> Iterator[None]:
    """A context in which errors of the model name the file that describes it."""
    try:
        yield
    except ValueError as error:
        if not given.file.get("model"):
            raise
        raise ValueError(f"{given.config}{' and --set' * bool(given.model)}: {error}") from None


def options_of(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of training and of the model that the user gave, by file and by flag; flags win."""
    file = given.file
    flags = {name: value for name, value in given.options.items() if value is not None}
    Settings.check_given(flags)
    _check_zeros(flags)
    in_file = {k: v for k, v in file.items() if k == "preset"} | file.get("train", {})
    train = over(over({}, in_file), flags)
    for name in SOURCES:
        if train.get(name) == []:
            raise ValueError(f"{name} is an empty list, expected files, folders or globs; leave it out for the default")
    for name in PATHS:
        value = train.get(name)
        if isinstance(value, str):
            train[name] = kept_path(name, value)
        elif isinstance(value, list):
            train[name] = [absolute(each) if isinstance(each, str) else each for each in value]
    if isinstance(asked := train.get("tasks"), str):
        train["tasks"] = ",".join(
            absolute(each) if each.endswith((".yaml", ".yml")) else each for each in asked.split(",")
        )
    of_file = file.get("model", {})
    seeing = of_file.get(VISION, {})
    if not isinstance(seeing, dict):
        raise ValueError(f"{given.config}: {VISION} is {seeing!r}, expected a table [model.{VISION}]")
    flat = {name: value for name, value in of_file.items() if name != VISION}
    flat |= {f"{VISION}.{name}": value for name, value in seeing.items()}
    try:
        Settings.check_given(in_file)
        _known(flat)
    except ValueError as error:
        raise ValueError(f"{given.config}: {error}") from None
    return train, _nested(flat | _known(dict(_assignment(text) for text in given.model)))


def _check_zeros(flags: Mapping[str, Any]) -> None:
    """Raises ValueError: the one budget that is given is 0, and the run would have the length of another one; or the
    rank of adapters is, and the whole model would be trained."""
    given = [name for name in ALTERNATIVES[0] if name in flags]
    if given and "steps" not in given and not any(flags[name] for name in given):
        raise ValueError(f"{flag_of(given[0])} is 0, expected more; leave it out, or give --steps N")
    if flags.get("lora") == 0:
        raise ValueError("--lora is 0, expected the rank of adapters; leave it out to train the whole model")


def kept_path(name: str, path: str) -> str:
    """An absolute path. A kind of tokenizer stays a word, even if a folder here has the same name."""
    return path if name == "tokenizer" and path in tokenizer.KINDS else absolute(path)


def _known(model: dict[str, Any]) -> dict[str, Any]:
    """The same options. Raises ValueError: no model has one of them."""
    if "draft" in model:
        raise ValueError("draft is a layer that follows from the model; add --draft to train one")
    own = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in WITHIN]
    names = [*own, *(f"{VISION}.{name}" for name in own)]
    if unknown := [name for name in model if name not in names]:
        where = placed(unknown[0])
        if unknown[0] in TABLES["train"]:
            where = f", which is of training: {flag_of(unknown[0])}, or [train] in a file"
        near = f"{where};" if where else did_you_mean(unknown[0], names)
        raise ValueError(f"unknown model option {unknown[0]!r}{near or ';'} docs/options.md lists them")
    return model


def _nested(model: dict[str, Any]) -> dict[str, Any]:
    """Options as `ModelConfig.replace` takes them: those of the vision stack in a dictionary."""
    own = {name: value for name, value in model.items() if "." not in name}
    seeing = {name.removeprefix(f"{VISION}."): value for name, value in model.items() if "." in name}
    return own | ({VISION: seeing} if seeing else {})


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Options overridden by others; of two that replace each other the overriding one counts."""
    below = dict(below)
    for first, *others in ALTERNATIVES:
        given = [name for name in others if above.get(name)] + [first] * (first in above)
        if len(given) > 1:
            raise ValueError(f"both {flag_of(given[0])} and {flag_of(given[1])} are given, expected one of them")
        for name in (first, *others) if given else ():
            below.pop(name, None)
    return below | above


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; expected a TOML file, or a Thinker's JSON") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if path.endswith(".json"):
        return thinker.parse(text, path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for name in values:
        if name not in ("preset", "train", "model"):
            table = next((kind for kind, known in TABLES.items() if name in known), "")
            near = f"; it belongs into [{table}]" if table else did_you_mean(name, ("train", "model"))
            raise ValueError(f"{path}: unknown name {name!r}, expected preset, [train] or [model]{near}")
        if name != "preset" and not isinstance(values[name], dict):
            raise ValueError(f"{path}: {name} is {values[name]!r}, expected a table [{name}]")
    return values


def _assignment(text: str) -> tuple[str, Any]:
    """`dim=256` as TOML would read it; a bare word is a string, or for a boolean option yes or no."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r}, expected NAME=VALUE")
    if name.removeprefix(f"{VISION}.") in BOOLEANS and value in ("yes", "no"):
        return name, value == "yes"
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
