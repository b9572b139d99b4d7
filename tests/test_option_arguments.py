"""Options of load, of sessions, of sampling and of messages: what is none gives one error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_runtime import InvalidParameterError, Model, Sampler, Sampling
from bitnet_runtime.defaults import FIELDS
from bitnet_runtime.structured.formats import KINDS
from runtime_models import TEMPLATE, scripted_model, small_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path, threads=1) as model:
        yield model


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
