"""Any argument gives a result, or one error that names the parameter."""

from __future__ import annotations

import array
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_cli import main
from bitnet_export import random_model
from bitnet_runtime import InvalidParameterError, Model, ModelFileError, ModelFormatError, Sampler, Sampling, StateError
from bitnet_runtime.defaults import FIELDS, help_of
from bitnet_runtime.embedding import embed_batch
from runtime_models import SMALL, TEMPLATE, scripted_model, small_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path, threads=1) as model:
        yield model


# ---- token ids ----


@pytest.mark.parametrize(
    "ids",
    [
        np.array(PROMPT), np.array(PROMPT, np.uint16), np.array([5, 0, 6, 0, 7])[::2], tuple(PROMPT), range(5, 8),
        array.array("i", PROMPT), [np.int64(5), 6, np.uint8(7)], [np.array(token) for token in PROMPT],
    ],
)  # fmt: skip
def test_ids_come_in_many_forms(model: Model, ids: Any) -> None:
    expected = model.generate(PROMPT, max_tokens=5, seed=1).tokens
    assert model.generate(ids, max_tokens=5, seed=1).tokens == expected
    assert [piece.token for piece in model.stream(ids, max_tokens=5, seed=1, draft=2)] == expected
    assert model.generate([ids, "x"], max_tokens=5, seed=1)[0].tokens == expected
    assert model.score(ids)[1:] == model.score(PROMPT)[1:]
    assert np.array_equal(model.embed(ids, pooling="mean"), model.embed(PROMPT, pooling="mean"))
    assert np.array_equal(model.embed([ids, ids], pooling="mean")[1:], model.embed(PROMPT, pooling="mean"))
    assert model.detokenize(ids) == model.detokenize(PROMPT)
    with model.session() as session:
        session.append(ids)
        assert session.tokens == PROMPT


def test_rows_of_an_array_are_several_prompts(model: Model) -> None:
    rows = np.array([PROMPT, [1, 2, 3]])
    found = model.generate(rows, max_tokens=3, seed=1)  # type: ignore[call-overload]
    assert [r.tokens for r in found] == [r.tokens for r in model.generate(rows.tolist(), max_tokens=3, seed=1)]


def test_an_array_of_texts_is_several_prompts(model: Model) -> None:
    expected = [each.tokens for each in model.generate(["a", "bc"], max_tokens=3, seed=1)]
    arrays: list[Any] = [np.array(["a", "bc"]), np.array(["a", "bc"], object)]
    for texts in arrays:
        assert [each.tokens for each in model.generate(texts, max_tokens=3, seed=1)] == expected
        assert model.embed(texts, pooling="mean").shape == (2, 64)
        with pytest.raises(InvalidParameterError, match=r"^prompt is .* expected one: only generate takes a list"):
            model.stream(texts)


WRONG_IDS: list[Any] = [
    b"abc", bytearray(b"abc"), memoryview(b"abc"), None, 5, 1.5, (i for i in PROMPT), {1: 2}, {1, 2}, [1.5], [None],
    [True, False], np.array([True]), [1, np.True_],
    [[[1]]], np.array([1.5]), np.zeros((2, 2, 2), int), np.array(5), [512], [-1], [2**70], [1, "a"], [np.array([1.5])],
]  # fmt: skip


@pytest.mark.parametrize("ids", WRONG_IDS, ids=lambda value: type(value).__name__)
def test_what_is_no_ids_is_refused_by_name(model: Model, ids: Any) -> None:
    with model.session() as session:
        calls: list[tuple[str, Callable[[Any], object]]] = [
            ("prompt", model.generate), ("prompt", model.stream), ("text", model.score), ("tokens", model.detokenize),
            ("text", lambda value: model.embed(value, pooling="mean")),
            ("tokens", session.append), ("tokens", session.feed), ("tokens", session.score),
            ("tokens", lambda value: session.embed(value, pooling="mean")),
        ]  # fmt: skip
        for param, call in calls:
            with pytest.raises(InvalidParameterError, match=param) as caught:
                call(ids)
            assert caught.value.param == param
            assert "expected" in str(caught.value) and "interpreted" not in str(caught.value)  # as Python says it
        assert session.position == 0


def test_nothing_to_continue(model: Model) -> None:
    for call in (model.generate, model.stream):
        for prompt in ([], (), np.array([], int)):
            with pytest.raises(InvalidParameterError, match="prompt is an empty list; give at least one"):
                call(prompt)  # type: ignore[operator]
    with pytest.raises(InvalidParameterError, match="give at least one token id, or at least one prompt"):
        model.generate([])
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidParameterError, match="prompt is empty and the model has no start token"):
            call("")  # type: ignore[operator]
    assert model.embed([], pooling="mean").shape == (0, 64)


@pytest.mark.parametrize("tokens", [[99999], [512], [-1]])
def test_detokenize_knows_its_vocabulary(model: Model, tokens: list[int]) -> None:
    with pytest.raises(InvalidParameterError, match=rf"tokens has the id {tokens[0]}, expected ids from 0 to 511"):
        model.detokenize(tokens)


@pytest.mark.parametrize("text", [None, 5, b"abc", ["a"]])
def test_tokenize_takes_text(model: Model, text: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"text is .*, expected a string"):
        model.tokenize(text)


@pytest.mark.parametrize("yes", [1, np.True_])
def test_switches_of_the_tokenizer_may_be_numbers(model: Model, yes: Any) -> None:
    assert model.tokenize("ab", add_bos=yes) == model.tokenize("ab")
    assert model.detokenize(PROMPT, skip_special=yes) == model.detokenize(PROMPT)


# ---- sessions ----


def test_a_session_of_another_model_is_refused(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "m", [b"Good", b" day"], template=TEMPLATE)
    hello = [{"role": "user", "content": "hello"}]
    with Model.load(path) as a, Model.load(path) as b, a.session() as session, b.session() as own:
        calls: list[Callable[[Any], object]] = [
            lambda s: b.generate("x", session=s), lambda s: b.stream("x", session=s),
            lambda s: b.chat(hello, session=s), lambda s: b.stream_chat(hello, session=s),
            lambda s: b.generate(["x", "y"], session=s),
        ]  # fmt: skip
        for call in calls:
            for wrong in (session, "session", a):
                with pytest.raises(InvalidParameterError, match="session") as caught:
                    call(wrong)
                assert caught.value.param == "session"
        with pytest.raises(InvalidParameterError, match="of several models"):
            embed_batch([own, session], [[1], [2]], "mean")
        assert b.generate("x", session=own).text == "Good day"


def test_batches_need_one_of_each(model: Model) -> None:
    with model.session() as one, model.session() as two:
        wrong: list[tuple[Any, Any]] = [([one, two], [1]), ([one], [1, 2]), ([], []), ([one, one], [1, 2])]
        for sessions, tokens in wrong:
            with pytest.raises(InvalidParameterError, match="sessions"):
                embed_batch(sessions, [[token] for token in tokens], "mean")
        assert one.position == two.position == 0


def test_embed_after_append_says_why_not(model: Model) -> None:
    with model.session() as session:
        session.append([1, 2])
        with pytest.raises(StateError, match=r"holds tokens not appended by embed with this pooling; call reset"):
            session.embed([3], "mean")
        session.reset()
        session.embed([1, 2], "mean")
        with pytest.raises(StateError, match="with this pooling"):
            session.embed([3], "last")


def test_a_choice_without_logits_says_what_is_missing(model: Model) -> None:
    sampler = Sampler(Sampling(temperature=0), model.vocab_size)
    with model.session() as session:
        for _ in range(2):
            for choose in (session.sample, lambda: session.advance(sampler)):
                with pytest.raises(StateError, match=f"no logits after position {session.position} .*append a token"):
                    choose()
            session.append([1, 2])
            session.sample()
            session.rewind(1)
        with pytest.raises(StateError, match=r"no logits after position 1 to score a token with; append a token"):
            session.score([2])
        session.rewind(0)
        assert len(session.score([1, 2])) == 2 and len(session.score([3])) == 1


# ---- files ----


def test_a_missing_file_says_what_the_system_says(tmp_path: Path) -> None:
    missing = tmp_path / "none.bitnet"
    with pytest.raises(FileNotFoundError) as caught:
        Model.load(missing)
    error = caught.value
    assert isinstance(error, ModelFileError)
    assert (error.errno, error.filename, error.strerror) == (errno.ENOENT, str(missing), os.strerror(errno.ENOENT))
    assert str(error) == f"{missing}: No such file or directory"
    with pytest.raises(ModelFileError, match="too long") as long:
        Model.load("x" * 5000)
    assert long.value.errno == errno.ENAMETOOLONG


def test_the_name_of_a_published_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        Model.load("HF1BitLLM/some-8B")
    commands = "`hf download HF1BitLLM/some-8B --local-dir FOLDER`, then `bitnet convert FOLDER model.bitnet`"
    said = f"a published model is downloaded and converted once: {commands}"
    assert str(caught.value) == f"HF1BitLLM/some-8B: No such file or directory; {said}"
    assert main(["generate", "HF1BitLLM/some-8B", "-p", "x"]) != 0
    assert capsys.readouterr().err == f"bitnet: error: No such file or directory: HF1BitLLM/some-8B; {said}\n"
    (tmp_path / "HF1BitLLM").mkdir()
    for path in ("HF1BitLLM/some-8B", "runs/model.bitnet", "./model"):  # of a folder that is there, or of no hub
        with pytest.raises(FileNotFoundError, match=r"No such file or directory$"):
            Model.load(path)


@pytest.mark.parametrize("metadata", [b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 1}}'])
def test_keys_of_the_metadata_come_once(tmp_path: Path, metadata: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda *_, **__: metadata.decode())
    random_model(SMALL, tmp_path / "m")
    with pytest.raises(ModelFormatError, match=r"metadata is not good JSON: the key .* occurs 2 times, expected once"):
        Model.load(tmp_path / "m")


# ---- help ----


def test_help_has_the_words_of_the_command_line() -> None:
    text = Model.generate.__doc__
    assert text is not None
    for name in FIELDS:
        assert f"\n    {name}: {help_of(name)}" in text


def test_help_of_a_model_shows_facts_and_no_internals() -> None:
    import pydoc

    text = pydoc.plain(pydoc.render_doc(Model))
    for name in ("info", "metadata", "isa", "n_ctx", "defaults", "threads", "generate", "stream", "load"):
        assert f" |  {name}" in text, name
    for name in ("adopt", "detokenizer", "handle", "_section", "kv_type: str)"):
        assert f" |  {name}" not in text, name
    with pytest.raises(TypeError, match=r"Model\.load"):
        Model("model.bitnet")


def test_a_stream_says_how_far_it_is(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=2)
    assert repr(stream) == "<Stream of 3 tokens and 0 more, not begun>"
    next(stream)
    assert repr(stream) == "<Stream of 3 tokens and 1 more, running>"
    list(stream)
    assert repr(stream) == "<Stream of 3 tokens and 2 more, length>"


def test_what_is_done_with_a_result_stays_in_it(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=2)
    list(stream)
    assert stream.result
    stream.result.tokens.append(9)
    assert len(stream.result.tokens) == stream.result.usage.completion_tokens == 2
