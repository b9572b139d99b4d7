"""Drafts in training: during a run, which they do not affect, and afterwards, when the model stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bitnet.data import dataset
from bitnet.data.corpus import DataError
from bitnet.evaluate import acceptance
from bitnet.train.checkpoint import Checkpoint
from training import TINY, bits, killed_before, losses
from training import bitnet as run

torch.set_num_threads(1)


SMALL = [*TINY, "--lr", "0.02"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    lines = [
        f"the {a} cat sees the {b} house and the {a} dog\n"
        for a in ["red", "blue", "old"]
        for b in ["big", "small", "new"]
    ]
    file.write_text("".join(lines * 40))
    return file


@pytest.fixture(scope="module")
def joint(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns a draft, too."""
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run("train", "--data", text, "--out", out, *SMALL, "--draft") == 0
    return out


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert run("train", "--data", text, "--out", out, *SMALL) == 0
    return out


def weights(folder: Path, *, draft: bool) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("draft.") == draft}


def test_the_model_is_that_of_a_run_without_a_draft(joint: Path, plain: Path) -> None:
    ours, theirs = (weights(folder / "step-000020", draft=False) for folder in (joint, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first, last = (weights(joint / step, draft=True) for step in ("step-000010", "step-000020"))
    assert first and not any(torch.equal(first[name], last[name]) for name in first if last[name].dim() == 2)
    for with_draft, without in zip(losses(joint), losses(plain), strict=True):
        assert with_draft.get("loss") == without.get("loss")
        assert with_draft.get("gradient_norm") == without.get("gradient_norm")
        assert with_draft.get("validation") == without.get("validation")


def test_the_log_says_what_the_draft_learns(joint: Path) -> None:
    records = losses(joint)
    steps = [record["draft"] for record in records if "loss" in record]
    assert steps[-1] < steps[0] - 0.3
    checks = [record["guesses"] for record in records if "validation" in record]
    assert all(len(check["accepted"]) == 3 and min(check["accepted"]) >= 0 for check in checks)
    assert checks[-1]["tokens_per_pass"] == 1 + sum(checks[-1]["accepted"])
    assert len(next(record["accepted"] for record in records if "accepted" in record)) == 3


def test_a_run_goes_on_in_the_same_bits(
    joint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    killed_before(13, "train", "--data", text, "--out", out, *SMALL, "--draft")
    capsys.readouterr()
    assert run("train", "--resume", "--out", out) == 0
    without = Checkpoint.open(joint / "step-000020").config.replace(draft=None)
    assert f"parameters, {without.ternary_weights:,} ternary;" in capsys.readouterr().err
    assert bits(out / "step-000020") == bits(joint / "step-000020")


def test_a_draft_is_learnt_afterwards(plain: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("finetune", plain, "--draft-only", "--data", text, "--out", out, "--threads", 1)
    assert run(*command, "--steps", 60, "--lr", 0.02, "--eval-every", 30, "--layers-every", 20) == 0
    before, after = (weights(folder, draft=False) for folder in (plain / "step-000020", out / "step-000060"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    records = losses(out)
    found = [record["validation"] for record in records if "validation" in record]
    assert found[-1]["nats_per_guess"] < records[0]["start"]["nats_per_guess"] - 0.5
    assert found[-1]["accepted"][0] > 0.5  # of 300 tokens
    saved = {name.split(".")[0] for name in load_file(out / "step-000060" / "optimizer.safetensors")}
    assert saved == {"draft"}
    assert json.loads((out / "step-000060" / "state.json").read_text())["settings"]["batch"] == 4
    assert (
        run("finetune", out, "--no-draft", "--data", text, "--out", tmp_path / "other", "--steps", 1, "--threads", 1)
        == 0
    )
    assert Checkpoint.open(tmp_path / "other").config.draft is None


def test_a_model_with_a_draft_goes_on(joint: Path, text: Path, tmp_path: Path) -> None:
    """The draft by itself, from where it is; and preferences without it."""
    few = ("--steps", 1, "--lr", 1e-9, "--threads", 1)
    assert run("finetune", joint, "--draft-only", "--data", text, "--out", tmp_path / "alone", *few) == 0
    before, after = weights(joint / "step-000020", draft=True), weights(tmp_path / "alone" / "step-000001", draft=True)
    assert before.keys() == after.keys() and all(torch.allclose(before[name], after[name], atol=1e-6) for name in after)
    wishes = tmp_path / "wishes.jsonl"
    wishes.write_text("".join(f'{{"prompt": "{i}", "chosen": " yes", "rejected": " no"}}\n' for i in range(40)))
    assert run("finetune", joint, "--preference", wishes, "--out", tmp_path / "polite", *few) == 0
    assert Checkpoint.open(tmp_path / "polite").config.draft is None


def test_a_draft_learns_from_the_text_of_the_run(
    plain: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--steps", 1, "--threads", 1)
    assert run("finetune", plain, "--draft-only", "--out", tmp_path / "same", *few) == 0
    assert "same: no --data, so it learns from the text that the source learned from" in capsys.readouterr().err
    made, source = (Checkpoint.open(folder).state for folder in (tmp_path / "same", plain))
    assert made["settings"]["data"] == source["settings"]["data"] == [str(text)] and made["data"] == source["data"]
    (tmp_path / "other.txt").write_text(text.read_text()[::-1])
    other = ("--data", tmp_path / "other.txt", "--out", tmp_path / "other")
    assert run("finetune", plain, "--draft-only", *other, *few) == 0
    made = Checkpoint.open(tmp_path / "other").state
    assert made["settings"]["data"] == [str(tmp_path / "other.txt")] and made["data"] != source["data"]


def test_an_evaluation_takes_what_it_may(joint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model keeps no keys in training, so a token that it writes takes all that stand before it."""
    model, context, computed = Checkpoint.open(joint).model, 32, list[int]()
    hidden = type(model).hidden

    def counted(self: Any, tokens: Any, *more: Any) -> Any:
        computed.append(tokens.numel())
        return hidden(self, tokens, *more)

    monkeypatch.setattr(type(model), "hidden", counted)
    text = dataset.Tokens.map(next(joint.glob("train-*.bin")), "uint16", 1, "")
    with pytest.raises(DataError, match="the text has 20 tokens, one window needs 33"):
        acceptance.evaluate(model, dataset.Tokens(text.ids[:20], 1, ""), context)
    costs, chains = [], []
    for limit in (1, 8192, 0):
        computed.clear()
        chains.append(acceptance.evaluate(model, text, context, limit).chains)
        costs.append(sum(computed))
    assert chains[0] < chains[1] < chains[2] and costs[1] < 3 * 8192
    assert [round(costs[i] / costs[0]) for i in (1, 2)] == [4, 16]


class Rows:
    """Rows of several documents, as those of --chat and --documents."""

    n_tokens = 0

    def __init__(self, tokens: torch.Tensor, documents: torch.Tensor) -> None:
        self.tokens, self.documents = tokens, documents

    def windows(self, context: int) -> int:
        return len(self.tokens)

    def window(self, indices: list[int], context: int) -> tuple[torch.Tensor, ...]:
        return self.tokens[indices], self.tokens[indices], self.documents[indices]


def test_an_evaluation_keeps_documents_apart(joint: Path) -> None:
    """What stands before the document that is continued changes nothing, nor do rows that end in the prompt."""
    model, context = Checkpoint.open(joint).model, 32
    text = dataset.Tokens.map(next(joint.glob("train-*.bin")), "uint16", 1, "")
    tokens, documents = text.window(range(4), context)[0], torch.arange(context).ge(6).long().expand(4, context).clone()
    found = acceptance.evaluate(model, Rows(tokens, documents), context)  # type: ignore[arg-type]
    other = torch.where(documents == 0, tokens.flip(1), tokens)
    assert not torch.equal(other, tokens)
    padded = torch.cat([other, torch.zeros(2, context, dtype=torch.int64)])
    ends = torch.cat([documents, torch.arange(context).ge(9).long().neg().expand(2, context)])
    for rows in (Rows(other, documents), Rows(padded, ends)):
        again = acceptance.evaluate(model, rows, context)  # type: ignore[arg-type]
        assert again.chains == found.chains and again.accepted == found.accepted
        assert again.nats_per_guess == pytest.approx(found.nats_per_guess, rel=1e-5)


def test_the_text_of_a_source_may_be_gone(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone.txt"
    gone.write_text(text.read_text())
    assert run("train", "--data", gone, "--out", tmp_path / "source", *TINY) == 0
    gone.unlink()
    assert run("finetune", tmp_path / "source", "--draft-only", "--steps", 1, "--out", tmp_path / "drafted") == 1
    assert f"matches '{gone}' (the text of the source; --data names another)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--draft", "--set", "mask=prefix"], "--draft is for causal models of the next token"),
        (["train", "--set", "draft=3"], "add --draft to train one"),
        (["train", "--draft-only"], "unknown option '--draft-only'"),
        (["finetune", "RUN", "--draft-only", "--no-draft"], "both given"),
        (["finetune", "RUN", "--self-written", "100"], "add --draft-only"),
        (["finetune", "RUN", "--draft", "--distill", "0.5"], "a draft cannot learn while its model is distilled"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    words: list[str], said: str, plain: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(plain) if word == "RUN" else word for word in words]
    more = TINY if words[0] == "train" else ["--steps", "1"]
    try:
        code = run(*words, "--data", text, "--out", tmp_path / "x", *more)
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code and said in capsys.readouterr().err
