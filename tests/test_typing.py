"""What `mypy --strict` says of programs that use the package: wrong options are errors, the docs are right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bitnet_runtime.defaults import FIELDS, Options
from docs_text import blocks

pytest.importorskip("mypy", reason="it comes with the extra dev")
from mypy import api

ROOT = Path(__file__).parent.parent

BEGIN = """\
from bitnet_runtime import Model, Sampling
import numpy as np
m = Model.load("m")
s = m.session()
"""

RIGHT = [
    "m.generate('x', max_tokens=5, temperature=0, stop=['a'], logit_bias={1: 2.0}, seed=None).text",
    "m.generate(['x', [1, 2]], stop='a')[0].text",
    "m.generate([[1, 2], [3]])[0].text",
    "m.generate([1, 2, 3], session=s, options=Sampling(top_k=3)).tokens",
    "m.generate(np.array([1, 2]), draft=3).tokens",
    "[piece.text for piece in m.stream('x', min_p=0.1)]",
    "m.chat([{'role': 'user', 'content': 'x'}], top_p=0.5).usage.total_tokens",
    "s.append([1, 2]).argmax()",
    "s.append([1, 2], logits='all')[0].argmax()",
    "s.append([1, 2], 'none')",
    "s.sample(temperature=0) + 1",
    "s.cancel()",
    "m.embed(['a', 'b']).shape",
]
WRONG = [
    "m.generate('x', max_token=5)",
    "m.generate('x', temperature='hot')",
    "m.generate('x', stop=5)",
    "m.generate(['x', 'y'], top_k=1.5)",
    "m.generate(['x', 'y'], session=s)[0].text",
    "m.generate('x', options={'top_k': 1})",
    "m.stream('x', max_token=5)",
    "m.chat([{'role': 'user', 'content': 'x'}], temperatur=0)",
    "m.stream_chat([{'role': 'user', 'content': 'x'}], seed='a')",
    "m.generate(5)",
    "s.sample(max_tokens=5)",
    "s.sample(top_k='many')",
    "s.append([1], 'none').argmax()",
    "s.append([1], 'some')",
    "s.append(['a'])",
    "Sampling(temperature='hot')",
]


@pytest.fixture(scope="module")
def wrong_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """For each program the lines in which mypy found errors."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {"right": BEGIN + "\n".join(RIGHT), "wrong": BEGIN + "\n".join(WRONG)}
    for page in ("README.md", "docs/python.md", "docs/train-python.md"):
        shown = [block for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language == "python"]
        programs |= {f"docs_{Path(page).stem.replace('-', '_')}_{i}": block.text for i, block in enumerate(shown)}
    files = []
    for name, text in programs.items():
        files.append(folder / f"{name}.py")
        files[-1].write_text(text, encoding="utf-8")
    # With the project's options, which are strict, `make lint` finds most in the cache.
    options = ["--no-error-summary", f"--cache-dir={ROOT / '.mypy_cache'}", f"--config-file={ROOT / 'pyproject.toml'}"]
    output, errors, _ = api.run([*options, *map(str, files)])
    assert not errors
    found: dict[str, set[int]] = {name: set() for name in programs}
    for line in output.splitlines():
        place = re.match(r".*?(\w+)\.py:(\d+): error:", line)
        if place and place[1] in found:
            found[place[1]].add(int(place[2]))
        assert place is None or place[1] in found, line
    return found


def test_wrong_programs_are_found(wrong_lines: dict[str, set[int]]) -> None:
    first = BEGIN.count("\n") + 1
    passed = [text for place, text in enumerate(WRONG) if first + place not in wrong_lines["wrong"]]
    assert passed == []


def test_right_programs_pass(wrong_lines: dict[str, set[int]]) -> None:
    first = BEGIN.count("\n") + 1
    assert [RIGHT[line - first] for line in sorted(wrong_lines["right"])] == []


def test_the_programs_of_the_docs_pass(wrong_lines: dict[str, set[int]]) -> None:
    of_docs = {name: lines for name, lines in wrong_lines.items() if name.startswith("docs_")}
    assert len(of_docs) >= 5
    assert not any(of_docs.values()), of_docs


def test_the_typed_options_are_those_of_the_table() -> None:
    assert Options.__optional_keys__ == set(FIELDS)


def test_packages_that_are_checked_say_that_they_are_typed() -> None:
    """Without a file py.typed in it, what imports a package gets no types of it."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {Path(folder).name: ROOT / folder for folder in tools["scikit-build"]["wheel"]["packages"]}
    assert folders.keys() == set(tools["mypy"]["packages"])
    assert [name for name, folder in folders.items() if not (folder / "py.typed").exists()] == []
