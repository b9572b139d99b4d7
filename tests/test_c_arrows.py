"""The engine's files depend on each other without cycles: each can be read knowing only those below it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import basename, dirname, join, normpath

SOURCE = Path(__file__).parents[1] / "runtime_c" / "src"
Arrows = Mapping[str, set[str]]

# What says nothing of who calls whom: comments, literals, and directives with their continued lines.
_SILENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
_FUNCTION = re.compile(r"^(?!static\b|typedef\b|extern\b)[a-z_][\w \t\n*]*?\b(bn_\w+)\([^;{}]*\)\s*\{", re.M)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.M)


def functions(text: str) -> set[str]:
    """Names of the functions that a file defines for others."""
    return set(_FUNCTION.findall(_SILENT.sub(" ", text)))


def calls(files: Mapping[str, str]) -> Arrows:
    """Which files name a function that another one defines. Calls through pointers have no name there."""
    home = {name: file for file, text in files.items() for name in functions(text)}
    named = {file: set(re.findall(r"\bbn_\w+", _SILENT.sub(" ", text))) for file, text in files.items()}
    return {file: {home[name] for name in names if name in home} - {file} for file, names in named.items()}


def includes(files: Mapping[str, str]) -> Arrows:
    """Which of these files include which others: from their own folder, else from the first."""
    found: dict[str, set[str]] = {}
    for file, text in files.items():
        near = ((normpath(join(dirname(file), name)), name) for name in _INCLUDE.findall(text))
        found[file] = {next(path for path in paths if path in files) for paths in near if files.keys() & set(paths)}
    return found


def circle(arrows: Arrows) -> list[str]:
    """Files of a circle, each pointing to the next and the last to the first; empty where there is none."""
    done: set[str] = set()

    def follow(file: str, path: list[str]) -> list[str]:
        if file in path:
            return path[path.index(file) :]
        if file in done:
            return []
        for below in sorted(arrows[file]):
            if found := follow(below, [*path, file]):
                return found
        done.add(file)
        return []

    return next((found for file in sorted(arrows) if (found := follow(file, []))), [])


def texts(pattern: str) -> dict[str, str]:
    return {
        path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob(pattern))
    }


def names(arrows: Arrows) -> set[tuple[str, str]]:
    """The same in whatever folders they are."""
    return {(basename(file), basename(below)) for file in arrows for below in arrows[file]}


def test_no_circle_among_c_files() -> None:
    arrows = calls(texts("*.c"))
    assert ("file.c", "tensors.c") in names(arrows)  # the parser sees them
    assert circle(arrows) == []


def test_no_circle_among_headers() -> None:
    arrows = includes(texts("*.h"))
    assert ("file.h", "kernels.h") in names(arrows)
    assert circle(arrows) == []


def test_a_circle_is_found() -> None:
    files = {
        "a.c": 'int bn_a(int x) {\n    return bn_b(x); /* bn_c */\n}\nconst char *t = "bn_c";\n',
        "b.c": "#define D(x) \\\n    bn_a(x)\nbn_status\nbn_b(const bn_x *x,\n     int n) {\n    return bn_c();\n}\n",
        "c.c": "static int bn_d(void) {\n    return bn_b(1);\n}\nint bn_a(int x);\nvoid bn_c(void) {}\n",
    }
    assert functions(files["b.c"]) == {"bn_b"} and functions(files["c.c"]) == {"bn_c"}
    assert calls(files) == {"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": {"b.c", "a.c"}}
    assert circle({"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": set()}) == []
    assert circle({"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": {"b.c"}}) == ["b.c", "c.c"]
    headers = {"a.h": '#include "x/b.h"\n', "x/b.h": '#include "c.h"\n#include <a.h>\n', "c.h": "", "x/c.h": ""}
    assert includes(headers) == {"a.h": {"x/b.h"}, "x/b.h": {"x/c.h"}, "c.h": set(), "x/c.h": set()}
    assert circle(includes(headers | {"x/c.h": '#include "a.h"\n'})) == ["a.h", "x/b.h", "x/c.h"]


_CONSTANT = r"(?:static )?const\b[^*=;]*[=;]"
_GLOBAL = re.compile(
    rf"^(?!typedef\b|extern\b|enum\b|struct \w+;|{_CONSTANT})(?:\w+[ *]+)+(\w+)(?:\[[^;]*?\])?(?: = [^;]*?)?;", re.M
)


def variables(text: str) -> set[str]:
    """Variables of a file, outside functions, that can change."""
    return set(_GLOBAL.findall(_SILENT.sub(" ", text)))


def test_global_state_is_what_contributing_says() -> None:
    assert variables("int a;\nstatic bn_x *b = 0;\nchar c[2] = {0};\nconst char *d;\nint f(int x);\n") == set("abcd")
    assert not variables(
        "static const int a = 1;\nconst bn_x b[] = {1};\nextern int c;\nint f(void) {\n    int d;\n}\n"
    )
    found = {(file, name) for file, text in texts("*.[ch]").items() for name in variables(text)}
    pools = {("system/threads.c", "pools"), ("system/threads.c", "pools_lock")}
    emulated = {("kernels/x86/tiles.h", "tile_file")}  # registers of a thread
    assert found == pools | emulated | {("kernels/cpu.c", "bn_like_intel")}
    said = " ".join((SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert "no global state except a list of its thread pools" in said and "whether the CPU is Intel's" in said


FOLDERS = ("session", "training", "", "file", "linear", "kernels", "system")
"""Each stands on those behind it; "" is the model, in runtime_c/src itself."""


def test_folders_point_down() -> None:
    arrows: dict[str, set[str]] = {}
    for found in (includes(texts("*.[ch]")), calls(texts("*.c"))):
        for file, below in found.items():
            arrows.setdefault(file, set()).update(below)
    rank = {folder: i for i, folder in enumerate(FOLDERS)}
    ranks = {file: rank[file.split("/")[0] if "/" in file else ""] for file in arrows}
    up = [f"{file} -> {below}" for file in arrows for below in arrows[file] if ranks[below] < ranks[file]]
    assert up == []
    assert {ranks[file] for file in ranks} == set(range(len(FOLDERS)))
