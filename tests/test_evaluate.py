"""Loss on text: windows with a stride, the engine against torch, and `bitnet eval` of packed files."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import bitnet_cli
from bitnet.data import dataset, views
from bitnet.evaluate import answers
from bitnet.evaluate.loss import Overlapping, Result, evaluate, evaluate_packed, log_probabilities, spread
from bitnet.model import head
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import random_adapter
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import Model
from runtime_models import SMALL, TEMPLATE, scripted_model, small_model

torch.set_num_threads(1)

CONTEXT = 32
TINY = ["vocab_size=300", "dim=32", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48"]
TINY = [word for option in [*TINY, f"max_context={CONTEXT}"] for word in ("--set", option)]


def tokens_of(ids: list[int]) -> dataset.Tokens:
    return dataset.Tokens(np.array(ids, np.uint16), 3 * len(ids), "")


def bitnet(*argv: str | Path) -> int:
    return bitnet_cli.main([str(word) for word in argv])


# ---- windows ----


@given(st.integers(2, 120), st.integers(1, 12), st.data())
def test_every_token_counts_once_with_enough_before_it(n: int, context: int, draw: st.DataObject) -> None:
    stride = draw.draw(st.integers(1, context))
    text = Overlapping(tokens_of(list(range(n))), stride)
    counted: list[int] = []
    for i in range(text.windows(context)):
        (inputs,), (targets,) = text.window([i], context)
        for place, target in enumerate(targets.tolist()):
            if target != dataset.IGNORED:
                assert target == inputs[place] + 1
                assert not counted or place >= context - stride or len(counted) < context
                counted.append(target)
        assert int((targets != dataset.IGNORED).sum()) == text.new(i, context)
    assert counted == list(range(1, len(counted) + 1))
    left = n - 1 - len(counted)
    assert left < (stride if counted else context)  # too few for another window


def test_a_stride_of_the_context_is_no_overlap() -> None:
    plain = tokens_of([random.Random(0).randrange(300) for _ in range(200)])
    text = Overlapping(plain, 16)
    assert text.windows(16) == plain.windows(16) == 12
    for mine, theirs in zip(text.window([0, 5, 11], 16), plain.window([0, 5, 11], 16), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_loss_with_a_stride_token_by_token(stride: int) -> None:
    """Compared with each token's probability after exactly the tokens that precede it in its window."""
    model = Transformer(SMALL.replace(max_context=8)).double().eval()
    ids = [random.Random(1).randrange(SMALL.vocab_size) for _ in range(40)]
    result = evaluate(model, Overlapping(tokens_of(ids), stride), 8, batch=3)
    nats = []
    for t in range(1, result.tokens + 1):
        first = 0 if t <= 8 else -(-(t - 8) // stride) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[first:t]]))[0, -1]
        nats.append(-float(logits.double().log_softmax(-1)[ids[t]]))
    # In fp64: a pass of all positions adds in another order than one of each, which in fp32 may cross a rounding edge.
    assert result.nats_per_token == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nats_per_token))
    assert type(result.nats_per_token) is type(result.bits_per_byte) is float  # not one of numpy's
    assert result.bits_per_byte == pytest.approx(result.nats_per_token / math.log(2) / 3)


@pytest.mark.parametrize("what", ["text", "masked", "answers"])
def test_logits_of_an_evaluation_are_never_in_memory_together(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and right tokens are those of the whole, and no tensor is as large as the logits of a batch."""
    model = Transformer(SMALL.replace(max_context=16)).eval()
    plain = tokens_of(random.Random(2).choices(range(SMALL.vocab_size), k=129))
    text = views.ViewedTokens(plain, views.Masking(1, SMALL.vocab_size, 0)) if what == "masked" else plain
    inputs, targets = (each.clone() for each in text.window(range(8), 16))  # of one tensor
    with torch.no_grad():
        logits = model(inputs)
    for row in range(0, 8, 2):  # half of the rows are right throughout
        counts = targets[row] != dataset.IGNORED
        targets[row, counts] = logits[row].argmax(-1)[counts]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    monkeypatch.setattr(type(text), "window", lambda *_: (inputs, targets))
    records: Any = SimpleNamespace(count=lambda _: 8, rows=lambda *_: (inputs, targets))
    monkeypatch.setitem(head.PORTION, "cpu", 4 * SMALL.vocab_size)
    sizes: list[int] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Watching():
        found = answers.evaluate(model, records, 16, 8) if what == "answers" else evaluate(model, text, 16, batch=8)
    assert found.nats_per_token == pytest.approx(float(expected), rel=1e-6)
    assert found.tokens == (targets >= 0).sum() and 0 < max(sizes) < 128 * SMALL.vocab_size
    likeliest = ((logits.argmax(-1) == targets) & (targets >= 0)).sum() / found.tokens
    right = {"text": None, "masked": pytest.approx(float(likeliest)), "answers": 0.5}[what]
    assert getattr(found, "accuracy", getattr(found, "right", None)) == right and 0 < likeliest < 1


def test_the_standard_error_is_how_far_parts_of_a_text_lie_from_the_whole() -> None:
    """Windows have different losses: over many draws of a part, the mean squared distance is the square of the
    error."""
    drawn = np.random.default_rng(0)
    nats, counted = drawn.normal(30, 8, 40), drawn.integers(5, 12, 40)
    whole = Result.of(spread(nats.tolist(), counted.tolist()), 40, 3.0)
    assert whole.standard_error == 0 and whole.nats_per_token == pytest.approx(nats.sum() / counted.sum())
    distances, errors = [], []
    for _ in range(2000):
        part = drawn.permutation(40)[:25]
        halves = [spread(nats[some].tolist(), counted[some].tolist()) for some in (part[:11], part[11:])]
        found = Result.of(np.sum(halves, 0).tolist(), 40, 3.0)
        assert found.standard_error is not None
        distances.append(found.nats_per_token - whole.nats_per_token)
        errors.append(found.standard_error)
    # of 2,000 draws the deviation is known to 1.6 %; a ratio's error is that of its first order, 1/25 off
    assert np.std(distances) == pytest.approx(np.mean(errors), rel=0.08)
    assert Result.of(spread(nats[:1].tolist(), [7]), 40, 3.0).standard_error is None


def test_log_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32) * 30
    expected = torch.from_numpy(logits).double().log_softmax(-1)[torch.arange(5), torch.arange(5) * 13]
    np.testing.assert_allclose(log_probabilities(logits, [0, 13, 26, 39, 52]), expected, rtol=1e-12)


def test_the_engine_scores_as_one_pass_does(tmp_path: Path) -> None:
    """For every stride, also where a window fills the whole context, compared with the logits of plain appends."""
    ids = [random.Random(2).randrange(SMALL.vocab_size) for _ in range(60)]
    with Model.load(small_model(tmp_path, config=SMALL.replace(max_context=16))) as model:
        for stride in (1, 5, 16):
            text, total = Overlapping(tokens_of(ids), stride), 0.0
            for i in range(text.windows(16)):
                row, new = text.row(i, 16), text.new(i, 16)
                with model.session() as session:
                    logits = session.append(row[:-1].tolist(), "all")
                assert logits is not None
                total -= log_probabilities(logits, row[1:].tolist())[-new:].sum()
            found = evaluate_packed(model, text, 16)
            assert found.tokens == 16 + (text.windows(16) - 1) * stride
            for limit in (1, 16, 30, 33):
                few = evaluate_packed(model, text, 16, limit).tokens
                assert few == 16 or limit - stride < few <= limit
            assert found.nats_per_token == pytest.approx(total / found.tokens, rel=1e-6)  # scores are fp32


# ---- checkpoint and packed file ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A run, the packed file of it, and other text."""
    folder, rng = tmp_path_factory.mktemp("trained run"), random.Random(0)
    vocabulary = ["the", "cat", "dog", "sees", "a", "red", "house", "and", "runs"]
    (folder / "text").mkdir()
    for i in range(20):
        words = " ".join(rng.choice(vocabulary) for _ in range(400))
        (folder / "text" / f"{i}.txt").write_text(words, encoding="utf-8")
    run = ["--steps", "40", "--batch", "4", "--eval-every", "1000", "--threads", "1"]
    assert bitnet("train", *TINY, *run, "--data", folder / "text", "--out", folder / "run") == 0
    pack_checkpoint(Checkpoint.open(folder / "run" / "step-000040"), folder / "model.bitnet")
    return folder / "run", folder / "model.bitnet", folder / "text"


@pytest.mark.parametrize("more", [[], ["--stride", "8"], ["--context", "20", "--stride", "7", "--tokens", "2000"]])
def test_packed_file_and_checkpoint_agree(
    trained: tuple[Path, Path, Path], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, packed, text = trained
    figures = []
    for source in (run, packed):
        assert bitnet("eval", source, "--data", text, "--json", *more) == 0
        figures.append(json.loads(capsys.readouterr().out))
    torch_s, engine_s = figures
    assert torch_s["tokens"] == engine_s["tokens"] > 1900
    assert {k: torch_s[k] for k in ("context", "stride")} == {k: engine_s[k] for k in ("context", "stride")}
    # The limit of every export; rounding events of int8, about 3e-3 a token, cancel over thousands of tokens.
    assert engine_s["nats_per_token"] == pytest.approx(torch_s["nats_per_token"], abs=1e-4)
    assert engine_s["bits_per_byte"] / torch_s["bits_per_byte"] == pytest.approx(1, abs=1e-4)


def test_more_context_never_costs_much(trained: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The first tokens of a window have little before them; a stride spares the text that."""
    _, packed, text = trained
    losses = []
    for more in ([], ["--stride", "4"]):
        assert bitnet("eval", packed, "--data", text, "--tokens", "8000", *more) == 0
        losses.append(float(capsys.readouterr().out.split()[0]))
    assert losses[1] < losses[0] + 0.01


def test_without_torch(trained: tuple[Path, Path, Path]) -> None:
    _, packed, text = trained
    argv = ["eval", str(packed), "--data", str(text), "--tokens", "64", "--samples", "1"]
    code = "import sys\nfor name in ('torch', 'safetensors', 'lm_eval'): sys.modules[name] = None\n"
    code += f"from bitnet_cli import main; sys.exit(main({argv}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "bits/byte" in done.stdout and "sample 0" in done.stdout, done.stderr
    code = code.replace("--data", "--tasks")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--tokens is for text, not for --tasks" in done.stderr
    code = code.replace("'--tokens', '64', '--samples', '1'", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "-m pip install 'lm-eval>=" in done.stderr


def test_samples(trained: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The same texts from the checkpoint, by way of the engine, and from its packed file."""
    run, packed, text = trained
    found = []
    for source in (run, packed):
        assert bitnet("eval", source, "--data", text, "--samples", "2", "--prompt", "the cat", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["samples"])
    assert found[0] == found[1] and len(set(found[0])) == 2
    assert all(sample.startswith("the cat") for sample in found[0])


def test_with_an_adapter(trained: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, packed, text = trained
    random_adapter(packed, tmp_path / "a.bitnet", rank=4)
    found = []
    for more in ([], ["--adapter", tmp_path / "a.bitnet"]):
        argv = ["eval", packed, "--data", text, "--tokens", "640", "--samples", "1", "--prompt", "the", "--json", *more]
        assert bitnet(*argv) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["nats_per_token"] + 0.1 < found[1]["nats_per_token"]  # random weights upon what was learnt
    with Model.load(packed, kv_type="f32", adapters=[tmp_path / "a.bitnet"]) as model:
        assert found[1]["samples"] == ["the" + model.generate("the", seed=0, adapter="a").text]
    assert found[0]["samples"] != found[1]["samples"]
    assert bitnet("eval", run, "--adapter", tmp_path / "a.bitnet") == 1
    assert "--adapter is for packed files" in capsys.readouterr().err


def test_threads(
    trained: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine and in PyTorch."""
    run, packed, text = trained
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for source in (run, packed):
        assert bitnet("eval", source, "--data", text, "--tokens", "64", "-t", "3") == 0
    assert taken in ([1], [2], [3]) and "threads 3>" in capsys.readouterr().err
    assert bitnet("eval", packed, "--data", text, "--threads", "0") == 2
    assert "-t/--threads: '0', expected an integer from 1 to 256" in capsys.readouterr().err
    for option in ("--tokens", "--context", "--stride", "--samples", "--fewshot", "--limit"):
        assert bitnet("eval", packed, "--data", text, option, "-1") == 2
        assert f"{option}: '-1', expected an integer from 0 to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{packed}"], "holds no text to measure it on; give the text with --data"),
        (["{packed}", "--data", "{text}", "--stride", "33"], "--stride is 33, expected at most the context, 32"),
        (["{run}", "--context", "33"], "--context is 33, the model has at most 32"),
        (["{run}", "--kv-type", "f16"], "--kv-type is for packed files"),
        (["{run}", "--prompt", "x"], "--prompt goes with --samples"),
        (["{text}"], "no step-* folder, expected a checkpoint"),
        (["{text}/0.txt", "--data", "{text}"], "0.txt"),
        (["{run}/nothing"], "nothing does not exist, expected a checkpoint or a run folder, or a packed file"),
    ],
)
def test_wrong_words(
    trained: tuple[Path, Path, Path], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, packed, text = trained
    assert bitnet("eval", *[word.format(run=run, packed=packed, text=text) for word in argv]) == 1
    out, errors = capsys.readouterr()
    assert not out and message in errors.splitlines()[-1] and "Traceback" not in errors


def test_packed_encoders_are_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gaps = SMALL.replace(mask="bidirectional")
    (tmp_path / "a.txt").write_text("ab")
    for config in (gaps, gaps.replace(has_head=False, pooling="mean")):
        file = small_model(tmp_path, config=config)
        for more in ([], ["--data", tmp_path / "a.txt"]):
            assert bitnet("eval", file, *more) == 1
            assert "is a packed encoder, which is not measured; measure its run" in capsys.readouterr().err
        assert bitnet("eval", file, "--samples", "1") == 1
        assert f"--samples, but {file} is an encoder" in capsys.readouterr().err


def test_files_that_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("ab")
    script = scripted_model(tmp_path / "script", [b"y"], template=TEMPLATE, generation={"bos_token_id": 3})
    remedy = "beside the tokenizer.json of its source, and write the packed file again"
    for file, message in (
        (script, "one window needs 65, or of conversations an answer within them; give more"),
        (small_model(tmp_path), remedy),
    ):
        assert bitnet("eval", file, "--data", tmp_path / "a.txt") == 1
        assert message in capsys.readouterr().err
