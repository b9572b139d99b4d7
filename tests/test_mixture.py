"""Runs on several sources: each has its share in every stage, and a resumed run sees what it would have seen."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet.data import corpus, dataset, views
from bitnet.data.corpus import DataError
from bitnet.data.mixed import Mixed
from bitnet.data.mixture import recorded
from bitnet.evaluate import acceptance
from bitnet.evaluate.loss import Overlapping, evaluate
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.real_text import real_tokens
from training import TINY, bitnet, bits, killed_before, losses

torch.set_num_threads(1)


FILE = """
[sources.animals]
data = ["animals"]
[sources.numbers]
data = ["numbers.jsonl"]
column = "content"

[[stages]]
until = 0.6
weights = { animals = 3, numbers = 1 }
[[stages]]
weights = { numbers = 1 }
"""
NUMBERS = "[[stages]]\nweights = { numbers = 1 }"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, and a file that names them."""
    folder, rng = tmp_path_factory.mktemp("mixture"), random.Random(0)
    (folder / "animals").mkdir()
    for i in range(40):
        words = rng.choices(["the", "cat", "dog", "sees", "a", "and", "runs"], k=300)
        (folder / "animals" / f"{i}.txt").write_text(" ".join(words))
    lines = [json.dumps({"content": " ".join(str(rng.randrange(100)) for _ in range(200))}) for _ in range(120)]
    (folder / "numbers.jsonl").write_text("\n".join(lines))
    (folder / "mix.toml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert bitnet("train", *TINY, "--mixture", folder / "mix.toml", "--out", run) == 0
    return run


# ---- the file ----


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[sources.animals]", "[sources.animals", "is not TOML"),
        ('data = ["animals"]', "", r"sources\.animals has no data"),
        ('data = ["animals"]', "data = []", r"data of sources\.animals is \[\]"),
        ('["animals"]', '[""]', r"data of sources\.animals is \[''\], expected a list of files, folders or globs"),
        ('column = "content"', "columns = 3", "has columns = 3, expected column, data"),
        ("until = 0.6\n", "", "stage 1 has no until"),
        ("until = 0.6", "until = 1.5", r"until is 1\.5, expected rising shares of the run below 1, or"),
        ("until = 0.6", "until = true", "until of stage 1 is True, expected a number"),
        ("until = 0.6", "until = nan", "until is nan, expected rising shares"),
        (
            '["animals"]',
            '"animals"',
            r"data of sources\.animals is 'animals', expected a list, such as \[\"animals\"\]",
        ),
        ("animals = 3", "animals = 1e308", "the weight of animals in stage 1 is 1e.308, expected a number from 0 to"),
        ("animals = 3", "animals = -1", "the weight of animals in stage 1 is -1"),
        ("animals = 3", "animal = 3", "weights of stage 1 have 'animal', expected names of sources: animals, numbers"),
        ("animals = 3", "animals = 0", "source animals has no weight, or less than a millionth"),
        ("{ numbers = 1 }", "{ numbers = 0.0 }", "the weights of stage 2 are all 0"),
        (NUMBERS, NUMBERS + "\nuntil = 1", "stage 2 has until, and is the last"),
        ('"animals"]', '"beasts"]', "source animals: no file, folder or glob matches '.*/beasts'"),
    ],
)
def test_a_file_that_is_no_mixture(
    before: str, after: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "x")
    assert before in FILE
    (tmp_path / "x" / "mix.toml").write_text(FILE.replace(before, after))
    assert bitnet("train", *TINY, "--mixture", tmp_path / "x" / "mix.toml", "--out", tmp_path / "run") == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_mixture_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("train", *TINY, "--mixture", tmp_path / "no.toml", "--out", tmp_path / "run") == 1
    assert "no.toml: No such file or directory; expected the TOML file of a mixture" in capsys.readouterr().err


def test_no_source_learns_what_another_holds_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashes alone see to that; a source of one text is cut, whose other part must not be learnt elsewhere."""
    texts = [f"{i} and more of it" for i in range(200)]
    seen = {side: [t for t in texts if t in [*corpus.split(texts, 0.2)[side]]] for side in (0, 1)}

    def check(**sources: list[str]) -> None:
        corpus.check_apart({name: corpus.split(source, 0.2) for name, source in sources.items()})

    learnt, held_out = seen[0][0], seen[1][0]
    check(a=texts, b=texts[::-1], c=[*texts, "another"])
    check(a=[learnt], b=[learnt], c=["another"])
    check(a=[learnt], b=[text for text in texts if text != learnt])
    for a, b, said in (
        ([learnt], texts, "source b learns from a document of which source a holds out"),
        ([held_out], texts, "source a learns from a document of which source b holds out"),
        (seen[1][:2], [learnt, seen[1][0]], "source a learns from a document of which source b holds out"),
        (seen[1][:2], [learnt, seen[1][1]], "source a learns from a document of which source b holds out"),
    ):
        for sources in ({"a": a, "b": b}, {"b": b, "a": a}):
            with pytest.raises(DataError, match=said):
                check(**sources)
    shutil.copytree(folder, tmp_path / "x")
    learnt = next(iter(corpus.split([file.read_text() for file in (folder / "animals").iterdir()], 0.05)[0]))
    (tmp_path / "x" / "numbers.jsonl").write_text(json.dumps({"content": learnt}))
    assert bitnet("train", *TINY, "--mixture", tmp_path / "x" / "mix.toml", "--out", tmp_path / "run") == 1
    assert "source animals learns from a document of which source numbers holds out" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["animals", "numbers"])
def test_no_source_learns_what_another_holds_out_of_token_ids(
    cut: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever of both is a single document, of which the end is held out. Older folders do not say what they have."""
    shutil.copytree(folder, tmp_path / "x")
    (tmp_path / "text").mkdir()
    texts = [file.read_text() for file in (folder / "animals").iterdir()]
    one = next(iter(corpus.split([20 * text for text in texts], 0.05)[0]))
    both = {name: [one] if name == cut else [one, *texts] for name in ("animals", "numbers")}
    (tmp_path / "x" / "numbers.jsonl").write_text("\n".join(json.dumps({"content": text}) for text in both["numbers"]))
    for i, text in enumerate(both["animals"]):
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    shutil.rmtree(tmp_path / "x" / "animals")
    ids = tmp_path / "x" / "animals"
    assert bitnet("tokenize", ids, "--data", tmp_path / "text", "--vocab-size", "300") == 0
    other = "numbers" if cut == "animals" else "animals"
    said = f"source {other} learns from a document of which source {cut} holds out a part or all; remove it from"
    train = ["train", *TINY, "--steps", "2", "--mixture", tmp_path / "x" / "mix.toml", "--out", tmp_path / "run"]
    assert bitnet(*train) == 1
    assert said in capsys.readouterr().err
    (ids / "train.documents").write_bytes(b"torn")
    assert bitnet(*train) == 1
    expected = "has 4 bytes, expected SHA-256 digests of 32" if cut == "numbers" else said
    assert expected in capsys.readouterr().err
    for file in ids.glob("*.documents"):
        file.unlink()
    assert bitnet(*train) == (0 if cut == "numbers" else 1)


# ---- runs ----


def test_a_run_says_what_it_learns_from(whole: Path) -> None:
    state = Checkpoint.open(whole).state
    assert state["course"] == [
        {"step": 0, "tokens": 0, "weights": {"animals": 0.75, "numbers": 0.25}},
        {"step": 12, "tokens": 1536, "weights": {"animals": 0.0, "numbers": 1.0}},
    ]
    last = losses(whole)[-1]["validation"]
    assert last["nats_per_token"] == last["sources"]["numbers"] != last["sources"]["animals"]


@pytest.mark.parametrize("step", [11, 12, 17])
def test_a_run_that_was_killed_ends_in_the_same_bits(step: int, folder: Path, whole: Path, tmp_path: Path) -> None:
    """Killed before the second stage, at its start and after it; text and file may be gone by then."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    words = ["train", *TINY, "--save-every", "4", "--mixture", copy / "mix.toml", "--out", tmp_path / "run"]
    killed_before(step, *words)
    shutil.rmtree(copy)
    assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run" / "step-000020") == bits(whole / "step-000020")
    assert losses(tmp_path / "run") == losses(whole)


def test_the_order_of_the_sources_may_change(folder: Path, whole: Path, tmp_path: Path) -> None:
    """It decides between sources that are equally due, so a run keeps its own."""
    shutil.copytree(folder, tmp_path / "x")
    file, run = tmp_path / "x" / "mix.toml", tmp_path / "run"
    killed_before(6, "train", *TINY, "--save-every", "5", "--mixture", file, "--out", run)
    animals, numbers = '[sources.animals]\ndata = ["animals"]\n', FILE[FILE.index("[sources.n") : FILE.index("[[")]
    assert animals + numbers in FILE
    file.write_text(FILE.replace(animals + numbers, numbers + animals))
    assert bitnet("train", "--resume", "--out", run) == 0
    assert bits(run / "step-000020") == bits(whole / "step-000020")


def test_evaluation_and_export_find_what_was_held_out(
    whole: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    figures: list[dict[str, Any]] = []
    said: list[str] = []
    for _ in range(2):  # with its token ids, and with the text read again
        assert bitnet("eval", tmp_path / "run", "--json") == 0
        figures.append(json.loads(capsys.readouterr().out))
        said.append(real_tokens(Checkpoint.open(tmp_path / "run"), 200)[1])
        for file in (tmp_path / "run").glob("validation-*.bin"):
            file.unlink()
    assert figures[0] == figures[1]
    assert said[0] == "validation text" and said[1].startswith("the standard library's source (the validation text")
    assert figures[0]["sources"] == losses(whole)[-1]["validation"]["sources"]
    assert bitnet("eval", tmp_path / "run") == 0
    assert f"animals {figures[0]['sources']['animals']:.4f}, numbers 2." in capsys.readouterr().out


def test_windows_of_each_source_may_overlap(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of each is that of its text alone."""
    shutil.copytree(whole, tmp_path / "run")
    held_out = recorded(Checkpoint.open(whole).state, "validation", whole)
    assert held_out
    for stride in (8, 32):
        assert bitnet("eval", tmp_path / "run", "--stride", stride, "--context", 32, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        alone = {name: Overlapping(part, stride) for name, part in held_out.parts.items()}
        expected = {name: evaluate(Checkpoint.open(whole).model, each, 32) for name, each in alone.items()}
        assert result["sources"] == {name: pytest.approx(each.nats_per_token) for name, each in expected.items()}
        assert result["stride"] == stride and result["tokens"] == sum(each.tokens for each in expected.values())


def test_what_comes_may_change_and_the_sources_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "x")
    file, run = tmp_path / "x" / "mix.toml", tmp_path / "run"
    killed_before(15, "train", *TINY, "--save-every", "14", "--mixture", file, "--out", run)
    file.write_text(FILE.replace("[[stages]]\nweights = { numbers", "[[stages]]\nweights = { animals = 1, numbers"))
    assert bitnet("train", "--resume", "--out", run) == 0
    assert [each["step"] for each in Checkpoint.open(run).state["course"]] == [0, 12, 14]
    file.write_text(FILE.replace('["animals"]', '["animals", "numbers.jsonl"]'))
    assert bitnet("train", "--resume", "--out", run, "--steps", "22") == 1
    assert "has other sources than the run, which keeps them" in capsys.readouterr().err


def test_a_source_whose_text_has_changed_is_refused_before_it_is_tokenized(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = tmp_path / "run", shutil.copytree(folder, tmp_path / "x")
    assert bitnet("train", *TINY, "--steps", "2", "--mixture", copy / "mix.toml", "--out", run) == 0
    for file in run.glob("*.bin"):
        file.unlink()
    (copy / "animals" / "0.txt").write_text("the cat sees")
    monkeypatch.delattr(dataset, "encoder")
    assert bitnet("train", "--resume", "--out", run, "--steps", "3") == 1
    assert "was trained on other text" in capsys.readouterr().err


def test_a_stage_stays_where_it_was_when_sequences_get_longer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = tmp_path / "run", tmp_path / "x" / "mix.toml"
    shutil.copytree(folder, file.parent)
    file.write_text(re.sub("until = [0-9.]+", "until = 1500", FILE))  # tokens
    longer = ["--set", "max_context=128", "--context", "32"]
    killed_before(15, "train", *TINY, *longer, "--save-every", "14", "--mixture", file, "--out", run)
    came_from: set[int] = set()
    sequences = Mixed.sequences

    def recorded(self: Mixed, first: int, last: int) -> tuple[Any, ...]:
        came_from.update(self._source(n) for n in range(first, last))
        return sequences(self, first, last)

    monkeypatch.setattr(Mixed, "sequences", recorded)
    assert bitnet("train", "--resume", "--out", run, "--context", "128") == 0
    assert came_from == {1}, "the second stage, which has numbers alone, had begun"


def test_sources_may_be_folders_of_token_ids(
    folder: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokenizer of the first, with which the text of others is encoded."""
    words = json.dumps(str(next(whole.glob("step-000020")) / "tokenizer.json"))
    tokens = ["tokenize", tmp_path / "animals", "--data", folder / "animals", "--tokenizer", json.loads(words)]
    assert bitnet(*tokens) == 0
    shutil.copy(folder / "numbers.jsonl", tmp_path)
    (tmp_path / "mix.toml").write_text(FILE)
    assert bitnet("train", *TINY, "--mixture", tmp_path / "mix.toml", "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run" / "step-000020") == bits(whole / "step-000020")
    assert real_tokens(Checkpoint.open(tmp_path / "run"), 200)[1] == "validation text"
    killed_before(21, "train", "--resume", "--out", tmp_path / "run", "--steps", "23")
    assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0
    both = ["--mixture", tmp_path / "mix.toml", "--out", tmp_path / "other"]
    capsys.readouterr()
    assert bitnet("train", *TINY, *both, "--validation", "0.2") == 1
    said = "different shares of their documents (animals 0.05, numbers 0.2), so one may learn what another holds out"
    assert said in capsys.readouterr().err
    ids = '[sources.animals]\ndata = ["animals"]\n[[stages]]\nweights = { animals = 1 }'
    (tmp_path / "ids.toml").write_text(ids)
    alone = ["--mixture", tmp_path / "ids.toml", "--out", tmp_path / "other", "--validation", "0.2"]
    assert bitnet("train", *TINY, *alone) == 1
    assert "holds out 0.05 of its documents, and --validation is 0.2; leave that out" in capsys.readouterr().err
    assert bitnet("train", *TINY, *both, "--objective", "mlm", "--set", "mask=bidirectional") == 1
    assert "--mixture is of text, for the next token" in capsys.readouterr().err
    assert bitnet("train", *TINY, *both, "--data", "x") == 1
    assert "both --data and --mixture are given" in capsys.readouterr().err


def test_attention_may_stay_within_documents(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What precedes a document does not change the predictions in it."""
    words = [*TINY, "--mixture", folder / "mix.toml", "--steps", "2", "--documents"]
    assert bitnet("train", *words, "--out", tmp_path / "run") == 0
    checkpoint = Checkpoint.open(tmp_path / "run")
    held_out = recorded(checkpoint.state, "validation", tmp_path / "run")
    assert held_out
    separate = replace(held_out, view=views.Apart(held_out.first)).seen["animals"]
    inputs, _, documents = separate.window([0], 32)
    inputs[0, 12] = held_out.first
    documents = views.Apart(held_out.first)(inputs, inputs, [0])[2]
    assert documents.unique().numel() == 2
    other = inputs.clone()
    other[0, 1:12] = other[0, 1:12].flip(0)
    with torch.no_grad():
        for told, same in (((documents,), True), ((), False)):
            a, b = (checkpoint.model(ids, *told) for ids in (inputs, other))
            assert torch.equal(a[:, 12:], b[:, 12:]) == same
    assert bitnet("eval", tmp_path / "run", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["sources"] == losses(tmp_path / "run")[-1]["validation"]["sources"]
    for more in (("--set", "mask=prefix"), ("--set", "mask=bidirectional", "--objective", "mlm")):
        assert bitnet("train", *TINY, "--data", folder, "--documents", *more, "--out", tmp_path / "x") == 1
        assert "--documents is of text, for the next token of a causal model" in capsys.readouterr().err


@pytest.mark.parametrize("weights", [{"numbers": 1}, {"animals": 1, "numbers": 3}])
def test_a_draft_is_measured_on_the_sources_of_the_loss(folder: Path, tmp_path: Path, weights: dict[str, int]) -> None:
    """With their weights, not on the first source alone, which may have none."""
    words = [*TINY, "--draft", "--eval-every", "100", "--eval-tokens", "1000000"]
    shares = ", ".join(f"{name} = {weight}" for name, weight in weights.items())
    stages = f"[[stages]]\nuntil = 0.5\nweights = {{ animals = 1 }}\n[[stages]]\nweights = {{ {shares} }}\n"
    (folder / "draft.toml").write_text(FILE.partition("[[stages]]")[0] + stages)
    assert bitnet("train", *words, "--mixture", folder / "draft.toml", "--out", tmp_path / "run") == 0
    kept, guesses = Checkpoint.open(tmp_path / "run"), losses(tmp_path / "run")[-1]["guesses"]
    text = recorded(kept.state, "validation", kept.run)
    assert text and [*text.parts] == ["animals", "numbers"]
    each = {name: acceptance.evaluate(kept.model, text.parts[name], 32) for name in weights}
    total = sum(weights.values())
    nats = sum(weights[name] / total * found.nats_per_guess for name, found in each.items())
    assert guesses["nats_per_guess"] == pytest.approx(nats)
    assert guesses["chains"] == sum(found.chains for found in each.values())
    assert guesses["tokens_per_pass"] == pytest.approx(1 + sum(guesses["accepted"]))


def test_prefix_models_learn_from_mixtures_too(folder: Path, tmp_path: Path) -> None:
    words = [*TINY, "--mixture", folder / "mix.toml", "--steps", "2", "--set", "mask=prefix"]
    assert bitnet("train", *words, "--out", tmp_path / "run") == 0
