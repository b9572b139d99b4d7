"""docs/options.md: every preset and every option of training and of the model, as the code has them; and other names.

    python -m bitnet.reference > docs/options.md

A test compares the page with the code. What a model option means is the comment beside its field.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import textwrap
import tokenize
from pathlib import Path
from types import NoneType
from typing import Any

from bitnet import config, settings
from bitnet.config import ModelConfig
from bitnet.other_names import ELSEWHERE, OWN, UNITS
from bitnet.presets import PRESETS
from bitnet.settings import CONTEXT, CONVERSION, FINETUNE_SETTINGS, PRESET_SETTINGS, Settings
from bitnet.settings_rules import flag_of
from bitnet.sizes import SIZES
from bitnet.source_settings import of_source

HEAD = """# Presets and options

These are the options of `bitnet train` and `bitnet finetune`. There are three places for them, and each wins over the
one before:

1. a preset,
2. a TOML file, given with `--config`; paths in it are seen from where the command runs,
3. flags: `--lr 0.004` for training, `--set dim=256` for the model. Values of `--set` are read as in TOML, and a bare
   word is text: `--set 'ternary=["q", "o"]'`.

```toml
preset = "tiny"              # bitnet train --config my.toml --lr 0.006
[train]
data = ["my_text", "more/*.md"]
out = "runs/mine"
steps = 3000
lr = 0.004
[model]
dim = 256
n_layers = 6
ternary = ["q", "k", "v", "o", "gate", "up", "down"]
```

`--steps`, `--minutes`, `--tokens` and `--tokens-per-parameter` are alternatives, and so are `--batch-tokens` and
`--accumulate`. A flag replaces the one that a file or preset gives, and a file that of a preset. Two flags, or two in
one file, are an error. With `--resume` the run has its own settings, and with `--from` those of another: see
[train.md](train.md). `--json` prints the result as one JSON object.

An option that is yes or no is a flag, `--compile`, and `--no-compile` takes back what a preset or file says. In a file
it is `compile = true`.

`python -m bitnet.reference` writes this page from the code, and a test compares the two.
"""


def page() -> str:
    """All of docs/options.md."""
    return "\n".join([HEAD, *_presets(), *_training(), *_model(), *_elsewhere()])


def default_of(name: str, finetune: bool = False) -> str:
    """The default of an option as --help prints it, "" where its sentence says what none means."""
    plain = getattr(Settings(), name)
    if finetune:
        if name == "lr":
            ternary = PRESETS["tiny"]
            rates = [_shown(of_source(ternary, lora=lora, preference=wish)[0]["lr"])
                     for lora, wish in ((False, False), (True, False), (False, True), (True, True))]  # fmt: skip
            return "{}; with --lora {}, with --preference {}, with both {}".format(*rates)
        depends = {
            "quantize_warmup": "0.5, from a ternary source 0",
            "context": f"the source's, at most {CONTEXT}",
        }
        return depends.get(name) or _shown(FINETUNE_SETTINGS.get(name, plain))
    values: dict[str, list[str]] = {}
    for preset, changes in PRESET_SETTINGS.items():
        if preset not in SIZES:
            values.setdefault(_shown(changes.get(name, plain)), []).append(preset)
    of_sizes = {_shown(PRESET_SETTINGS[preset].get(name, plain)) for preset in SIZES}
    if name != "steps":  # they have another budget
        values.setdefault("by size" if len(of_sizes) > 1 else of_sizes.pop(), []).append("1m to 1b")
    if len(values) == 1:
        return _shown(plain)
    return "; ".join(f"{', '.join(presets)}: {value}" for value, presets in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value in ("", []) else str(value)


def _presets() -> list[str]:
    shapes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context")
    lines = ["## Presets", "", f"| | ternary weights | {' | '.join(shapes)} |", "|---" * (len(shapes) + 2) + "|"]
    for name, model in [(name, stack) for name, preset in PRESETS.items() for stack in preset.stacks]:
        name = f"its {model.name}" if model.input == "images" else f"`{name}`"
        sizes = [f"{getattr(model, shape):,}" for shape in shapes]
        lines.append(f"| {name} | {model.ternary_weights:,} | {' | '.join(sizes)} |")
    others = [name for name in PRESETS if name not in PRESET_SETTINGS]
    *more, last = (f"`{name}`" for name in others)
    lines += [
        "",
        f"{', '.join(more)} and {last} are published shapes, meant for `bitnet bench`: no options of training were "
        "chosen for them.",
        "",
        "| by size | parameters, gains not | `--lr` | tokens in a step | tokens |",
        "|---|---|---|---|---|",
    ]
    for name in SIZES:
        model, training = PRESETS[name], PRESET_SETTINGS[name]
        parameters = model.ternary_weights + model.vocab_size * model.dim
        tokens = float(f"{parameters * training['tokens_per_parameter']:.2g}")
        cells = f"{training['lr']:g}", f"{training['batch_tokens']:,}", f"{tokens:,.0f}"
        lines.append(f"| `{name}` | {parameters:,} | {' | '.join(cells)} |")
    lines += ["", "From 10m on these are extrapolated, not measured.", ""]
    return lines


def _training() -> list[str]:
    lines = ["## Training: flags, or `[train]`", "", "| option | type | default | of finetune, where another | |"]
    lines.append("|---|---|---|---|---|")
    for f in dataclasses.fields(Settings):
        plain = getattr(Settings(), f.name)
        kind = "text, several" if isinstance(plain, list) else _kind(plain)
        train, finetune = default_of(f.name), default_of(f.name, finetune=True)
        if f.name in CONVERSION:
            train, finetune = "", train or "none"
        elif f.name in ("preset", "tokenizer"):
            finetune = "not an option"
        other = finetune if finetune != train else ""
        choices = ", ".join(settings.CHOICES.get(f.name, ()))
        flag = "SRC" if f.name == "source" else flag_of(f.name)
        lines.append(f"| `{flag}` | {choices or kind} | {train} | {other} | {_cell(f.metadata['help'])} |")
    return [*lines, "", "In the file names have `_` in place of `-`, such as `save_every`.", ""]


def _model() -> list[str]:
    """The fields of ModelConfig under the headings that its source has, each with the comment beside it."""
    lines = ["## Model: `--set NAME=VALUE`, or `[model]`", ""]
    lines += ["A model that is shown images has a stack for them, `vision`, with options of its own:"]
    lines += ["`--set vision.dim=256`, or a table `[model.vision]`.", ""]
    lines += ["Adapters come from `bitnet finetune --lora`, and are refused here."]
    fields = {f.name: f for f in dataclasses.fields(ModelConfig)}
    for name, comment in _comments():
        if not name:
            lines += [
                "",
                f"**{comment[0].upper()}{comment[1:]}**",
                "",
                "| option | type | default | |",
                "|---|---|---|---|",
            ]
            continue
        default = fields[name].default
        shown = "by preset" if default is dataclasses.MISSING else _toml(default)
        kind = ", ".join(config.CHOICES.get(name, ())) or (
            "whole number" if default is dataclasses.MISSING else _kind(default)
        )
        lines.append(f"| `{name}` | {kind} | {shown} | {_cell(comment)} |")
    return [*lines, ""]


def _elsewhere() -> list[str]:
    lines = ["## Names in other trainers", "", "Each is refused, with its name here.", "", "| there | here |"]
    lines.append("|---|---|")
    for ours, others in ELSEWHERE.items():
        there = ", ".join(f"`{name}`" for name in others.split())
        here = f"`{ours if ours in OWN else flag_of(ours)}`"
        lines.append(f"| {there} | {here}{': ' * (ours in UNITS)}{UNITS.get(ours, '')} |")
    return [*lines, ""]


def _comments() -> list[tuple[str, str]]:
    """("", heading) and (field, comment) in the order of config.py."""
    source = Path(config.__file__).read_text(encoding="utf-8")
    body = source[source.index("class ModelConfig") : source.index("def __post_init__")]
    return comments_of(body[body.index("    # size") :])


def comments_of(body: str) -> list[tuple[str, str]]:
    """The same of a part of a class. Raises ValueError for a field without a comment: the page would say nothing of it.

    A field may take several lines; its comment is on any of them.
    """
    found: list[tuple[str, str]] = []
    field, comment = "", ""
    for each in tokenize.generate_tokens(io.StringIO(textwrap.dedent(body)).readline):
        if each.type == tokenize.COMMENT:
            comment = each.string.removeprefix("# ")
        elif each.type == tokenize.NAME and not field and each.start[1] == 0:
            field = each.string
        elif each.type == tokenize.NEWLINE or (each.type == tokenize.NL and comment and not field):
            if not comment:
                raise ValueError(f"the field {field} of ModelConfig has no comment on its lines; write one behind it")
            found.append((field, comment))
            field, comment = "", ""
    return found


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {
        bool: "yes or no", int: "whole number", float: "number", str: "text", tuple: "list", NoneType: "table",
    }  # fmt: skip
    return kinds[type(value)]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    try:
        print(page(), end="")
    except ValueError as error:
        sys.exit(f"bitnet.reference: error: {error}")
