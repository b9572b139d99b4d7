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
from bitnet_runtime.structured.formats import KINDS
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


# ---- options ----


def test_options_in_one_object(model: Model) -> None:
    options = Sampling(temperature=0, max_tokens=4, stop=["zzz"])  # type: ignore[arg-type]
    expected = model.generate("abc", temperature=0, max_tokens=4)
    assert options.stop == ("zzz",)
    assert model.generate("abc", options=options).tokens == expected.tokens
    assert len(model.generate("abc", options=options, max_tokens=2).tokens) == 2
    assert [r.tokens for r in model.generate(["abc"], options=options)] == [expected.tokens]
    assert [piece.token for piece in model.stream("abc", options=options)] == expected.tokens
    with model.session() as session:
        row = session.append(PROMPT)
        assert session.sample(options=options) == int(row.argmax())
    with pytest.raises(InvalidParameterError, match=r"options is \{'top_k': 1\}, expected a Sampling"):
        model.generate("abc", options={"top_k": 1})  # type: ignore[call-overload]
    with pytest.raises(InvalidParameterError, match="temperature is 'hot'"):
        Sampling(temperature="hot")  # type: ignore[arg-type]


def test_options_in_one_object_replace_those_of_the_model(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "m", [b"one", b"two"], generation={"max_new_tokens": 1, "temperature": 0})
    with Model.load(path) as model:
        assert model.generate("go").text == "one"
        assert model.generate("go", options=Sampling(temperature=0)).text == "onetwo"


def test_what_the_engine_would_take_for_zero(model: Model) -> None:
    with pytest.raises(InvalidParameterError, match=r"^repeat_penalty is 1e-60, expected a number from 1e-30"):
        model.generate("abc", repeat_penalty=1e-60)
    assert model.generate("abc", max_tokens=1, repeat_penalty=1e-30).tokens
    assert model.generate("abc", top_p=1e-60, seed=1).tokens == model.generate("abc", temperature=0).tokens


@pytest.mark.parametrize("value", [10**400, 10**5000, -(10**400), np.array([1.0, 2.0]), np.array([1, 2])], ids=type)
@pytest.mark.parametrize(
    "name", [name for name in FIELDS if name not in ("stop", "stop_token_ids", "logit_bias", *KINDS)]
)
def test_values_beyond_all_floats(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} is .*, expected") as caught:
        Sampling(**{name: value})
    assert len(str(caught.value)) < 250
    with pytest.raises(InvalidParameterError, match="logit_bias"):
        Sampling(logit_bias={1: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "2"), ("threads", 2.5), ("threads", True), ("threads", [2]), ("threads", 10**5000),
        ("n_ctx", "9"), ("n_ctx", 9.5), ("kv_type", None), ("kv_type", ["f16"]), ("isa", 5), ("isa", ["avx2"]),
        ("path", None), ("path", b"model"), ("path", 5), ("path", ""), ("verify", "false"), ("verify", 0),
        ("mmap", "no"), ("mmap", None),
    ],
    ids=type,
)  # fmt: skip
def test_arguments_of_load(path: Path, name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} is .*expected") as caught:
        Model.load(**({"path": path} | {name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize("value", ["no", 1, None])
def test_what_is_neither_true_nor_false(value: Any, tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "chat.bitnet", [b"a"], template=TEMPLATE)
    said: Any = [{"role": "user", "content": "x"}]
    with Model.load(path, threads=1) as model:
        for name, call in (
            ("receipt", lambda: model.generate("x", receipt=value)),
            ("receipt", lambda: model.chat(said, receipt=value)),
            ("draft", lambda: model.session(draft=value)),
            ("add_generation_prompt", lambda: model.apply_template(said, add_generation_prompt=value)),
            ("add_generation_prompt", lambda: model.render_template(said, add_generation_prompt=value)),
        ):
            with pytest.raises(InvalidParameterError, match=f"^{name} is {value!r}, expected true or false") as caught:
                call()
            assert caught.value.param == name


def test_arguments_of_sessions(model: Model) -> None:
    with model.session(np.int64(9)) as session:  # type: ignore[arg-type]
        assert session.n_ctx == 9
        session.rewind(np.int64(0))  # type: ignore[arg-type]
        for call, param in ((session.rewind, "n"), (session.seed, "seed"), (model.session, "n_ctx")):
            for value in ("1", 1.5, -1, [1]):
                with pytest.raises(InvalidParameterError, match=f"^{param} is .*expected an integer from"):
                    call(value)  # type: ignore[operator]
        with pytest.raises(AttributeError, match=r"^seed is a method of a session, expected session.seed\(5\)$"):
            session.seed = 5  # type: ignore[assignment,method-assign]
        session.seed(5)
        with pytest.raises(InvalidParameterError, match=r"^logits is \['all'\], expected"):
            session.append([1], ["all"])  # type: ignore[call-overload]


def test_arguments_of_steps(model: Model) -> None:
    sampler = Sampler(Sampling(temperature=0), model.vocab_size)
    with model.session() as session:
        before = session.append(PROMPT)
        calls: list[tuple[str, Callable[[Any], object], list[Any]]] = [
            ("token", session.step, [np.float32(3.9), 2**40, True, np.True_, -1, 512, "5", None]),
            ("draft", lambda value: session.advance(sampler, value), [[np.float32(1.5)], [2**40], [-5], [True], 5]),
            ("most", lambda value: session.advance(sampler, most=value), [-3, 0, 1.5, 2**31, True]),
            ("sampler", session.advance, [0.8, None, Sampling()]),
            ("sampler", session.draw, [0.8, None, Sampling()]),
            ("sampler", lambda value: session.guess(value, 1, 1), [0.8, None]),
            ("token", lambda value: session.guess(sampler, value, 1), [1.5, 2**40, True, -1]),
            ("most", lambda value: session.guess(sampler, 1, value), [-1, 1.5, 2**31]),
        ]  # fmt: skip
        for param, call, values in calls:
            for value in values:
                with pytest.raises(InvalidParameterError, match=f"^{param} .*expected") as caught:
                    call(value)
                assert caught.value.param == param
        assert session.tokens == PROMPT and np.array_equal(session.logits, before)  # type: ignore[arg-type]
        wrong: list[tuple[str, Any, Any]] = [("options", {"top_k": 1}, 512), ("vocab_size", Sampling(), "512")]
        for param, options, vocab_size in wrong:
            with pytest.raises(InvalidParameterError, match=f"^{param} is .*expected"):
                Sampler(options, vocab_size)
        token = int(before.argmax())
        with session.fork() as other:
            assert other.advance(sampler, np.array([token, 2]), most=2**31 - 1)[0] == token
        assert session.guess(sampler, token, 2**31 - 1) == []
        session.step(np.int64(token))  # type: ignore[arg-type]
        assert session.tokens == [*PROMPT, token]


def test_keys_of_messages(tmp_path: Path) -> None:
    with Model.load(scripted_model(tmp_path / "m", [b"Good"], template=TEMPLATE)) as model:
        message = {"role": "user", "content": "x", (1, 2): "y"}
        with pytest.raises(InvalidParameterError, match=r"messages: .*key") as caught:
            model.chat([message])
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ([("a", 1)], r"is \[\('a', 1\)\], expected a dictionary"), (True, "is True, expected a dictionary"),
        ([], r"is \[\], expected a dictionary"), ({"a": {1}}, "Object of type set is not JSON"), ({1: 2}, "a key is 1"),
    ],
)  # fmt: skip
def test_variables_of_a_template(variables: Any, said: str, tmp_path: Path) -> None:
    with Model.load(scripted_model(tmp_path / "m", [b"Good"], template=TEMPLATE)) as model:
        for call in (model.chat, model.render_template, model.apply_template):
            with pytest.raises(InvalidParameterError, match=rf"^variables:? {said}") as caught:
                call([{"role": "user", "content": "x"}], variables=variables)  # type: ignore[operator]
            assert caught.value.param == "variables"


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
