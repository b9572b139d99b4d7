"""What `bitnet train` and `bitnet finetune` share: a flag for each option, and the report of a run that ended."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from bitnet.reference import default_of
from bitnet.settings import CHOICES, Settings, flag_of
from bitnet_runtime.terminal import show

if TYPE_CHECKING:
    from bitnet.setup.given import Given
    from bitnet.train.loop import Outcome


FIRST = ("preset", "data", "chat", "out", "tokenizer", "steps", "minutes", "context", "batch", "lr")
"""Options that most runs give: --help shows them before the others."""


def add_branch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="branch", default="", metavar="RUN",
        help="continue a checkpoint of another run, or that run, in --out; with another --steps, for example",
    )  # fmt: skip


def add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...], finetune: bool = False) -> None:
    """One flag for each field of Settings; absent flags are None, so that the file below them shows."""
    source = "SRC " * finetune
    parser.usage = f"%(prog)s {source}[--data NAME ...] [--out NAME] [--steps N | --minutes X] [OPTION ...]"
    parser.add_argument(
        "--config", metavar="FILE", help="TOML: options in tables [train] and [model]; or a Thinker's JSON; flags win"
    )
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append",
        help="an option of the model, such as dim=256; repeatable; docs/options.md lists them",
    )  # fmt: skip
    first, others = map(parser.add_argument_group, ("options of most runs", "more options"))
    for f in dataclasses.fields(Settings):
        if f.name in without:
            continue
        group = first if f.name in FIRST else others
        plain, shown = getattr(Settings(), f.name), default_of(f.name, finetune)
        text = f.metadata["help"] + (f" [{shown}]" if shown else "")
        if isinstance(plain, bool):
            group.add_argument(flag_of(f.name), action=argparse.BooleanOptionalAction, help=text)
            continue
        kind: dict[str, Any] = {"nargs": "+", "action": "extend"} if isinstance(plain, list) else {"type": type(plain)}
        if f.name in CHOICES:
            kind["choices"] = CHOICES[f.name]
        word = None if f.name in CHOICES else {int: "N", float: "X"}.get(type(plain), "NAME")
        group.add_argument(flag_of(f.name), default=None, help=text, metavar=word, **kind)


def given(args: argparse.Namespace) -> Given:
    """The options given as flags."""
    from bitnet.setup.given import Given

    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(Settings) if hasattr(args, f.name)}
    return Given(options=options, config=args.config, model=args.set or [])


def conclude(outcome: Outcome, as_json: bool) -> int:
    """Say where the checkpoint is and how good the model. Returns the exit code: 130 / 143 on Ctrl-C / SIGTERM."""
    if outcome.checkpoint and outcome.validation:
        figures = {"checkpoint": str(outcome.checkpoint)} | outcome.reached
        if as_json:
            print(json.dumps(figures | {"validation": dataclasses.asdict(outcome.validation)}))
        else:
            spent = f"{outcome.reached['tokens']:,} tokens, {outcome.reached['seconds']:.0f} s"
            show(f"{outcome.checkpoint}: validation {outcome.validation} after {spent}\n")
    return 128 + outcome.signal if outcome.signal else 0
