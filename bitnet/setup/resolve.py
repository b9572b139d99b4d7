"""The options of a training run: a preset, then a TOML file, then flags; each overrides the one before.

    preset = "tiny"
    [train]
    lr = 0.004
    [model]
    dim = 256

`bitnet.setup.given` reads file and flags. A run that is resumed has its own settings in place of a preset.
docs/options.md lists all options.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from bitnet.config import TERNARY_LINEARS, WITHIN, ModelConfig
from bitnet.presets import PRESETS
from bitnet.settings import PRESET_SETTINGS, SOURCES, TEXT, Settings, flag_of
from bitnet.setup import adapters
from bitnet.setup.given import PATHS, VISION, Given, kept_path, naming_file, options_of, over
from bitnet.train.state import State
from bitnet_runtime.errors import did_you_mean

if TYPE_CHECKING:
    from bitnet.train.source_model import Start

STACK: dict[str, Any] = {
    "name": VISION, "input": "images", "vocab_size": 0, "max_context": -1, "mask": "bidirectional", "has_head": False,
    "tie_embeddings": False, "position": "learned", "channels": 3, "patch_bias": True,
}  # fmt: skip
"""The defaults of a new vision stack; `--set vision.NAME=VALUE` overrides them."""

KEPT = (
    "preset", "tokenizer", "source", "objective", "contrastive_loss", "vision", "freeze_vision", "draft", "draft_only",
    "self_written", "lora", "lora_linears", "documents", "validation",
)  # fmt: skip
"""Options that a resumed run cannot change: model, vocabulary, first weights, objective, masks and what is held out."""


def resolve(
    given: Given,
    saved: State | None = None,
    base: tuple[dict[str, Any], ModelConfig] | None = None,
    tower: Start | None = None,
) -> tuple[Settings, ModelConfig]:
    """Settings and model of a run from what a user asks.

    saved: the state of a run to resume, instead of a preset. base: defaults and model of a source, instead of a preset.
    tower: the model that --vision names.
    """
    train, overrides = options_of(given)
    if saved is not None:
        _check_resumed(train, overrides, saved)
        return Settings.from_dict(over(saved["settings"], train)), ModelConfig.from_dict(saved["model"])
    if base is not None:
        for name in ("preset", "tokenizer"):
            if name in train:
                raise ValueError(
                    f"{flag_of(name)} is an option of `bitnet train`; a model that is finetuned keeps its own"
                )
        if any(train.get(name) for name in SOURCES):
            base = ({name: value for name, value in base[0].items() if name not in TEXT}, base[1])
        if train.get("lora"):
            settings = _checked(Settings.from_dict(over(base[0], train)))
            return settings, adapters.added(base[1], overrides, settings)
    else:
        preset = train.get("preset", "tiny")
        if preset not in PRESETS:
            raise ValueError(
                f"unknown preset {preset!r}, expected {', '.join(PRESET_SETTINGS)}" + did_you_mean(preset, PRESETS)
            )
        base = PRESET_SETTINGS.get(preset, {}), PRESETS[preset]
    settings, stack = _together(*base, train, overrides, tower)
    with naming_file(given):
        return settings, with_sight(base[1], overrides, settings, stack)


def _together(
    defaults: dict[str, Any], base: ModelConfig, train: dict[str, Any], overrides: dict[str, Any], tower: Start | None
) -> tuple[Settings, dict[str, Any] | None]:
    """The settings, and the options of the vision stack that --vision names. A full-precision one becomes ternary if
    the rest is, and gradually even if the rest already is. A frozen one stays as it is, without dropout."""
    becomes = tower and tower.sees_in_floats and overrides.get("ternary", base.ternary)
    becomes = becomes and not train.get("freeze_vision")
    if becomes and not defaults.get("quantize_warmup", Settings().quantize_warmup):
        defaults = defaults | {"quantize_warmup": 0.5}
    settings = _checked(Settings.from_dict(over(defaults, train)))
    changes: dict[str, Any] = {"ternary": list(TERNARY_LINEARS)} if becomes else {}
    if settings.freeze_vision:
        changes["dropout"] = 0.0
    stack = _stack_of(tower, settings) | changes if tower else None
    return settings, stack


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
    "tasks_every": "tasks", "tasks_limit": "tasks",
}  # fmt: skip
"""Options that have no effect without another."""


def _checked(settings: Settings) -> Settings:
    """The settings of a new run. Raises ValueError: the learning rate would fall before it has risen, or an option
    would be ignored."""
    for name, other in NEEDS.items():
        if getattr(settings, name) != getattr(Settings(), name) and not getattr(settings, other):
            raise ValueError(f"{flag_of(name)} has no effect without {flag_of(other)}; add that, or leave it out")
    if settings.schedule != "constant" and settings.warmdown != Settings().warmdown:
        raise ValueError(f"--warmdown has no effect with --schedule {settings.schedule}, which falls all the time")
    shares = [length for length in (settings.warmup, settings.warmdown) if length <= 1]
    if settings.schedule == "constant" and sum(shares) > 1:
        raise ValueError(
            f"--warmup {settings.warmup:g} and --warmdown {settings.warmdown:g} are shares of one run, "
            "expected at most 1 together"
        )
    return settings


def _check_resumed(train: dict[str, Any], overrides: dict[str, Any], saved: State) -> None:
    """Raises ValueError: a resumed run cannot change that option."""
    before, elsewhere = saved["settings"], "start another run with --out to change it"
    for name in KEPT:
        old = before.get(name, "")
        if name in train and train[name] != (old := kept_path(name, old) if name in PATHS else old):
            raise ValueError(f"{flag_of(name)} is {train[name]}, but a resumed run keeps its own, {old}; {elsewhere}")
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
