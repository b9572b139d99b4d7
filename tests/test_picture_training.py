"""`bitnet train` on images: two towers and a decoder learn, resume with the same bits, are measured, and refuse."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bitnet.data import picture_rows, pictures, tokenizer
from bitnet.settings import Settings
from bitnet.setup import sights
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import random_adapter
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import Model
from picture_data import DECODER, TINY, TOWERS, captions, halves, lines, questions
from training import bitnet, bits, killed_before, losses

torch.set_num_threads(1)
pytestmark = pytest.mark.plots  # whichever test asks for a run first makes it

STEPS = ("--steps", "80", "--validation", "0.2")
Runs = dict[str, tuple[Path, Path]]


def options(name: str, runs: Runs) -> list[object]:
    return (
        [*TOWERS, "--augment", "crop", "--set", "vision.dropout=0.05"]
        if name == "towers"
        else [*DECODER, "--vision", runs["towers"][1]]
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two towers, and a decoder that begins with the one of images: the data and the run."""
    found: Runs = {}
    for name, make in (("towers", captions), ("decoder", questions)):
        folder = tmp_path_factory.mktemp(name)
        data, out = make(folder / "data"), folder / "run"
        assert bitnet("train", *options(name, found), *STEPS, "--data", data, "--out", out) == 0
        found[name] = data, out
    return found


@pytest.mark.parametrize("name", ["towers", "decoder"])
def test_interrupted_and_resumed_is_as_uninterrupted(name: str, runs: Runs, tmp_path: Path) -> None:
    data, _ = runs[name]
    short = ("--steps", "12", "--validation", "0.2", "--save-every", "5")
    command = ["train", *options(name, runs), *short, "--data", data]
    assert bitnet(*command, "--out", tmp_path / "whole") == 0
    killed_before(8, *command, "--out", tmp_path / "run")
    hidden = data.rename(data.with_suffix(".away"))
    try:
        assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0  # the pictures are no longer needed
    finally:
        hidden.rename(data)
    assert bits(tmp_path / "run" / "step-000012") == bits(tmp_path / "whole" / "step-000012")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("name", "figure"), [("towers", "recall"), ("decoder", "right")])
def test_it_learns_and_eval_says_the_same(
    name: str, figure: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chance: of the 12 pairs of colours one is right; half of them are never right by luck."""
    data, run = runs[name]
    last = next(record["validation"] for record in losses(run) if record.get("final"))
    assert last[figure] > 0.5 and last["recall_back" if figure == "recall" else figure] > 0.5
    assert bitnet("eval", run, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {key: said[key] for key in last} == last
    assert bitnet("eval", run, "--data", data) == 0  # other records, and figures for people
    assert re.search({"recall": "recall@1", "right": r"% of \d+ answers right"}[figure], capsys.readouterr().out)
    assert bitnet("report", run, "--out", tmp_path / "page.html", "--tokens", "0") == 0
    assert {"recall": "recall@1", "right": "of the answers right"}[figure] in (tmp_path / "page.html").read_text()
    assert (run / "loss.png").is_file()


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def test_scale_and_bias_are_learnt(runs: Runs, tmp_path: Path) -> None:
    """They start from ln 10 and -10; with softmax from ln 1/0.07, and no bias."""
    learnt = weights(runs["towers"][1] / "step-000080")
    for name, begin in (("log_scale", math.log(10)), ("bias", -10)):
        assert 1e-3 < abs(learnt[f"similarity.{name}"].item() - begin) < 2
    softmax = [*TOWERS, "--contrastive-loss", "softmax", "--steps", "4", "--save-every", "2"]
    assert bitnet("train", *softmax, "--data", runs["towers"][0], "--out", tmp_path / "run") == 0
    begun, learnt = (weights(tmp_path / "run" / f"step-00000{step}") for step in (2, 4))
    assert begun["similarity.bias"] == learnt["similarity.bias"] == 0
    assert begun["similarity.log_scale"] != learnt["similarity.log_scale"]
    assert learnt["similarity.log_scale"].item() == pytest.approx(math.log(1 / 0.07), abs=0.3)
    assert bitnet("train", "--resume", "--out", tmp_path / "run", "--steps", "6") == 0


def test_a_frozen_stack_stays(runs: Runs, tmp_path: Path) -> None:
    """Except its projector, which is new; and the quantizers of a trained stack are not phased in again."""
    run, frozen = tmp_path / "run", [*options("decoder", runs), "--freeze-vision", "--steps", "4", "--save-every", "2"]
    killed_before(3, "train", *frozen, "--data", runs["decoder"][0], "--out", run)
    assert bitnet("train", "--resume", "--out", run) == 0
    tower, learnt = (weights(folder) for folder in (runs["towers"][1] / "step-000080", run / "step-000004"))
    kept = [name for name in learnt if name.startswith("vision.") and "projector" not in name]
    assert len(kept) > 10 and all(learnt[name].equal(tower[name]) for name in kept)
    assert learnt["vision.projector.weight"].shape == (24, 24)
    assert not learnt["vision.projector.weight"].equal(weights(run / "step-000002")["vision.projector.weight"])


def test_the_token_of_images_is_that_of_the_tokenizer(runs: Runs) -> None:
    run = Checkpoint.open(runs["decoder"][1])
    assert run.config.image_token == run.words.token_to_id("<image>") == run.words.get_vocab_size() - 1
    assert run.words.encode("<image>", add_special_tokens=False).ids[0] != run.config.image_token
    assert Checkpoint.open(runs["towers"][1]).words.token_to_id("<image>") is None


def test_right_answers_are_those_of_greedy_generation(runs: Runs) -> None:
    """Token by token, from what stands before the answer alone."""
    run = Checkpoint.open(runs["decoder"][1])
    kept = pictures.recorded(run.state, "validation", run.folder.parent)
    assert kept and run.config.vision
    rows = sights.rows(Settings(), run.config.vision, run.words, {}, kept, 24)
    assert isinstance(rows, picture_rows.Answers)
    found, n = 0, rows.count(24)
    with torch.no_grad():
        for i in range(n):
            inputs, targets, _, prefix, pixels = rows.rows([i], 24)
            ids, answer = inputs[:, : int(prefix)], targets[targets >= 0].tolist()
            for _ in answer:
                documents = torch.zeros_like(ids)
                likeliest = run.model(ids, documents, prefix, pixels)[0, -1].argmax()
                ids = torch.cat([ids, likeliest.view(1, 1)], 1)
            found += ids[0, int(prefix) :].tolist() == answer
            assert answer[-1] == tokenizer.END_ID
    final = next(record["validation"] for record in losses(run.folder.parent) if record.get("final"))
    assert final["answers"] == n and final["right"] == pytest.approx(found / n)


def test_a_causal_decoder_learns_and_answers(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each token sees those before it, as in any text model that is given pictures."""
    data, towers = runs["decoder"][0], runs["towers"][1]
    causal = [*TINY, "--set", "max_context=24", "--vision", towers, "--steps", "2", "--data", data]
    assert bitnet("train", *causal, "--out", tmp_path / "run") == 0
    run = Checkpoint.open(tmp_path / "run")
    assert run.config.mask == "causal" and run.config.vision
    pack_checkpoint(run, tmp_path / "m.bitnet")
    capsys.readouterr()
    found = []
    for model in (tmp_path / "run", tmp_path / "m.bitnet"):
        assert bitnet("eval", model, "--data", data, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    # An activation on an edge of rounding may fall on the other side: over 80 records that moves a mean by less.
    assert found[1]["nats_per_token"] == pytest.approx(found[0]["nats_per_token"], abs=1e-4)


def test_a_run_is_finetuned(runs: Runs, tmp_path: Path) -> None:
    for name, (data, run) in runs.items():
        assert bitnet("finetune", run, "--data", data, "--steps", "2", "--out", tmp_path / name) == 0
        begun, learnt = weights(tmp_path / name / "step-000000"), weights(run / "step-000080")
        assert begun.keys() == learnt.keys() and all(begun[key].equal(learnt[key]) for key in begun)


@pytest.mark.parametrize(
    ("name", "objective", "said"),
    [
        (
            "towers",
            ("--objective", "next"),
            "two towers of images and texts learn by contrastive alone; add --objective contrastive\n",
        ),
        (
            "decoder",
            ("--objective", "contrastive"),
            "a decoder that sees images learns by next alone; add --objective next\n",
        ),
    ],
)
def test_a_run_is_not_finetuned_by_another_objective(
    name: str, objective: tuple[str, ...], said: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to do is an option that `bitnet finetune` has: there are no presets."""
    assert bitnet("finetune", runs[name][1], *objective, "--steps", "2", "--out", tmp_path / "run") == 1
    assert capsys.readouterr().err.endswith(said)


def test_records_that_do_not_fit_are_counted(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 8 and with 4 tokens per image, records of two pictures are too long; a context in which no record fits is an
    error."""
    short = [*options("decoder", runs), "--data", runs["decoder"][0], "--steps", "1", "--out", tmp_path / "run"]
    assert bitnet("train", *short, "--context", "13") == 0
    assert "records have more than 13 tokens and are left out; see --context" in capsys.readouterr().err
    assert bitnet("train", *short[:-1], tmp_path / "other", "--context", "2") == 1
    assert "no record fits --context 2: the shortest has" in capsys.readouterr().err


def test_pictures_of_a_run_that_were_damaged(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    killed_before(2, "train", *TOWERS, "--data", runs["towers"][0], "--steps", "4", "--out", run)
    (pixels,) = run.glob("train-*.pixels")
    pixels.write_bytes(pixels.read_bytes()[:-1])
    assert bitnet("train", "--resume", "--out", run) == 1
    assert "pixels is damaged (SHA-256); remove it" in capsys.readouterr().err
    pixels.unlink()
    assert bitnet("train", "--resume", "--out", run) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((*DECODER, "--set", "vision.pooling=mean"), "the vision stack has a pooling, and nothing would train it"),
        ((*DECODER, "--temperature", "0.1"), "--temperature is of vectors of texts; leave it out"),
        ((*TOWERS, "--temperature", "0.1"), "--temperature is of vectors of texts; leave it out"),
        ((*DECODER, "--contrastive-loss", "softmax"), "--contrastive-loss is of vectors of images and texts"),
        ((*TOWERS, "--batch", "1"), "there is no other text to tell from; raise --batch"),
        ((*TOWERS, "--chat", "x.jsonl"), "--chat is for"),
        (TOWERS, "a model that looks at images learns from records of images and texts; name them with --data"),
        ((*TOWERS, "--freeze-vision"), "--freeze-vision keeps the stack that --vision names, and it names none"),
    ],
)
def test_refusals(
    more: tuple[str, ...], said: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeing = ("--vision", runs["towers"][1]) if more[: len(DECODER)] == tuple(DECODER) else ()
    assert bitnet("train", *more, *seeing, "--out", tmp_path / "run") == 1
    assert said in capsys.readouterr().err and not list(tmp_path.glob("run/step-*"))


def test_refused_data(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(halves(tmp_path, 20))
    of_two = ({"images": [f"{i}.png", f"{i + 1}.png"], "prefix": "?", "suffix": "x"} for i in range(0, 20, 2))
    ask = ("--data", lines(tmp_path, "ask.jsonl", list(of_two)))
    for command, said in (
        (TOWERS, ", line 10: it has 2 images, and --objective contrastive"),
        ((*DECODER, "--augment", "crop"), "--augment is of images, and the model sees none; leave it out"),
        ((*DECODER, "--vision", tmp_path / "none"), "none does not exist, expected a checkpoint"),
        ((*DECODER, "--vision", runs["towers"][1], "--set", "vision.image_size=16"), "vision.image_size is 8 in "),
        ((*DECODER, "--vision", runs["towers"][1], "--set", "vision.dim=25"), "in the model [25]; leave out the --set"),
    ):
        assert bitnet("train", *command, *ask, "--out", tmp_path / "r") == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "loss"), [("towers", "nats_per_pair"), ("decoder", "nats_per_token")])
def test_the_packed_file_does_what_was_learnt(
    name: str, loss: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same records in torch and in the engine. An activation on an edge of rounding may fall on the other side:
    over 80 records and more that moves a mean by less than 1e-4."""
    data, run = runs[name]
    pack_checkpoint(Checkpoint.open(run), tmp_path / "m.bitnet")
    capsys.readouterr()
    found = []
    for model in (run, tmp_path / "m.bitnet"):
        assert bitnet("eval", model, "--data", data, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    torch_says, engine_says = found
    assert engine_says[loss] == pytest.approx(torch_says[loss], abs=1e-4)
    assert {key: engine_says[key] for key in engine_says.keys() - {loss, "source"}}.items() <= torch_says.items()
    assert bitnet("eval", tmp_path / "m.bitnet", "--data", data, "--tokens", "200") == 0
    assert re.search({"towers": "recall@1", "decoder": r"% of \d+ answers right"}[name], capsys.readouterr().out)
    assert bitnet("eval", tmp_path / "m.bitnet", "--data", data, "--stride", "4") == 1
    for source in (run, tmp_path / "m.bitnet"):
        assert bitnet("eval", source, "--data", data, "--column", "x") == 1
        assert "--column is for text, not for records of images" in capsys.readouterr().err
    assert bitnet("eval", tmp_path / "m.bitnet") == 1
    assert "give records of images with --data" in capsys.readouterr().err
    random_adapter(tmp_path / "m.bitnet", tmp_path / "a.bitnet", rank=2)
    assert bitnet("eval", tmp_path / "m.bitnet", "--data", data, "--adapter", tmp_path / "a.bitnet") == 1
    assert "models of text alone here; measure its run: bitnet eval RUN" in capsys.readouterr().err


def test_the_engine_answers_and_finds_from_files(runs: Runs, tmp_path: Path) -> None:
    """The model learnt from decoded pictures on disk, and is asked with picture files."""
    for name, (_, run) in runs.items():
        pack_checkpoint(Checkpoint.open(run), tmp_path / f"{name}.bitnet")
    pictures_of = {f"{left} {right}": tmp_path / name for name, left, right in halves(tmp_path, 30, seed=9)}
    texts, files = list(pictures_of), list(pictures_of.values())
    with Model.load(tmp_path / "towers.bitnet", threads=1, kv_type="f32") as model:
        found = model.similarity(files, texts).argmax(1)
    assert sum(found == np.arange(len(texts))) > 0.5 * len(texts)
    with Model.load(tmp_path / "decoder.bitnet", threads=1, kv_type="f32") as model:
        answers = [model.generate("colours?", images=[file], temperature=0, max_tokens=9).text for file in files]
    assert sum(a == b for a, b in zip(answers, texts, strict=True)) > 0.5 * len(texts)
