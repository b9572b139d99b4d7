"""Adapters in the server: each is a model with its own name, all in one batch, and none sees the texts of another."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import bitnet_cli
from bitnet_cli.verbs import serve
from bitnet_export import random_adapter
from bitnet_runtime import Model
from bitnet_runtime.errors import InvalidParameterError
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import idle, post, request, served, wait

NAMES = ("small-0-256", "small-0-256:cats", "small-0-256:dogs")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("models")
    model, adapters = small_model(folder), [folder / "cats.bitnet", folder / "dogs.bitnet"]
    for seed, path in enumerate(adapters):
        random_adapter(model, path, seed, rank=4 + seed)
    return model, adapters


@pytest.fixture(scope="module")
def serving(files: tuple[Path, list[Path]]) -> Iterator[Serving]:
    with served(files[0], adapters=files[1], parallel=8) as serving:
        yield serving


def ask(serving: Serving, name: str, prompt: list[int], **more: Any) -> tuple[int, dict[str, Any]]:
    """Tokens of the prompt that were there already, and the response."""
    asked = {"model": name, "prompt": prompt, "max_tokens": 20, "seed": 5, "logprobs": 2}
    status, found = post(serving, "/v1/completions", asked | more)
    assert status == 200, found
    return found["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0), found


def test_each_is_a_model_by_name(serving: Serving) -> None:
    listed = request(serving, "GET", "/v1/models")[2]["data"]
    assert [each["id"] for each in listed] == [*NAMES] and listed[1]["parent"] == NAMES[0]
    assert request(serving, "GET", f"/v1/models/{NAMES[2]}")[2]["id"] == NAMES[2]
    status, found = post(serving, "/v1/completions", {"model": f"{NAMES[0]}:cows", "prompt": "a"})
    assert status == 404 and all(name in found["error"]["message"] for name in NAMES)
    answers = {name: ask(serving, name, [1, 2, 3], receipt=True)[1] for name in NAMES}
    assert all(answer["model"] == name for name, answer in answers.items())
    for what in ("system_fingerprint", "choices"):
        assert len({str(answer[what]) for answer in answers.values()}) == len(NAMES)


def test_a_stale_adapter_takes_nobody_down(tmp_path: Path) -> None:
    """Its model and other adapters keep working; it works again once its file is right."""
    model, cats, dogs = small_model(tmp_path), tmp_path / "cats.bitnet", tmp_path / "dogs.bitnet"
    for seed, path in enumerate((cats, dogs)):
        random_adapter(model, path, seed)
    random_adapter(small_model(tmp_path, 1), tmp_path / "stale", 0)
    right = shutil.copy(cats, tmp_path / "right")
    with served(model, adapters=[cats, dogs]) as serving:
        before = [ask(serving, name, [1, 2])[1]["choices"] for name in NAMES]
        (tmp_path / "stale").rename(cats)
        for _ in range(2):
            for name, expected in zip(NAMES, before, strict=True):
                if name.endswith("cats"):
                    status, answer = post(serving, "/v1/completions", {"model": name, "prompt": [1, 2]})
                    assert (status, answer["error"]["code"]) == (500, "model_load_failed")
                    assert f"the adapter cats of the model {NAMES[0]} cannot be loaded: " in answer["error"]["message"]
                else:
                    assert ask(serving, name, [1, 2])[1]["choices"] == expected
        wait(lambda: idle(serving))  # the last one gives its place back after its answer
        assert serving.models[NAMES[0]].loads == 2
        assert [each["id"] for each in request(serving, "GET", "/v1/models")[2]["data"]] == [*NAMES]
        Path(right).rename(cats)
        assert [ask(serving, name, [1, 2])[1]["choices"] for name in NAMES] == before


def test_adapters_take_memory_of_the_models(files: tuple[Path, list[Path]]) -> None:
    """They are loaded with their model, and with many of them take more than it does."""
    model, adapters = files
    most = sum(path.stat().st_size for path in (model, *adapters))
    with served(model, adapters=adapters, models_memory=most) as serving:
        assert serving.models[NAMES[0]].loaded and serving.models[NAMES[0]].nbytes == most
    refused = pytest.raises(InvalidParameterError, match="--models-memory is 0 MB, but small-0-256 takes 1; give more")
    with refused, served(model, adapters=adapters, models_memory=most - 1):
        pass


def test_none_goes_on_from_a_text_of_another(serving: Serving) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(256) for _ in range(100)]
    first = {name: ask(serving, name, prompt) for name in NAMES}
    assert all(reused == 0 for reused, _ in first.values())
    for name in NAMES:
        reused, answer = ask(serving, name, prompt)
        assert reused == 99 and answer["choices"] == first[name][1]["choices"]


def test_together_each_has_what_it_has_alone(serving: Serving, files: tuple[Path, list[Path]]) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(3, 40))] for _ in range(12)]
    pairs = list(zip(itertools.cycle(NAMES), prompts, strict=False))
    with ThreadPoolExecutor(len(pairs)) as pool:
        found = list(pool.map(lambda pair: ask(serving, *pair)[1]["choices"][0]["text"], pairs))
    with Model.load(files[0], threads=1, adapters=files[1]) as model:
        for (name, prompt), text in zip(pairs, found, strict=True):
            adapter = name.partition(":")[2] or None
            assert model.generate(prompt, adapter=adapter, max_tokens=20, seed=5).text == text


def test_the_commands(files: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, (cats, dogs) = files
    said = []
    for adapter in ((), ("--adapter", cats), ("--adapter", dogs)):
        receipt = ("--receipt", tmp_path / "r.json") if adapter else ()
        argv = ["generate", model, "-p", "a", "--seed", 1, "-n", 12, "--json", "--quiet", *adapter, *receipt]
        assert bitnet_cli.main([str(word) for word in argv]) == 0
        said.append(str(json.loads(capsys.readouterr().out)["tokens"]))
    assert len(set(said)) == 3
    for path, code in ((dogs, 0), (cats, 1)):
        argv = ["verify-receipt", model, tmp_path / "r.json", "--adapter", path]
        assert bitnet_cli.main([str(word) for word in argv]) == code
    assert "none of those that the model was loaded with" in capsys.readouterr().err
    assert bitnet_cli.main(["serve", str(model), str(cats), "--adapter", f"x={cats}", "--port", "0"]) in (1, 2)
    assert "--adapter x=" in capsys.readouterr().err


def test_an_adapter_is_called_as_its_file_unless_told() -> None:
    serve.arguments(parser := argparse.ArgumentParser())
    words = ["a/cats.bitnet", "dogs", "x=b=c.bitnet", "m:y=d"]
    given = parser.parse_args(["m.bitnet", *(f"--adapter={word}" for word in words)]).adapter
    assert [(model, name, str(file)) for model, name, file in given] == [
        ("", "cats", "a/cats.bitnet"), ("", "dogs", "dogs"), ("", "x", "b=c.bitnet"), ("m", "y", "d"),
    ]  # fmt: skip


def test_no_name_is_of_an_adapter_and_of_a_model(
    files: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (cats, _) = files
    monkeypatch.setattr(Serving, "run", lambda _: False)
    other = shutil.copy(model, tmp_path / f"{NAMES[1]}.bitnet")
    words = ["serve", str(model), str(other), "--port", "0", "--adapter"]
    assert bitnet_cli.main([*words, f"{NAMES[0]}:dogs={cats}"]) == 0
    assert bitnet_cli.main([*words, f"{NAMES[1]}={cats}"]) == 1
    assert f"two models or adapters would be {NAMES[1]}; give one another name" in capsys.readouterr().err


def test_a_name_may_hold_a_colon(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    model, (cats, _) = files
    with served(model, adapters=[shutil.copy(cats, tmp_path / "cats:old.bitnet")]) as serving:
        assert ask(serving, f"{NAMES[0]}:cats:old", [1, 2])[1]["model"] == f"{NAMES[0]}:cats:old"
