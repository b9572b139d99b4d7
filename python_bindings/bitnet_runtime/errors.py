"""The exceptions of this package, and the one place where a C status becomes an exception.

A message says what was found, what was expected and what to do. Each class also derives from
the builtin that fits, so `except ValueError` or `except OSError` work as a reader expects.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitnet_runtime._native import ffi, lib


class BitnetError(Exception):
    """Base of every error of this package."""


class ModelFileError(BitnetError, OSError):
    """The file cannot be opened or read, or is not a regular file. `errno` and `filename` as the system has them."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}" if self.errno else super().__str__()


class ModelNotFoundError(ModelFileError, FileNotFoundError):
    """There is no such file. `advice` is for whoever gave the name; one of its own is part of the message."""

    advice = "expected a packed file, as `bitnet export` makes of a run and `bitnet convert` of a published model"

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.advice}" if "advice" in vars(self) else super().__str__()


class ModelFormatError(BitnetError, ValueError):
    """Not a packed file, a damaged one, or one of a version this build does not know."""


class UnsupportedModelError(ModelFormatError):
    """A valid file whose model this engine cannot run, or a call that the model does not support: it has no head
    and so no logits, no table of tokens, or a mask without a next token."""


class SessionFileError(BitnetError, ValueError):
    """Not a saved session, a damaged one, or one that another model has saved."""


class ReceiptError(BitnetError, ValueError):
    """Not a receipt, or one that no answer of the model can have."""


class ModelTooLargeError(BitnetError, MemoryError):
    """Not enough memory for the model or for a session's context."""


class ContextLengthError(BitnetError, ValueError):
    """More tokens than the context holds. Both numbers are attributes.

    at_least: `n_prompt` is what the length of a text proves; it was refused before its tokens were made.
    most: the largest context that the model allows. some: what is said of some of them. The message ends with `advice`.
    """

    def __init__(self, n_prompt: int, n_ctx: int, *, at_least: bool = False, most: int = 0, some: str = "") -> None:
        larger = f", or ask for a larger n_ctx: the model allows up to {most}" if most > n_ctx else ""
        self.advice = f"; shorten the text{larger}"
        super().__init__(
            f"{'at least ' if at_least else ''}{n_prompt} tokens exceed the available context "
            f"size: this model's maximum context length is {n_ctx} tokens{some and f'; {some}'}{self.advice}"
        )
        self.n_prompt, self.n_ctx, self.most = n_prompt, n_ctx, most
        self.some = some

    def __reduce__(self) -> tuple[Any, ...]:
        """As `args` has the sentence, which `naming` may have begun anew, and `__init__` takes numbers."""
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[BitnetError], args: tuple[Any, ...]) -> BitnetError:
    return kind.__new__(kind, *args)


class CacheFullError(BitnetError, RuntimeError):
    """No room for more tokens in the `cache_bytes` of the model. The session is unchanged; retry when others end."""


class InvalidParameterError(BitnetError, ValueError):
    """A parameter with an unknown name or a value out of range. `param` is its name."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class GrammarError(InvalidParameterError):
    """A JSON schema, regular expression or grammar that is wrong or too costly."""


class TokenizerError(BitnetError, ValueError):
    """The file has no tokenizer, a broken one, or it refused the text."""


class ToolCallError(BitnetError, ValueError):
    """A model's tool call has arguments that are not a JSON object."""


class TemplateError(BitnetError, ValueError):
    """The chat template is missing, wrong or too costly. `fault`: what is wrong with it, whatever the messages are."""

    fault = ""


class ImageError(BitnetError, ValueError):
    """A picture that cannot be read, is too large, or is not what the call takes."""


class MissingDependencyError(BitnetError, RuntimeError):
    """A library that this call needs is not installed."""


class ClosedError(BitnetError, RuntimeError):
    """The model or the session was closed."""


class StateError(BitnetError, RuntimeError):
    """A call in the wrong order, such as sampling before anything was appended."""


class CancelledError(BitnetError, RuntimeError):
    """`Session.cancel()` was called. Every call on the session raises this until `rewind` or `reset`."""


class NumericError(BitnetError, RuntimeError):
    """The logits are not numbers, or every token is ruled out."""


class ThreadError(BitnetError, RuntimeError):
    """A worker thread could not be started, or the process in which a template, a tokenizer or a format runs; or the
    machine is too busy for it."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """An error within says of which of several things it is. "": there is only one."""
    try:
        yield
    except BitnetError as error:
        if what and error.args and isinstance(error.args[0], str):
            error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise


_CLASSES: dict[int, type[BitnetError]] = {
    lib.BN_ERR_ARGUMENT: InvalidParameterError,
    lib.BN_ERR_MEMORY: ModelTooLargeError,
    lib.BN_ERR_IO: ModelFileError,
    lib.BN_ERR_NOT_REGULAR: ModelFileError,
    lib.BN_ERR_UNSUPPORTED: UnsupportedModelError,
    lib.BN_ERR_CONTEXT: InvalidParameterError,  # callers know both numbers, and raise ContextLengthError
    lib.BN_ERR_TOKEN: InvalidParameterError,
    lib.BN_ERR_STATE: StateError,
    lib.BN_ERR_CANCELLED: CancelledError,
    lib.BN_ERR_NUMERIC: NumericError,
    lib.BN_ERR_THREAD: ThreadError,
    lib.BN_ERR_NO_HEAD: UnsupportedModelError,
    lib.BN_ERR_NO_TABLE: UnsupportedModelError,
    lib.BN_ERR_MASK: UnsupportedModelError,
    lib.BN_ERR_INPUT: UnsupportedModelError,
    lib.BN_ERR_CACHE: CacheFullError,
}
"""Statuses not named here say that the file is wrong."""


def check(status: int, detail: str = "") -> None:
    """Raise the exception of a status other than BN_OK; `detail` completes its sentence."""
    if status != lib.BN_OK:
        sentence = ffi.string(lib.bn_status_text(status)).decode()
        raise _CLASSES.get(status, ModelFormatError)(f"{sentence}: {detail}" if detail else sentence)


def check_session(status: int, model: Any, options: Any) -> None:
    """`check` for a new session: says what it needs, what there is, and how much context fits."""
    if status == lib.BN_ERR_MEMORY:
        memory = ffi.new("bn_session_memory *")
        check(lib.bn_session_plan(model, options, memory))
        if memory.needed > memory.available:
            most = memory.largest_n_ctx
            largest = f"the largest that fits is {most} (n_ctx={most}, --ctx {most})" if most else "not even 1 fits"
            raise ModelTooLargeError(
                f"a session with n_ctx {options.n_ctx} takes {memory.needed / 1e6:,.1f} MB, expected at most "
                f"{memory.available / 1e6:,.1f} MB: {ffi.string(memory.limited_by).decode()}; {largest}"
            )
    check(status)


def check_open(status: int, detail: str, path: Path, is_adapter: bool) -> None:
    """`check` for opening a file: adds the path, what the system says, and what makes a packed file of a folder."""
    if status == lib.BN_ERR_IO:  # the detail is a call and strerror
        reason = detail.partition(": ")[2]
        number = next((number for number in errno.errorcode if os.strerror(number) == reason), None)
        if number is not None:
            raise _not_found(path, is_adapter) if number == errno.ENOENT else ModelFileError(number, reason, str(path))
    if status == lib.BN_ERR_NOT_REGULAR and path.is_dir():
        verb = "export" if any([*path.glob("state.json"), *path.glob("step-*/state.json")]) else "convert"
        detail += f"; `bitnet {verb} {shlex.quote(str(path))} OUT` makes a packed file of a folder with a model"
    check(status, f"{path}: {detail}" if detail else str(path))


def _not_found(path: Path, is_adapter: bool) -> ModelNotFoundError:
    """Whoever gave the name of a published model is told how to get it."""
    error = ModelNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if is_adapter:
        error.advice = "expected an adapter, as `bitnet export` makes of a run of `bitnet finetune --lora`"
        return error
    owned = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path.as_posix(), re.ASCII) and not path.parent.is_dir()
    if owned and path.suffix != ".bitnet":
        error.advice = (
            "a published model is downloaded and converted once: "
            f"`hf download {path.as_posix()} --local-dir FOLDER`, then `bitnet convert FOLDER model.bitnet`"
        )
    return error


def to_install(package: str) -> str:
    """The command that adds a package to this Python, which need not be the one that `pip` means."""
    return shlex.join([sys.executable, "-m", "pip", "install", package])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant. min_x is not a typo of max_x: whoever asks for one does not want the other."""
    other = {"min": "max", "max": "min"}.get(word[:3], "\0")
    near = difflib.get_close_matches(word, [name for name in known if not name.startswith(other)], 1)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The suggestion at the end of an error; "" when nothing is near. Leading dashes do not count as likeness."""
    bare = {name.lstrip("-"): name for name in known}
    near = nearest(word.lstrip("-"), bare)
    return f", did you mean {bare[near]!r}?" if near else ""


def shown(value: object, most: int = 100) -> str:
    """A value as a message shows it: short, and never an error of its own."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())  # an array's has several
    except Exception:  # such as an integer of 5,000 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def json_kind(value: object) -> str:
    """What a value of a JSON file is, by the name that JSON has for it."""
    names = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")  # from a table


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads`. Raises ValueError: a key is there twice, and programs would differ in which
    one counts."""
    values = dict(pairs)
    if len(values) != len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r:.80} occurs {times} times, expected once")
    return values
