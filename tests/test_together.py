"""Batches: texts computed together are the texts computed one by one."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime import InvalidParameterError, Model, StateError, Stream
from bitnet_runtime.answers import together, writer
from bitnet_runtime.answers.choosing import AT_ONCE
from bitnet_runtime.answers.together import Passes
from bitnet_runtime.defaults import resolve
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.steps import Entry, step_batch
from runtime_models import scripted_model, small_model

GREEDY: dict[str, Any] = {"temperature": 0}
# A random model does not repeat itself; of three tokens it has to, and guesses come true.
FEW: dict[str, Any] = {"logit_bias": {1: 30.0, 2: 30.0, 3: 30.0}}
DRAWN: dict[str, Any] = {"temperature": 0.7, "seed": 5, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=2) as model:
        yield model


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_batch_gives_what_each_prompt_gives_alone(model: Model, sampling: dict[str, Any]) -> None:
    prompts = [[5], list(range(40)), [1, 2, 3] * 30, "text", [5]]
    together = model.generate(prompts, max_tokens=40, **sampling)
    alone = [model.generate(prompt, max_tokens=40, **sampling) for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    assert [result.usage for result in together] == [result.usage for result in alone]


def test_a_batch_ends_one_text_at_a_time(tmp_path: Path) -> None:
    script = [b"ab", b"cd", b"ef"]
    with Model.load(scripted_model(tmp_path / "m", script), threads=1) as model:
        results = model.generate(["x", "xef", "xab"], max_tokens=2, **GREEDY)
        assert [(r.text, r.finish_reason) for r in results] == [
            ("abcd", "length"),
            ("abcd", "length"),
            ("abcd", "length"),
        ]
        token = model.generate("x", max_tokens=1, **GREEDY).tokens[0]
        results = model.generate([[token], model.tokenize("x")], **GREEDY)
        assert [r.text for r in results] == ["cdef", "abcdef"]
        assert {r.finish_reason for r in results} == {"stop"}
        assert [r.text for r in model.generate(["x", "y"], max_tokens=0)] == ["", ""]


def test_texts_join_while_others_run(model: Model) -> None:
    """Short and long prompts, drafts, ends at different times; one more for each that is done."""
    prompts = [[1 + i % 7] * (1 + 37 * i % 200) for i in range(12)]
    options: list[dict[str, Any]] = [GREEDY | FEW | {"draft": 3}, DRAWN, GREEDY, DRAWN | FEW | {"draft": 0}]
    asked = [options[i % 4] | {"max_tokens": 5 + 3 * i} for i in range(12)]
    alone = [model.generate(prompt, **each) for prompt, each in zip(prompts, asked, strict=True)]
    with model.batch(most=3) as batch:
        added = {batch.add(prompts[i], **asked[i]): i for i in range(5)}
        pieces: dict[int, list[str]] = {}
        for stream, piece, done in batch:
            pieces.setdefault(added[stream], []).append(piece.text)
            assert not done or stream.result is not None
            if done and len(added) < 12:
                added[batch.add(prompts[len(added)], **asked[len(added)])] = len(added)
        assert len(batch) == 0
        for stream, place in added.items():
            assert stream.result is not None
            assert (stream.result.tokens, stream.result.finish_reason) == (
                alone[place].tokens,
                alone[place].finish_reason,
            )
            assert "".join(pieces[place]) == alone[place].text


def test_a_text_leaves_and_the_others_go_on(model: Model) -> None:
    alone = model.generate([3, 4], max_tokens=30, **DRAWN)
    with model.batch() as batch:
        leaving, staying = batch.add([1, 2], max_tokens=200, **DRAWN), batch.add([3, 4], max_tokens=30, **DRAWN)
        made = 0
        for stream, _, done in batch:
            made += stream is leaving
            if made == 5:
                leaving.close()
            assert not (stream is leaving and made > 5 + AT_ONCE + 1)  # what had been computed by then
            if stream is leaving and done:
                assert leaving.result and leaving.result.finish_reason == "cancelled"
        assert staying.result and staying.result.tokens == alone.tokens
        assert next(batch, None) is None
        assert batch.add([3, 4], max_tokens=30, **DRAWN) and len(list(batch)) >= 1  # it goes on


def test_a_pass_keeps_what_the_library_reads(model: Model) -> None:
    sampler = Sampler(resolve(GREEDY), model.vocab_size)
    alive = weakref.ref(sampler)
    with model.session() as session:
        entry = Entry(session, [1], sampler, most=1)
        del sampler
        assert alive() is not None
        step_batch([entry])
        entry.ask([2])
        assert alive() is None


def test_a_stream_asks_for_no_pass_while_another_thread_has_its_session(model: Model) -> None:
    """The library may read and write what it asked for before."""
    with model.batch() as batch:
        text = batch.add([1, 2], max_tokens=9, **GREEDY)
        next(batch)
        other = threading.Thread(target=text._writer.entry)
        with text._session._lock:
            other.start()
            other.join(0.05)
            assert other.is_alive()
        other.join(30)
        assert not other.is_alive() and len(list(batch)) == 8


def test_a_text_of_a_batch_is_read_there_alone(model: Model) -> None:
    """Whoever takes tokens beside it left a pass with nothing to compute, which ended all texts."""
    alone = model.generate([1, 2], max_tokens=20, seed=5, **FEW)
    with model.batch() as batch:
        texts = [batch.add([1, 2], max_tokens=20, seed=5, **FEW) for _ in range(2)]
        for step in range(3):
            with pytest.raises(StateError, match="iterate over the batch"):
                next(texts[step % 2])
            next(batch)
        list(batch)
        assert [text.result and text.result.tokens for text in texts] == [alone.tokens] * 2
        assert list(texts[0]) == []


def test_a_batch_looks_through_its_texts_for_a_given_session_alone(model: Model) -> None:
    """Else ten thousand texts took seconds to add."""
    looks = []

    class Watched(deque[Stream]):
        def __iter__(self) -> Iterator[Stream]:
            looks.append(len(self))
            return super().__iter__()

    with model.batch() as batch, model.session() as session:
        batch._waiting = Watched()
        for _ in range(3):
            batch.add([1], max_tokens=1, **GREEDY)
        assert looks == []
        batch.add([1], session=session, max_tokens=1, **GREEDY)
        assert looks == [3] and len(list(batch)) == 4


def test_texts_of_one_session_wait_for_each_other(model: Model) -> None:
    with model.session() as session, model.batch() as batch:
        for _ in range(2):
            batch.add([1], session=session, max_tokens=3, **GREEDY)
            with pytest.raises(InvalidParameterError, match="uses this session"):
                batch.add([2], session=session, max_tokens=3, **GREEDY)
            assert len(list(batch)) == 3


def test_running_texts_have_a_token_in_each_pass_while_prompts_load(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only as much of the prompts as one pass has time for; the one that waited longest comes first."""
    passes: list[list[int]] = []

    def counted(entries: Sequence[Entry]) -> None:
        passes.append([len(entry.tokens) for entry in entries])
        step_batch(entries)
        for entry in entries:  # ten tokens of a prompt take as long as an answer's
            entry.seconds = 1 + sum(len(entry.tokens) for entry in entries if len(entry.tokens) > 1) / 10

    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", counted)
    with model.batch() as batch:
        batch.add([1], max_tokens=60, draft=0, **GREEDY)
        for _ in range(5):
            next(batch)
        batch.add([2] * 200, max_tokens=1, **GREEDY)
        batch.add([3] * 200, max_tokens=1, **GREEDY)
        list(batch)
    mixed = [sizes for sizes in passes if len(sizes) > 1]
    assert len(mixed) > 20 and all(sizes[0] == 1 for sizes in mixed)
    assert mixed[0][1] == 8 and max(sum(sizes[1:]) for sizes in mixed[2:]) <= 11  # unknown at first
    assert passes.index(mixed[0]) <= 6


def test_texts_go_on_together_for_a_moment(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has several passes, but not while prompts load, whose time is measured; the texts are the same.
    They hardly repeat themselves: of draft tokens there would be as many as pay at the moment, and fewer calls."""

    def texts(moment: float) -> tuple[list[list[int]], list[tuple[int, int]]]:
        found: list[tuple[int, int]] = []

        def noted(entries: Sequence[Entry]) -> None:
            step_batch(entries)
            found.append((max(len(entry.tokens) for entry in entries), entries[0].passes))

        monkeypatch.setattr(writer, "MOMENT", moment)
        monkeypatch.setattr(together, "step_batch", noted)
        results = model.generate([[5], [6, 7] * 20, [8]], max_tokens=40, temperature=3, seed=5)
        return [result.tokens for result in results], found

    alone, calls = texts(0)
    assert all(passes == 1 for _, passes in calls) and len(calls) > 30
    tokens, calls = texts(1e6)
    assert tokens == alone and len(calls) < 15
    assert all(passes == 1 for loaded, passes in calls if loaded > 1) and max(passes for _, passes in calls) > 5


@pytest.mark.parametrize(
    ("alone", "token", "room"), [(0.1, 0.014, 6), (0.01, 0.02, 2), (1e-4, 5e-4, 8), (1e-4, 2e-3, 2), (0.1, 1e-3, 64)]
)
def test_prompts_take_the_time_of_a_pass_or_little(alone: float, token: float, room: int) -> None:
    """If a pass is short, 8 tokens if they take at most 5 ms; and never fewer than 2."""
    passes = Passes()
    passes._note(2, 0, alone)
    assert passes._room(2) == 8
    for n in range(9):
        tokens = passes._room(2)
        passes._note(2, tokens, (1 + n % 2) * (alone + tokens * token))  # every second one is disturbed
    assert passes._room(2) == passes._room(3) == room
    assert passes._room(0) == 128


def test_prompts_get_less_the_longer_what_was_read_takes_again() -> None:
    """The part of a pass that depth alone takes does not count: However long a pass takes for the depth alone, prompts
    get what fits beside that."""
    passes, rooms = Passes(), []
    passes._note(1, 0, 1.0)
    for depth in range(1000):
        rooms.append(passes._room(1))
        passes._note(1, rooms[-1], 1 + 0.05 * rooms[-1] + 0.0006 * depth)
    assert rooms[100] == 15 and rooms[900] == 6  # (0.85 - 0.0006 * depth) / 0.05, a little later
    longest = max(0.05 * n + 0.0006 * depth for depth, n in enumerate(rooms) if depth > 20)
    assert longest < 0.9


def test_refusals(model: Model) -> None:
    with pytest.raises(InvalidParameterError, match="several prompts"), model.session() as session:
        model.generate([[1], [2]], session=session)
    with pytest.raises(InvalidParameterError, match="draft is 65"):
        model.generate([1], draft=65)
