"""The table of sampling options: Python, the command line and the engine agree with it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_cli import model_options
from bitnet_cli.verbs import generate
from bitnet_runtime import InvalidParameterError, Model, ModelFormatError, NumericError, Sampling, StateError
from bitnet_runtime.defaults import ALIASES, DEFAULTS, FIELDS, model_defaults, resolve
from bitnet_runtime.sessions.sampler import Sampler
from runtime_models import scripted_model, small_model

DOCUMENTED = {
    "max_tokens": 256, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0,
    "repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "stop": (),
    "stop_token_ids": (), "min_tokens": 0, "ignore_eos": False, "draft": None,
    "logit_bias": None, "json_schema": None, "regex": None, "grammar": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=1) as model:
        yield model


def parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The whole parser and that of `generate`."""
    whole = argparse.ArgumentParser(allow_abbrev=False)
    verb = whole.add_subparsers(dest="verb").add_parser("generate")
    generate.arguments(verb)
    return whole, verb


def test_the_documented_defaults() -> None:
    assert dataclasses.asdict(DEFAULTS) == DOCUMENTED


def test_help_names_the_defaults_of_the_table() -> None:
    text = re.sub(r"\s+", " ", parser()[1].format_help().partition("\nsampling:")[2])
    for name, default in DOCUMENTED.items():
        flag = "--temp" if name == "temperature" else "--" + name.replace("_", "-")
        shown = re.search(rf" {flag}[ ,].*?\(default: ([^)]*)\)", text)
        assert shown, f"{flag} is not in the help"
        word = "none" if default in (None, ()) else str(default)
        assert shown[1] == word, f"{flag} says {shown[1]}, the table {word}"


def test_no_flag_means_the_table_and_so_does_no_argument(model: Model) -> None:
    whole, _ = parser()
    assert model_options.sampling(whole.parse_args(["generate", "x.bitnet"])) == {}
    explicit = {name: value for name, value in DOCUMENTED.items() if name != "seed"}
    assert model.generate("abc", seed=7).tokens == model.generate("abc", **explicit, seed=7).tokens


def test_every_flag_reaches_the_option_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "s").write_text('{"type": "integer"}', "utf-8")
    line = (
        "generate x -n 3 --temp 0.5 --top-k 2 --top-p 0.5 --min-p 0.25 --repeat-penalty 1.5 --repeat-last-n -1 "
        "--presence-penalty 0.5 --frequency-penalty -0.5 -s 9 --stop A --stop B --draft 4 --logit-bias 5=-inf "
        "--stop-token-ids 7 --stop-token-ids 8 --min-tokens 2 --ignore-eos"
    )
    given: dict[str, Any] = {}
    for flag, value in (("--regex", "a+"), ("--json-schema", tmp_path / "s"), ("--grammar", tmp_path / "s")):
        given |= model_options.sampling(parser()[0].parse_args([*line.split(), flag, str(value)]))
    assert set(given) == set(FIELDS)
    assert resolve(given) == Sampling(
        max_tokens=3, temperature=0.5, top_k=2, top_p=0.5, min_p=0.25, repeat_penalty=1.5, repeat_last_n=-1,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=9, stop=("A", "B"), draft=4, logit_bias={5: -math.inf},
        stop_token_ids=(7, 8), min_tokens=2, ignore_eos=True,
        json_schema='{"type": "integer"}', regex="a+", grammar='{"type": "integer"}',
    )  # fmt: skip


def test_the_table_reaches_the_engine() -> None:
    struct = Sampler(resolve({"logit_bias": {3: 1.5}}), 10).struct
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(struct, name) == np.float32(DOCUMENTED[name])
    assert struct.penalty_window == DOCUMENTED["repeat_last_n"]
    assert (struct.n_bias, struct.bias_tokens[0], struct.bias_values[0]) == (1, 3, 1.5)


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias: str) -> None:
    name = ALIASES[alias]
    value = "x" if name == "stop" else 1
    assert resolve({alias: value}) == resolve({name: value})
    with pytest.raises(InvalidParameterError, match=f"{name}.*given twice.*{alias}|{alias}"):
        resolve({name: value, alias: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -2), ("max_tokens", 2**63), ("max_tokens", 1.5), ("max_tokens", "3"), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_k", -1), ("top_p", -0.1), ("top_p", 1.01), ("min_p", -0.01), ("min_p", 2), ("repeat_penalty", 0),
        ("repeat_last_n", -2), ("presence_penalty", 1e9), ("frequency_penalty", math.nan), ("seed", -2),
        ("seed", 2**64), ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", ["a", 5]),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}), ("logit_bias", [1]), ("stop_token_ids", 5), ("min_tokens", -1),
        ("min_tokens", 1.5), ("ignore_eos", 1), ("ignore_eos", None), ("temperature", None), ("top_k", None),
    ],
)  # fmt: skip
def test_a_value_out_of_range_names_itself(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        resolve({name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} is {value!r}, expected ")


def test_stop_tokens_come_as_other_ids_do() -> None:
    """A wrong one is named: a list was refused with the words "expected a list"."""
    for given in ([3, 5], (3, 5), np.array([3, 5]), [np.int64(3), np.int32(5)]):
        assert resolve({"stop_token_ids": given}).stop_token_ids == (3, 5)
    for wrong, said in (
        ([3, -1], "has the id -1, expected ids from 0 to"), ([2**31], f"has the id {2**31}, expected ids from 0 to"),
        ([True], "has True, expected token ids"), (["a"], "has 'a', expected token ids"),
    ):  # fmt: skip
        with pytest.raises(InvalidParameterError, match=f"^stop_token_ids {said}"):
            resolve({"stop_token_ids": wrong})


def test_words_of_other_engines(model: Model) -> None:
    assert resolve({"n_predict": -1, "seed": -1}) == resolve({"max_tokens": None, "seed": None})
    assert model.generate("abc", top_p=0, seed=3).tokens == model.generate("abc", temperature=0).tokens


def test_what_ends_an_answer(tmp_path: Path) -> None:
    """Also with guesses, alone as well as computed together with others."""
    script = scripted_model(tmp_path / "m.bitnet", [b"one", b"two", b"three"], max_context=64)
    with Model.load(script, threads=1) as model:
        one, two, three = model.generate("go", temperature=0).tokens
        (end,) = model.end_tokens
        for draft in (0, 8, None):
            asked: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "draft": draft}

            def made(asked: dict[str, Any] = asked, **more: Any) -> tuple[list[int], str]:
                found = model.generate("go", **asked, **more)
                assert model.generate(["go", "go"], **asked, **more)[1].tokens == found.tokens
                return found.tokens, found.finish_reason

            assert made(stop_token_ids=[two]) == ([one], "stop")
            assert made(stop_token_ids=[end, 5]) == ([one, two, three], "stop")
            tokens, why = made(ignore_eos=True)
            assert (tokens[:4], len(tokens), why) == ([one, two, three, end], 9, "length")
            assert made(ignore_eos=True, stop_token_ids=[three]) == ([one, two], "stop")
            for least in (3, 4, 7, 9):
                tokens, why = made(min_tokens=least)
                assert tokens[:3] == [one, two, three] and end not in tokens and len(tokens) >= least
            assert made(min_tokens=2, stop_token_ids=[two])[0] != [one]
        for wrong, said in (
            ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, expected at most max_tokens, which is 2"),
            ({"min_tokens": 1, "regex": "a"}, "min_tokens is given beside a format"),
            ({"ignore_eos": True, "json_schema": True}, "ignore_eos is given beside a format"),
            ({"stop_token_ids": [10_000]}, "stop_token_ids has 10000, expected ids from 0 to"),
        ):
            with pytest.raises(InvalidParameterError, match=f"^{said}"):
                model.generate("go", **wrong)


def test_unknown_names_get_the_nearest(model: Model) -> None:
    with pytest.raises(InvalidParameterError, match="unknown parameter 'temprature'; did you mean 'temperature'"):
        model.generate("x", temprature=1)
    with pytest.raises(InvalidParameterError, match="'max_newtokens'; did you mean 'max_new_tokens'"):
        model.stream("x", max_newtokens=1)
    with pytest.raises(InvalidParameterError, match="'max_p'; expected one of max_tokens"):  # not the opposite
        resolve({"max_p": 1})
    with pytest.raises(InvalidParameterError, match="'zzz'; expected one of max_tokens, temperature"):
        resolve({"zzz": 1})


@pytest.mark.parametrize(
    ("word", "value"), [("max_tokens", "x"), ("max_completion_tokens", 1.5), ("temp", -1), ("until", 5)]
)
def test_a_wrong_value_is_refused_by_the_name_it_came_with(word: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{word} is {value!r}, expected") as caught:
        resolve({word: value})
    assert caught.value.param == word


def test_the_model_overrides_the_table_and_arguments_override_both(tmp_path: Path) -> None:
    generation = {"temperature": 0, "max_new_tokens": 2, "bos_token_id": None, "transformers_version": "4"}
    path = scripted_model(tmp_path / "m", [b"one", b"two", b"three"], generation=generation)
    with Model.load(path) as model:
        assert model.defaults == dataclasses.replace(DEFAULTS, temperature=0.0, max_tokens=2)
        assert model.generate("go").text == "onetwo"
        assert model.generate("go", max_tokens=1).text == "one"
        assert model.generate("go", max_tokens=None).text == "onetwothree"


@pytest.mark.parametrize("generation", [{"temperature": -1}, {"top_k": "many"}, {"eos_token_ids": [10**6]}])
def test_wrong_defaults_of_a_model_are_refused_by_name(tmp_path: Path, generation: dict[str, Any]) -> None:
    path = scripted_model(tmp_path / "m", [b"one"], generation=generation)
    with pytest.raises(ModelFormatError, match=next(iter(generation))):
        Model.load(path)


def test_model_defaults_ignores_what_is_not_ours() -> None:
    assert model_defaults({"pad_token_id": 3, "do_sample": True}) == DEFAULTS


# ---- what the options do ----


def test_temperature_zero_takes_the_largest_logit(model: Model) -> None:
    with model.session() as session:
        for token in range(20):
            row = session.append([token])
            assert session.sample(temperature=0) == int(np.argmax(row))
            assert session.sample(top_k=1) == int(np.argmax(row))


def test_a_seed_decides_the_tokens_and_is_reported(model: Model) -> None:
    first = model.generate("abc", max_tokens=40)
    assert model.generate("abc", max_tokens=40, seed=first.seed).tokens == first.tokens
    others = {tuple(model.generate("abc", max_tokens=40, seed=seed).tokens) for seed in range(5)}
    assert len(others) == 5
    assert len({model.generate("abc", max_tokens=1).seed for _ in range(5)}) == 5


def test_the_text_of_a_result_is_what_it_prints(model: Model) -> None:
    result = model.generate([5, 6, 7], max_tokens=12, seed=1)
    assert str(result) == f"{result}" == result.text != ""
    assert repr(result).startswith("Result(text=") and "finish_reason='length'" in repr(result)


def test_bias_bans_and_forces(model: Model) -> None:
    greedy = model.generate("abc", max_tokens=1, temperature=0).tokens[0]
    assert model.generate("abc", max_tokens=20, temperature=0, logit_bias={greedy: -math.inf}).tokens.count(greedy) == 0
    assert model.generate("abc", max_tokens=5, logit_bias={7: 1000.0}).tokens == [7] * 5
    with pytest.raises(InvalidParameterError, match=r"logit_bias names token 512, expected ids from 0 to 511"):
        model.generate("abc", logit_bias={512: 1.0})


def test_penalties_break_a_loop(model: Model) -> None:
    def longest_repeat(**options: float) -> int:
        tokens = model.generate("abc", max_tokens=60, temperature=0, logit_bias={7: 6.0}, **options).tokens
        return max(tokens.count(token) for token in tokens)

    plain = longest_repeat()
    assert longest_repeat(frequency_penalty=2) < plain
    assert longest_repeat(presence_penalty=20) < plain


def test_sampling_follows_the_probabilities(model: Model) -> None:
    with model.session() as session:
        row = session.append([5, 6, 7])
        assert row is not None
        best = np.argsort(-row)[:4]
        weights = np.exp((row[best] - row[best[0]]).astype(np.float64) / 1.5)
        expected = weights / weights.sum()
        draws = 4000
        drawn = []
        for seed in range(draws):
            session.seed(seed)
            drawn.append(session.sample(temperature=1.5, top_k=4, top_p=1.0, min_p=0.0))
            assert session.sample(temperature=1.5, top_k=4, top_p=1.0, min_p=0.0) == drawn[-1]
    counts = np.array([drawn.count(int(token)) for token in best])
    assert counts.sum() == draws, "a token outside the top 4 was drawn"
    chi_square = float((((counts - draws * expected) ** 2) / (draws * expected)).sum())
    assert chi_square < 21.1  # 3 degrees of freedom, probability 1e-4; the seeds are fixed


def test_every_token_ruled_out(model: Model) -> None:
    banned = dict.fromkeys(range(512), -math.inf)
    with pytest.raises(NumericError):
        model.generate("abc", logit_bias=banned)
    assert model.generate("abc", max_tokens=1).tokens


def test_sampling_before_appending(model: Model) -> None:
    with model.session() as session, pytest.raises(StateError):
        session.sample()
