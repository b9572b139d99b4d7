"""Benchmarks that train: each in its quick form, whose runs are made once, and what becomes of their losses."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import bitnet_cli
from bitnet.train.checkpoint import Checkpoint
from test_benchmarks import is_picture

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Makes runs of benchmarks here, one after the other, and each picture once; the verbs that were called."""
    runs, calls = importlib.import_module("training_runs"), list[str]()

    def here(*words: str, until: float = math.inf) -> Any:
        calls.append(words[0])
        capsys.readouterr()  # of the benchmark itself
        assert bitnet_cli.main(words) == 0
        return json.loads(capsys.readouterr().out)

    class InTurn:
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:
            done = Future[Any]()
            done.set_result(function(*arguments))
            return done

    report = importlib.import_module("report")
    save = report.save
    monkeypatch.setattr(report, "save", lambda figure, path: path.exists() or save(figure, path))
    monkeypatch.setattr(runs, "bitnet", here)
    monkeypatch.setattr(runs, "workers", lambda jobs: InTurn())
    return calls


@pytest.mark.parametrize(("name", "more"), [("qat_gap", 1), ("recipe", 3), ("conversion", 0), ("experts", 1)])
def test_training(name: str, more: int, tmp_path: Path, called: list[str]) -> None:
    """The quick form; a second start finds every run made. more: runs besides the rows, for the token ids and for
    seeds."""
    rng = random.Random(0)
    for folder in (tmp_path / "text", tmp_path / "runs"):
        folder.mkdir()
    for i in range(20):
        words = [rng.choice(["the", "cat", "dog", "sees", "a", "red", "house", "and", "runs"]) for _ in range(20)]
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words), encoding="utf-8")
    benchmark = importlib.import_module(name)
    where = ["--data", str(tmp_path / "text"), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert benchmark.main(["--quick", *where]) == 0
    (written,) = tmp_path.glob(f"{name}*.json")
    first, results = called.copy(), json.loads(written.read_text())
    assert benchmark.main(["--quick", *where]) == 0
    assert first.count("train") + first.count("finetune") == len(results["rows"]) + more
    assert {"train", "finetune"}.isdisjoint(called[len(first) :])
    assert json.loads(written.read_text())["rows"] == results["rows"]
    assert all(math.isfinite(row["loss"]) for row in results["rows"]) and is_picture(written.with_suffix(".png"))


def test_rates(tmp_path: Path, called: list[str]) -> None:
    """The best one lies between those tried, where a parabola has its lowest point; not at either end."""
    rates = importlib.import_module("rates")
    (tmp_path / "a.txt").write_text("the red cat sees a dog " * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog sees the red house " * 100, encoding="utf-8")
    where = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert rates.main(["--quick", *where]) == 0
    (row,) = json.loads((tmp_path / "rates.json").read_text())["rows"]
    assert called == ["train"] * 4 and len(row["losses"]) == 3 and is_picture(tmp_path / "rates.png")
    parabola = {rate: 3 + math.log(rate / 6e-3) ** 2 for rate in rates.RATES}
    assert rates.best(parabola) == pytest.approx(6e-3)
    assert rates.best({rate: rate for rate in rates.RATES}) is None


def test_one_change_of_the_recipe(tmp_path: Path, called: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With as many seeds as the defaults, whose runs it shares with all other changes."""
    recipe = importlib.import_module("recipe")
    (tmp_path / "a.txt").write_text("the red cat sees a dog " * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog sees the red house " * 100, encoding="utf-8")
    where = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert recipe.main(["--quick", "--only", "AdamW", *where]) == 0
    results = json.loads((tmp_path / "recipe-AdamW.json").read_text())
    assert len(called) == 5 and [row["change"] for row in results["rows"]] == list(recipe.CHANGES)[:1]
    assert len(results["rows"][0]["differences"]) == 2
    assert recipe.main(["--quick", *where]) == 0
    assert len(called) == 6 and len(json.loads((tmp_path / "recipe.json").read_text())["rows"]) == 2
    with pytest.raises(SystemExit):
        recipe.main(["--quick", "--only", "Adam W", *where])
    assert "no change is named 'Adam W', expected part of one of: AdamW in place of" in capsys.readouterr().err
    for options, said in (
        (["--seeds", "1"], "--seeds is 1, expected 2 or more"),
        (["--when", "--only", "A"], "--only is"),
    ):
        with pytest.raises(SystemExit):
            recipe.main([*options, *where])
        assert said in capsys.readouterr().err and len(called) == 6


def test_a_difference_varies_more_than_one_run() -> None:
    """Over many draws, 5 % of the differences that are chance alone are outside, with one seed and with three."""
    recipe, drawn = importlib.import_module("recipe"), random.Random(0)
    for seeds in (1, 3):
        means = [[sum(drawn.gauss(0, 0.1) for _ in range(seeds)) / seeds for _ in range(2)] for _ in range(4000)]
        found = [a - b for a, b in means]
        limit = recipe.chance({"deviation": 0.1, "rows": [{"differences": found[:seeds]}]})
        assert 0.035 < sum(abs(each) > limit for each in found) / len(found) < 0.06


def test_a_gap_is_against_full_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever models are asked for, in whichever order; and one seed has no deviation."""
    qat_gap, runs = importlib.import_module("qat_gap"), importlib.import_module("training_runs")
    losses = {"full": 2.0, "ternary": 2.2, "wide": 2.1}

    def made(name: str) -> Any:
        return runs.Outcome(tmp_path, losses[name.partition("-")[0]], 1.0, [(1, 2.0)], 1.0)

    monkeypatch.setattr(runs, "best_rate", lambda _, name, *__, **___: (0.1, {0.1: made(name)}))
    monkeypatch.setattr(qat_gap, "exported", lambda _: {})
    here = argparse.Namespace(prepare=lambda _: None, all=lambda asked: {name: made(name) for name in asked})
    monkeypatch.setattr(qat_gap, "Runs", lambda *_: here)
    args = {"tokens": 512, "quick": True, "runs": tmp_path, "jobs": 1, "data": None, "seeds": 1}
    for models, gaps in ((["wide", "ternary", "full"], [0, 0.1, 0.05]), (["ternary", "wide"], [None, None])):
        rows = qat_gap.measure("quick", argparse.Namespace(models=models, **args))
        assert [row["gap"] for row in rows] == [gap if gap is None else pytest.approx(gap) for gap in gaps]
        page = qat_gap.markdown({"rows": rows})
        assert "0.0000" not in page and page.count("%") == 3 * (len(gaps) == 3)


def test_runs_of_other_options_or_code_are_no_figures(
    tmp_path: Path, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of a quick run, of a shorter one or of another quantizer are not read as those of this one."""
    runs, config = importlib.import_module("training_runs"), importlib.import_module("qat_gap").SIZES["quick"]
    (tmp_path / "a.txt").write_text("the red cat sees a dog " * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog sees the red house " * 100, encoding="utf-8")
    made = runs.Runs(tmp_path / "runs", 1, {"data": str(tmp_path)})
    made.prepare(config)
    short, long = runs.budget(1, 2), runs.budget(2, 2)
    first = made.all({"default": (config, short)})
    assert made.all({"default": (config, short)}) == first and called == ["train"] * 2
    expected = r"runs/default has a run of another {}, expected that of: bitnet train .*; remove the folder, or name"
    for asked, changed in (((config, long), "command"), ((config.replace(qk_norm=True), short), "model")):
        with pytest.raises(ValueError, match=expected.format(changed)):
            made.all({"new": (config, short), "default": asked})
    monkeypatch.setattr(runs, "version", lambda: "a changed quantizer")
    with pytest.raises(ValueError, match="has a run of another version"):
        made.prepare(config)
    assert called == ["train"] * 2


def test_runs_that_have_not_begun_never_do_after_one_that_fails(tmp_path: Path) -> None:
    """As at Ctrl-C: a benchmark would end hours later."""
    runs, told = importlib.import_module("training_runs"), threading.Event()

    def made(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt
        assert told.wait(60)

    pool = runs.workers(1)
    waiting = {str(number): pool.submit(made, number) for number in range(3)}
    with pytest.raises(KeyboardInterrupt):
        runs.results(waiting)
    assert waiting["2"].cancelled()  # the second may have begun
    told.set()
    pool.shutdown()
    with pytest.raises(runs.report.BenchmarkError, match="--jobs is 0, expected 1 or more"):
        runs.Runs(tmp_path, 0, {})


def test_when_the_quantizers_come_in(tmp_path: Path, called: list[str]) -> None:
    """Each way at each length with each seed; a second start finds every run made."""
    recipe = importlib.import_module("recipe")
    (tmp_path / "a.txt").write_text("the red cat sees a dog " * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog sees the red house " * 100, encoding="utf-8")
    where = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert recipe.main(["--quick", "--when", *where]) == 0
    results = json.loads((tmp_path / "recipe-when.json").read_text())
    assert results["lengths"] == [512, 1024] and called == ["train"] * 9  # the first for the token ids
    assert [row["way"] for row in results["rows"]] == list(recipe.WHEN)[:2]
    assert all(math.isfinite(loss) for row in results["rows"] for each in row["losses"] for loss in each)
    assert recipe.main(["--quick", "--when", *where]) == 0
    assert len(called) == 9 and is_picture(tmp_path / "recipe-when.png")


def test_images(tmp_path: Path, called: list[str]) -> None:
    """Twins differ in nothing but their quantizers; a second start finds every run made."""
    vision, where = importlib.import_module("image_gap"), ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert vision.main(["--quick", *where]) == 0
    assert called == ["train", "train", "eval", "eval"] * 2
    results = json.loads((tmp_path / "image_gap.json").read_text())
    assert [row["variant"] for row in results["rows"]] == ["ternary", "full"]
    assert all(0 <= row[name]["mean"] <= 1 for row in results["rows"] for name in vision.MEASURES)
    quantizers = {"ternary", "head_format"}
    for model in ("siglip", "paligemma"):
        ternary, full = (
            Checkpoint.open(tmp_path / "runs" / f"{model}-{variant}-seed0").config for variant in vision.VARIANTS
        )
        assert ternary.ternary and not full.ternary
        assert ternary.vision and full.vision and ternary.vision.ternary and not full.vision.ternary
        both = [config.to_dict() for config in (ternary, full)]
        for fields in (*both, *(each["vision"] for each in both)):
            for name in quantizers:
                fields.pop(name)
        assert both[0] == both[1]
    assert vision.main(["--quick", *where]) == 0 and called[8:] == []
    (tmp_path / "runs/full-seed0.json").unlink()
    assert vision.main(["--quick", *where]) == 0 and called[8:] == ["eval", "eval"]
    assert json.loads((tmp_path / "image_gap.json").read_text())["rows"] == results["rows"]
    assert "| ternary |" in (tmp_path / "image_gap.md").read_text() and is_picture(tmp_path / "image_gap.png")
    count = len(called)
    with pytest.raises(ValueError, match=r"runs has runs of another siglip_steps, 3, expected 2000; remove the folder"):
        vision.main(where)  # would count seed 0 of the quick form, and draw no other pictures
    assert len(called) == count
