"""The pages in benchmarks/results: what today's scripts write about the figures beside them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

BY_HAND = {"norms-20m", "preset-1m"}  # of single commands of `bitnet train`, which they name
PAGES = {"passes": lambda module, found: module.markdown(found["rows"]),
         "scaling": lambda _, found: importlib.import_module("scaling_page").markdown(found),
         "serving_faults": lambda module, found: module.page(found["parts"]),
         "serving": lambda module, found: module.page(found)}  # fmt: skip
FOUND = sorted(file.stem for file in (BENCHMARKS / "results").glob("*.json") if file.stem not in BY_HAND)


@pytest.mark.parametrize("name", FOUND)
def test_a_page_is_that_of_its_script(name: str) -> None:
    report = importlib.import_module("report")
    script = name.partition("-")[0]
    found: dict[str, Any] = json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    module = importlib.import_module(script)
    of = module.markdown_when if name == "recipe-when" else getattr(module, "markdown", None)
    text = PAGES[script](module, found) if script in PAGES else of(found)
    page, _, shown = (report.RESULTS / f"{name}.md").read_text(encoding="utf-8").partition("\n![")
    assert page == f"{text}\n\n{report._footer(found['origin'])}\n"
    assert (report.RESULTS / f"{name}.png").exists() == bool(shown)
