"""Errors, Ctrl-C and closing while texts are computed together: what ends one leaves the others as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bitnet_runtime import CacheFullError, ClosedError, ContextLengthError, InvalidParameterError, Model, NumericError
from bitnet_runtime.defaults import resolve
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.steps import Entry, step_batch
from runtime_models import small_model
from test_together import DRAWN, GREEDY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=2) as model:
        yield model


def test_an_error_of_a_text_leaves_the_others_as_they_are(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose tokens were computed in the same pass, and later."""
    alone = model.generate([3, 4], max_tokens=30, **DRAWN)
    passes = 0

    def failing(entries: Sequence[Entry]) -> None:
        nonlocal passes
        step_batch(entries)
        passes += 1
        if passes == 5:
            entries[0].error, entries[1].error = NumericError("first"), NumericError("second")

    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", failing)
    monkeypatch.setattr("bitnet_runtime.answers.writer.MOMENT", 0)
    with model.batch() as batch:
        for prompt in ([1, 2], [2, 3], [3, 4]):
            staying = batch.add(prompt, max_tokens=30, **DRAWN)
        for name in ("first", "second"):
            with pytest.raises(NumericError, match=name):
                list(batch)
        assert len(batch) == 1
        list(batch)
        assert staying.result and staying.result.tokens == alone.tokens


@pytest.mark.parametrize("own", [False, True])
def test_ctrl_c_ends_what_is_computed(model: Model, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Python hears of it as the library returns: sessions have tokens then of which their streams do not know."""
    prompts, options = ([1, 2], [3, 4], [5, 6]), {"max_tokens": 30, **DRAWN}
    alone = [model.generate(prompt, **options).tokens for prompt in prompts]
    passes = 0

    def interrupted(entries: Sequence[Entry]) -> None:
        nonlocal passes
        step_batch(entries)
        passes += 1
        if passes == 9:
            for entry in entries:
                entry.chosen = []
            raise KeyboardInterrupt

    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", interrupted)
    monkeypatch.setattr("bitnet_runtime.answers.writer.MOMENT", 0)
    session = model.session() if own else None
    with model.batch(most=2) as batch:
        first, second = batch.add(prompts[0], session=session, **options), batch.add(prompts[1], **options)
        waiting = batch.add(prompts[2], **options)
        with pytest.raises(KeyboardInterrupt):
            list(batch)
        assert [step.stream for step in batch if step.done] == [first, second, waiting]
        for stream, tokens in zip((first, second), alone, strict=False):
            assert stream.result and stream.result.finish_reason == "cancelled"
            assert 0 < len(stream.result.tokens) < 30 and stream.result.tokens == tokens[: len(stream.result.tokens)]
        assert waiting.result and waiting.result.tokens == alone[2]
    if session:
        assert model.generate(prompts[0], session=session, **options).tokens == alone[0]


def test_an_error_says_of_which_prompt_it_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextLengthError, match=r"^prompt 1: \d+ tokens exceed"):
        model.generate([[1], [1] * (model.n_ctx + 1)], max_tokens=1)

    def failing(entries: Sequence[Entry]) -> None:
        step_batch(entries)
        entries[2].error = NumericError("not numbers")

    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", failing)
    with pytest.raises(NumericError, match=r"^prompt 2: not numbers$"):
        model.generate([[1, 2], [2, 3], [3, 4]], max_tokens=5)


def test_a_pass_that_cannot_begin_ends_its_texts_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Sequence[Entry]) -> None:
        raise MemoryError

    with model.batch(most=2) as batch:
        for _ in range(3):
            staying = batch.add([3, 4], max_tokens=5, **GREEDY)
        with monkeypatch.context() as patched:
            patched.setattr("bitnet_runtime.answers.together.step_batch", failing)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    next(batch)
        list(batch)
        assert staying.result and len(staying.result.tokens) == 5


def test_what_no_pass_can_do_is_an_error_of_each(model: Model) -> None:
    with model.session() as one, model.session() as other:
        entries = [Entry(one, [1], most=1), Entry(other, [])]
        step_batch(entries)
        assert all(isinstance(entry.error, InvalidParameterError) for entry in entries)
        assert one.position == 0
        again = Entry(one, [1], most=1)
        step_batch([again])
        assert len(again.chosen) == 1
        again.ask([])
        step_batch([again])
        assert isinstance(again.error, InvalidParameterError) and not again.chosen


def test_a_wrong_sampler_is_an_error_of_its_text(model: Model) -> None:
    wrong = Sampler(resolve(GREEDY), model.vocab_size)
    wrong.struct.temperature = -1
    with model.session() as one, model.session() as other:
        entries = [Entry(one, [1], wrong, most=1), Entry(other, [1], most=1)]
        step_batch(entries)
        assert isinstance(entries[0].error, InvalidParameterError)
        assert entries[1].error is None and len(entries[1].chosen) == other.position == 1


def test_a_text_that_finds_no_room_leaves_its_own_to_the_others(tmp_path: Path) -> None:
    """Four texts need a third block in two passes, where there are ten."""
    path = small_model(tmp_path)
    prompts = [[1 + i] * (3 + i // 2) for i in range(4)]
    with Model.load(path, threads=1) as model:
        alone = [model.generate(prompt, max_tokens=150, **DRAWN).tokens for prompt in prompts]
        limit = 10 * 64 * model.kv_bytes_per_token
    with Model.load(path, threads=1, cache_bytes=limit) as model, model.batch() as batch:
        texts = [batch.add(prompt, max_tokens=150, draft=0, **DRAWN) for prompt in prompts]
        errors = []
        while len(batch):
            try:
                list(batch)
            except CacheFullError as error:
                errors.append(error)
        results = [text.result for text in texts]
        ended = [result is not None and result.finish_reason == "cancelled" for result in results]
        assert len(errors) == sum(ended) == 1
        for result, tokens in zip(results, alone, strict=True):
            assert result and result.tokens == tokens[: len(result.tokens)]
        assert model.cache_bytes == 0


def test_a_list_is_computed_as_far_as_the_cache_has_room(tmp_path: Path) -> None:
    """As each prompt alone: one that finds no room beside others is tried again, and refused if it finds none alone."""
    path, prompts = small_model(tmp_path), [[1 + i] * (60 if i % 3 else 120) for i in range(9)]
    with Model.load(path, threads=1) as model:
        alone = [model.generate(prompt, max_tokens=20, **DRAWN).tokens for prompt in prompts]
        limit = 4 * 64 * model.kv_bytes_per_token  # one or two of them
    with Model.load(path, threads=1, cache_bytes=limit) as model:
        for _ in range(2):
            assert [each.tokens for each in model.generate(prompts, max_tokens=20, **DRAWN)] == alone
            assert model.cache_bytes == 0
        with model.session() as other:
            other.feed([1] * 129)  # of whose blocks one is left
            with pytest.raises(CacheFullError, match=r"^prompt \d: .*cache_bytes"):
                model.generate(prompts[:4], max_tokens=20, **DRAWN)
        assert model.cache_bytes == 0
        for last in model.generate([[5] * 60, [6] * 3], max_tokens=20, **DRAWN):
            assert len(last.tokens) == 20


def test_a_closed_batch_takes_no_text(model: Model) -> None:
    with model.batch() as batch:
        text = batch.add([1, 2], max_tokens=200, **DRAWN)
        next(batch)
    assert text.result and text.result.finish_reason == "cancelled"
    assert list(batch) == []
    with pytest.raises(ClosedError, match="make another with"):
        batch.add([1], max_tokens=1)
    assert len(batch) == 0


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_batch_that_is_closed_in_a_pass_ends(model: Model, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    batch = model.batch()
    texts = [batch.add([1 + i], max_tokens=50, **DRAWN) for i in range(4)]

    def closed(entries: Sequence[Entry]) -> None:
        if when == "before":
            batch.close()
        step_batch(entries)
        batch.close()

    next(batch)
    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", closed)
    assert len(list(batch)) < 4  # what was there already
    assert len(batch) == 0
    assert all(text.result and text.result.finish_reason == "cancelled" for text in texts)
