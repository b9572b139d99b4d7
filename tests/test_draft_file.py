"""Drafts in files: packed and compared with what was trained, shown, and left out of the formats of others."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitnet.config import ModelConfig
from bitnet.data import dataset, tokenizer
from bitnet.data.infilling import Infilling
from bitnet.model.draft import Draft
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.setup import own_text
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.source_model import Start
from bitnet_export.checkpoint.drafts import compare_guesses
from bitnet_export.checkpoint.pack import export_checkpoint, pack_checkpoint
from bitnet_export.checkpoint.repack import repack
from bitnet_export.checkpoint.verify import VerificationError, _check_weights
from bitnet_export.foreign.outgoing import DRAFT_LEFT_OUT
from bitnet_export.packed.random_model import random_model
from bitnet_export.packed.reader import PackedFile
from bitnet_runtime import Model
from training import bitnet as run
from training import saved

torch.set_num_threads(1)

SMALL = ModelConfig(
    vocab_size=260, dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=128, max_context=64
).with_draft()


def of(config: ModelConfig, folder: Path) -> Checkpoint:
    torch.manual_seed(1)
    return Checkpoint.open(saved(folder, Transformer(config)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return of(SMALL, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("encoding", ["2.0", "1.6"])
def test_every_number_in_the_file_is_that_of_training(checkpoint: Checkpoint, encoding: str, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "m.bitnet", encoding=encoding, sparse=False)
    file = PackedFile.open(tmp_path / "m.bitnet")
    assert file.config == SMALL and [config.name for config in file.configs] == ["decoder", "draft"]
    facts = _check_weights(file, checkpoint.model)
    assert facts["ternary_weights"] == SMALL.ternary_weights and len(facts["zero_fraction"]) == 3
    with torch.no_grad():
        model = Checkpoint.open(checkpoint.folder).model
        assert model.draft
        model.draft.draft_projection.weight[5, 7] *= -1
    with pytest.raises(VerificationError, match=r"stacks\.1\.draft_projection\.weight: codes in the file differ"):
        _check_weights(file, model)


@pytest.mark.parametrize("tokens", [260, 8192])
def test_export_compares_its_guesses(tokens: int, tmp_path: Path) -> None:
    """With those of torch; another draft would be noticed. With a large head, which has a sketch, only the guesses
    count."""
    checkpoint = of(SMALL.replace(vocab_size=tokens), tmp_path / "run")
    report = export_checkpoint(checkpoint.folder, tmp_path / "m.bitnet", tokens=600, sparse=False)
    assert report.draft and report.draft.median < 1e-5 and "64 chains of 3 draft tokens" in str(report)
    sketched = PackedFile.open(tmp_path / "m.bitnet").sketched
    assert sketched == (tokens == 8192)
    other = copy.deepcopy(checkpoint.model)
    assert isinstance(other.draft, Draft)
    other.draft.draft_hidden_norm.weight.data *= torch.linspace(0.5, 1.5, SMALL.dim)
    texts = np.arange(12 * 7).reshape(12, 7)
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as engine:
        models = (checkpoint.model, other)
        found = [compare_guesses(engine, model, model, texts, estimated=sketched) for model in models]
    assert found[0] and found[1] and found[0].median < 1e-5 < 1e-3 < found[1].median


def test_another_encoding_keeps_it(tmp_path: Path) -> None:
    two, there = tmp_path / "two", tmp_path / "there"
    random_model(SMALL, two)
    repack(two, there, encoding="1.6")
    repack(there, tmp_path / "back", encoding="2.0")
    assert (tmp_path / "back").read_bytes() == two.read_bytes()


def test_inspect_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(SMALL, tmp_path / "m.bitnet")
    assert run("inspect", tmp_path / "m.bitnet") == 0
    shown = capsys.readouterr().out
    assert "stack draft\n  draft head: drafts tokens for the stack before it" in shown
    assert "stacks.1.draft_projection.weight" in shown
    assert SMALL.draft and f"{SMALL.draft.ternary_weights:,} of them ternary" in shown


@pytest.mark.parametrize("to", ["hf", "gguf", "onnx"])
def test_other_formats_are_those_of_the_model_alone(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says that the draft was left out."""
    plain = SMALL.replace(
        draft=None, ffn_dim=256, dim=256, head_dim=64, **({"activation": "silu"} if to == "gguf" else {})
    )
    random_model(plain, tmp_path / "plain.bitnet")
    random_model(plain.with_draft(), tmp_path / "with.bitnet")
    more: list[Any] = ["--no-tokenizer"] if to == "gguf" else []
    reports = []
    written = [tmp_path / "of plain/model", tmp_path / "of with/model"]
    for name, out in zip(("plain", "with"), written, strict=True):
        out.parent.mkdir()
        assert run("convert", "--to", to, tmp_path / f"{name}.bitnet", out, *more) == 0
        reports.append(capsys.readouterr().err)
    assert [DRAFT_LEFT_OUT in report for report in reports] == [False, True]
    if to == "gguf":
        assert written[0].read_bytes() == written[1].read_bytes()
        return
    assert len({frozenset(path.name for path in out.iterdir()) for out in written}) == 1
    for one in written[0].iterdir():
        assert one.read_bytes() == (written[1] / one.name).read_bytes()


def test_a_draft_learns_from_what_its_model_writes(tmp_path: Path) -> None:
    """Half of the text is the data's, half the model's, behind pieces of the data."""
    checkpoint = saved(tmp_path / "source", Transformer(SMALL.replace(draft=None, dim=32, head_dim=8)))
    text = tmp_path / "a.txt"
    text.write_text("".join(f"{n} is not {n * n % 97}\n" for n in range(1500)))
    out = tmp_path / "run"
    words = ("--draft-only", "--self-written", 2000, "--context", 64, "--batch", 4, "--threads", 1, "--steps", 3)
    assert run("finetune", checkpoint, "--data", text, "--out", out, *words) == 0
    state = json.loads((out / "step-000003" / "state.json").read_text())
    ids = np.fromfile(out / state["texts"]["train"]["file"], state["texts"]["train"]["dtype"])
    rows = -(-2000 // 48)
    data, written = ids[: rows * 64], ids[rows * 64 :]
    assert len(written) >= 2000 and len(written) - rows * 64 < 64  # those that it was to write, at the least
    assert written[:16].tolist() == data[:16].tolist()  # a piece of the data, and what the model says behind it
    (tmp_path / "source").rename(tmp_path / "moved")  # the run has what it wrote
    assert run("finetune", "--resume", "--out", out, "--steps", 5) == 0
    assert json.loads((out / "step-000005" / "state.json").read_text())["data"] == state["data"]


def test_what_a_model_wrote_is_that_of_its_weights(tmp_path: Path) -> None:
    """Wherever the model is: a folder may be moved, or hold another model than before."""
    (np.arange(161) % 200).astype(np.uint16).tofile(tmp_path / "a.bin")
    tokens = dataset.Tokens.map(tmp_path / "a.bin", "uint16", 161, "x")
    words = tokenizer.build("byte", [], 257)
    settings = Settings(self_written=600, quantize_warmup=0.5, draft=True, draft_only=True, source="x")
    weights = {"q.weight": torch.zeros(2, 2)}
    here, moved = (Start(f"checkpoint {name}/step-000001", SMALL, weights, words) for name in ("here", "moved"))
    other = Start(here.what, SMALL, {"q.weight": torch.ones(2, 2)}, words)
    digests = [own_text._digest(settings, start, tokens, 16) for start in (here, moved, other)]
    assert digests[0] == digests[1] != digests[2]


def test_behind_a_text_that_ends_early_stands_another(tmp_path: Path) -> None:
    """Texts of 4 prompt tokens, 2 to 12 more, and the end token, unless there is no room for it."""
    file, end = tmp_path / "a.bin", 300
    asked: list[int] = []
    (np.arange(400) % 256).astype(np.uint16).tofile(file)
    tokens = dataset.Tokens.map(file, "uint16", 400, "x")

    def writes(prompts: list[list[int]], most: int, seed: int) -> Iterator[list[int]]:
        asked.append(len(prompts))
        for i, prompt in enumerate(prompts):
            more = 2 + (seed + i) * 7 % 11
            yield prompt + [256 + more] * min(most, more) + [end] * (more < most)

    settings = Settings(self_written=600, steps=1, quantize_warmup=0.5, draft=True, draft_only=True, source="x")
    rows = list(own_text._rows(tokens, writes, 24, 16, settings))
    assert {len(row) for row in rows[:-1]} == {16} and len(asked) > 1
    assert sum(token >= 256 for row in rows for token in row) >= 600
    for row in rows:
        assert row[0] < 256  # the first of a piece of the data
        assert all(token == end for token, next_ in itertools.pairwise(row) if token >= 256 > next_)
    assert not list(own_text._rows(tokens, lambda *_: iter(()), 24, 16, settings))  # a model that writes nothing stops


def test_the_whole_data_counts_and_a_gap_ends_as_in_a_resumed_run(tmp_path: Path) -> None:
    """Also where the model writes more than the data has; the end token is the one that the source names."""
    words, context = tokenizer.build("byte", [], 260, *tokenizer.FIM), 16
    (np.arange(10 * context + 1) % 200).astype(np.uint16).tofile(tmp_path / "a.bin")
    tokens = dataset.Tokens.map(tmp_path / "a.bin", "uint16", 161, "x")
    settings = Settings(
        self_written=600,
        quantize_warmup=0.5,
        draft=True,
        draft_only=True,
        source="x",
        fim=0.5,
        batch=2,
        out=str(tmp_path),
    )
    generation = {"bos_token_id": 0, "eos_token_ids": [65]}
    start = Start("a model", SMALL, {}, words, generation=generation, writer=lambda: nullcontext(lambda *_: iter(())))
    data = dataset.Batches(tokens, 2, context, 0)
    made = own_text.added(settings, SMALL, words, start, data)
    assert made.tokens.ids.tolist() == tokens.ids[: 10 * context].tolist()
    assert isinstance(made, dataset.Batches) and isinstance(made.view, Infilling) and made.view.end == 65
