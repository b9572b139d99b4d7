"""Everything this package raises, and the one place where a C status becomes an exception.

A message says what was found, what was expected and what to do. Each class also derives from
the builtin that fits, so `except ValueError` or `except OSError` work as a reader expects.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from bitnet_runtime._native import ffi, lib


class BitnetError(Exception):
    """Base of every error of this package."""


class ModelFileError(BitnetError, OSError):
    """The file cannot be opened or read, or is not a regular file."""


class ModelFormatError(BitnetError, ValueError):
    """Not a packed file, a damaged one, or one of a version this build does not know."""


class UnsupportedModelError(ModelFormatError):
    """A valid file whose model this engine cannot run, or that has no head and so no logits."""


class ModelTooLargeError(BitnetError, MemoryError):
    """Not enough memory for the model or for a session's context."""


class ContextLengthError(BitnetError, ValueError):
    """More tokens than the context holds. Both numbers are attributes.

    at_least: `n_prompt` is what the length of a text proves; it was refused before its tokens were made.
    """

    def __init__(self, n_prompt: int, n_ctx: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"{'at least ' if at_least else ''}{n_prompt} tokens exceed the available context size: "
            f"the maximum context length is {n_ctx} tokens; "
            f"shorten the text, or load the model with a larger n_ctx if the model allows it"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class InvalidParameterError(BitnetError, ValueError):
    """A parameter with an unknown name or a value out of range. `param` is its name."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class TokenizerError(BitnetError, ValueError):
    """The file has no tokenizer, a broken one, or it refused the text."""


class TemplateError(BitnetError, ValueError):
    """The chat template is missing, wrong, or asks for more work than a template may."""


class MissingDependencyError(BitnetError, RuntimeError):
    """A library that this call needs is not installed."""


class ClosedError(BitnetError, RuntimeError):
    """The model or the session was closed."""


class StateError(BitnetError, RuntimeError):
    """A call in the wrong order, such as sampling before anything was appended."""


class NumericError(BitnetError, RuntimeError):
    """The logits are not numbers, or every token is ruled out."""


class ThreadError(BitnetError, RuntimeError):
    """A worker thread could not be started."""


_CLASSES: dict[int, type[BitnetError]] = {
    lib.BN_ERR_ARGUMENT: InvalidParameterError,
    lib.BN_ERR_MEMORY: ModelTooLargeError,
    lib.BN_ERR_IO: ModelFileError,
    lib.BN_ERR_NOT_REGULAR: ModelFileError,
    lib.BN_ERR_UNSUPPORTED: UnsupportedModelError,
    lib.BN_ERR_CONTEXT: InvalidParameterError,  # callers check first and raise ContextLengthError
    lib.BN_ERR_TOKEN: InvalidParameterError,
    lib.BN_ERR_STATE: StateError,
    lib.BN_ERR_CANCELLED: StateError,  # nothing here cancels
    lib.BN_ERR_NUMERIC: NumericError,
    lib.BN_ERR_THREAD: ThreadError,
    lib.BN_ERR_NO_HEAD: UnsupportedModelError,
}
"""Statuses not named here say that the file is wrong."""


def check(status: int, detail: str = "") -> None:
    """Raise the exception of a status other than BN_OK; `detail` completes its sentence."""
    if status != lib.BN_OK:
        sentence = ffi.string(lib.bn_status_text(status)).decode()
        raise _CLASSES.get(status, ModelFormatError)(f"{sentence}: {detail}" if detail else sentence)


def check_open(status: int, detail: str, path: Path) -> None:
    """`check` for opening a file: adds the path, and what makes a packed file of a folder."""
    if status == lib.BN_ERR_NOT_REGULAR and path.is_dir():
        verb = "export" if any([*path.glob("state.json"), *path.glob("step-*/state.json")]) else "convert"
        detail += f"; `bitnet {verb} {shlex.quote(str(path))} OUT` makes a packed file of a folder with a model"
    check(status, f"{path}: {detail}" if detail else str(path))
