"""`bitnet report`: a page about a run that has ended, continues, was interrupted, or left damaged files."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models

import bitnet_cli
from bitnet import process
from bitnet.data import tokenizer
from bitnet.presets import PRESETS
from bitnet.report import attention
from bitnet.report.figures import PANELS, of_layers, smooth
from bitnet.report.page import sample, summary
from bitnet.train import checkpoint, runlog
from bitnet.train.checkpoint import Checkpoint
from runtime_models import byte_tokenizer

torch.set_num_threads(1)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run whose name is none for HTML."""
    return Path(shutil.copytree(finished, tmp_path / "<run> $x$"))


def report(*argv: object) -> int:
    return bitnet_cli.main(["report", *map(str, argv)])


def page(run: Path, *more: object) -> str:
    assert report(run, "--tokens", "0", *more) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def test_one_html_file_that_needs_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(run, "--prompt", "the <b>cat", "--tokens", "12") == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    text = (run / "report.html").read_text(encoding="utf-8")
    images = re.findall(r'src="([^"]*)"', text)
    assert len(images) == len(PANELS) and len(set(images)) == len(images)  # ten figures, none like another
    assert all(image.startswith("data:image/png;base64,iVBORw0KGgo") for image in images)
    assert "http" not in text and "<script" not in text and "&lt;run&gt; $x$" in text and "<run>" not in text
    assert re.search(r"<pre>the &lt;b&gt;cat.", text, re.DOTALL)  # the sample goes on after its prompt
    facts = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td>", text))
    assert (facts["state"], facts["steps"], facts["checkpoint"]) == ("finished", "20", "step-000020")
    assert facts["tokens"].startswith("2,560 in") and "15,360 ternary weights" in facts["model"]
    last = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][-1]["validation"]
    assert facts["validation loss"].startswith(f"{last['nats_per_token']:.4f} nats/token, {last['bits_per_byte']:.4f}")
    assert not list(run.glob(".*.partial"))


@pytest.mark.usefixtures("no_figures")
def test_nothing_stays_of_a_page_that_is_stopped_while_it_is_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even by a signal that allows no cleanup: no file exists yet."""
    names: list[set[str]] = []
    before = {path.name for path in run.iterdir()}
    monkeypatch.setattr("bitnet.report.page.sample", lambda *_: names.append({p.name for p in run.iterdir()}) or "")
    assert report(run) == 0
    assert names == [before] and (run / "report.html").is_file()


def test_png(run: Path, tmp_path: Path) -> None:
    assert report(run, "--out", tmp_path / "page.png", "--tokens", "5") == 0
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_figures")
def test_a_run_that_goes_on_and_one_that_was_interrupted(run: Path) -> None:
    log = run / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:7]) + '\n{"step": 8, "tok')
    with process.locked(run):
        facts = summary(run, runlog.read(log))
        assert (facts["state"], facts["steps"]) == ("running", "7")
    for saved in checkpoint.all_of(run):
        shutil.rmtree(saved)
    text = page(run, "--tokens", "9")
    assert "<td>stopped before its end</td>" in text and "[no sample: " in text and "expected a checkpoint" in text


STRANGE = [
    {"step": 1}, {"step": 1, "loss": "x", "tokens": []}, {"step": 1, "tokens": 2, "loss": 10**400, "lr": None},
    {"step": 30, "tokens": 9, "seconds": "x", "validation": 3, "layers": {"zeros": {"q": 1, "k": [], "v": ["x"]}}},
    {"step": 30, "tokens": 9, "layers": {"zeros": {"q": [0.1] * 3, "o": [float("nan")]}, "flips": [1], "near": {}}},
    {"step": 30, "tokens": 9, "layers": {"flips": {"q": [0.0, 0.0]}, "absmax": {"down": [1e299, -5]}}},
    {"step": 30, "tokens": 9, "final": {}, "skipped": [1]},
]  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
def test_records_of_any_content_give_a_page(alone: bool, run: Path) -> None:
    log = run / "log.jsonl"
    log.write_text(("" if alone else log.read_text()) + "".join(json.dumps(record) + "\n" for record in STRANGE))
    assert page(run).count("<figure>") == len(PANELS)


@pytest.mark.plots
@pytest.mark.parametrize("record", STRANGE)
def test_records_of_any_content_can_be_drawn(record: dict[str, Any], run: Path) -> None:
    from matplotlib.figure import Figure

    for records in ([record], [*runlog.read(run / "log.jsonl"), record]):
        assert summary(run, records)["steps"]
        for panel in PANELS:
            panel.draw(Figure().subplots(), records)
        runlog.plot(records, run / "loss.png", "as a run draws it at its end")


def test_codes_that_have_settled_are_not_red() -> None:
    """Flips of 0.006 % and of 0.0005 % differ by much and mean the same."""
    from matplotlib.figure import Figure

    panel = next(panel for panel in PANELS if panel.title.startswith("Now, by layer: flips"))
    for flips, coloured in (([6e-5, 5e-6, 5e-6], False), ([6e-2, 5e-3, 5e-3], True)):
        axes = Figure().subplots()
        assert panel.draw(axes, [{"step": 1, "tokens": 1, "layers": {"flips": {"q": flips}}}])
        assert axes.images[0].get_array().any() == coloured


def test_a_sample_begins_and_ends_with_the_tokens_that_the_model_names() -> None:
    """In a published model token 0 may be a character."""
    script, begun = [*b"b\0c!d"], list[int]()

    class Scripted:
        config = PRESETS["tiny"].replace(vocab_size=256)

        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            begun.append(int(ids[0, 0]))
            logits = torch.zeros(1, 1, 256)
            logits[0, 0, script[len(begun) - 1]] = 100.0
            return logits

    named = {"bos_token_id": 7, "eos_token_ids": [ord("!")]}
    checkpoint = SimpleNamespace(
        config=Scripted.config, words=byte_tokenizer(), generation=named, model=Scripted(), folder=Path("x")
    )
    assert sample(cast(Checkpoint, checkpoint), "", "a", 5) == "ab\0c" and set(begun) == {7}


def test_a_prompt_is_encoded_as_the_model_was_trained(tmp_path: Path) -> None:
    """A Unigram model makes </s> of a text with this tag of HTML, which training and the engine read as characters."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((chr(code), -8.0) for code in range(33, 127))]
    words = Tokenizer(models.Unigram(pieces, 0, False))
    words.add_special_tokens(["<unk>", "<s>", "</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    words, seen = tokenizer.load(tmp_path / "tokenizer.json"), list[list[int]]()
    expected = [1, *next(tokenizer.encoder(words)(["a</s>b"]))]

    class Listening:
        config = PRESETS["tiny"].replace(vocab_size=97)

        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(ids[0].tolist())
            return torch.zeros(1, 1, 97)

        def attention_weights(self, ids: torch.Tensor, prefix_B: torch.Tensor) -> list[torch.Tensor]:
            seen.append(ids[0].tolist())
            return []

    named = {"bos_token_id": 1, "eos_token_ids": [2]}
    checkpoint = cast(Checkpoint, SimpleNamespace(
        config=Listening.config, words=words, generation=named, model=Listening(), folder=tmp_path
    ))  # fmt: skip
    sample(checkpoint, "", "a</s>b", 1)
    attention.weights_of(checkpoint, "a</s>b")
    assert len(expected) == 7 and seen == [expected, expected]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("name", ["config.json", "state.json", "tokenizer.json", "model.safetensors"])
def test_damaged_checkpoints_are_said_to_be(name: str, run: Path) -> None:
    assert name not in page(run, "--tokens", "3")
    (run / "step-000020" / name).write_text("[]")
    assert name in page(run, "--tokens", "3")


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").write_text("{}\n")
    for argv, message in (
        ([tmp_path / "no"], "/no does not exist, expected a run folder of `bitnet train`"),
        ([__file__], "test_report.py is a file, expected a run folder"),
        ([tmp_path], "has no log.jsonl, expected a run folder of `bitnet train`"),
        ([tmp_path / "empty"], "holds no step yet"),
        ([run, "--out", "page.pdf"], "--out is page.pdf, expected a name that ends in .html or .png"),
        ([run, "--tokens", "-1"], "--tokens is -1, expected 0 to 4096"),
        ([run, "--tokens", "0", "--out", tmp_path / "no" / "page.html"], "/no does not exist"),
    ):
        assert report(*argv) == 1
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1


@pytest.mark.usefixtures("no_figures")
def test_what_cannot_be_written_is_not_drawn(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "page.html").mkdir()
    before = set(run.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("bitnet.report.page.summary", lambda *_: pytest.fail("begun to draw"))
        taken = f"{run / 'page.html'} is a directory, expected the name of a file to write"
        for out, reason in (("/proc/r.html", "No such file or directory"), (run / "page.html", taken)):
            assert report(run, "--out", out) == 1
            assert capsys.readouterr().err == f"bitnet: error: {out} cannot be written: {reason}; name another --out\n"
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert report(run, "--tokens", "0") == 1
    assert "report.html cannot be written: No space left on device; name another" in capsys.readouterr().err
    assert set(run.iterdir()) == before


def test_losses_have_the_unit_that_was_measured(tmp_path: Path) -> None:
    for unit in ("token", "pair", "guess"):
        record = {"step": 1, "tokens": 8, "seconds": 1.0, "loss": 2.0, "validation": {f"nats_per_{unit}": 1.5}}
        facts = summary(tmp_path, [record])
        assert facts["validation loss"] == f"1.5000 nats/{unit}" and f"2.0000 nats/{unit} " in facts["training loss"]


@pytest.mark.usefixtures("no_figures")
def test_a_link_stays_one_and_a_name_may_be_as_long_as_any(run: Path, tmp_path: Path) -> None:
    old, link, long = tmp_path / "old.html", tmp_path / "link.html", tmp_path / f"{'x' * 250}.html"
    old.write_text("old")
    link.symlink_to(old)
    for out in (link, long):
        assert report(run, "--tokens", "0", "--out", out) == 0
    assert link.is_symlink() and old.read_text("utf-8") == long.read_text("utf-8")


def test_numbers_out_of_records() -> None:
    records = [
        {"step": i, "tokens": 10 * i, "layers": {"absmax": {"q": [i, 2], "k": [i, 2], "o": [1, i]}}} for i in (1, 2)
    ]
    tokens, roles = of_layers(records, "absmax")
    assert tokens.tolist() == [10, 20] and list(roles) == ["q k", "o"] and roles["q k"].tolist() == [[1, 2], [2, 2]]
    at, values = runlog.series([{"tokens": 1, "a": {"b": 2}}, {"tokens": 3}, {"a": {"b": 2}}], "a", "b")
    assert (at.tolist(), values.tolist()) == ([1], [2])
    assert smooth(values.repeat(3).cumsum(), 2).tolist() == [2, 3, 5]
