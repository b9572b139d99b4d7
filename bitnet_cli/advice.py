"""What to do about an error whose own text does not say it."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import sys

EXTRAS = {
    "onnx": "export", "onnxruntime": "export", "tensorboard": "tensorboard", "lm_eval": "eval", "datasets": "datasets",
    "pyarrow": "data", "datasketch": "data", "wandb": "wandb", "trackio": "trackio",
}  # fmt: skip
"""The extra that holds a package, where that is not the extra of the verb."""


def of_argument(parser: argparse.ArgumentParser | None, args: argparse.Namespace, error: OSError) -> str:
    """What the argument is for that names no file, in the words of its help; what to do where none can be made; "" for
    any other error."""
    if parser and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        for action in parser._actions:
            value, told = getattr(args, action.dest, None), re.match(r"an? [^;%[]*", action.help or "")
            if told and str(error.filename) in map(str, value if isinstance(value, list) else [value]):
                return f"expected {told[0].strip()}"
    closed = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and isinstance(error.filename, str)
    if closed and not os.path.lexists(error.filename):
        folder = os.path.dirname(os.path.abspath(error.filename))
        if os.access(folder, os.X_OK) and not os.access(folder, os.W_OK):
            return "no file may be made there; name another folder"
    return ""


def of_folder() -> str:
    """What to do if the current folder was removed, of which torch ends without a word; "" otherwise."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was removed; change to one that exists"
    return ""


def of_memory(error: Exception) -> str:
    """What to do where memory ran out; "" for any other error. Python may say nothing, torch has no type for it."""
    said = str(error).partition("\n")[0]
    if not isinstance(error, MemoryError) and "allocate memory" not in said.lower():
        return ""
    return f"memory ran out{said and f' ({said})'}; end other programs, raise the limit, or take a smaller model"


def of_another_project() -> str:
    """What to do about the unrelated package that is also imported as `bitnet`; "" if it is not installed."""
    from importlib import metadata

    try:
        version = metadata.version("bitnet")
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"the package `bitnet` {version}, another project, is installed too and has files of the same names; "
        f"run {sys.executable} -m pip uninstall bitnet, then install bitnet-edge again with --force-reinstall"
    )


def install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, however this package was installed."""
    from importlib import metadata

    def packages(extra: str) -> list[str]:
        found = []
        for requirement, _, marker in (line.partition(";") for line in metadata.requires("bitnet-edge") or ()):
            if re.search(rf"extra == ['\"]{extra}['\"]", marker):
                ours = re.match(r"bitnet-edge\[(.*)\]", requirement)
                found += [more for name in ours[1].split(",") for more in packages(name)] if ours else [requirement]
        return [requirement.strip() for requirement in dict.fromkeys(found)]

    return shlex.join([sys.executable, "-m", "pip", "install", *packages(extra)])
