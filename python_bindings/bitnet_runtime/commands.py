"""The command line of the runtime: `generate`, `chat`, `bench`.

The answer goes to stdout, everything else to stderr. Flags of sampling come from the table in
defaults.py. Only here may the runtime reach the other packages, inside `bench --shape`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bitnet_runtime.defaults import FIELDS, help_of, resolve
from bitnet_runtime.errors import ContextLengthError, InvalidParameterError
from bitnet_runtime.facts import KV_TYPES
from bitnet_runtime.terminal import cut_off, end_line, escape, fitting, say, show, too_long

if TYPE_CHECKING:
    from bitnet_runtime.model import Model

T = TypeVar("T")


def register(subparsers: Any) -> None:
    """Add the verbs; each sets `func`, which takes the parsed arguments and returns the exit code."""
    generate = subparsers.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text. The prompt comes from -p, from -f, or from standard input.",
    )
    _add_model(generate)
    source = generate.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with the text to continue")
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    generate.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    generate.set_defaults(func=_generate)

    chat = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model in the terminal; /help there lists the commands. Each line, typed or from a "
        'pipe, is a message; """ begins and ends one of several lines. A paste of several lines is one message where '
        "Python has GNU readline.",
    )
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    _add_sampling(chat)
    chat.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    chat.set_defaults(func=_chat)

    bench = subparsers.add_parser(
        "bench",
        help="measure speed and memory against the machine's limits",
        description="Measure a packed file, or random weights of a given shape written to a temporary file.",
    )
    _add_model(bench)
    bench.add_argument(
        "--shape", metavar="NAME", help="random weights of a preset, such as bitnet-2b4t, tiny, gguf, mini-gpt"
    )
    bench.add_argument(
        "--encoding",
        choices=("2.0", "1.6"),
        help="with --shape: bits a ternary weight (default: 2.0)",
    )
    bench.add_argument("--prompt", type=_count(1), default=128, metavar="N", help="tokens of prefill (default: 128)")
    bench.add_argument("--gen", type=_count(1), default=128, metavar="N", help="tokens to decode (default: 128)")
    bench.add_argument(
        "--depth", type=_count(0), default=0, metavar="N", help="tokens in the cache before (default: 0)"
    )
    bench.add_argument(
        "--repeat", type=_count(1), default=3, metavar="N", help="runs to take the median of (default: 3)"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(func=_bench)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a packed model file")
    parser.add_argument("-m", "--model", dest="model_flag", type=Path, metavar="MODEL", help="the same")
    group = parser.add_argument_group("engine")
    group.add_argument("-t", "--threads", type=_count(1), metavar="N", help="threads (default: physical cores)")
    group.add_argument(
        "-c",
        "--ctx",
        type=_count(1),
        metavar="N",
        help="tokens of context (default: the model's, as far as memory allows)",
    )
    group.add_argument("--isa", metavar="TIER", help="instruction set tier, such as avx2 or scalar (default: the best)")
    group.add_argument("--kv-type", choices=tuple(KV_TYPES), default="f16", help="numbers in the cache (default: f16)")
    group.add_argument("--no-verify", action="store_true", help="do not check the bytes of the weights")
    group.add_argument("--no-mmap", action="store_true", help="read the file into memory in place of mapping it")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """One flag for each row of the table; only flags that are given override the model's defaults."""
    group = parser.add_argument_group("sampling", "defaults of the model file come before those named here")
    for name, field in FIELDS.items():
        row = field.metadata
        flags = row["flags"] or ("--" + name.replace("_", "-"),)
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_of(name)}
        if name == "stop":
            options |= {"action": "append", "metavar": "TEXT", "type": _stop}
        elif name == "logit_bias":
            options |= {"action": "append", "metavar": "ID=X", "type": _bias}
        else:
            options |= {
                "metavar": "N" if isinstance(field.default, int) or name == "seed" else "X",
                "type": _option(name),
            }
        group.add_argument(*flags, **options)


def _option(name: str) -> Callable[[str], Any]:
    """A parser of one option that checks its range, so that argparse reports it as wrong usage."""
    integer = isinstance(FIELDS[name].default, int) or name == "seed"

    def parse(text: str) -> Any:
        try:
            value = None if text == "none" else int(text) if integer else float(text)
        except ValueError:
            value = text  # type: ignore[assignment]  # refused in the next line, with the range
        try:
            return getattr(resolve({name: value}), name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'', expected at least one character")
    return text


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        resolve({"logit_bias": {int(token): float(value)}})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a token id, =, and a number or -inf") from None
    return int(token), float(value)


def _count(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least {low}")
        return int(text)

    return parse


def _usage(message: str) -> int:
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


def _model_path(args: argparse.Namespace) -> Path | None:
    if args.model_flag and args.model:
        raise ValueError(f"two models, {args.model} and {args.model_flag}; expected one")
    path: Path | None = args.model_flag or args.model
    return path


@contextmanager
def _open(args: argparse.Namespace, path: Path) -> Iterator[Model]:
    """The model. Its errors of a context too small name the option that sets it."""
    from bitnet_runtime.model import Model

    try:
        with Model.load(path, **_load_options(args)) as model:
            yield model
    except InvalidParameterError as error:
        if error.param != "n_ctx":
            raise
        raise InvalidParameterError(str(error).replace("n_ctx", "--ctx", 1), "ctx") from None


def _load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Model.load."""
    return {
        "threads": args.threads,
        "n_ctx": args.ctx,
        "isa": args.isa,
        "kv_type": args.kv_type,
        "verify": not args.no_verify,
        "mmap": not args.no_mmap,
    }


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    given = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def _generate(args: argparse.Namespace) -> int:
    path = _model_path(args)
    if path is None:
        return _usage("no model; give a packed file, as in `bitnet generate model.bitnet -p TEXT`")
    prompt = _prompt(args)
    if prompt is None:
        return _usage("no prompt; give -p TEXT or -f FILE, or pipe text in")
    with _open(args, path) as model:
        _note(args, escape(str(model)))
        try:
            stream = _fitting(args, model, lambda: model.stream(prompt, **_sampling(args)))
        except ContextLengthError as error:
            raise ValueError(too_long("prompt", error.n_prompt, model)) from None
        try:
            for piece in stream:
                if not args.json and piece.text:
                    show(piece.text)
        finally:
            stream.close()
            result = stream.result
            assert result is not None  # the stream is closed
            if args.json:
                print(json.dumps(_as_json(result), ensure_ascii=sys.stdout.isatty()))
            else:
                print(flush=True)
            if result.usage.completion_tokens != getattr(args, "max_tokens", None):  # as many as were asked for
                _note(args, cut_off(result, model))
            _note(args, end_line(result))
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    """The text to continue; None when there is none."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # in the C locale it is not
    try:
        return sys.stdin.read() if args.file is None else str(args.file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{args.file or 'standard input'}: {found}, expected UTF-8 text") from None


def _note(args: argparse.Namespace, text: str) -> None:
    if text and not args.quiet:
        say(text)


def _fitting(args: argparse.Namespace, model: Model, make: Callable[[], T]) -> T:
    """`fitting`, unless the context was asked for."""
    return make() if args.ctx else fitting(model, make, lambda text: _note(args, text))


def _as_json(result: Any) -> dict[str, Any]:
    """A Result as plain dictionaries."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return values | {"usage": result.usage._asdict(), "timings": result.timings._asdict()}


def _chat(args: argparse.Namespace) -> int:
    path = _model_path(args)
    if path is None:
        return _usage("no model; give a packed file, as in `bitnet chat model.bitnet`")
    from bitnet_runtime.conversation import Conversation

    with _open(args, path) as model:
        model.require_head()
        _note(args, escape(str(model)))
        conversation = Conversation(model, args.system, _sampling(args), quiet=args.quiet)
        return conversation.run(_fitting(args, model, model.session))


def _bench(args: argparse.Namespace) -> int:
    from bitnet_runtime.bench import bench, table

    path = _model_path(args)
    if (path is None) == (args.shape is None):
        return _usage("give either a packed file or --shape NAME")
    if path is not None and args.encoding:
        return _usage("--encoding goes with --shape; a file has its own, which `bitnet export` can change")
    with _given(path) if path else _random_file(args.shape, args.encoding or "2.0") as file:
        figures = bench(
            file, prompt=args.prompt, gen=args.gen, depth=args.depth, repeat=args.repeat, **_load_options(args)
        )
    made = {"shape": args.shape, "encoding": None if path else args.encoding or "2.0"}
    print(json.dumps(made | figures) if args.json else table(figures))
    return 0


@contextmanager
def _given(path: Path) -> Iterator[Path]:
    yield path


@contextmanager
def _random_file(shape: str, encoding: str) -> Iterator[Path]:
    """A temporary packed file with random weights of a preset's shape."""
    from bitnet.config import PRESETS
    from bitnet_export import random_model

    if shape not in PRESETS:
        raise ValueError(f"shape is {shape!r}, expected one of {', '.join(PRESETS)}")
    with tempfile.TemporaryDirectory(prefix="bitnet-bench-") as folder:
        path = Path(folder) / f"{shape}.bitnet"
        print(f"writing random weights of shape {shape} …", file=sys.stderr)
        try:
            random_model(PRESETS[shape], path, 0, encoding=encoding)
        except MemoryError as error:
            said = f" ({error})" if str(error) else ""
            raise MemoryError(f"memory ran out while shape {shape} was written{said}; take a smaller one") from None
        yield path
