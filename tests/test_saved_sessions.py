"""Sessions in files: they go on as if never interrupted; what is no session of the model is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_cli import main
from bitnet_export import random_model
from bitnet_runtime import CacheFullError, ClosedError, InvalidParameterError, Model, SessionFileError, available_isas
from runtime_models import SMALL, byte_tokenizer, small_model

TEXT = "A text that goes on, and on, and on; and then it is put away for a while."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(path: Path) -> Any:
    with Model.load(path, threads=1) as model:
        yield model


@pytest.fixture
def saved(model: Model, tmp_path: Path) -> Path:
    with model.session(n_ctx=200) as session:
        session.feed(model.tokenize(TEXT))
        session.seed(5)
        session.save(tmp_path / "s", note="hällo".encode())
    return tmp_path / "s"


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8", "k4v8"])
def test_it_goes_on_in_another_process_of_any_kind(path: Path, kv_type: str, tmp_path: Path) -> None:
    with Model.load(path, threads=1, kv_type=kv_type) as model, model.session() as session:
        first = model.generate(TEXT, session=session, seed=1, max_tokens=9)
        session.save(tmp_path / "s")
        longer = [*model.tokenize(TEXT), *first.tokens, 65, 66, 67]
        expected = model.generate(longer, session=session, seed=2, max_tokens=20, draft=4)
        logits = session.logits
    for isa in available_isas():
        with Model.load(path, isa=isa, threads=2) as other, other.load_session(tmp_path / "s") as session:
            held = session.position
            answer = other.generate(longer, session=session, seed=2, max_tokens=20, draft=4)
            assert answer.tokens == expected.tokens
            assert session.logits is not None and logits is not None
            assert np.array_equal(session.logits, logits)
            computed = round(answer.timings.prompt_tokens_per_second * answer.timings.prompt_seconds)
            assert computed == len(longer) - held < 10  # the rest was in the file


def test_all_of_its_state(model: Model, saved: Path) -> None:
    with model.load_session(saved) as session, model.session(n_ctx=200) as fresh:
        fresh.feed(model.tokenize(TEXT))
        fresh.seed(5)
        assert session.note == "hällo".encode() and fresh.note == b""
        assert (session.tokens, session.n_ctx, session.position) == (fresh.tokens, fresh.n_ctx, fresh.position)
        assert session.sample(temperature=2) == fresh.sample(temperature=2)
        again = saved.with_name("again")
        session.save(again, session.note)
        assert again.read_bytes() == saved.read_bytes()


def test_it_is_inspected_without_its_model(path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(saved), "kind": "session", "bytes": saved.stat().st_size, "position": len(TEXT), "context": 200,
        "kv_type": "f16", "seed": 5, "note_bytes": 6, "model_bytes": path.stat().st_size,
        "model_checksum": model["header_crc"], "adapter_bytes": 0, "adapter_checksum": "",
    }  # fmt: skip
    assert main(["inspect", str(saved)]) == 0
    assert f"{len(TEXT)} of 200 tokens of context" in capsys.readouterr().out
    raw = saved.read_bytes()
    unknown = raw[16:52] + b"\x63" + raw[53:]  # a type of numbers that there is not, and the checksum of that
    crafted = raw[:12] + zlib.crc32(unknown).to_bytes(4, "little") + unknown
    for wrong in (raw[:8], raw[:111], raw[:-1], raw + b"x", raw[:8] + b"\x63" + raw[9:], raw[:-1] + b"\0", crafted):
        saved.write_bytes(wrong)
        assert main(["inspect", str(saved)]) == 1
        assert re.search("session|damaged", capsys.readouterr().err)


def test_a_file_is_replaced_whole_or_not_at_all(model: Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with model.session() as session:
        session.feed([1, 2, 3])
        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, full)
                with pytest.raises(OSError, match=rf"No space left on device: '{saved}'"):
                    session.save(saved)
            assert saved.read_bytes() == before
            assert [each.name for each in saved.parent.iterdir()] == ["s"]
        session.save(saved)
        assert saved.read_bytes() != before
    with pytest.raises(ClosedError):
        session.save(saved)
    with model.session() as session, pytest.raises(InvalidParameterError, match="expected bytes"):
        session.save(saved, note="text")  # type: ignore[arg-type]
    with model.session() as session, pytest.raises(FileNotFoundError, match="there does not exist; create it first"):
        session.save(saved.parent / "there" / "s")


def test_nothing_but_a_file_is_replaced(model: Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with model.session() as session:
        with pytest.raises(FileExistsError, match="pipe is a device or pipe, expected the name of a file"):
            session.save(tmp_path / "pipe")
        with pytest.raises(IsADirectoryError, match="is a directory, expected the name of a file"):
            session.save(tmp_path)
    assert (tmp_path / "pipe").is_fifo()
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_who_may_read_a_file_stays_as_it_was(
    model: Model, saved: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else can open the new file before it has its name."""

    def writing(number: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(number).st_mode))

    def changing(file: Path, mode: int, chmod: Callable[..., None] = os.chmod) -> None:
        assert not file.stat().st_mode & 0o077
        chmod(file, mode)

    modes: list[int] = []
    saved.chmod(mode)
    monkeypatch.setattr(os, "fsync", writing)
    monkeypatch.setattr(os, "chmod", changing)
    before = os.umask(0o022)
    try:
        with model.session() as session:
            session.save(saved)
            assert stat.S_IMODE(saved.stat().st_mode) == modes[0] == mode
            session.save(saved.with_name("new"))
            assert stat.S_IMODE(saved.with_name("new").stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_a_link_stays_one(model: Model, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, target in (("link", saved), ("dangling", tmp_path / "folder" / "made")):
        (tmp_path / name).symlink_to(target)
        with model.session() as session:
            session.feed([1, 2])
            session.save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert model.load_session(target).tokens == [1, 2]
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["made"]
    (tmp_path / "lost").symlink_to(tmp_path / "none" / "x")
    with model.session() as session, pytest.raises(FileNotFoundError, match="none does not exist; create it first"):
        session.save(tmp_path / "lost")


def test_no_room_for_a_session_is_said_once(path: Path, model: Model, saved: Path) -> None:
    block = 64 * model.kv_bytes_per_token  # the session takes two
    with Model.load(path, threads=1, cache_bytes=block) as small, pytest.raises(CacheFullError) as caught:
        small.load_session(saved)
    assert str(caught.value).startswith(f"{saved}: the texts of the model leave no room")
    assert str(caught.value).count("cache_bytes") == 1


def test_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    random_model(SMALL, tmp_path / "other", 1, tokenizer=byte_tokenizer().to_str().encode())
    with Model.load(tmp_path / "other", threads=1) as other, pytest.raises(SessionFileError, match="belongs to"):
        other.load_session(saved)


@pytest.mark.parametrize(
    ("name", "found"),
    [("", "path is empty"), ("a\0b", "path has a zero byte"), (5, "path is 5"), (b"a", "path is b'a'")],
)
def test_what_is_no_name_of_a_file(model: Model, name: Any, found: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{found}, expected the name of a saved session"):
        model.load_session(name)
    with (
        model.session() as session,
        pytest.raises(InvalidParameterError, match=f"^{found}, expected the name of a file"),
    ):
        session.save(name)


def test_what_is_no_session(model: Model, saved: Path, path: Path) -> None:
    content = saved.read_bytes()
    wrong = saved.with_name("wrong")
    for data, message in [
        (b"", "is empty"),
        (content[:50], "there are 50 bytes, expected a saved session, 112 or more"),
        (content[:-1], "expected"),
        (content + b"x", "expected"),
        (content[:200] + b"\xff\xff" + content[202:], "the checksum is"),
        (path.read_bytes(), "this is not a saved session"),
        (content[:8] + b"\x63" + content[9:], "version is 99, expected 2"),
    ]:
        wrong.write_bytes(data)
        with pytest.raises(SessionFileError, match=message) as caught:
            model.load_session(wrong)
        assert str(wrong) in str(caught.value)
    with pytest.raises(SessionFileError, match="not a regular file"):
        model.load_session("/dev/zero")
    os.mkfifo(saved.with_name("fifo"))
    with pytest.raises(SessionFileError, match="not a regular file"):
        model.load_session(saved.with_name("fifo"))
    with pytest.raises(FileNotFoundError):
        model.load_session(saved.with_name("none"))
    assert model.load_session(saved).position == len(model.tokenize(TEXT))
