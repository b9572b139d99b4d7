"""Texts with a common beginning reuse what was computed, with the bits that each gets alone."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from bitnet_cli.verbs import serve
from bitnet_runtime import InvalidParameterError, Model
from bitnet_runtime.sessions.state import all_sessions
from bitnet_serve.models import sessions
from bitnet_serve.models.sessions import Kept, Memory, Sessions
from bitnet_serve.server import Serving
from runtime_models import SMALL, small_model
from servers import post, served

KEYS = ["one", "two"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(small_model(tmp_path_factory.mktemp("models")), api_keys=KEYS) as serving:
        yield serving


def ask(serving: Serving, prompt: list[int], key: str = "one", **more: Any) -> tuple[int, Any]:
    """Tokens of the prompt that were there already, and the answer."""
    asked = {"prompt": prompt, "max_tokens": 20, "seed": 5, "logprobs": 2} | more
    status, answer = post(serving, "/v1/completions", asked, authorization=f"Bearer {key}")
    assert status == 200
    return answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0), answer["choices"][0]


def test_the_longest_beginning_is_reused(serving: Serving) -> None:
    rng = random.Random(0)
    first = [rng.randrange(256) for _ in range(100)]
    other = [*first[:80], *(rng.randrange(256) for _ in range(60))]
    assert ask(serving, first)[0] == 0
    reused, answer = ask(serving, first)
    assert reused == 99
    assert ask(serving, first, "two") == (0, answer)  # not that of another, and the same answer
    reused, answer = ask(serving, other)
    assert reused == 80
    assert ask(serving, other, "two")[1] == answer
    assert ask(serving, other[:70])[0] == 69
    assert ask(serving, other[:50])[0] == 0  # less than a block
    reused, scored = ask(serving, other, echo=True)
    assert reused == 0 and scored["logprobs"]["token_logprobs"][140:] == answer["logprobs"]["token_logprobs"]


def test_none_goes_on_in_a_session_that_has_no_room_for_it(serving: Serving) -> None:
    """One that is scored gets a session of its own length."""
    text = [9, *range(100)]
    ask(serving, text, echo=True, max_tokens=1)
    reused, answer = ask(serving, [*text, *range(50)])
    assert reused == 0 and len(answer["logprobs"]["tokens"]) == 20


def test_a_short_text_is_not_kept_as_is_said(serving: Serving) -> None:
    root, said = Path(__file__).parent.parent, f"texts of more than {sessions.BLOCK} tokens"
    assert said in (root / "docs/server.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    serve.arguments(parser)
    assert said in " ".join(parser.format_help().split())
    for n, kept in ((sessions.BLOCK, False), (sessions.BLOCK + 1, True)):
        prompt = [7 * i % (200 + n % 2) for i in range(n)]  # other tokens each time
        assert ask(serving, prompt, max_tokens=1)[0] == 0
        assert ask(serving, [*prompt, 1, 2], max_tokens=1)[0] == n * kept


def test_of_several_answers_the_prompt_counts_once(serving: Serving) -> None:
    """A client takes one from the other, to know what was computed."""
    prompt = [3 * i % 251 for i in range(90)]
    for expected in (0, 89):
        _, answer = post(
            serving, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "n": 4}, authorization="Bearer one"
        )
        assert answer["usage"]["prompt_tokens"] == 90
        assert answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == expected


def test_random_texts_that_part_and_join(serving: Serving) -> None:
    """Each result is that of a model that computes it alone."""
    rng, model = random.Random(1), serving.models["small-0-256"].model
    texts = [[rng.randrange(256) for _ in range(120)]]
    saved = 0
    for seed in range(40):
        text = rng.choice(texts)
        text = [*text[: rng.randrange(60, len(text))], *(rng.randrange(256) for _ in range(rng.randrange(1, 30)))]
        texts.append(text)
        reused, choice = ask(serving, text, seed=seed)
        assert choice["text"] == model.generate(text, max_tokens=20, seed=seed).text
        saved += reused
    assert saved > 500
    kept = [each for each in all_sessions() if each._model is model and each._handle is not None]
    assert 1 < len(kept) <= sessions.MOST


def test_texts_become_vectors_together_as_far_as_there_is_memory(tmp_path: Path) -> None:
    path, vectors = small_model(tmp_path), []
    for most in (0, 250_000):  # less than half of sixteen texts at once
        with served(path, max_cache=most) as serving:
            asked = {"input": [[i, 7, 7] for i in range(16)], "pooling": "mean"}
            status, answer = post(serving, "/v1/embeddings", asked)
            assert status == 200
            vectors.append([each["embedding"] for each in answer["data"]])
    assert vectors[0] == vectors[1]


def test_what_is_kept_is_bounded(serving: Serving) -> None:
    model = serving.models["small-0-256"].model

    def text(keep: Sessions, prompt: list[int], who: str = "") -> int:
        session, same = keep.begin(prompt, 200, who)
        session.feed(prompt[same:])
        keep.end(session, who)
        return same

    size = model.session().nbytes
    memory = Memory(8 * size, 0.5)  # room for a few texts
    keep = Sessions(model, memory)
    texts = [[i, *range(100)] for i in range(10)]
    for prompt in texts:
        assert text(keep, prompt) == 0
    assert text(keep, texts[9]) == 100
    assert text(keep, texts[0]) == 0  # it was dropped
    session, _ = keep.begin(texts[8], 200, "")
    others = []
    while memory.take(size, others):  # now another client has the memory
        others.append(size)
    with pytest.raises(MemoryError):
        for _ in range(9):
            keep.begin([5], 200, "")
    assert session.position > 0  # the running text kept all it had


def test_a_text_too_large_to_be_kept_leaves_its_beginning(serving: Serving) -> None:
    model = serving.models["small-0-256"].model
    with model.session() as empty:
        memory = Memory(4 * empty.nbytes, 1)
        keep = Sessions(model, memory)
        memory.most_kept = keep._size(empty, 100, 0)
    for n, same in ((70, 0), (250, 70), (250, 70)):
        prompt = [*range(n)]
        session, found = keep.begin([*prompt, 0], n + 1, "")
        assert found == same
        session.feed(prompt[same:])
        keep.end(session, "")


def test_what_forks_keep_of_texts_that_went_is_counted(tmp_path: Path) -> None:
    """A session is freed as a whole, when none sees a block of it any more: texts that part from one another a little
    later each time must not hold more than the server says."""
    with Model.load(small_model(tmp_path, config=SMALL.replace(max_context=2048)), threads=1) as model:
        size = model.session().nbytes
        keep = Sessions(model, Memory(4 * size, 0.5))
        most, reused = 0, 0
        for i in range(1, 26):
            prompt = [7] * (64 * i) + [i] * (2000 - 64 * i)
            session, same = keep.begin(prompt, len(prompt), None)
            session.feed(prompt[same:], keep_logits=False)
            most = max(most, model.cache_bytes)
            reused += same
            keep.end(session, None)
        assert reused > 5000 and most <= 4 * size


def test_what_a_text_keeps_and_does_not_see_goes_on_with_it(serving: Serving) -> None:
    """Of two with the same beginning the one with less of it is taken; at a whole context of it, none is."""
    model = serving.models["small-0-256"].model
    keep = Sessions(model, Memory(64 * model.session().nbytes, 0.5))

    def text(prompt: list[int]) -> tuple[int, int]:
        session, same = keep.begin([*prompt, 0], len(prompt) + 1, None)
        session.feed(prompt[same:])
        keep.end(session, None)
        return same, keep._kept[-1].idle

    first = [1] * 200
    assert text(first) == (0, 0)
    assert text([*first[:100], *[2] * 50]) == (100, 100)
    assert text([*first, *[3] * 10]) == (200, 0)
    assert text(fourth := [*first[:80], *[4] * 50]) == (80, 130)
    assert text(fifth := [*fourth[:100], *[5] * 100]) == (100, 160)
    assert text(sixth := [*fifth[:150], *[6] * 100]) == (150, 210)
    assert text([*sixth[:160], 7]) == (0, 0)


def test_a_beginning_that_many_go_on_from_stays(serving: Serving) -> None:
    model = serving.models["small-0-256"].model
    keep = Sessions(model, Memory(64 * model.session().nbytes, 1))
    first = [1] * 200
    for prompt, expected in [(first, 0), *(([*first[:80], *[i] * 50], 80) for i in range(2, 30)), ([*first, 0], 200)]:
        session, same = keep.begin([*prompt, 0], len(prompt) + 1, None)
        assert same == expected
        session.feed(prompt[same:])
        keep.end(session, None)


def test_memory_is_counted_exactly() -> None:
    def kept(size: int) -> Kept:
        anything: Any = Mock()
        return Kept(anything, anything, np.zeros(0, np.int32), None, 0, size)

    memory = Memory(100, 1)
    assert memory.take(90, "a") and not memory.keep(kept(20), ())
    assert memory.keep(first := kept(10), ()) and not memory.keep(kept(1), ())
    assert memory.keep(second := kept(5), (first,)) and memory.kept == [second]
    memory.give(90)
    assert memory.take(100, "a") and not memory.kept and not memory.take(1, "a")


def test_texts_take_no_more_than_their_budget(tmp_path: Path) -> None:
    """Requests beyond it wait for those that run, and what was kept gives way; all get the bits of an answer alone."""
    path = small_model(tmp_path, config=SMALL.replace(max_context=2048))
    with Model.load(path, threads=1) as alone, ThreadPoolExecutor(8) as askers:
        size = alone.session().nbytes
        with (
            pytest.raises(InvalidParameterError, match="--max-cache is 0 MB, but 2,048 tokens of small"),
            served(path, max_cache=size - 1),
        ):
            pass
        with served(path, max_cache=2 * size) as serving:
            model = next(iter(serving.models.values())).model
            prompts = [[i] * 100 for i in range(24)]
            most = 0

            def answer(prompt: list[int]) -> str:
                nonlocal most
                text = str(ask(serving, prompt, max_tokens=200, logprobs=None)[1]["text"])
                most = max(most, model.cache_bytes)
                return text

            assert [*askers.map(answer, prompts)] == [
                alone.generate(prompt, max_tokens=200, seed=5).text for prompt in prompts
            ]
            assert 0 < most <= 2 * size


def test_it_can_be_turned_off(serving: Serving) -> None:
    keep = Sessions(serving.models["small-0-256"].model, Memory(1 << 30, 0))
    for _ in range(2):
        session, same = keep.begin([1] * 100, 120, None)
        assert same == 0
        session.feed([1] * 100)
        keep.end(session, None)
        assert session._handle is None


def test_layers_with_a_window_start_anew_where_they_forgot(tmp_path_factory: pytest.TempPathFactory) -> None:
    windows = SMALL.replace(sliding_window=16, max_context=2048)
    path = small_model(tmp_path_factory.mktemp("windows"), config=windows)
    with served(path) as serving, Model.load(path, threads=1) as alone:
        text = [i % 250 for i in range(1000)]  # the first blocks are free
        for prompt, held in ((text, 0), (text, 999), (text[:500], 0), ([*text, 7, 8], 1000)):
            found, answer = ask(serving, prompt, logprobs=None)
            assert (found, answer["text"]) == (held, alone.generate(prompt, max_tokens=20, seed=5).text)
