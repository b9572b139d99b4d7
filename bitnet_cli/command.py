"""The `bitnet` command: one parser, which imports the module of the verb that is typed.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from bitnet_cli import advice
from bitnet_cli.signals import ENDS, at_once, leave
from bitnet_cli.table import VERBS

KIN = {"train": "finetune", "finetune": "train"}
"""Verbs that share most of their options."""
TEXTS = {"-p", "--prompt", "--text", "--system", "--attention"}
"""Options that may be empty."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that suggests the nearest valid word, and does not accept abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse ignores a full disk, so a help text that is cut off would seem to be whole."""
        (file or sys.stderr).write(message or "")

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            from bitnet_runtime.errors import did_you_mean

            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        valued = re.fullmatch(r"argument (?:.*/)?(-+[\w-]+): expected one argument", message)
        if valued:
            message += f"; one that begins with - is given as {valued[1]}=VALUE"
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        if not words[0].startswith("-") or " " in words[0]:
            where = {"-p": "a prompt follows -p", "--data": "text to read follows --data"}
            hint = next((f"; {said}" for option, said in where.items() if option in self._option_string_actions), "")
            self.error(f"unexpected argument {words[0]!r}{hint}")
        options = [name for name in self._option_string_actions if name.startswith("--")]
        word = words[0].partition("=")[0]
        file = f"; the file of that name is ./{words[0]}" if os.path.exists(words[0]) else ""
        from bitnet_runtime.errors import did_you_mean

        self.error(f"unknown option {word!r}" + (file or self.elsewhere(word) or did_you_mean(word, options)))

    def elsewhere(self, word: str) -> str:
        """Says where an option belongs that this verb lacks, or what it is called here."""
        return ""


class VerbParser(Parser):
    """The parser of one verb, which adds its arguments only when it has to parse."""

    def __init__(self, verb: str, **options: Any) -> None:
        super().__init__(**options)
        self._verb = verb

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _module(self._verb).arguments(self)
        self._refuse_empty(args)
        found, left = super().parse_known_args(args, namespace)
        several = next((each for each in self._actions if each.nargs == "+" and not each.option_strings), None)
        if several:  # argparse takes those in front of the first option alone
            more = [word for word in left if not word.startswith("-")]
            getattr(found, several.dest).extend(map(several.type or str, more))  # type: ignore[arg-type]
            left = [word for word in left if word.startswith("-")]
        return found, left

    def _refuse_empty(self, words: Sequence[str]) -> None:
        """Refuse empty arguments: an unset shell variable would mean the current folder, or an option not given."""
        for before, word in zip(["", *words], words, strict=False):
            option = before if word == "" else word[:-1] if re.fullmatch(r"--[\w-]+=", word) else None
            if option is not None and option not in TEXTS:
                self.error(f"{option if option.startswith('-') else 'an argument'} is empty, expected a value")

    def elsewhere(self, word: str) -> str:
        if not (other := KIN.get(self._verb)):
            return ""
        _module(other).arguments(theirs := Parser())
        if word in theirs._option_string_actions:
            return f", which is of bitnet {other}"
        from bitnet.other_names import placed

        return placed(word.removeprefix("--").replace("-", "_"))


def _module(verb: str) -> Any:
    return import_module(f"bitnet_cli.verbs.{verb.replace('-', '_')}")


def build_parser() -> tuple[Parser, dict[str, VerbParser]]:
    """The main parser and the parsers of the verbs."""
    about = "Train a ternary transformer, pack it into one file, run it fast."
    more = (
        "bitnet VERB --help shows the options of a verb. A first model: bitnet train --data my_text --out runs/mine, "
        "then bitnet export runs/mine mine.bitnet, then bitnet generate mine.bitnet -p TEXT."
    )
    parser = Parser(prog="bitnet", description=about, epilog=more, formatter_class=_Columns)
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=VerbParser)
    for verb in VERBS:
        verbs.add_parser(verb.name, help=verb.help, verb=verb.name)
    return parser, verbs.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Expected errors become one line."""
    if sys.stderr is None:  # closed by the parent process; print would use stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale may lack characters that we print
    if sys.stdout is None and (sys.argv[1:] if argv is None else argv)[:1] == ["serve"]:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (all that it says goes to standard error)
    if sys.stdout is None:
        return _fail("standard output is closed, expected a place for the answer")
    code = 0
    try:
        with _ending():
            code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # as the answer goes out
        return 130
    except OSError as error:  # the reader is gone, or the disk is full; Python would fail again at exit
        from bitnet_runtime.terminal import discard

        discard(sys.stdout.fileno())
        if code or isinstance(error, BrokenPipeError):  # the reason was given, or there is nobody to tell
            return code or 1
        return _fail(f"{error.strerror}: standard output")


@contextmanager
def _ending() -> Iterator[None]:
    """Let signals that end the program act like Ctrl-C, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in ENDS if signal.getsignal(number) == signal.SIG_DFL]  # nohup ignores one
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(argv: Sequence[str] | None) -> int:
    parser, verbs = build_parser()
    verb, args = "", argparse.Namespace()
    try:
        with at_once():  # the verb is imported
            args, unknown = parser.parse_known_args(argv)
        verb = args.verb
        if not verb and unknown:
            parser.refuse_unknown(unknown)
        if not verb:
            parser.error("the following arguments are required: VERB")
        if unknown:
            verbs[verb].refuse_unknown(unknown)
        if told := advice.of_folder():
            return _fail(told)
        # Read when torch is loaded. By default its threads spin for milliseconds between operations, so that on a
        # machine that is busy with something else a training step takes ten times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        code: int = _module(verb).run(args)
        return code
    except SystemExit as stop:  # argparse: --help, --version, wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except ImportError as error:
        if told := advice.of_another_project():
            return _fail(told)
        if not (verb and isinstance(error, ModuleNotFoundError)):
            raise  # the module of a verb itself imports only what is always installed
        missing = (error.name or "").partition(".")[0]
        extra = advice.EXTRAS.get(missing) or next(row.extra for row in VERBS if row.name == verb)
        return _fail(f"`bitnet {verb}` needs {missing}: {advice.install(extra)}")
    except OSError as error:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name)  # of a copy both
        if not names:
            sys.stdout.flush()  # fails again if the answer is what could not be written, as `main` then says
        told = getattr(error, "advice", "") or advice.of_argument(verbs.get(verb), args, error)
        told = told and f"; {told}"
        return _fail(f"{error.strerror}: {names}{told}" if names else error.strerror or str(error))
    except (ValueError, MemoryError, RuntimeError) as error:
        ours = type(error).__module__.startswith("bitnet")
        if not ours and (told := advice.of_memory(error)):
            return _fail(told)
        if isinstance(error, RuntimeError) and not ours:
            raise  # a bug of ours, so show the traceback
        return _fail(str(error) or type(error).__name__)


def _fail(message: str) -> int:
    from bitnet_runtime.terminal import escape, say

    say(f"bitnet: error: {escape(message)}")  # it may quote a file: no escape sequences, one line
    return 1


class _Columns(argparse.HelpFormatter):
    """A column wide enough for the longest verb: argparse forgets that verbs are indented further."""

    def format_help(self) -> str:
        self._action_max_length += 2
        return super().format_help()


class _Version(argparse.Action):
    """--version, which looks up the version only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata

        try:
            version = metadata.version("bitnet-edge")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"bitnet-edge {version}")
        parser.exit()
