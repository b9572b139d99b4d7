"""More models than fit in memory: those that are requested are loaded, those that nobody uses are closed."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitnet_export import random_model
from bitnet_runtime import InvalidParameterError, Model, ModelFormatError, TokenizerError
from bitnet_serve.models import registry as models
from bitnet_serve.models import shelf
from bitnet_serve.models.registry import Served
from bitnet_serve.models.sessions import LEASE, Memory
from bitnet_serve.server import Serving
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, scripted_model, slow_model, small_model
from servers import as_http, connect, post, request, served, until, wait

TEMPLATES = [("works", TEMPLATE), ("wrong", "{{ raise_exception('no') }}")]
NAMES = ["small-0-256", "small-1-256", "small-2-256"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [small_model(folder, seed) for seed in range(3)]


@pytest.fixture
def tight(paths: list[Path]) -> Iterator[Serving]:
    """Room for two of three."""
    with served(*paths, models_memory=int(2.5 * paths[0].stat().st_size)) as serving:
        yield serving


def loaded(serving: Serving) -> list[str]:
    _, _, answer = request(serving, "GET", "/v1/models")
    assert [each["id"] for each in answer["data"]] == list(serving.models)
    return [each["id"] for each in answer["data"] if each["meta"]["loaded"]]


def ask(serving: Serving, name: str, **more: Any) -> tuple[int, Any]:
    return post(serving, "/v1/completions", {"model": name, "prompt": [1, 2], "max_tokens": 8, "seed": 3} | more)


def test_the_least_recently_used_leaves(tight: Serving) -> None:
    assert loaded(tight) == NAMES[:2]  # in order, as far as there is room
    assert ask(tight, NAMES[0])[0] == 200
    assert ask(tight, NAMES[2])[0] == 200
    assert loaded(tight) == [NAMES[0], NAMES[2]]
    assert ask(tight, NAMES[1])[0] == 200
    assert loaded(tight) == NAMES[1:]
    status, _, answer = request(tight, "GET", f"/tokenizer_info?model={NAMES[0]}")
    assert status == 200 and answer["model_max_length"] == 256
    _, _, text = request(tight, "GET", "/metrics")
    for name, times, there in zip(NAMES, (2, 2, 1), (1, 1, 0), strict=True):
        assert f'bitnet_model_loads_total{{model="{name}"}} {times}' in text
        assert f'bitnet_model_loaded{{model="{name}"}} {there}' in text


def test_parameters_are_all_of_them(tight: Serving) -> None:
    _, _, answer = request(tight, "GET", "/v1/models")
    table, norms = SMALL.vocab_size * SMALL.dim, 2 * (3 * SMALL.dim + SMALL.ffn_dim) + SMALL.dim
    assert answer["data"][0]["meta"]["n_params"] == SMALL.ternary_weights + table + norms


def test_the_process_of_a_template_starts_with_its_model(tmp_path: Path) -> None:
    """Not with the first conversation, which waited for it. One of which nobody hears anything takes no model down."""
    paths = [scripted_model(tmp_path / f"{name}.bitnet", [b"Good"], template=template) for name, template in TEMPLATES]
    with served(*paths) as serving:
        for name, _ in TEMPLATES:
            wait(lambda name=name: serving.models[name].model._template._worker._process is not None)  # type: ignore[misc]
        told = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1}
        found = {name: post(serving, "/v1/chat/completions", {"model": name, **told})[0] for name, _ in TEMPLATES}
    assert found == {"works": 200, "wrong": 400}


def test_all_fit_where_nothing_is_said(paths: list[Path]) -> None:
    with served(*paths) as serving:
        assert loaded(serving) == NAMES


def test_a_tokenizer_that_does_not_fit_its_model_is_told_at_the_start(tmp_path: Path) -> None:
    words = byte_tokenizer()
    random_model(SMALL.replace(vocab_size=128), tmp_path / "wrong.bitnet", tokenizer=words.to_str().encode())
    with (
        pytest.raises(TokenizerError, match="the model's vocabulary has 128 tokens"),
        served(tmp_path / "wrong.bitnet"),
    ):
        pytest.fail("it serves")


def test_random_requests_get_the_bits_of_each_model_alone(paths: list[Path]) -> None:
    rng, expected = random.Random(2), {}
    for name, path in zip(NAMES, paths, strict=True):
        with Model.load(path, threads=1) as model:
            expected[name] = model.generate([1, 2], max_tokens=8, seed=3).text
    with served(*paths, models_memory=paths[0].stat().st_size) as serving, ThreadPoolExecutor(8) as askers:
        names = [rng.choice(NAMES) for _ in range(80)]
        answers = [*askers.map(lambda name: (*ask(serving, name), len(loaded(serving))), names)]
        for name, (status, answer, there) in zip(names, answers, strict=True):
            assert status == 200 and there <= 1
            assert answer["choices"][0]["text"] == expected[name]


def test_one_in_use_stays_and_nobody_passes_who_waits(paths: list[Path], tmp_path: Path) -> None:
    slow = slow_model(tmp_path)
    with served(slow, paths[0], models_memory=slow.stat().st_size) as serving:
        small, asked = serving.models[NAMES[0]], {"model": "slow", "prompt": [1], "temperature": 0}
        stream = connect(serving, as_http("/v1/completions", asked | {"max_tokens": 60_000, "stream": True}))
        until(stream, b"data: {")
        other = connect(serving, as_http("/v1/completions", {"model": NAMES[0], "prompt": [1], "max_tokens": 1}))
        wait(lambda: small.scheduler.requests == 1)
        gone = connect(serving, as_http("/v1/completions", {"model": NAMES[0], "prompt": [1], "max_tokens": 1}))
        wait(lambda: small.scheduler.requests == 2)
        gone.close()  # a waiting request ends when its client leaves
        wait(lambda: small.scheduler.requests == 1)
        found: list[int] = []
        later = threading.Thread(target=lambda: found.append(post(serving, "/v1/completions", asked)[0]))
        later.start()
        wait(lambda: serving.models["slow"].scheduler.requests == 2)
        until(stream, b"data: {")
        assert not found and small.loads == 0
        stream.close()
        assert until(other, b"seed").startswith(b"HTTP/1.1 200")
        later.join()
        assert found == [200] and loaded(serving) == ["slow"]
        assert serving.models["slow"].loads == 2 and small.loads == 1


def test_whoever_leaves_makes_room_at_once(paths: list[Path], tmp_path: Path) -> None:
    slow = slow_model(tmp_path)
    with served(slow, paths[0], models_memory=slow.stat().st_size) as serving:
        for _ in range(5):
            asked = {"model": "slow", "prompt": [1], "max_tokens": 60_000, "stream": True}
            stream = connect(serving, as_http("/v1/completions", asked))
            until(stream, b"data: {")
            stream.close()
            assert ask(serving, NAMES[0])[0] == 200
            assert loaded(serving) == [NAMES[0]]


def test_a_failure_to_load_is_one_clear_error(tmp_path: Path) -> None:
    paths = [small_model(tmp_path, seed) for seed in range(2)]
    with served(*paths, models_memory=paths[0].stat().st_size) as serving, ThreadPoolExecutor(8) as askers:
        whole = paths[1].read_bytes()
        paths[1].rename(tmp_path / "kept")  # whoever maps the file still has it
        paths[1].write_bytes(whole[:-100])
        for status, answer in askers.map(lambda _: ask(serving, NAMES[1]), range(8)):
            assert (status, answer["error"]["code"]) == (500, "model_load_failed")
            assert f"the model {NAMES[1]} cannot be loaded: " in answer["error"]["message"]
        assert ask(serving, NAMES[0])[0] == 200
        paths[1].write_bytes(whole)
        assert ask(serving, NAMES[1])[0] == 200
        paths[0].unlink()
        status, answer = ask(serving, NAMES[0])
        assert status == 500 and "No such file" in answer["error"]["message"]
        assert ask(serving, NAMES[1])[0] == 200
        _, _, text = request(serving, "GET", "/metrics")
        assert f'bitnet_model_load_failures_total{{model="{NAMES[0]}"}} 1' in text
        assert serving.models[NAMES[1]].failures > 0


def test_a_file_that_stays_damaged_is_logged_once(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    """However often it is asked for; and again after a file was there that could be loaded."""
    file = small_model(tmp_path)
    with served(file) as serving:
        whole = file.read_bytes()
        for _ in range(2):
            for content, expected in ((whole[:-100], 500), (whole, 200)):
                (tmp_path / "new").write_bytes(content)
                (tmp_path / "new").rename(file)
                assert [ask(serving, NAMES[0])[0] for _ in range(3)] == [expected] * 3
    failed = [each.getMessage() for each in logged if "cannot be loaded" in each.getMessage()]
    assert len(failed) == 2 and all(str(file) in said for said in failed)


def test_a_failure_to_load_is_told_although_its_client_has_left(
    tight: Serving, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    """In one line, and not as a task whose exception nobody has asked for."""
    model, begun, left = tight.models[NAMES[2]], threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        left.wait(60)
        raise ModelFormatError("it is damaged")

    monkeypatch.setattr(model, "open", fails)
    with connect(tight, as_http("/v1/completions", {"model": NAMES[2], "prompt": [1]})):
        assert begun.wait(60)
    request(tight, "GET", "/health")  # after which the server has seen the client leave
    left.set()
    wait(lambda: not model.scheduler.requests)
    gc.collect()
    assert [each.getMessage() for each in logged] == [f"the model {NAMES[2]} cannot be loaded: it is damaged"]
    assert model.failures == 1


@pytest.mark.parametrize("way", ["renamed", "written"])
def test_a_file_that_is_another_now_is_loaded_again(paths: list[Path], tmp_path: Path, way: str) -> None:
    """When no answer is running. The file has the same size, so that a text that continues could not have lost
    anything."""
    file, other = (Path(shutil.copy(path, tmp_path / name)) for path, name in zip(paths, "ab", strict=False))
    expected = []
    for path in (file, other):
        with Model.load(path, threads=1) as model:
            expected.append((model.generate([1, 2], max_tokens=8, seed=3).text, f"bitnet-{model.checksum}"))
    with served(file) as serving:
        before = ask(serving, "a")[1]
        if way == "renamed":
            other.rename(file)
        else:
            file.write_bytes(other.read_bytes())
        after = ask(serving, "a")[1]
        assert serving.models["a"].loads == 2
        file.unlink()
        assert ask(serving, "a")[1]["choices"] == after["choices"]  # it stays open
        assert serving.models["a"].loads == 2
    found = [(answer["choices"][0]["text"], answer["system_fingerprint"]) for answer in (before, after)]
    assert found == expected


def test_a_file_that_changes_while_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a replaced file the answer continues; with one that was written to it is refused."""
    slow = slow_model(tmp_path)
    with served(slow) as serving:
        asked = {"model": "slow", "prompt": [1], "max_tokens": 60_000, "stream": True}
        stream = connect(serving, as_http("/v1/completions", asked))
        until(stream, b"data: {")
        os.utime(slow)
        status, answer = ask(serving, "slow")
        assert (status, answer["error"]["code"]) == (503, "model_changed")
        shutil.copy(slow, tmp_path / "new").rename(slow)
        looks: list[int] = []
        monkeypatch.setattr(Served, "_look", lambda served: looks.append(1) or [models._identity(slow)])
        assert ask(serving, "slow")[0] == 200 and serving.models["slow"].loads == 1
        assert len(looks) == 2  # at first, and again once no other request is loading it
        monkeypatch.undo()
        stream.close()
        wait(lambda: not serving.models["slow"].users)
        assert ask(serving, "slow")[0] == 200 and serving.models["slow"].loads == 2


def test_a_replaced_file_is_loaded_even_if_answers_never_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later requests wait for the running answer; they do not go on with the old file for ever."""
    slow = slow_model(tmp_path)
    with served(slow) as serving:
        model, asked = serving.models["slow"], {"model": "slow", "prompt": [1], "max_tokens": 60_000, "stream": True}
        stream = connect(serving, as_http("/v1/completions", asked))
        until(stream, b"data: {")
        shutil.copy(slow, tmp_path / "new").rename(slow)
        assert ask(serving, "slow")[0] == 200 and model.loads == 1
        monkeypatch.setattr(shelf, "AGAIN", 0.0)
        with ThreadPoolExecutor(2) as pool:
            later = [pool.submit(ask, serving, "slow") for _ in range(2)]
            wait(lambda: model.scheduler.requests == 3)
            until(stream, b"data: {")
            assert model.users == 1 and model.loads == 1
            stream.close()
            assert [each.result()[0] for each in later] == [200, 200] and model.loads == 2


def test_a_model_larger_than_the_budget_is_refused_at_the_start(paths: list[Path], tmp_path: Path) -> None:
    large = small_model(tmp_path, 9, SMALL.replace(n_layers=8))
    most = paths[0].stat().st_size
    found = "--models-memory is 0 MB, but small-9-256 takes 1; give more"
    with (
        pytest.raises(InvalidParameterError, match=found),
        served(large, models_memory=most),
    ):
        pass


def test_a_model_that_became_larger_than_the_budget_is_refused_and_holds_up_no_other(
    paths: list[Path], tmp_path: Path
) -> None:
    file = Path(shutil.copy(paths[0], tmp_path / "a.bitnet"))
    with served(file, paths[1], models_memory=file.stat().st_size) as serving:
        small_model(tmp_path, 9, SMALL.replace(n_layers=8)).rename(file)
        for _ in range(2):
            status, answer = ask(serving, "a")
            assert (status, answer["error"]["code"]) == (500, "model_load_failed")
            assert "the model a now takes 1 MB, but --models-memory is 0 MB" in answer["error"]["message"]
            assert ask(serving, NAMES[1])[0] == 200
        shutil.copy(paths[2], tmp_path / "small").rename(file)
        assert ask(serving, "a")[0] == 200


def test_a_model_whose_texts_outgrew_the_memory_says_so(paths: list[Path], tmp_path: Path) -> None:
    """What fits is answered as before."""
    file = Path(shutil.copy(paths[0], tmp_path / "a.bitnet"))
    with Model.load(file, threads=1) as model, model.session() as session:
        size = session.nbytes
    with served(file, max_cache=size) as serving:
        small_model(tmp_path, 9, SMALL.replace(max_context=2048)).rename(file)
        assert ask(serving, "a")[0] == 200
        status, answer = ask(serving, "a", max_tokens=1000)
        assert (status, answer["error"]["code"]) == (400, "out_of_memory")
        assert "tokens take 1 MB, but the texts of all models may take 0; ask for fewer" in answer["error"]["message"]


def test_texts_of_one_model_leave_memory_to_another(tmp_path: Path) -> None:
    """Kept texts are dropped; running ones are waited for, and new ones cannot overtake the other model."""
    roomy, large = SMALL.replace(max_context=2048), {"max_tokens": 2000, "seed": 1}
    paths = [small_model(tmp_path, seed, roomy) for seed in range(2)]
    first, second = (path.stem for path in paths)
    with Model.load(paths[0], threads=1) as model, model.session() as session:
        size = session.nbytes
    with served(*paths, max_cache=11 * size // 10) as serving, ThreadPoolExecutor(8) as askers:
        alike = {"prompt": [5] * 300, "max_tokens": 1}
        ask(serving, first, **alike)
        assert serving.models[first].sessions.kept == 1
        assert ask(serving, second, **large)[0] == 200
        assert (serving.models[first].sessions.kept, serving.models[second].sessions.kept) == (0, 0)

        done = threading.Event()

        def over_and_over(number: int) -> int:
            times = 0
            while not done.is_set():
                assert ask(serving, first, max_tokens=500 + 50 * number)[0] == 200
                times += 1
            return times

        busy = [askers.submit(over_and_over, number) for number in range(3)]
        wait(lambda: serving.models[first].scheduler.load[0] > 1)
        answers = [ask(serving, second, **large) for _ in range(3)]
        done.set()
        assert [status for status, _ in answers] == [200] * 3 and answers[0][1]["choices"] == answers[1][1]["choices"]
        assert all(each.result() > 0 for each in busy)


def test_a_model_that_found_no_memory_is_the_next_to_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    memory = Memory(100, 0.25)
    assert memory.take(70, "one") and not memory.take(50, "two")
    assert not memory.take(10, "one")  # though there is room
    memory.give(70)
    assert not memory.take(10, "one") and memory.take(50, "two") and memory.take(10, "one")
    assert not memory.take(50, "two")
    now = 2 * LEASE  # it asks no longer
    assert memory.take(40, "one")
