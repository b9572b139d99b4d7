"""The files that the sources of a run name (paths, folders, globs), without files that runs wrote."""

from __future__ import annotations

import functools
import glob
import itertools
import os
import shlex
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from bitnet.data import files, hub
from bitnet.data.files import DataError

PACKED = b"\x89BITNET\n"  # first bytes of a packed model (export/FORMAT.md)
LOG = "log.jsonl"  # the log of a run
PYTHON = "pyvenv.cfg"  # marks a virtual environment
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders of the standard library with third-party packages, tests, or generated tables."""


def files_of(sources: Sequence[str], runs: set[Path] | None = None, others: Counter[str] | None = None) -> list[Path]:
    """The files that paths, folders and globs name, each once; no source: Python's standard library.

    In folders and open globs only files with a known suffix count; a file that is named, or matched by a glob with its
    suffix, always does. Files that a run wrote in folders and globs are left out. runs: receives the folders of such
    runs. others: receives the suffixes of files of unknown kinds in folders.
    """
    runs = set() if runs is None else runs
    others = Counter() if others is None else others
    if not sources:
        return [*_standard_library()]
    taken: dict[Path, None] = {}
    for source in sources:
        path = Path(source)
        named = path.exists() or path.is_symlink()
        named_so = [path] if named else [Path(match) for match in matches(source)]
        if not named_so:
            raise DataError(f"no file, folder or glob matches {source!r}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(
                f"{source!r} is a pipe or a device, expected a file, as text is read several times; write it to one"
            )
        known = [path] if path.is_file() else []
        for match in named_so if not known else ():
            found, rest = walk(match) if match.is_dir() else ([match] if _is_there(match) else [], [])
            of_runs = _in_runs([*found, *rest], match if match.is_dir() else match.parent)
            others.update(file.suffix.lower() or "no suffix" for file in rest if file not in of_runs)
            runs |= set(of_runs.values())
            wanted = path.suffix or None
            known += [f for f in found if (files.is_known(f) or f.suffix == wanted) and f not in of_runs]
        if not known:
            raise DataError(f"{source!r} holds no text, expected files ending in {files.ENDINGS}")
        taken |= dict.fromkeys(known)
    for file in taken:
        if not files.is_known(file) and _is_packed(file):
            raise DataError(
                f"{file} is a packed model, expected text; `bitnet finetune RUN --data TEXT` goes on with the run it "
                f"came from, `bitnet eval {shlex.quote(str(file))} --data TEXT` measures it"
            )
    return list(taken)


@functools.cache  # each export asks, and looks at thousands of files
def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in walk(root, LEFT_OUT)[0] if file.suffix == ".py"]


def absolute(path: str, folder: Path | None = None) -> str:
    """The absolute path of a file, folder, glob or dataset.

    A source that names nothing stays as it was given, for messages. folder: the only base of relative paths; None: the
    current folder.
    """
    kind, name, more = hub.parts_of(path) if hub.is_named(path) else ("", path, [])
    whole = os.path.join(folder or "", name)
    elsewhere = folder is not None and not kind
    if name and (elsewhere or os.path.exists(whole) or (not kind and matches(whole))):
        name = os.path.abspath(whole)
    return kind + ":".join([name, *more])


def matches(pattern: str) -> list[str]:
    """The paths that match a glob. `glob` itself follows a link to a parent folder forty times, and two forever."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    roots = [root for root in glob.glob(str(Path(*parts[:at]))) if Path(root).is_dir()]
    if not (rest := [*itertools.dropwhile(lambda part: part == "**", parts[at:])]):
        return sorted(roots)
    inner = (str(Path(glob.escape(folder), *rest)) for root in roots for folder, *_ in _places(root))
    return sorted({match for each in inner for match in matches(each)})


def _is_packed(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as handle:
        return handle.read(len(PACKED)) == PACKED


def walk(folder: Path, without: Collection[str] = ()) -> tuple[list[Path], list[Path]]:
    """The text files below a folder, also through links, and the other files. Skipped: folders with the names
    `without`, hidden ones, and virtual environments of Python."""
    found: list[Path] = []
    for place, folders, names in _places(folder, without, _cannot_read):
        if PYTHON in names and Path(place) != folder:
            folders[:] = []
            continue
        found += [file for name in names if not name.startswith(".") and _is_there(file := Path(place, name))]
    return sorted(filter(files.is_known, found)), list(itertools.filterfalse(files.is_known, found))


def _places(
    root: str | Path, without: Collection[str] = (), failed: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like `os.walk`, following links: the folder and those below it, each once, without hidden ones and those in
    `without`."""
    seen = set()
    for place, folders, names in os.walk(root, onerror=failed, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders[:] = []  # a link to a folder already seen, perhaps a parent
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        yield place, folders, names


def _cannot_read(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}; a part of the text would be missing")


def _is_there(file: Path) -> bool:
    """Whether this is a file or a broken link. Raises DataError for a broken link with the suffix of a text."""
    nowhere = file.is_symlink() and not file.exists()
    if nowhere and files.is_known(file):
        raise DataError(
            f"{file} is a link to {os.readlink(file)}, which does not exist; a part of the text would be missing"
        )
    return nowhere or file.is_file()


def _in_runs(files: Iterable[Path], walked: Path) -> dict[Path, Path]:
    """Which of the files below `walked` lie in the folder of a run, and in which.

    In `walked` itself, which the user named, only the log counts.
    """
    known: dict[Path, bool] = {}
    found = {}
    for file in files:
        for folder in file.parents:
            if folder not in known:
                known[folder] = _is_run(folder)
            if known[folder] and (folder != walked or file == folder / LOG):
                found[file] = folder
            if folder == walked:
                break
    return found


def _is_run(folder: Path) -> bool:
    """Whether `bitnet train` wrote the folder: it has a log and checkpoints."""
    states = ("manifest.json", "state.json")
    return (folder / LOG).is_file() and any(
        (step / name).is_file() for step in folder.glob("step-*") for name in states
    )
