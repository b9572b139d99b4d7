"""Everything this package raises, and the one place where a C status becomes an exception.

A message says what was found, what was expected and what to do. Each class also derives from
the builtin that fits, so `except ValueError` or `except OSError` work as a reader expects.
"""

from __future__ import annotations

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
    """More tokens than the context holds. Both numbers are attributes."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"{n_prompt} tokens exceed the available context size: the maximum context length is {n_ctx} tokens; "
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


_SIGNATURES: list[tuple[bytes, str]] = [
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a git-LFS pointer: the text that stands for a file git did not download"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "a program"),
]

_EXPECTED = "expected a packed model, written by `bitnet export CHECKPOINT OUT`"


def describe_foreign(path: Path) -> str:
    """What a file that is not ours is, from its bytes and never from its name; "" when unknown."""
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        return "an empty file"
    for magic, name in _SIGNATURES:
        if head.startswith(magic):
            return name
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page, perhaps an error page saved in place of a download"
    if head.startswith(b"PK\x03\x04"):
        is_torch = b"data.pkl" in head or b".data/" in head or b"archive/" in head
        return "a PyTorch checkpoint (zip)" if is_torch else "a zip archive"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file"
    if head[:1] == b"\x80" and 2 <= head[1] <= 5:
        return "a Python pickle, which is never opened because it could run code"
    if head[:1] == b"\x08" and head[1] < 32 and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x3a"):
        return "an ONNX model"  # protobuf: ir_version, then producer_name, its version, domain, or the graph
    if text.startswith((b"{", b"[")):
        return "a JSON text"
    return ""


def check_open(status: int, detail: str, path: Path) -> None:
    """`check` for opening a file: adds the path, and what a foreign file is."""
    if status == lib.BN_OK:
        return
    if status not in (lib.BN_ERR_IO, lib.BN_ERR_NOT_REGULAR, lib.BN_ERR_MEMORY, lib.BN_ERR_THREAD) and path.is_file():
        found = describe_foreign(path)
        if found and status in (lib.BN_ERR_MAGIC, lib.BN_ERR_TRUNCATED):
            raise ModelFormatError(f"{path} is {found}; {_EXPECTED}")
        if status == lib.BN_ERR_MAGIC:
            raise ModelFormatError(f"{path} is not a packed model: {detail or 'unknown format'}; {_EXPECTED}")
    check(status, f"{path}: {detail}" if detail else str(path))
