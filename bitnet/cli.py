"""The `bitnet` command: one parser, a function for each verb.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 Ctrl-C. Nothing heavy is imported before a verb is known.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bitnet import settings

EXTRAS = {
    "export": "export", "convert": "export", "onnx": "export", "onnxruntime": "export",
    "tensorboard": "tensorboard", "lm_eval": "eval", "datasets": "datasets",
}  # fmt: skip
"""Of a verb or a package that has another than [train]."""


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest valid word, and does not guess from abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += settings.did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        if not words[0].startswith("-") or " " in words[0]:
            takes_text = "-p" in self._option_string_actions
            self.error(f"unexpected argument {words[0]!r}" + "; a prompt follows -p" * takes_text)
        options = [name for name in self._option_string_actions if name.startswith("--")]
        word = words[0].partition("=")[0]
        self.error(f"unknown option {word!r}" + settings.did_you_mean(word, options))


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and that of each verb."""
    import bitnet_export.commands as export_commands
    import bitnet_runtime.commands as runtime_commands
    from bitnet import eval_verb

    parser = Parser(prog="bitnet", description="Train a ternary transformer, pack it into one file, run it fast.")
    parser.add_argument("--version", action="version", version=f"bitnet-edge {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    register(verbs)
    eval_verb.register(verbs)
    export_commands.register(verbs)
    runtime_commands.register(verbs)
    return parser, verbs.choices


def register(verbs: Any) -> None:
    """The verbs of training."""
    train = verbs.add_parser(
        "train",
        help="train a model on text",
        description="Train a model. Options come from the preset, then --config, then flags. "
        "Without --data it learns from the source of Python's standard library.",
    )
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")
    train.add_argument("--json", action="store_true", help="print the result as one JSON object")
    settings.add_flags(train, without=settings.CONVERSION)
    train.set_defaults(func=_train)

    report = verbs.add_parser(
        "report",
        help="one page of figures about a training run",
        description="Draw a run, finished or not: losses, ternary codes, scales and activations, layer by layer, "
        "and text of the newest checkpoint. docs/watch.md says how to read it.",
    )
    report.add_argument("run", help="a run folder of `bitnet train`")
    report.add_argument("--out", metavar="", help="the page, .html or .png; none: report.html in the run folder")
    report.add_argument("--prompt", default="", metavar="", help="what the sample of text begins with")
    report.add_argument("--tokens", type=int, default=100, metavar="", help="of the sample; 0: no sample [100]")
    report.set_defaults(func=_report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Expected errors become one line."""
    if sys.stderr is None:  # closed by whoever started us; print would take stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return _fail("standard output is closed, expected a place for the answer")
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has left: nothing more to say, to anyone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str] | None) -> int:
    parser, verbs = build_parser()
    verb = ""
    try:
        args, unknown = parser.parse_known_args(argv)
        verb = args.verb
        if unknown:
            verbs[verb].refuse_unknown(unknown)
        code: int = args.func(args)
        return code
    except SystemExit as stop:  # argparse: --help, --version, wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(missing) or EXTRAS.get(verb, "train")
        return _fail(f"`bitnet {verb}` needs {missing}: {_install(extra)}")
    except OSError as error:
        return _fail(f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error))
    except (ValueError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not type(error).__module__.startswith("bitnet"):
            raise  # a mistake of ours: its traceback is wanted
        return _fail(str(error) or type(error).__name__)


def _fail(message: str) -> int:
    from bitnet_runtime.terminal import escape

    print(f"bitnet: error: {escape(message)}", file=sys.stderr)  # it may quote a file: no escape sequences, one line
    return 1


def _install(extra: str) -> str:
    """The command that adds what an extra of pyproject.toml names, whatever this installation came from."""
    from importlib import metadata

    def packages(extra: str) -> list[str]:
        found = []
        for requirement, _, marker in (line.partition(";") for line in metadata.requires("bitnet-edge") or ()):
            if re.search(rf"extra == ['\"]{extra}['\"]", marker):
                ours = re.match(r"bitnet-edge\[(.*)\]", requirement)
                found += [more for name in ours[1].split(",") for more in packages(name)] if ours else [requirement]
        return [requirement.strip() for requirement in dict.fromkeys(found)]

    return shlex.join([sys.executable, "-m", "pip", "install", *packages(extra)])


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("bitnet-edge")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _train(args: argparse.Namespace) -> int:
    # Read when torch is loaded. By default its threads spin for milliseconds between operations,
    # which on a machine that is busy with something else makes a step ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from bitnet.train import command

    return command(args)


def _report(args: argparse.Namespace) -> int:
    from bitnet.report import command

    return command(args)
