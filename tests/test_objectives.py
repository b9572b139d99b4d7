"""`bitnet train --objective`: each one learns, resumes with the same bits, is measured, and refuses what does not
fit."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet.data import dataset
from bitnet.evaluate.loss import evaluate
from bitnet.train import loop
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.source_model import read_checkpoint
from training import TINY, bitnet, bits, killed_before, losses

torch.set_num_threads(1)

ENCODER = ("--set", "mask=bidirectional", "--set", "position=learned", "--set", "norm=layer")
OBJECTIVES = {
    # CPUs with bf16 take it unless they are told: then 20 steps at this rate may end above the tenth
    "mlm": (*ENCODER, "--objective", "mlm", "--lr", "0.02", "--precision", "fp32"),
    "contrastive": (
        *ENCODER, "--objective", "contrastive", "--set", "has_head=no", "--set", "pooling=mean", "--set",
        "n_experts=2", "--set", "experts_per_token=2",
    ),
    "prefix": ("--set", "mask=prefix"),
}  # fmt: skip


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts each of which has words of its own."""
    folder, rng = tmp_path_factory.mktemp("subjects"), random.Random(0)
    for i in range(60):
        own = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(4)]
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(own, k=120)), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def runs(sentences: str, subjects: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """For each objective its data and a run."""
    found = {}
    for name, options in OBJECTIVES.items():
        data, out = subjects if name == "contrastive" else sentences, tmp_path_factory.mktemp(name) / "run"
        assert bitnet("train", *TINY, *options, "--data", data, "--out", out) == 0
        found[name] = data, out
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_interrupted_and_resumed_is_as_uninterrupted(
    name: str, runs: dict[str, tuple[str, Path]], tmp_path: Path
) -> None:
    data, whole = runs[name]
    killed_before(13, "train", *TINY, *OBJECTIVES[name], "--data", data, "--out", tmp_path / "run")
    assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run" / "step-000020") == bits(whole / "step-000020")
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize(
    ("name", "loss", "more"),
    [
        ("mlm", "nats_per_token", {"accuracy", "tokens"}),
        ("contrastive", "nats_per_pair", {"recall", "recall_back", "pairs", "pool"}),
        ("prefix", "nats_per_token", {"bits_per_byte", "perplexity", "tokens", "standard_error"}),
    ],
)
def test_it_learns_and_eval_says_the_same(
    name: str, loss: str, more: set[str], runs: dict[str, tuple[str, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = runs[name]
    checks = [record["validation"] for record in losses(run) if "validation" in record]
    assert checks[0].keys() == {loss} | more and checks[-1][loss] < checks[0][loss]
    assert bitnet("eval", run, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {key: said[key] for key in checks[-1]} == checks[-1]
    assert bitnet("eval", run, "--data", data) == 0  # other text, and figures for people
    assert {"mlm": "right", "contrastive": "recall@1", "prefix": "bits/byte"}[name] in capsys.readouterr().out
    assert bitnet("eval", run, "--stride", "8") == 1
    assert "--stride is for text of which each token follows" in capsys.readouterr().err
    if name != "prefix":
        assert bitnet("eval", run, "--samples", "1") == 1
        out, errors = capsys.readouterr()
        assert not out and "is an encoder, which writes no text; leave it out" in errors
    assert bitnet("report", run, "--out", run / "page.png") == 0 and (run / "loss.png").is_file()


def test_hidden_tokens_are_hidden(runs: dict[str, tuple[str, Path]]) -> None:
    """The mask token is the last, no text has it, and a model that copies what it sees is wrong."""
    run = Checkpoint.open(runs["mlm"][1])
    assert run.words.token_to_id("<|mask|>") == run.words.get_vocab_size() - 1 == run.config.vocab_size - 1
    assert run.words.encode("<|mask|>", add_special_tokens=False).ids[0] != run.config.vocab_size - 1
    text = dataset.recorded(run.state, "validation", run.folder.parent)
    assert text and int(text.ids.max()) < run.config.vocab_size - 1


def test_a_prefix_costs_what_a_causal_pass_says_of_the_rest(runs: dict[str, tuple[str, Path]]) -> None:
    """With prefixes of one token a prefix model is causal: the loss is the same as without the mask."""
    run = Checkpoint.open(runs["prefix"][1])
    text = dataset.recorded(run.state, "validation", run.folder.parent)
    assert text
    model = run.model
    prefix = torch.ones(3, dtype=torch.int64)
    inputs, _ = text.window(range(3), 32)
    with torch.no_grad():
        assert torch.allclose(model(inputs, torch.zeros_like(inputs), prefix), model(inputs), atol=1e-5)
    assert dataclasses.asdict(evaluate(model, text, 32))["tokens"] == text.windows(32) * 32


def test_conversations_with_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row is one conversation; its prefix is what stands before the first answer."""
    rng, file = random.Random(0), tmp_path / "talks.jsonl"
    with file.open("w") as out:
        for _ in range(40):
            asked = rng.choice(["one", "two", "six"]) + str(rng.randrange(1000))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": asked[::-1]}]
            out.write(json.dumps({"messages": messages}) + "\n")
    options = (*TINY, "--tokenizer", "byte", "--set", "max_context=64", "--set", "mask=prefix", "--steps", "12")
    assert bitnet("train", *options, "--chat", file, "--validation", "0.3", "--out", tmp_path / "run") == 0
    assert bitnet("eval", tmp_path / "run") == 0
    assert "bits/byte" in capsys.readouterr().out


def lines_of_pairs(file: Path) -> Path:
    rng = random.Random(0)
    owns = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(80)]
    lines = [json.dumps({"question": f"where is {own}", "answer": f"{own} is here"}) for own in owns]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_pairs_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines_of_pairs(tmp_path / "pairs.jsonl")
    options = (*TINY, *OBJECTIVES["contrastive"], "--tokenizer", "byte", "--validation", "0.2", "--eval-tokens", "64")
    killed_before(12, "train", *options, "--data", file, "--out", tmp_path / "run")
    copy = file.rename(tmp_path / "elsewhere.jsonl")
    assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0  # the text is no longer needed
    said, last = capsys.readouterr().err, losses(tmp_path / "run")[-1]["validation"]
    assert bitnet("eval", tmp_path / "run", "--json") == 0
    n = json.loads(capsys.readouterr().out)["pairs"]
    assert 8 < n < 40
    assert f"evaluating on 512 of {n * 64:,} tokens of validation" in said and last["pairs"] == 8  # each takes 64
    assert bitnet("eval", tmp_path / "run", "--json", "--data", copy) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 80
    assert bitnet("eval", tmp_path / "run", "--data", copy, "--context", "8") == 0
    assert "80 of 80 pairs have a text of more than 8 tokens, which loses its end" in capsys.readouterr().err


def test_what_fills_rows_is_not_text_that_is_seen_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs take half of their rows: 75 times as many rows have more than 100 times as many tokens."""
    monkeypatch.setattr(loop, "carry_out", lambda *_: loop.Outcome())
    file = lines_of_pairs(tmp_path / "pairs.jsonl")
    options = (*TINY[:-2], *OBJECTIVES["contrastive"], "--tokenizer", "byte", "--data", file)
    for passes in (75, 150):
        assert bitnet("train", *options, "--steps", passes * 80 // 4, "--out", tmp_path / str(passes)) == 0
        assert ("is seen about" in capsys.readouterr().err) == (passes > 100)


def test_no_batch_is_of_one_pair(subjects: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*TINY, *OBJECTIVES["contrastive"], "--batch", "4", "--batch-tokens", str(64 * 9))
    assert bitnet("train", *options, "--data", subjects, "--out", tmp_path / "run") == 1
    assert "has 9 pairs in each process, in batches of 4, so the last one would have no" in capsys.readouterr().err


def test_a_packed_file_is_measured_without_a_prefix(
    runs: dict[str, tuple[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = runs["prefix"]
    assert bitnet("export", run, tmp_path / "m.bitnet", "--tokens", "300") == 0
    capsys.readouterr()
    assert bitnet("eval", tmp_path / "m.bitnet", "--data", data, "--tokens", "100") == 0
    assert "measured without a prefix, unlike its checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "has_head=no"), "--objective next, but the model has no head; add --set has_head=yes, or --obj"),
        (
            ("--set", "mask=bidirectional"),
            "each token sees the one it is to say; add --set mask=causal, or --objective",
        ),
        (("--temperature", "0.1"), "--objective next, but --temperature is of vectors of texts; leave it out"),
        (("--objective", "mlm"), "mask is causal, so a masked token sees one side alone; add --set mask=bidirectional"),
        ((*ENCODER, "--objective", "mlm", "--set", "has_head=no"), "the model has no head; add --set has_head=yes"),
        (("--objective", "contrastive"), "the model has a head; add --set has_head=no --set pooling=mean\n"),
        (("--objective", "contrastive", "--set", "pooling=last"), "the model has a head; add --set has_head=no\n"),
        (
            ("--objective", "contrastive", "--set", "has_head=no"),
            "pooling is none, so a text has no vector; add --set pooling=mean",
        ),
        ((*OBJECTIVES["contrastive"], "--batch", "1"), "there is no other text to tell from; raise --batch"),
        (("--preset", "siglip-tiny", "--objective", "mlm"), "learn by contrastive alone; take that, or --preset pali"),
        (
            ("--preset", "paligemma-tiny", "--set", "vision.out_dim=32", "--objective", "contrastive"),
            "learns by next alone; take that, or --preset siglip-tiny",
        ),
        (("--preset", "clip-base"), "(clip-base is a published shape, to measure with `bitnet bench`; siglip-tiny"),
        ((*ENCODER, "--objective", "mlm", "--chat", "x.jsonl"), "--chat is for the next token; give --data"),
        (("--objective", "gap"), "invalid choice: 'gap'"),
        (("--set", "input=embeddings"), "input is embeddings, and text has none; add --set input=tokens"),
        (
            ("--set", "adapter_rank=2", "--set", 'adapters=["q"]'),
            "the model has adapters, which are not trained together with it; begin with a model without them",
        ),
    ],
)
def test_refusals(options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("train", *TINY, *options, "--out", tmp_path / "run") in (1, 2)
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_mask_token(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("train", *TINY, "--steps", "1", "--data", sentences, "--out", tmp_path / "run") == 0
    words = tmp_path / "run" / "step-000001" / "tokenizer.json"
    options: tuple[Any, ...] = (*TINY, *OBJECTIVES["mlm"], "--tokenizer", words, "--data", sentences)
    assert bitnet("train", *options, "--out", tmp_path / "other") == 1
    assert "has no mask token, expected one of <|mask|>, [MASK], <mask>" in capsys.readouterr().err


def test_too_few_pairs_to_measure_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is said before the first step."""
    (tmp_path / "a.txt").write_text("some words of a text " * 100, encoding="utf-8")
    options = (*TINY, *OBJECTIVES["contrastive"], "--tokenizer", "byte", "--validation", "0.01")
    assert bitnet("train", *options, "--data", tmp_path / "a.txt", "--out", tmp_path / "run") == 1
    assert "1 pairs to measure on, expected at least 2" in (error := capsys.readouterr().err)
    assert "step 1" not in error


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_finetuned_learns_the_same_from_the_same(
    name: str, runs: dict[str, tuple[str, Path]], tmp_path: Path
) -> None:
    data, source = runs[name]
    objective = "next" if name == "prefix" else name
    few = ["--steps", 1, "--batch", 4, "--threads", 1]
    assert bitnet("finetune", source, "--out", tmp_path / "run", *few) == 0
    before, after = (Checkpoint.open(folder).state for folder in (source, tmp_path / "run"))
    assert after["settings"]["objective"] == objective
    assert after["settings"]["data"] == before["settings"]["data"] == [data] and after["data"] == before["data"]
    others = {"next", "mlm", "contrastive"} - {objective}
    assert not any("data" in read_checkpoint(source).defaults(objective=other)[0] for other in others)


def test_the_objective_stays(runs: dict[str, tuple[str, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("train", "--resume", "--out", runs["mlm"][1], "--objective", "next", "--steps", "30") == 1
    assert "--objective is next, but a resumed run keeps its own, mlm" in capsys.readouterr().err
