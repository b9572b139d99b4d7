"""The README.md of a Hugging Face folder: what is known of a model is there, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitnet.presets import PRESETS
from bitnet.train import runlog
from bitnet_export import export_checkpoint
from bitnet_export.foreign.hf import card
from bitnet_export.packed.random_model import random_model
from bitnet_export.packed.reader import PackedFile
from training import bitnet


def table(page: str) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_the_card_of_a_run(finished: Path, sentences: str, tmp_path: Path) -> None:
    export_checkpoint(finished, tmp_path / "m.bitnet", tokens=256)
    assert bitnet("convert", tmp_path / "m.bitnet", tmp_path / "mine", "--to", "hf") == 0
    page = (tmp_path / "mine" / "README.md").read_text()
    front = yaml.safe_load(page.split("---")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["bitnet", "ternary"]}
    assert "# mine\n" in page and "license:" in page.split("## Licence")[1]
    rows = table(page)
    last = [record for record in runlog.read(finished / "log.jsonl") if "validation" in record][-1]
    assert rows["nats per token"] == f"{last['validation']['nats_per_token']:,.6g}"
    assert rows["bits per byte"] == f"{last['validation']['bits_per_byte']:,.6g}"
    assert rows["optimizer steps"] == "20" and rows["tokens seen"] == f"{last['tokens']:,}"
    assert rows["λ, how much the quantizers count"] == "from 0 to 1 over 70% of the run, then 1"
    assert rows["learnt from text"] == Path(sentences).name and str(finished.parent) not in page
    state = json.loads((finished / "step-000020" / "state.json").read_text())
    assert f"lr {state['settings']['lr']}" in rows["options"]
    ternary = PackedFile.open(tmp_path / "m.bitnet").configs[0].ternary_weights
    assert rows["ternary weights"] == f"{ternary:,}"


def test_a_model_of_which_nothing_is_known(tmp_path: Path) -> None:
    random_model(PRESETS["tiny"], tmp_path / "m.bitnet")
    page = card.card(PackedFile.open(tmp_path / "m.bitnet"), "m")
    assert "does not say how this model was trained" in page and "no figures of an evaluation" in page
    assert "λ" not in page and "learnt from" not in page and "begun with" not in page


def test_a_model_without_ternary_weights_is_not_called_ternary(tmp_path: Path) -> None:
    random_model(PRESETS["tiny"], tmp_path / "t.bitnet")
    assert "- ternary" in (told := card.card(PackedFile.open(tmp_path / "t.bitnet"), "m")) and "-1, 0 or 1" in told
    random_model(PRESETS["tiny"].replace(ternary=()), tmp_path / "m.bitnet")
    page = card.card(PackedFile.open(tmp_path / "m.bitnet"), "m")
    assert "tags:" not in page and "b1.58" not in page and "| ternary weights | 0 |" in page


@pytest.mark.parametrize("known", [
    3, {"training": 3, "validation": [1]}, {"training": {"lr": {"a": []}, "data": {"x": "y"}, "quantize_warmup": "z"}},
    {"tokens": "many", "step": True, "training": {"chat": ["a\n# b", "| x |", "<script>"], "source": "\x1b[31m" * 900}},
    {"tokens": 10**4000, "training": {"quantize_warmup": 10**400}}, {"validation": {"perplexity": 10**400}},
])  # fmt: skip
def test_a_strangers_file(known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METADATA is whatever its writer put there: no markup of it reaches the page."""
    random_model(PRESETS["tiny"], tmp_path / "m.bitnet")
    file = PackedFile.open(tmp_path / "m.bitnet")
    monkeypatch.setitem(file.metadata, "provenance", known)
    page = card.card(file, "m\n# evil")
    assert [line for line in page.splitlines() if line.startswith("# ")] == ["# m \\# evil"]
    assert "<script>" not in page and "\x1b" not in page and max(map(len, page.splitlines())) < 1000
    assert all(line.count(" | ") <= 2 for line in page.splitlines())
