"""Tasks that a run evaluates during training: when, what is logged, and which checkpoint is kept for them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitnet.evaluate.engine_lm import EngineLM
from bitnet.report import page
from bitnet.train import runlog, tasks
from bitnet.train.checkpoint import all_of
from bitnet_export.checkpoint import pack
from training import TINY, bitnet, bits, killed_before, losses


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A file that defines one, which needs no network."""
    lines = [{"question": f"the {word}", "choices": [" cat", " house", " x7q"], "answer": i % 2}
             for i, word in enumerate(["red", "big", "one", "old"])]  # fmt: skip
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    defined = {
        "task": "animals", "dataset_path": "json", "dataset_kwargs": {
            "data_files": str(tmp_path / "questions.jsonl"), "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "train", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "animals.yaml").write_text(yaml.safe_dump(defined))
    return tmp_path / "animals.yaml"


def asked(run: Path) -> dict[int, float]:
    return {r["step"]: r["tasks"]["animals/acc"] for r in runlog.read(run / "log.jsonl") if "tasks" in r}


def test_a_run_is_asked_and_goes_on_alike(
    task: Path, sentences: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = ["train", *TINY, "--data", sentences, "--tasks", task.name, "--tasks-every", "10", "--tasks-limit", "3"]
    assert bitnet(*command, "--out", whole) == 0
    found = asked(whole)
    assert list(found) == [0, 10, 20] and all(value in (0, 1 / 3, 2 / 3, 1) for value in found.values())
    assert bits(whole / "step-000020") == bits(finished / "step-000020")  # being evaluated changes nothing
    assert not list(whole.glob(".*"))
    capsys.readouterr()
    assert bitnet("eval", whole, "--tasks", task, "--limit", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"]["animals"]["acc,none"] == found[20]
    assert page.summary(whole, runlog.read(whole / "log.jsonl"))["tasks"].startswith("animals/acc ")
    killed_before(15, *command, "--out", killed)
    monkeypatch.chdir("/")
    assert bitnet("train", "--resume", "--out", killed) == 0
    assert losses(killed) == losses(whole)


def test_the_best_is_kept(task: Path, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.1, 0.9, 0.5, 0.4, 0.9])

    def how(*_: Any) -> dict[str, Any]:
        return {"results": {"a": {"alias": "a", "ppl,none": 3.0, "acc,none": next(answers), "acc_stderr,none": 0.1}},
                "higher_is_better": {"a": {"ppl": False, "acc": True}}}  # fmt: skip

    monkeypatch.setattr("bitnet_cli.verbs.train.ask", how)
    run = tmp_path / "run"
    command = ["--data", sentences, "--tasks", "a", "--tasks-every", "5", "--keep", "1", "--keep-best", "--out", run]
    assert bitnet("train", *TINY, "--eval-every", "20", *command) == 0
    records = [record for record in runlog.read(run / "log.jsonl") if "tasks" in record]
    assert [(r["step"], r["task_score"]) for r in records] == [(0, 0.1), (5, 0.9), (10, 0.5), (15, 0.4), (20, 0.9)]
    assert records[0]["tasks"] == {"a/ppl": 3.0, "a/acc": 0.1}
    assert {"step-000005", "step-000020"} <= {path.name for path in all_of(run)}


def test_a_failure_costs_no_run(
    sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step a failure ends the run; later it is only reported."""
    failures: list[Exception | None] = [KeyError("question")]

    def how(*_: Any) -> dict[str, Any]:
        if failure := failures.pop(0):
            raise failure
        return {"results": {"animals": {"acc,none": 0.5}}, "higher_is_better": {"animals": {"acc": True}}}

    monkeypatch.setattr("bitnet_cli.verbs.train.ask", how)
    run = tmp_path / "run"
    command = ["train", *TINY, "--data", sentences, "--tasks", "a", "--tasks-every", "5", "--out", run]
    assert bitnet(*command) == 1
    assert "--tasks a: KeyError: 'question'" in capsys.readouterr().err and not run.exists()
    failures += [None, ConnectionError("no route to host"), None, RuntimeError("broken"), None]
    assert bitnet(*command) == 0
    said = capsys.readouterr().err
    assert "tasks at step 5, left out: no route to host\n" in said
    assert "tasks at step 15, left out: RuntimeError: broken\n" in said
    assert {r["step"]: r["tasks_failed"] for r in runlog.read(run / "log.jsonl") if "tasks_failed" in r} == {
        5: "no route to host", 15: "RuntimeError: broken"
    }  # fmt: skip
    assert list(asked(run)) == [0, 10, 20] and not list(run.glob(".*"))
    assert bits(run / "step-000020") == bits(finished / "step-000020")


def test_a_signal_ends_what_is_asked(
    task: Path, sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the question during which it came; the run is saved, and resumes as if nothing had been asked."""
    score, questions = EngineLM._score, 0

    def interrupted(*given: Any) -> Any:
        nonlocal questions
        questions += 1
        if questions == 13:  # four times three answers are scored before the first step
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*given)

    monkeypatch.setattr(EngineLM, "_score", interrupted)
    run = tmp_path / "run"
    command = ["train", *TINY, "--data", sentences, "--tasks", task, "--tasks-every", "5", "--out", run]
    assert bitnet(*command, "--tasks-limit", "4") == 128 + signal.SIGTERM
    log = runlog.read(run / "log.jsonl")
    assert questions == 13 and [r["step"] for r in log if "tasks_failed" in r] == [5] and list(asked(run)) == [0]
    assert all_of(run)[-1].name == "step-000005"
    assert bitnet("train", "--resume", "--out", run) == 0
    assert bits(run / "step-000020") == bits(finished / "step-000020") and list(asked(run)) == [0, 10, 15, 20]


def test_a_run_that_patience_ends_is_asked_in_the_end(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"results": {"animals": {"acc,none": 0.5}}, "higher_is_better": {"animals": {"acc": True}}}
    monkeypatch.setattr("bitnet_cli.verbs.train.ask", lambda *_: figures)
    monkeypatch.setattr("bitnet.train.validation.over", lambda run: run.state["step"] == 10)
    run = tmp_path / "run"
    assert bitnet("train", *TINY, "--data", sentences, "--tasks", "a", "--out", run) == 0
    assert list(asked(run)) == [0, 10] and all_of(run)[-1].name == "step-000010"


def test_a_task_that_is_none(
    sentences: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(pack, "pack_checkpoint", lambda *_, **__: pytest.fail("packed before the name was looked up"))
    assert bitnet("train", *TINY, "--data", sentences, "--tasks", "none.yaml", "--out", run) == 1
    said = capsys.readouterr().err
    assert "none.yaml does not exist, expected a file that defines a task" in said and "cannot be written" not in said
    assert not run.exists()
    assert bitnet("eval", finished, "--tasks", "none.yaml") == 1
    assert "none.yaml does not exist, expected a file that defines a task" in capsys.readouterr().err


def test_the_score_of_tasks() -> None:
    one = {"acc,none": 0.5, "acc_norm,none": 0.7}
    better = {"one": {"acc": True, "acc_norm": True}, "two": {"word_perplexity": False}}
    figures = {"results": {"one": one, "two": {"word_perplexity,none": 9.0}}, "higher_is_better": better}
    assert tasks.mean(figures) == 0.5
    assert tasks.mean({"results": {"two": {"word_perplexity,none": 9.0}}, "higher_is_better": better}) is None
    no_number = {"results": {"one": {"acc,none": float("nan")}}, "higher_is_better": better}
    assert tasks.mean(no_number) is None and tasks.scores(no_number) == {}
