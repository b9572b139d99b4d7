"""What the docs promise: they are short, every path and option in them exists, and what they show runs."""

from __future__ import annotations

import ast
import functools
import glob
import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

import bitnet_runtime
from bitnet_cli import command as cli
from bitnet_cli.command import build_parser
from bitnet_runtime.defaults import FIELDS
from command import bitnet
from docs_text import Block, blocks, commands, commands_of, inline_code, links, prose, sentences, slug, words

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md",
    ROOT / "benchmarks/history.md", ROOT / "export/FORMAT.md",
    *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MOST_WORDS = 30
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build"}
CLIENTS = {"langchain_openai", "llama_index"}
"""Modules that `make clients` has: it runs the program that names them."""
OTHERS = {
    "--max-restarts",
    "--shutdown-timeout",
    "--llama-python",
    "--llama-server",
    "--size",
    "--url",
    "--runs",
    "--quick",
}
"""Options of torchrun and of benchmarks that the text names."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


every_page = pytest.mark.parametrize("name", NAMES)


# ---- words ----


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 150


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two three! Four?", ["One.", "Two three!", "Four?"]),
        ("It costs 1.5 nats, e.g. here, i.e. 0.3 % more. Then\nit ends.", None),
        ("A [link. With. Dots](x.md#a.b) and `code. With. Dots` here.", ["A link. With. Dots and CODE here."]),
        ("- one item\n- two items\n  go on", ["one item", "two items go on"]),
        ("Text (in brackets.) More. **Bold.** End.", ["Text (in brackets.)", "More.", "Bold.", "End."]),
        (
            "# Head\n\nText:\n\n    code. code\n\nmore\n\n| a. b | c |\n\n```sh\nx. y\n```\nend",
            ["Text:", "more", "end"],
        ),
    ],
)
def test_sentences_are_told_apart(text: str, expected: list[str] | None) -> None:
    """Full stops inside a sentence are not ends."""
    found = sentences(text)
    assert found == expected if expected is not None else len(found) == 2


def test_words_are_counted() -> None:
    assert len(words("Two and 2 − 1 words, well-known (three).")) == 7


@every_page
def test_no_sentence_is_long(name: str) -> None:
    long = [sentence for sentence in sentences(read(name)) if len(words(sentence)) > MOST_WORDS]
    assert not long, "\n".join(f"{len(words(sentence))} words: {sentence}" for sentence in long)


# ---- paths ----


@every_page
def test_links_lead_somewhere(name: str) -> None:
    for target in links(read(name)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


@functools.cache
def tracked() -> frozenset[str]:
    """Names of all source files, without their folders."""
    sources = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return frozenset(path.name for path in [*ROOT.iterdir(), *sources])


def missing_paths(text: str) -> Iterator[str]:
    """Paths from the root, and names of sources, that are not in the repository."""
    for word in re.findall(r"[\w.*/{},-]+", text):
        path = word.rstrip(".,")
        if "/" in path and path.split("/")[0] in FOLDERS:
            if not glob.glob(str(ROOT / path.replace("NAME", "*"))):
                yield path
        elif re.fullmatch(r"[\w.-]+\.(py|c|h|md|sh)", path) and path not in tracked() | {"my_program.c"}:
            yield path


@every_page
def test_paths_in_the_docs_exist(name: str) -> None:
    text = read(name)
    shown = [block.text for block in blocks(text) if block.language in ("", "sh")]
    # What commands write is no source: build/, runs/.
    assert [path for code in [*inline_code(text), *shown] for path in missing_paths(code)] == []


def test_pages_that_the_code_cites_exist() -> None:
    others = ("docs/gguf.md", "docs/bitnet-embeddings-gguf-conversion.md")  # of ggml, of Microsoft
    for folder in FOLDERS | {"Makefile", ".ci"}:
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            if path.suffix not in (".py", ".c", ".h", ".sh") and path.name not in ("Makefile", "run"):
                continue
            if path == Path(__file__) or not path.is_file():
                continue
            for cited in re.findall(r"\b(?:docs|bitnet|export|benchmarks|runtime_c)/[\w/-]+\.md\b", path.read_text()):
                assert cited in others or (ROOT / cited).is_file(), f"{path}: {cited}"
    assert "## Less to download" in read("docs/install.md")  # the Makefile names it


# ---- commands ----


class Verb(NamedTuple):
    options: frozenset[str]
    help: str


@functools.cache
def verbs() -> dict[str, Verb]:
    """Every verb with its options, from `bitnet --help` and `bitnet VERB --help`."""
    names = re.findall(r"^    ([\w-]+)  ", bitnet("--help").stdout, re.MULTILINE)
    helps = {name: bitnet(name, "--help").stdout for name in names}
    return {
        name: Verb(frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text.partition("options:")[2])), text)
        for name, text in helps.items()
    }


def given(command: str) -> set[str]:
    """Options in a command, but those in quotes."""
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    return set(re.findall(r"(?<!\S)--?[a-z][\w-]*", unquoted))


@every_page
def test_commands_have_the_options_they_are_shown_with(name: str) -> None:
    for command in commands(read(name)):
        if script := re.search(r"python (benchmarks/\w+\.py)", command):
            source = read(script[1]) + read("benchmarks/training_runs.py")
            missing = [option for option in given(command) if f'"{option}"' not in source]
        elif run := re.search(r"(?:^|-m )bitnet ([\w-]+)", command):
            assert run[1] in verbs(), command
            missing = sorted(given(command[run.end() :]) - verbs()[run[1]].options)
        else:
            assert not command.startswith("bitnet "), command
            continue
        assert not missing, f"{command}: no {missing}"


@every_page
def test_commands_of_blocks_can_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer.json").write_text('{"enum": ["yes", "no"]}')  # the file that a page writes
    page = read(name)
    monkeypatch.chdir(tmp_path)
    for command in (command for block in blocks(page) if block.fenced for command in commands_of(block)):
        if run := re.search(r"(?:^|/|-m )bitnet (.*?)(?: [<>|] .*)?$", command):
            parser, _ = build_parser()
            assert parser.parse_known_args(shlex.split(run[1]))[1] == [], command


@every_page
def test_options_that_are_named_exist(name: str) -> None:
    every = set().union(*(verb.options for verb in verbs().values())) | OTHERS
    named = {option for code in inline_code(read(name)) for option in re.findall(r"^--[a-z][\w-]*", code)}
    assert named - every == set()


def test_the_table_of_sampling_has_the_defaults() -> None:
    shown = verbs()["generate"].help.partition("\nsampling:")[2]
    rows = re.findall(r"^\| (`-.*?`) \| ([\w.-]+) \|", read("docs/command-line.md"), re.MULTILINE)
    assert len(rows) == 19
    for options, default in rows:
        option = re.findall(r"`(.*?)`", options)[-1]
        described = re.search(rf"{option}\b.*?\(default:\s+(.*?)\)", shown, re.DOTALL)
        assert described and described[1] == default, option


def test_the_page_names_every_exit_code() -> None:
    told = re.search(r"Exit codes: (.*?)\.", cli.__doc__ or "", re.DOTALL)
    (row,) = re.findall(r"^\| exit code \| (.*) \|$", read("docs/command-line.md"), re.MULTILINE)
    assert told and {*re.findall(r"\d+", told[1])} == {*re.findall(r"\d+", row)}


def test_variables_of_the_environment_are_on_a_page() -> None:
    """Those that a user may set. Of the others one is torchrun's, one the terminal's, one follows --workers, and one
    is set where no thread may start."""
    folders = ("bitnet", "bitnet_cli", "export", "python_bindings", "runtime_c/src")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.[cp]*") if path.suffix in (".py", ".c")]
    asked = re.compile(r'(?:environ\[|environ\.\w+\(|getenv\()"([A-Z_]+)"')
    found = {name for path in files for name in asked.findall(path.read_text(encoding="utf-8"))}
    assert "BITNET_ISA" in found
    pages = "".join(map(read, NAMES))
    ours = {"LOCAL_RANK", "TERM", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
    assert [name for name in found - ours if f"`{name}" not in pages] == []


def test_the_page_of_python_names_all_options_errors_and_facts() -> None:
    page = read("docs/python.md") + read("docs/structured.md")
    errors = {name for name in bitnet_runtime.__all__ if name.endswith("Error")}
    assert [name for name in {*FIELDS, *errors} if f"`{name}`" not in page] == []
    (facts,) = re.findall(r"## What a model says of itself\n(.*?)\n## ", page, re.DOTALL)
    named = re.findall(r"`m\.(\w+)", facts)
    assert len(named) >= 10 and [name for name in named if not hasattr(bitnet_runtime.Model, name)] == []


def test_each_public_name_of_the_runtime_is_on_a_page() -> None:
    """What is for the packages beside it is elsewhere: the tab key behind `model.` shows what the pages name."""
    told = {*re.findall(r"[.`](\w+)", "".join(map(read, NAMES)))}
    kinds = [kind for name in bitnet_runtime.__all__ if isinstance(kind := getattr(bitnet_runtime, name), type)]
    kinds = [kind for kind in kinds if not issubclass(kind, Exception)]
    assert bitnet_runtime.Model in kinds and bitnet_runtime.Stream in kinds
    names = {(kind.__name__, name) for kind in kinds for name in (*dir(kind), *getattr(kind, "__annotations__", ()))}
    public = {(kind, name) for kind, name in names if not name.startswith("_") and not hasattr(tuple, name)}
    public |= {("bitnet_runtime", name) for name in bitnet_runtime.__all__}
    assert sorted(f"{kind}.{name}" for kind, name in public if name not in told) == []


def test_the_table_of_a_run_folder_is_whole(finished: Path) -> None:
    (table,) = re.findall(r"## What is in a run folder\n(.*?)\n## ", read("docs/train.md"), re.DOTALL)
    told = [name.replace("NNNNNN", "*") for row in table.splitlines() for name in inline_code(row.split(" | ")[0])]
    assert [file.name for file in finished.iterdir() if not any(fnmatch(file.name, name) for name in told)] == []


# ---- programs ----


def code(language: str) -> list[tuple[str, Block]]:
    return [(name, block) for name in NAMES for block in blocks(read(name)) if block.language == language]


def test_every_block_says_its_language() -> None:
    for name in NAMES:
        if not name.endswith("FORMAT.md"):
            known = {"sh", "console", "python", "c", "toml", "json", "cmake", "vim", "yaml"}
            assert {block.language for block in blocks(read(name)) if block.fenced} <= known, name


@pytest.mark.parametrize(("name", "block"), code("python"))
def test_python_compiles_and_its_imports_exist(name: str, block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module
            if node.module.split(".")[0] in CLIENTS:
                continue
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize(("name", "block"), code("c"))
def test_c_compiles(name: str, block: Block) -> None:
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'runtime_c/include'}"]
    done = subprocess.run([compiler, *strict, "-x", "c", "-"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "int main(" in block.text


def test_prose_is_found() -> None:
    """Were code or tables all that is seen, no sentence could be too long."""
    for name in NAMES:
        assert len(words(" ".join(prose(read(name))))) > 50, name
