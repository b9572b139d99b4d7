"""Options shared by verbs that run a model: the file, how it is loaded, and how tokens are sampled.

Flags of sampling come from the table in bitnet_runtime/defaults.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bitnet_cli.arguments import Once, at_least
from bitnet_cli.signals import at_once
from bitnet_cli.texts import read_text, typed
from bitnet_runtime.defaults import FIELDS, help_of, is_whole, resolve
from bitnet_runtime.errors import InvalidParameterError, ModelTooLargeError, shown
from bitnet_runtime.model_sessions import shrink
from bitnet_runtime.shape import KV_TYPES
from bitnet_runtime.structured.formats import KINDS
from bitnet_runtime.terminal import say

if TYPE_CHECKING:
    from bitnet_runtime.model import Model

T = TypeVar("T")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a packed model file")
    parser.add_argument("-m", "--model", dest="model_flag", type=Path, metavar="MODEL", help="a packed model file")
    add_engine(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded."""
    group = parser.add_argument_group("engine")
    add_threads(group)
    group.add_argument(
        "-c",
        "--ctx",
        type=at_least(1),
        metavar="N",
        help="tokens of context (default: the model's, as far as memory allows)",
    )
    group.add_argument(
        "--isa", type=_tier, metavar="TIER", help="instruction set tier, such as avx2 or scalar (default: the best)"
    )
    group.add_argument(
        "--kv-type", choices=tuple(KV_TYPES), default="f16", help="numbers in the KV cache (default: f16)"
    )
    group.add_argument("--no-verify", action="store_true", help="do not check the bytes of the weights")
    group.add_argument("--no-mmap", action="store_true", help="read the file into memory instead of mapping it")


def add_threads(group: argparse._ActionsContainer) -> None:
    group.add_argument("-t", "--threads", type=at_least(1, 256), metavar="N", help="threads (default: physical cores)")


def _tier(name: str) -> str:
    from bitnet_runtime.machine import available_isas

    if name not in (tiers := available_isas()):
        raise argparse.ArgumentTypeError(f"{shown(name)}, expected one of {', '.join(tiers)}")
    return name


def add_adapter(parser: argparse.ArgumentParser, help: str = "an adapter of the model (docs/adapters.md)") -> None:
    parser.add_argument("--adapter", action=Once, type=Path, metavar="FILE", help=help)


def add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template", type=_template, metavar="FILE", help="a chat template in Jinja's language, in place of the "
        "model's, or for a model without one",
    )  # fmt: skip


def _template(name: str) -> str:
    try:
        found = read_text(Path(name))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}; expected the name of a file") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found:
        raise argparse.ArgumentTypeError(f"{name} is empty, expected a chat template")
    return found


def add_images(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("-i", "--image", action="append", metavar="FILE", help=help)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """One flag for each row of the table; only flags that are given override the model's defaults."""
    group = parser.add_argument_group("sampling", "defaults of the model file come before those named here")
    formats = group.add_mutually_exclusive_group()
    for name, field in FIELDS.items():
        row = field.metadata
        flags = row["flags"] or ("--" + name.replace("_", "-"),)
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_of(name)}
        if name == "stop":
            options |= {"action": "append", "type": typed, "metavar": "TEXT"}
        elif name == "stop_token_ids":
            options |= {"action": "append", "metavar": "ID", "type": _token}
        elif name == "ignore_eos":
            options |= {"action": "store_true"}
        elif name == "logit_bias":
            options |= {"action": "append", "metavar": "ID=X", "type": _bias}
        elif name in KINDS:
            options |= {"metavar": "TEXT" if name == "regex" else "FILE", "type": _format(name)}
        else:
            options |= {
                "metavar": "N" if is_whole(name) else "X",
                "type": _option(name),
            }
        (formats if name in KINDS else group).add_argument(*flags, **options)


def _option(name: str) -> Callable[[str], Any]:
    """A parser of one option that checks its range, so that argparse reports it as wrong usage."""
    integer = is_whole(name)

    def parse(text: str) -> Any:
        value: float | str | None = text  # what is no number is refused below, with the range
        with suppress(ValueError):
            value = None if text == "none" else int(text) if integer else float(text)
        try:
            return getattr(resolve({name: value}), name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _token(text: str) -> int:
    try:
        (token,) = resolve({"stop_token_ids": [int(text)]}).stop_token_ids
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a token id") from None
    return token


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        resolve({"logit_bias": {int(token): float(value)}})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a token id, =, and a number or -inf") from None
    return int(token), float(value)


def _format(name: str) -> Callable[[str], Any]:
    """A parser of an answer's format: a regular expression, or the name of a file with a schema or grammar."""

    def parse(given: str) -> Any:
        try:
            return getattr(resolve({name: typed(given) if name == "regex" else read_text(Path(given))}), name)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{given}: {error.strerror}; expected the name of a file") from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def model_path(args: argparse.Namespace) -> Path | None:
    if args.model_flag and args.model:
        raise ValueError(f"two models, {args.model} and {args.model_flag}; expected one")
    path: Path | None = args.model_flag or args.model
    return path


@contextmanager
def opened(args: argparse.Namespace, path: Path) -> Iterator[Model]:
    """The loaded model. Errors about a context that is too small name the option that sets it."""
    with _naming_ctx(), load(args, path) as model:
        yield model


def load(args: argparse.Namespace, path: Path, **changes: Any) -> Model:
    """The loaded model. changes: arguments of Model.load that replace those given."""
    with at_once():
        from bitnet_runtime.model import Model

    with _naming_ctx():
        model = Model.load(path, **load_options(args) | changes)
    try:
        if getattr(args, "chat_template", None):  # a broken one is told now, not with the first answer
            model.render_template([{"role": "user", "content": "?"}])
    except BaseException:
        model.close()
        raise
    return model


@contextmanager
def _naming_ctx() -> Iterator[None]:
    try:
        yield
    except InvalidParameterError as error:
        if error.param != "n_ctx":
            raise
        raise InvalidParameterError(str(error).replace("n_ctx", "--ctx", 1), "ctx") from None


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Model.load."""
    return {
        "threads": args.threads,
        "n_ctx": args.ctx,
        "isa": args.isa,
        "kv_type": args.kv_type,
        "verify": not args.no_verify,
        "mmap": not args.no_mmap,
        "chat_template": getattr(args, "chat_template", None),
        "adapters": [args.adapter] if isinstance(getattr(args, "adapter", None), Path) else (),
    }


def adapter_of(model: Model) -> str | None:
    """The name of the adapter that --adapter gave."""
    return next(iter(model.adapters), None)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    given = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def note(args: argparse.Namespace, text: str) -> None:
    if text and not args.quiet:
        say(text)


def fitting_session(args: argparse.Namespace, model: Model, make: Callable[[], T]) -> T:
    """What `make` returns, which has a session. If that does not fit in memory, and no context was asked for: a smaller
    context, and a note."""
    try:
        return make()
    except ModelTooLargeError:
        if args.ctx or not shrink(model):
            raise
        what = f"[a context of {model.n_ctx:,} tokens, as the model's {model.info.max_context:,} do not fit in memory; "
        note(args, what + "-c N sets another]")
        return make()
