"""Computed texts survive a restart: the same bits, never for another client, within limits, whatever is in the
folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import Request, urlopen

import pytest

from bitnet_export import random_adapter
from bitnet_runtime import InvalidParameterError, Model, ModelTooLargeError, Session
from bitnet_serve.models import sessions
from bitnet_serve.models.sessions import Memory, Sessions
from bitnet_serve.models.stored import Folder, Shelved
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import post, served, wait

PROMPT = [i % 250 for i in range(150)]


def ask(serving: Serving, prompt: list[int], key: str = "one") -> tuple[int, str]:
    """Tokens that were there already, and the answer."""
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 20, "seed": 5}
    status, answer = post(serving, "/v1/completions", asked, authorization=f"Bearer {key}")
    assert status == 200
    return answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0), answer["choices"][0]["text"]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.session"))


def test_a_restart_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    path, folder = small_model(tmp_path), tmp_path / "cache"
    with Model.load(path, threads=1) as alone:
        expected = {n: alone.generate(PROMPT[:n], max_tokens=20, seed=5).text for n in (100, 150)}
    options: dict[str, Any] = {"cache_dir": folder, "api_keys": ["one", "two"]}
    with served(path, **options) as serving:
        assert ask(serving, PROMPT[:100]) == (0, expected[100])
    assert len(files(folder)) == 1 and folder.stat().st_mode & 0o777 == 0o700
    assert b"one" not in b"".join(file.read_bytes() for file in files(folder))
    with served(path, **options) as serving:
        assert ask(serving, PROMPT, "two") == (0, expected[150])  # the key of the other
        assert ask(serving, PROMPT) == (100, expected[150])
    with served(path, cache_dir=folder) as serving:
        assert ask(serving, PROMPT)[0] == 0  # without keys: nobody's
    with served(path, cache_dir=folder, api_keys=["two"]) as serving:
        assert ask(serving, PROMPT, "two") == (149, expected[150])
    with served(path, **options) as serving:
        assert ask(serving, PROMPT) == (149, expected[150])


def test_a_folder_and_a_link_to_nothing_under_such_names(tmp_path: Path) -> None:
    path, folder = small_model(tmp_path), tmp_path / "cache"
    with served(path, cache_dir=folder) as serving:
        expected = ask(serving, PROMPT)[1]
    (file,) = files(folder)
    (file.parent / "a.session").mkdir()
    (file.parent / "b.session").symlink_to("nowhere")
    with served(path, cache_dir=folder) as serving:
        assert ask(serving, PROMPT) == (149, expected)
    assert (file.parent / "a.session").is_dir() and not (file.parent / "b.session").is_symlink()


def test_models_that_come_and_go_keep_their_texts(tmp_path: Path) -> None:
    paths = [small_model(tmp_path, seed) for seed in (0, 1)]
    most = paths[0].stat().st_size
    with served(*paths, models_memory=most, cache_dir=tmp_path / "cache") as serving:
        for expected in (0, 149, 149):
            for name in ("small-0-256", "small-1-256"):
                asked = {"model": name, "prompt": PROMPT, "max_tokens": 1}
                _, answer = post(serving, "/v1/completions", asked)
                assert answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == expected


def test_a_server_that_is_killed_has_kept_its_texts(tmp_path: Path) -> None:
    """Written while it runs; what was written in part is dropped."""
    path, folder = small_model(tmp_path), tmp_path / "cache"
    code = "from bitnet_serve.models import sessions; sessions.EVERY = 0.05; from bitnet_cli import main; main()"
    words = [
        sys.executable,
        "-c",
        code,
        "serve",
        str(path),
        "--port",
        "0",
        "--cache-dir",
        str(folder),
        "--threads",
        "1",
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if "Listening on" in line)
        asked = json.dumps({"prompt": PROMPT, "max_tokens": 20, "seed": 5}).encode()
        for _ in range(2):
            with urlopen(Request(f"{address}/v1/completions", asked, {"content-type": "application/json"})) as answer:
                text = json.load(answer)["choices"][0]["text"]
            wait(lambda: len(files(folder)) == 1, 60)
        process.kill()
    (file,) = files(folder)
    file.with_name(".left.1234").write_bytes(file.read_bytes()[:1000])
    with served(path, cache_dir=folder) as serving:
        assert ask(serving, PROMPT) == (149, text)
    assert [*file.parent.iterdir()] == [file]


def test_texts_are_written_beside_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several models at once, as texts come and go: each text once, and nothing is left that is not kept."""
    monkeypatch.setattr(sessions, "EVERY", 0.001)
    paths, folder, saved = [small_model(tmp_path, seed) for seed in (0, 1)], tmp_path / "cache", list[Path]()
    save = Session.save
    monkeypatch.setattr(Session, "save", lambda session, file, note: (saved.append(file), save(session, file, note)))
    with served(*paths, cache_dir=folder) as serving, ThreadPoolExecutor(4) as pool:

        def some(i: int) -> None:
            asked = {"model": f"small-{i % 2}-256", "prompt": [i // 40, *PROMPT[: 100 + i % 40]], "max_tokens": 5}
            assert post(serving, "/v1/completions", asked)[0] == 200

        list(pool.map(some, range(200)))
        kept = sum(each.sessions.kept for each in serving.models.values())
    assert len(files(folder)) == kept and len({*saved}) == len(saved)


def test_whatever_is_in_the_folder(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    path, folder = small_model(tmp_path), tmp_path / "cache"
    with served(path, cache_dir=folder) as serving:
        whole = ask(serving, PROMPT)[1]
    (file,) = files(folder)
    data, rng = file.read_bytes(), random.Random(0)
    other = small_model(tmp_path, 1)
    with Model.load(other, threads=1) as model, model.session() as session:
        session.feed(PROMPT)
        session.save(file.with_name("other.session"))
    (folder / "salt").write_bytes(b"")
    (file.parent / "empty.session").touch()
    (file.parent / ".left.1234").write_bytes(b"half")
    for i in range(40):
        at = rng.randrange(len(data))
        cut = data[:at] if i % 2 else data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        (file.parent / f"{i}.session").write_bytes(cut)
    (file.parent / "folder.session").symlink_to("/dev/zero")
    with served(path, cache_dir=folder) as serving:
        assert ask(serving, PROMPT) == (149, whole)
    assert files(folder) == [file] and [*file.parent.iterdir()] == [file]
    assert len(logged) == 43 and all("was dropped: " in each.getMessage() for each in logged)


def test_the_folder_is_bounded_and_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with Model.load(small_model(tmp_path), threads=1) as model:
        prompts = [[i, *PROMPT] for i in range(6)]
        store = Folder(folder, 10**9, [])
        for most in (10**9, 0):
            if not most:
                size = sum(file.stat().st_size for file in files(folder))
                store.close()
                store = Folder(folder, size // 2, [])
            keep = Sessions(model, Memory(1 << 30, 0.5), store.of("m"))
            for prompt in prompts:
                session, _ = keep.begin(prompt, 200, None)
                session.feed(prompt[session.position :])
                keep.end(session, None)
            keep.close()
        assert len(files(folder)) == 3
        with pytest.raises(InvalidParameterError, match="is another server's"):
            Folder(folder, 10**9, [])
        store.close()
        store = Folder(folder, 10**9, [])
        again = Sessions(model, Memory(1 << 30, 0.5), store.of("m"))
        assert again.begin(prompts[5], 200, None)[1] == 150  # the latest are there
        assert again.begin(prompts[0], 200, None)[1] == 0
    folder.chmod(0o755)
    with pytest.raises(InvalidParameterError, match="can be seen by other users"):
        Folder(folder, 1, [])
    with pytest.raises(InvalidParameterError, match="there/none cannot be made: No such file or directory; name one"):
        Folder(tmp_path / "not there" / "none", 1, [])
    with pytest.raises(InvalidParameterError, match="is no folder"):
        Folder(files(folder)[0], 1, [])


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space") as caught:
        Folder(tmp_path / "cache", 1000, ())
    assert caught.value.filename == str(tmp_path / "cache/salt")
    monkeypatch.undo()
    Folder(tmp_path / "cache", 1000, ()).close()  # it is nobody's


def test_which_texts_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same model, in the order of their last use; and a text that went is not left behind."""
    path, folder = small_model(tmp_path), tmp_path / "cache"
    random_adapter(path, tmp_path / "a.bitnet", rank=4)
    store = Folder(folder, 10**9, [])

    def read(model: Model, shelved: Shelved | None = None) -> list[tuple[int, str | None]]:
        return [(each.tokens[0], each.adapter) for each, _ in (shelved or store.of("m")).read(model)]

    with Model.load(path, threads=1, adapters=[tmp_path / "a.bitnet"]) as model:
        one, two, adapted = model.session(), model.session(), model.session(adapter="a")
        for session, token in ((one, 1), (two, 2), (adapted, 1)):
            session.feed([token] * 70)
        shelved = store.of("m")
        shelved.write([(one, None), (two, None), (adapted, None)])
        assert read(model) == [(1, None), (2, None), (1, "a")]
        shelved.write([(two, None), (adapted, None), (one, None)])  # nothing new is written
        assert read(model) == [(2, None), (1, "a"), (1, None)]
        for others in ({"kv_type": "int8"}, {"n_ctx": 128}):
            with Model.load(path, threads=1, adapters=[tmp_path / "a.bitnet"], **others) as other:
                assert not read(other) and len(files(folder)) == 3
        with monkeypatch.context() as patch:
            patch.setattr(Model, "load_session", Mock(side_effect=ModelTooLargeError("no memory now")))
            assert not read(model) and len(files(folder)) == 3, "it may fit another time"
        again = store.of("m")
        assert len(read(model, again)) == 3
        again.write([(two, None)])
        assert read(model) == [(2, None)] and len(files(folder)) == 1
    store.close()


def test_what_is_no_text_does_not_keep_the_folder_from_its_bound(tmp_path: Path) -> None:
    store = Folder(tmp_path / "cache", 0, [])
    store.of("m")
    texts = tmp_path / "cache" / "m.texts"
    for name in ("a.session", ".b"):
        (texts / name).mkdir()
    (texts / "c.session").symlink_to("nowhere")
    for name in ("d.session", ".e"):
        (texts / name).write_bytes(b"text")
    store.prune()
    assert sorted(path.name for path in texts.iterdir()) == [".b", "a.session"]
    store.close()


def test_a_text_that_finds_no_memory_to_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    def save(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Session, "save", save)
    folder = tmp_path / "cache"
    with served(small_model(tmp_path), cache_dir=folder) as serving:
        ask(serving, PROMPT)
    assert [each.getMessage().partition(": ")[2] for each in logged] == ["there is no memory for a copy"]
    assert not files(folder)


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    """A folder is a cache only if it was made as one."""
    home = tmp_path / "home"
    for name in ("project/.env", "chats/mine.session", "m/mine.session"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    home.chmod(0o700)
    with pytest.raises(InvalidParameterError, match="has files of others"):
        Folder(home, 1, [])
    (home / "salt").write_bytes(bytes(16))  # even then
    store = Folder(home, 0, [])
    for name in ("", "..", "salt", "m"):
        store.of(name)
    store.prune()
    assert sorted(path.name for path in home.rglob("*") if path.is_file()) == [
        ".env", "mine.session", "mine.session", "salt",
    ]  # fmt: skip
