"""What may import what, between the packages and inside them, and what works without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bitnet_cli.table import VERBS
from runtime_models import TEMPLATE, scripted_model

ARROWS = """
| package | what it is | may import |
|---|---|---|
| `bitnet_cli` | the verbs of the `bitnet` command | `bitnet_serve`, `bitnet_export`, `bitnet`, `bitnet_runtime` |
| `bitnet_serve` | the server | `bitnet_runtime` |
| `bitnet_export` | the packed file and the formats of others | \
`bitnet_runtime`; the numbers: \
`bitnet.config`, `bitnet.quant`, `bitnet.straight_through`, `bitnet.kernels`, `bitnet.model`; \
text: `bitnet.data`; checkpoints: `bitnet.train.checkpoint`, `bitnet.train.source_model`, `bitnet.settings`; \
files on disk: `bitnet.process` |
| `bitnet` | training | `bitnet_runtime` |
| `bitnet_runtime` | the engine from Python | none of these, and never torch |
""".strip()
"""Who may import whom, at the top of a file or inside a function. CONTRIBUTING.md has the same table."""

DOORS = {"bitnet.__main__": "bitnet_cli"}
"""A module that belongs to another package than its folder: `python -m bitnet`, which torchrun starts."""

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "bitnet_cli": ROOT / "bitnet_cli",
    "bitnet_serve": ROOT / "python_bindings/bitnet_serve",
    "bitnet_export": ROOT / "export/bitnet_export",
    "bitnet": ROOT / "bitnet",
    "bitnet_runtime": ROOT / "python_bindings/bitnet_runtime",
}


@dataclass(frozen=True)
class Import:
    """`source` imports `target`, a module of ours or the name of another's package."""

    source: str
    target: str
    names: tuple[str, ...]  # out of it
    typing: bool  # under `if TYPE_CHECKING`


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name; a package has the name of its folder."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def imports_of(module: str) -> Iterator[Import]:
    """All imports of a module, also those inside functions."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, (), id(node) in typing)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                target, names = (inner, ()) if inner in MODULES else (base, (alias.name,))
                yield Import(module, target, names, id(node) in typing)


@cache
def imports() -> list[Import]:
    return [each for module in MODULES for each in imports_of(module)]


def package_of(module: str) -> str:
    return DOORS.get(module, module.partition(".")[0])


def allowed() -> dict[str, list[str]]:
    """The table as a dictionary."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", ARROWS, re.MULTILINE)
    return {package: re.findall(r"`([\w.]+)`", targets) for package, targets in rows}


def test_arrows_between_packages_point_down() -> None:
    table = allowed()
    assert list(table) == list(FOLDERS)
    wrong = [
        f"{each.source} imports {each.target}"
        for each in imports()
        if (package := package_of(each.source)) != (target := package_of(each.target)) and target in FOLDERS
        if not any(f"{each.target}.".startswith(f"{module}.") for module in table[package])
    ]
    assert not wrong


def test_no_arrow_of_the_table_is_without_use() -> None:
    for package, targets in allowed().items():
        for module in targets:
            assert any(
                package_of(each.source) == package and f"{each.target}.".startswith(f"{module}.") for each in imports()
            ), f"{package} no longer imports {module}"


def test_the_table_is_that_of_contributing() -> None:
    assert ARROWS in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_runtime_is_free_of_torch() -> None:
    names = {each.target.partition(".")[0] for each in imports() if package_of(each.source) == "bitnet_runtime"}
    assert not names & {"torch", "safetensors", "tqdm", "onnx"}


def test_what_is_private_to_a_package_stays_there() -> None:
    wrong = [
        f"{each.source} imports {each.target} {each.names}"
        for each in imports()
        if package_of(each.source) != package_of(each.target) and package_of(each.target) in FOLDERS
        if any(part.startswith("_") for part in (*each.target.split("."), *each.names) if part != "__version__")
    ]
    assert not wrong


def test_only_the_table_of_verbs_is_imported_by_name() -> None:
    """An import that no one sees in the text would be an arrow that no one sees here."""
    found = [name for name, path in MODULES.items() if re.search(r"\b(import_module|__import__)\(", path.read_text())]
    assert found == ["bitnet_cli.command"]


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules of which each reaches each (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for target in sorted(arrows.get(module, ())):
            if target not in number:
                visit(target)
            if target in path:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == number[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1 or module in arrows.get(module, ()):
                found.append(sorted(group))

    for module in sorted(arrows):
        if module not in number:
            visit(module)
    return found


def arrows(typing: bool) -> dict[str, set[str]]:
    """Module to modules; with those that only annotations need, or without."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        if each.target in MODULES and (typing or not each.typing):
            found[each.source].add(each.target)
    found["bitnet_cli.command"] |= {f"bitnet_cli.verbs.{verb.name}" for verb in VERBS}
    return found


@pytest.mark.parametrize("typing", [False, True], ids=["imports", "imports and annotations"])
def test_no_modules_import_each_other_in_a_circle(typing: bool) -> None:
    assert circles(arrows(typing)) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b", "e"}, "e": {"f"}}) == [["b", "c", "d"]]
    assert circles({"a": {"a", "b"}, "b": set()}) == [["a"]]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}) == []


# ---- what works without torch ----

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Block())
"""


def run(code: str, *blocked: str) -> str:
    """Output of `code` in a new process in which these packages cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=set(blocked) or "()") + code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_runtime_imports_without_training_and_export() -> None:
    names = [name for name in MODULES if name.startswith("bitnet_runtime.")]
    run("".join(f"import {name}\n" for name in names), "torch", "bitnet", "bitnet_export", "safetensors", "tqdm")


def test_the_verbs_import_without_libraries() -> None:
    """`bitnet --help`, and a verb that does not need a library, work without it."""
    names = [name for name in MODULES if name.startswith("bitnet_cli") and not name.endswith("__main__")]
    blocked = ("torch", "numpy", "tokenizers", "jinja2", "safetensors", "tqdm", "onnx", "matplotlib")
    run("".join(f"import {name}\n" for name in names), *blocked)


def test_export_and_the_options_of_training_import_without_torch() -> None:
    run("import bitnet_export, bitnet.config, bitnet.settings, bitnet.setup.resolve", "torch", "safetensors")


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import bitnet_cli.verbs.generate, bitnet_cli.verbs.chat, bitnet_cli.verbs.bench\n"
        "print(*({'numpy', 'tokenizers', 'jinja2', 'torch', 'huggingface_hub', 'cffi'} & set(sys.modules)))"
    )
    assert run(code).strip() == ""


def test_a_server_has_loaded_what_answers_need() -> None:
    """The first request would wait for it."""
    assert run("import bitnet_serve.server\nprint('numpy' in sys.modules)").strip() == "True"


def test_the_list_of_verbs_loads_no_package_below() -> None:
    code = (
        "import contextlib, io, sys, bitnet_cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    bitnet_cli.main(['--help'])\n"
        "print(*({'bitnet', 'bitnet_export', 'bitnet_runtime', 'numpy'} & set(sys.modules)))"
    )
    assert run(code).strip() == ""


def test_libraries_come_when_they_are_needed(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "m", [b"Good", b" day"], template=TEMPLATE)
    code = f"""
from bitnet_runtime import Model

def loaded():
    return sorted({{"numpy", "tokenizers", "jinja2"}} & set(sys.modules))

model = Model.load({str(path)!r})
session = model.session()
session.feed([1, 2])
session.sample()
print(loaded())
model.generate("go")
print(loaded())
model.chat([{{"role": "user", "content": "go"}}])
print(loaded())
session.append([1])
print(loaded())
"""
    expected = ["[]", "['tokenizers']", "['tokenizers']", "['numpy', 'tokenizers']"]  # templates: another process
    assert run(code, "torch", "bitnet", "bitnet_export").splitlines() == expected


@pytest.mark.parametrize(
    ("library", "call"),
    [("tokenizers", "model.generate('go')"), ("jinja2", "model.chat([{'role': 'user', 'content': 'go'}])")],
)
def test_a_missing_library_is_named(tmp_path: Path, library: str, call: str) -> None:
    path = scripted_model(tmp_path / "m", [b"Good"], template=TEMPLATE)
    code = f"""
from bitnet_runtime import MissingDependencyError, Model
model = Model.load({str(path)!r})
try:
    {call}
except MissingDependencyError as error:
    print(error)
"""
    assert f"needs the `{library}` library" in run(code, library)


def test_bench_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("random", "json", "bitnet_runtime", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was imported')")
    model = scripted_model(tmp_path / "m", [b"Good"])
    command = [Path(sys.executable).parent / "bitnet", "bench", model, "--prompt", "4", "--gen", "4", "--repeat", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["peak_rss_mb"] < 100  # of the engine alone, before the limits are measured


# ---- rooms ----

ROOMS = {
    "bitnet": ("", "model", "data", "evaluate", "train", "setup", "report"),
    "bitnet_export": ("packed", "checkpoint", "foreign", "convert", ""),
}
"""The folders of a package, lowest first; "" is its own. A module imports from its folder and from those before it."""

ABOVE = {"bitnet.harness", "bitnet"}
"""Above all folders of their package: what is run, as `python -m` says in docs, and the names for users of it."""


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and MODULES[module].name == "__init__.py") else ""


@pytest.mark.parametrize("package", ROOMS)
def test_arrows_between_rooms_point_down(package: str) -> None:
    order = ROOMS[package]
    assert {room_of(module) for module in MODULES if package_of(module) == package} == set(order)
    wrong = [
        f"{each.source} imports {each.target}"
        for each in imports()
        if package_of(each.source) == package == package_of(each.target) and each.target in MODULES
        if each.source not in ABOVE and order.index(room_of(each.target)) > order.index(room_of(each.source))
    ]
    assert not wrong
