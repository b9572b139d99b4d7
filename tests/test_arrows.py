"""What may import what: the runtime needs its compiled module and nothing of training or export."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_runtime
from runtime_models import TEMPLATE, scripted_model

PACKAGE = Path(bitnet_runtime.__file__).parent

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
    modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    code = "".join(f"import bitnet_runtime.{name}\n" for name in modules)
    run(code, "torch", "bitnet", "bitnet_export", "safetensors", "tqdm")


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import bitnet_cli.verbs.generate, bitnet_cli.verbs.chat, bitnet_cli.verbs.bench\n"
        "print(*({'numpy', 'tokenizers', 'jinja2', 'torch', 'huggingface_hub', 'cffi'} & set(sys.modules)))"
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


def test_only_the_command_line_names_the_other_packages() -> None:
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.partition(".")[0] in ("bitnet", "bitnet_export", "torch"):
                    assert file.name == "commands.py", f"{file.name} imports {name}"
                    assert node.col_offset > 0, f"{file.name} imports {name} when it is imported"


def test_bench_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("random", "json", "bitnet_runtime", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was imported')")
    model = scripted_model(tmp_path / "m", [b"Good"])
    command = [Path(sys.executable).parent / "bitnet", "bench", model, "--prompt", "4", "--gen", "4", "--repeat", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"decode"' in done.stdout
