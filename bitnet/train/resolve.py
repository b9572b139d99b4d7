"""The options of a training run: a preset, then a TOML file, then flags; each overrides the one before.

    preset = "tiny"
    [train]
    lr = 0.004
    [model]
    dim = 256

The JSON configuration of a Thinker may take the place of the file. A run that is resumed has its own
settings in place of a preset. docs/options.md lists all options.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.config import BOOLEANS, TERNARY_LINEARS, WITHIN, ModelConfig
from bitnet.data import tokenizer
from bitnet.data.finding import absolute
from bitnet.presets import PRESETS
from bitnet.settings import ALTERNATIVES, PRESET_SETTINGS, SOURCES, TEXT, Settings, did_you_mean, flag_of
from bitnet.train import adapters, thinker

if TYPE_CHECKING:
    from bitnet.train.source_model import Start

PATHS = (*SOURCES, "tokenizer", "source", "teacher", "vision")
"""Options that a run keeps as absolute paths, so that it can be resumed from any folder."""

VISION = "vision"
"""The option that is a model of its own: `--set vision.dim=64`, `[model.vision]`."""

STACK: dict[str, Any] = {
    "name": VISION, "input": "images", "vocab_size": 0, "max_context": -1, "mask": "bidirectional", "has_head": False,
    "tie_embeddings": False, "position": "learned", "channels": 3, "patch_bias": True,
}  # fmt: skip
"""The defaults of a new vision stack; `--set vision.NAME=VALUE` overrides them."""

KEPT = (
    "preset", "tokenizer", "source", "objective", "contrastive_loss", "vision", "freeze_vision", "draft", "draft_only",
    "self_written", "lora", "lora_linears",
)  # fmt: skip
"""Options that a resumed run cannot change: model, vocabulary, first weights and objective follow from them."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user asks of a run."""

    options: Mapping[str, Any]  # of training, by name; None: not given
    config: str | None = None  # a TOML file with more of them, or the JSON of a Thinker
    model: Sequence[str] = ()  # options of the model, NAME=VALUE each


def run_folder(given: Given) -> Path:
    """The folder of the run. Raises ValueError: nothing names it."""
    train = _given(given)[0]
    if not train.get("out") and "source" in given.options and not given.options["source"]:
        raise ValueError("--resume without SRC needs the run; name its folder with --out")
    source = {"source": train["source"], "quantize_warmup": 0.0} if "source" in train else {}
    return Settings.from_dict({name: train[name] for name in ("out", "preset") if name in train} | source).run_folder


def named(given: Given, name: str) -> str:
    """The path that a flag or the file gives an option; "": none."""
    return str(_given(given)[0].get(name, ""))


def asks(given: Given, name: str) -> bool:
    """Whether a yes-or-no option is given as yes."""
    return bool(_given(given)[0].get(name))


def resolve(
    given: Given,
    saved: dict[str, Any] | None = None,
    base: tuple[dict[str, Any], ModelConfig] | None = None,
    tower: Start | None = None,
) -> tuple[Settings, ModelConfig]:
    """Settings and model of a run from what a user asks.

    saved: the state of a run to resume, instead of a preset. base: defaults and model of a source, instead of a preset.
    tower: the model that --vision names.
    """
    train, overrides = _given(given)
    if saved is not None:
        _check_resumed(train, overrides, saved)
        return Settings.from_dict(_over(saved["settings"], train)), ModelConfig.from_dict(saved["model"])
    if base is not None:
        for name in ("preset", "tokenizer"):
            if name in train:
                raise ValueError(f"{name} is an option of `bitnet train`; a model that is finetuned keeps its own")
        if any(train.get(name) for name in SOURCES):
            base = ({name: value for name, value in base[0].items() if name not in TEXT}, base[1])
        if train.get("lora"):
            settings = _checked(Settings.from_dict(_over(base[0], train)))
            return settings, adapters.added(base[1], overrides, settings)
        return _together(*base, train, overrides, tower)
    preset = train.get("preset", "tiny")
    if preset not in PRESETS:
        raise ValueError(
            f"unknown preset {preset!r}, expected {', '.join(PRESET_SETTINGS)}" + did_you_mean(preset, [*PRESETS])
        )
    return _together(PRESET_SETTINGS.get(preset, {}), PRESETS[preset], train, overrides, tower)


def _together(
    defaults: dict[str, Any], base: ModelConfig, train: dict[str, Any], overrides: dict[str, Any], tower: Start | None
) -> tuple[Settings, ModelConfig]:
    """A full-precision vision stack becomes ternary if the rest is, and gradually even if the rest already is. A frozen
    one stays as it is, without dropout."""
    becomes = tower and tower.sees_in_floats and overrides.get("ternary", base.ternary)
    becomes = becomes and not train.get("freeze_vision")
    if becomes and not defaults.get("quantize_warmup", Settings().quantize_warmup):
        defaults = defaults | {"quantize_warmup": 0.5}
    settings = _checked(Settings.from_dict(_over(defaults, train)))
    changes: dict[str, Any] = {"ternary": list(TERNARY_LINEARS)} if becomes else {}
    if settings.freeze_vision:
        changes["dropout"] = 0.0
    stack = _stack_of(tower, settings) | changes if tower else None
    return settings, with_sight(base, overrides, settings, stack)


def with_sight(
    base: ModelConfig, overrides: dict[str, Any], settings: Settings, tower: dict[str, Any] | None
) -> ModelConfig:
    """`base` with the given options. For a model that sees images, what follows from others is filled in: its stack is
    that of --vision, `tower`. A decoder gets vectors of its own width, in place of a token that the tokenizer will
    name."""
    own, seeing = dict(overrides), dict(overrides.get(VISION, {}))
    if not (seeing or base.vision or tower):
        return base.replace(**own)
    answers = own.get("has_head", base.has_head)
    if base.vision is None or tower:
        stack = tower or STACK
        if answers:
            stack = stack | {"pooling": "none", "out_dim": own.get("dim", base.dim), "projector_bias": True}
        for name in ("image_size", "patch_size", "channels"):
            if tower and seeing.get(name, stack[name]) != stack[name]:
                raise ValueError(
                    f"vision.{name} is {stack[name]} in {settings.vision}, {seeing[name]} in this run; leave "
                    f"--set vision.{name} out, or train without --vision"
                )
        seeing = stack | seeing
        for field in ("pixel_mean", "pixel_std"):
            seeing.setdefault(field, [0.5] * seeing["channels"])
        own.setdefault("name", "decoder" if answers else "text")
    if answers:
        own.setdefault("image_token", base.image_token or 1)
    return base.replace(**own | ({VISION: seeing} if seeing else {}))


def _stack_of(tower: Start, settings: Settings) -> dict[str, Any]:
    """The options of the vision stack that a model has, or is. Raises ValueError: it has none."""
    if tower.sight is None:
        raise ValueError(f"--vision {settings.vision} has no vision stack; name a model that sees images")
    return tower.sight.to_dict() | {"name": VISION}


NEEDS = {
    "beta": "preference", "distill_temperature": "distill", "distill_layer": "distill_relations", "column": "data",
}  # fmt: skip
"""Options that have no effect without another."""


def _checked(settings: Settings) -> Settings:
    """The settings of a new run. Raises ValueError: the learning rate would fall before it has risen, or an option
    would be ignored."""
    for name, other in NEEDS.items():
        if getattr(settings, name) != getattr(Settings(), name) and not getattr(settings, other):
            raise ValueError(f"{flag_of(name)} has no effect without {flag_of(other)}; add that, or leave it out")
    shares = [length for length in (settings.warmup, settings.warmdown) if length <= 1]
    if settings.schedule == "constant" and sum(shares) > 1:
        raise ValueError(
            f"warmup {settings.warmup:g} and warmdown {settings.warmdown:g} are shares of one run, "
            "expected at most 1 together"
        )
    return settings


def _given(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of training and of the model that the user gave, by file and by flag; flags win."""
    file = _read(given.config) if given.config else {}
    flags = {name: value for name, value in given.options.items() if value is not None}
    Settings.check_names(flags)
    in_file = {k: v for k, v in file.items() if k == "preset"} | file.get("train", {})
    train = _over(_over({}, in_file), flags)
    for name in SOURCES:
        if train.get(name) == []:
            raise ValueError(f"{name} is an empty list, expected files, folders or globs; leave it out for the default")
    for name in PATHS:
        value = train.get(name)
        if isinstance(value, str):
            train[name] = _kept(name, value)
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
        Settings.check_names(in_file)
        _known(flat)
    except ValueError as error:
        raise ValueError(f"{given.config}: {error}") from None
    return train, _nested(flat | _known(dict(_assignment(text) for text in given.model)))


def _kept(name: str, path: str) -> str:
    """An absolute path. A kind of tokenizer stays a word, even if a folder here has the same name."""
    return path if name == "tokenizer" and path in tokenizer.KINDS else absolute(path)


def _known(model: dict[str, Any]) -> dict[str, Any]:
    """The same options. Raises ValueError: no model has one of them."""
    if "draft" in model:
        raise ValueError("draft is a layer that follows from the model; add --draft to train one")
    own = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in WITHIN]
    names = [*own, *(f"{VISION}.{name}" for name in own)]
    if unknown := [name for name in model if name not in names]:
        near = did_you_mean(unknown[0], names)
        raise ValueError(f"unknown model option {unknown[0]!r}{near or ';'} docs/options.md lists them")
    return model


def _nested(model: dict[str, Any]) -> dict[str, Any]:
    """Options as `ModelConfig.replace` takes them: those of the vision stack in a dictionary."""
    own = {name: value for name, value in model.items() if "." not in name}
    seeing = {name.removeprefix(f"{VISION}."): value for name, value in model.items() if "." in name}
    return own | ({VISION: seeing} if seeing else {})


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Options overridden by others; of two that replace each other the overriding one counts."""
    below = dict(below)
    for first, *others in ALTERNATIVES:
        given = [name for name in others if above.get(name)] + [first for _ in (0,) if first in above]
        if len(given) > 1:
            raise ValueError(f"both {flag_of(given[0])} and {flag_of(given[1])} are given, expected one of them")
        for name in (first, *others) if given else ():
            below.pop(name, None)
    return below | above


def _check_resumed(train: dict[str, Any], overrides: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError: a resumed run cannot change that option."""
    before, elsewhere = saved["settings"], "start another run with --out to change it"
    for name in KEPT:
        old = before.get(name, "")
        if name in train and train[name] != (old := _kept(name, old) if name in PATHS else old):
            raise ValueError(f"{name} is {train[name]}, but a resumed run keeps its {name}, {old}; {elsewhere}")
    for name in SOURCES:
        if train.get(name) and not before.get(name):
            raise ValueError(f"a resumed run keeps its text, which --{name} would change; {elsewhere}")
    if train.get("fim") and not before.get("fim"):
        raise ValueError(f"a resumed run keeps its tokenizer, which has no tokens for --fim; {elsewhere}")
    model = ModelConfig.from_dict(saved["model"])
    if overrides.get("vocab_size") == saved.get("vocab_size"):
        overrides = {name: value for name, value in overrides.items() if name != "vocab_size"}
    if overrides and (changed := model.replace(**overrides)) != model:
        said = ", ".join(f"{name} = {value}" for name, value in _flat(model).items() if _flat(changed)[name] != value)
        raise ValueError(f"a resumed run keeps its model, which has {said}; {elsewhere}")
    behind = {"steps": saved["step"], "minutes": saved["seconds"] / 60, "tokens": saved["tokens"]}
    behind["tokens_per_parameter"] = saved["tokens"] / saved["parameters"]
    for name, done in behind.items():
        given, shape = train.get(name), ",.0f" if name in ("steps", "tokens") else ",.4g"
        if isinstance(given, int | float) and 0 < given < done and given != before.get(name):
            raise ValueError(
                f"{flag_of(name)} is {given:g}, but the run already has {done:{shape}}; give more, or leave it out"
            )


def _flat(model: ModelConfig) -> dict[str, Any]:
    """Options by their names in `--set`."""
    own = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name not in WITHIN}
    seeing = model.vision and _flat(model.vision)
    return own | {f"{VISION}.{name}": value for name, value in (seeing or {}).items()}


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
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
            raise ValueError(f"{path}: unknown name {name!r}, expected preset, [train] or [model]")
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
