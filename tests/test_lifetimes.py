"""Forks, finalizers and reentrancy: nothing hangs, and nothing is freed while in use."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import bitnet_runtime.errors
import runtime_models
from bitnet_runtime import (
    BitnetError,
    ClosedError,
    ContextLengthError,
    InvalidParameterError,
    Model,
    ModelNotFoundError,
    Session,
)
from bitnet_runtime._native import lib
from bitnet_runtime.errors import naming
from runtime_models import TEMPLATE, scripted_model, small_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.load(path, threads=2) as model:
        yield model


def in_a_child(work: Callable[[], object], forked: Callable[[], object] = lambda: None, seconds: float = 30) -> int:
    """Exit code of a forked process that does the work: 0, or 1 if it raised; minus SIGKILL if it hangs. `forked` is
    called in the parent."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    forked()
    deadline = time.monotonic() + seconds
    while (waited := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(waited[1])


class Busy:
    """Threads that call something repeatedly, but for the time that a child takes: what counts is what they do when
    the process forks."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.over = False
        self.awake = threading.Event()
        self.awake.set()
        self.threads = [threading.Thread(target=self._run, args=(call,), daemon=True) for call in calls]

    def _run(self, call: Callable[[], object]) -> None:
        while not self.over:
            self.awake.wait()
            call()

    def in_children(self, work: Callable[[], object], number: int) -> Iterator[int]:
        """Their exit codes, one after the other."""
        for _ in range(number):
            time.sleep(0.01)  # until the threads are somewhere in their calls
            code = in_a_child(work, forked=self.awake.clear)
            self.awake.set()
            yield code

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_a_child_says_that_it_has_one_thread(model: Model) -> None:
    def child() -> None:
        assert model.threads == model.info.threads == 1
        assert "threads 1>" in repr(model)
        with Model.load(model.path, threads=2) as again:
            assert again.threads == 2

    assert in_a_child(child) == 0
    assert model.threads == model.info.threads == 2


def test_forks_while_other_threads_generate(model: Model) -> None:
    expected = model.generate("x", max_tokens=5, seed=1).tokens
    shared = model.session()

    def child() -> None:
        assert model.generate("x", max_tokens=5, seed=1).tokens == expected
        try:
            shared.reset()
        except ClosedError as error:
            assert "when the process forked" in str(error)
        model.session().close()
        model.close()

    def turns() -> None:
        shared.reset()
        shared.feed([1] * 100)

    opened = (lambda: model.session().close(), lambda: model.score([1, 2, 3]))
    with Busy(lambda: model.generate([1], max_tokens=20), turns, *opened) as busy:
        assert not any(busy.in_children(child, 12))
    assert model.generate("x", max_tokens=5, seed=1).tokens == expected
    shared.feed([1])


def test_a_session_in_use_is_closed_in_the_child_alone(tmp_path: Path) -> None:
    with Model.load(runtime_models.slow_model(tmp_path), threads=1) as model, model.session() as session:
        other = model.session(n_ctx=8)
        other.feed([1, 2])
        running = threading.Thread(target=lambda: model.generate([1] * 60_000, session=session))
        running.start()
        while not lib.bn_session_position(session._open.pointer):
            time.sleep(0.001)

        def child() -> None:
            assert other.tokens == [1, 2]
            assert repr(session) == "<Session closed>"
            with pytest.raises(ClosedError, match="another thread was using this session when the process forked"):
                session.feed([1])
            session.cancel()
            session.close()

        assert in_a_child(child) == 0
        session.cancel()
        running.join(60)
        assert session.position > 0


def test_a_child_chats_while_other_threads_do(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with Model.load(scripted_model(tmp_path / "m", [b"Good", b" day"], template=TEMPLATE), threads=1) as model:
        model.chat(hello)  # no fork while Python imports, which can hang it
        with Busy(lambda: model.apply_template(hello), lambda: model.chat(hello)) as busy:
            assert not any(busy.in_children(lambda: model.chat(hello), 12))


@pytest.mark.usefixtures("quick_gc")
def test_two_models_are_collected_by_any_thread(path: Path) -> None:
    """Finalizers of one model run within calls of the other, in both orders."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                pair = [Model.load(path, threads=1, verify=False) for _ in range(2)]
                for model in pair:
                    garbage: list[Any] = [model, model.session(n_ctx=8), model.stream([1], max_tokens=2)]
                    next(garbage[2])
                    garbage.append(garbage)
                    model.cycle = garbage  # type: ignore[attr-defined]
                pair[0].other, pair[1].other = pair[1], pair[0]  # type: ignore[attr-defined]
                del pair, model, garbage
                gc.collect()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


@pytest.mark.usefixtures("quick_gc")
def test_a_finalizer_of_the_same_garbage_may_still_call(path: Path) -> None:
    found: list[object] = []

    class Owner:
        def __init__(self, session: Session) -> None:
            self.session, self.cycle = session, self

        def __del__(self) -> None:
            for call in (lambda: self.session.append([1, 2]), lambda: self.session.logits, self.session.close):
                try:
                    found.append(call())
                except Exception as error:
                    found.append(error)

    for _ in range(50):
        Owner(Model.load(path, threads=1, verify=False).session(n_ctx=4))
        gc.collect()
    assert len(found) == 150


def is_mapped(path: Path) -> bool:
    """Whether an open model, or one whose sessions are not all freed, maps the file."""
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def own(path: Path, tmp_path: Path) -> Path:
    """A file that no other test has open."""
    return Path(shutil.copy(path, tmp_path / "own.bitnet"))


def test_a_model_goes_after_the_last_of_its_sessions(own: Path) -> None:
    model = Model.load(own, threads=1)
    session = model.session()
    call = session._open  # what a running call holds
    model.close()
    assert is_mapped(own)
    del call
    assert not is_mapped(own)


class Interrupting:
    """The C library, with Ctrl-C arriving while it is in one function."""

    def __init__(self, function: str) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        found = getattr(lib, name)
        if name != self._function:
            return found

        def call(*arguments: Any) -> Any:
            assert found(*arguments) == lib.BN_OK
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("what", ["model_open", "session_new", "session_load", "session_fork"])
def test_ctrl_c_loses_nothing(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with Model.load(own, threads=1) as model:
        with model.session(n_ctx=8) as session:
            session.append([1, 2])
            session.save(tmp_path / "saved")
            for module in ("model", "sessions.session", "sessions.saved"):
                monkeypatch.setattr(f"bitnet_runtime.{module}.lib", Interrupting(f"bn_{what}"))
            call: Callable[[], object] = {
                "model_open": lambda: Model.load(own, threads=1),
                "session_new": lambda: model.session(n_ctx=8),
                "session_load": lambda: model.load_session(tmp_path / "saved"),
                "session_fork": session.fork,
            }[what]
            with pytest.raises(KeyboardInterrupt):
                call()
        monkeypatch.undo()
        gc.collect()
        assert model.cache_bytes == 0
    assert not is_mapped(own)


@pytest.mark.parametrize("what", ["model", "session", "stream"])
def test_copies_are_refused(model: Model, what: str) -> None:
    thing = {"model": model, "session": model.session(), "stream": model.stream([1], max_tokens=2)}[what]
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"a {what.capitalize()} cannot be copied or pickled; give .* path"):
            make(thing)  # type: ignore[operator]
    assert model.generate([1], max_tokens=1).tokens


ERRORS: dict[type[Exception], Exception] = {kind: kind("why") for kind in vars(bitnet_runtime.errors).values()
    if isinstance(kind, type) and issubclass(kind, BitnetError) and kind is not ContextLengthError} | {
    ContextLengthError: ContextLengthError(300, 256, most=512, some="some of them are of images"),
    InvalidParameterError: InvalidParameterError("n is -1", "n"),
    ModelNotFoundError: ModelNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "model.bitnet"),
}  # fmt: skip


@pytest.mark.parametrize("error", ERRORS.values(), ids=[kind.__name__ for kind in ERRORS])
def test_errors_come_whole_out_of_another_process(error: Exception) -> None:
    """As from a ProcessPoolExecutor; also errors that say which prompt they are of."""
    with pytest.raises(type(error)), naming("prompt 3"):
        raise error
    error.add_note("a note")
    ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
    for made in (way(error) for way in ways):
        assert type(made) is type(error)
        assert (str(made), made.args, vars(made)) == (str(error), error.args, vars(error))
        assert getattr(made, "errno", 0) == getattr(error, "errno", 0)
