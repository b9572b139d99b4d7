"""Filling in the middle: training data and prompts have the same form."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from bitnet.data import tokenizer
from bitnet.data.infilling import LEAST, Infilling
from bitnet_runtime import InvalidParameterError, Model, UnsupportedModelError
from bitnet_runtime.tokenizer.infilling import NAMES, Gap, around
from runtime_models import byte_tokenizer, scripted_model, small_model
from training import TINY, bitnet, bits, killed_before, losses

WORDS = ["def", "read(self,", "size):", "return", "self.größe", "+ 1\n   ", "# 日本", "of", "file,", "ÄÖÜ\n"]


def texts(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, 60))) for _ in range(n)]


@pytest.fixture(params=["byte", "char", "bpe"])
def words(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer.build(request.param, texts(50), 330, *tokenizer.FIM)


def rows_of(words: Tokenizer, context: int) -> torch.Tensor:
    ids = [token for text in texts(200) for token in (tokenizer.END_ID, *words.encode(text).ids)]
    n = len(ids) // (context + 1)
    return torch.tensor(ids[: n * (context + 1)]).view(n, context + 1)


def seen(view: Infilling, rows: torch.Tensor) -> torch.Tensor:
    inputs, targets = view(rows[:, :-1], rows[:, 1:], range(len(rows)))
    assert inputs.shape == targets.shape == rows[:, 1:].shape and bool((inputs[:, 1:] == targets[:, :-1]).all())
    return torch.cat([inputs, targets[:, -1:]], 1)


def parts(row: list[int], ends: int, marks: tuple[int, int, int]) -> Iterator[tuple[list[int], bool]]:
    """The documents of a row, moved ones in their original order, and whether each was moved."""
    rest = row
    while rest:
        rest = rest[rest[0] == ends :]
        n = rest.index(ends) if ends in rest else len(rest)
        document, rest = rest[:n], rest[n:]
        begin, hole, gap = (document.index(mark) if mark in document else None for mark in marks)
        if begin is None:
            assert hole is gap is None
            yield document, False
        else:
            assert hole is not None and gap is not None and begin == 0 < hole < gap and len(set(marks)) == 3
            yield document[1:hole] + document[gap + 1 :] + document[hole + 1 : gap], True


@pytest.mark.parametrize("context", [12, 64, 200])
def test_moved_documents_hold_what_the_row_held(words: Tokenizer, context: int) -> None:
    rows = rows_of(words, context)
    view = Infilling(0.5, words, tokenizer.END_ID, tokenizer.END_ID, seed=7)
    made = seen(view, rows)
    n_moved = n_plain = changed = 0
    for before, after in zip(rows.tolist(), made.tolist(), strict=True):
        text = words.decode(before).replace("\ufffd", "")
        documents = list(parts(after, tokenizer.END_ID, view.marks))
        for document, moved in documents:
            n_moved += moved
            n_plain += not moved and len(document) >= LEAST
            assert words.decode(document).strip("\ufffd") in text
            changed += moved and document not in ([*before[i : i + len(document)]] for i in range(len(before)))
    assert (n_moved > 20 and 0.6 < n_moved / max(n_plain, 1) < 1.7) or context == 12
    assert changed > 5 or words.get_vocab_size() < 300  # cuts within tokens


def test_each_sequence_is_a_function_of_its_number() -> None:
    words = tokenizer.build("byte", [], 260, *tokenizer.FIM)
    rows = rows_of(words, 64)
    whole = seen(Infilling(0.5, words, tokenizer.END_ID, tokenizer.END_ID, seed=7), rows)
    view = Infilling(0.5, words, tokenizer.END_ID, tokenizer.END_ID, seed=7)
    inputs, _ = view(rows[3:5, :-1], rows[3:5, 1:], [3, 4])
    assert bool((inputs == whole[3:5, :-1]).all())
    assert not bool((seen(Infilling(0.5, words, tokenizer.END_ID, tokenizer.END_ID, seed=8), rows) == whole).all())
    assert bool((seen(Infilling(0.0, words, tokenizer.END_ID, tokenizer.END_ID, seed=7), rows) == rows).all())
    moved = seen(Infilling(1.0, words, tokenizer.END_ID, tokenizer.END_ID, seed=7), rows)
    assert sum(view.marks[0] in row for row in moved.tolist()) > 0.9 * len(rows)  # a long middle may leave no room


def test_documents_without_tokens_keep_their_places() -> None:
    words = tokenizer.build("byte", [], 260, *tokenizer.FIM)
    end, empty = tokenizer.END_ID, [tokenizer.END_ID] * 3  # texts of spaces, to a tokenizer that strips them
    rows = torch.tensor([[*empty, *words.encode("some words and more").ids, *empty, *words.encode("others").ids]] * 9)
    made = seen(Infilling(0.5, words, end, end, seed=7), rows).tolist()
    assert {row[:3] == empty for row in made} == {True} and rows[0].tolist() in made and len(set(map(str, made))) > 1


def test_a_run_resumes_exactly_and_its_model_is_asked_as_it_learned(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("train", *TINY, "--data", sentences, "--fim", "0.5", "--documents")
    assert bitnet(*given, "--out", tmp_path / "whole") == 0
    killed_before(13, *given, "--out", tmp_path / "cut")
    assert bitnet("train", "--resume", "--out", tmp_path / "cut") == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert bits(tmp_path / "cut/step-000020") == bits(tmp_path / "whole/step-000020")
    assert bitnet("train", *TINY, "--data", sentences, "--documents", "--out", tmp_path / "plain") == 0
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")
    assert bitnet("export", tmp_path / "whole", tmp_path / "m.bitnet", "--tokens", 200) == 0
    with Model.load(tmp_path / "m.bitnet", threads=1) as model:
        words = tokenizer.load(tmp_path / "whole/step-000020/tokenizer.json")
        marks = tokenizer.fim_tokens(words)
        prompt = model.infill_prompt("the cat", " dog")
        before, behind = (words.encode(text).ids for text in ("the cat", " dog"))
        assert prompt == [tokenizer.END_ID, marks[0], *before, marks[1], *behind, marks[2]]
        answer = model.infill("the cat", " dog", max_tokens=5, seed=1, receipt=True)
        assert answer.tokens == model.generate(prompt, max_tokens=5, seed=1).tokens
        assert answer.receipt is not None and model.verify_receipt(answer.receipt).valid
    capsys.readouterr()
    for wrong in (["--objective", "mlm", "--set", "mask=bidirectional"], ["--set", "mask=prefix"]):
        assert bitnet(*given[:-1], *wrong, "--out", tmp_path / "no") == 1
        assert "--fim is of text, for the next token of a causal model" in capsys.readouterr().err


def test_a_finetuned_model_gets_the_tokens_that_it_lacks(finished: Path, sentences: str, tmp_path: Path) -> None:
    options = ["--data", sentences, "--steps", 2, "--batch", 2, "--threads", 1, "--fim", "1", "--context", 32]
    assert bitnet("finetune", finished, *options, "--out", tmp_path / "run") == 0
    assert bitnet("export", tmp_path / "run", tmp_path / "m.bitnet", "--tokens", 200) == 0
    with Model.load(tmp_path / "m.bitnet", threads=1) as model:
        assert len(model.infill("the cat ", " the dog", max_tokens=3, seed=1, logit_bias={0: -100.0}).tokens) == 3


def test_names_that_published_models_have(tmp_path: Path) -> None:
    for i, names in enumerate(NAMES):
        words = byte_tokenizer()
        words.add_special_tokens(list(names))
        path = scripted_model(tmp_path / f"{i}.bitnet", [b"b", b"c"], tokenizer=words)
        with Model.load(path, threads=1) as model:
            before, behind, gap = map(words.token_to_id, names)
            assert model.infill_prompt("a", "z") == [before, ord("a"), behind, ord("z"), gap]
    path = small_model(tmp_path)
    with Model.load(path, threads=1) as model, pytest.raises(UnsupportedModelError, match=r"--fim 0\.5"):
        model.infill("a", "b")


@pytest.mark.parametrize(
    ("before", "behind", "room", "left"),
    [(5, 5, 20, (5, 5)), (50, 50, 24, (15, 5)), (2, 50, 24, (2, 18)), (50, 2, 24, (18, 2)), (9, 9, 4, (0, 0))],
)
def test_what_is_nearest_to_the_gap_is_kept(before: int, behind: int, room: int, left: tuple[int, int]) -> None:
    found = around(Gap(7, 8, 9), 1, list(range(100, 100 + before)), list(range(200, 200 + behind)), room)
    n, m = left
    assert found == [1, 7, *range(100 + before - n, 100 + before), 8, *range(200, 200 + m), 9]
    assert len(found) <= room


def test_a_long_text_is_cut_to_the_context(tmp_path: Path) -> None:
    words = byte_tokenizer()
    words.add_special_tokens(list(tokenizer.FIM))
    path = scripted_model(tmp_path / "m.bitnet", [b"b", b"c"], tokenizer=words)
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    with Model.load(path, threads=1) as model:
        prompt = model.infill_prompt("x" * 10_000_000 + "y", "z" + "x" * 1000, 8)
        gap = prompt.index(words.token_to_id(tokenizer.FIM[1]))
        assert len(prompt) == model.n_ctx - 8 and bytes([prompt[gap - 1], prompt[gap + 1]]) == b"yz"
        assert model.infill("x" * 1000, "y" * 1000, **given).usage.prompt_tokens == model.n_ctx - 8
        for most in (None, -1):  # as elsewhere
            assert len(model.infill_prompt("x" * 1000, "y" * 1000, most)) == model.n_ctx * 3 // 4
        wrongs: list[Any] = [-2, "8"]
        for wrong in wrongs:
            with pytest.raises(InvalidParameterError, match=r"^max_tokens is "):
                model.infill_prompt("x", "y", wrong)
