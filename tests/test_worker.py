"""The process in which untrusted programs run: its limits, and that nothing is left of it."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jinja2.filters import FILTERS

from bitnet_runtime import MissingDependencyError, Model, TemplateError, ThreadError
from bitnet_runtime.chat.template import ChatTemplate
from bitnet_runtime.sandbox import worker as worker_module
from bitnet_runtime.sandbox.worker import Worker, WorkerError
from runtime_models import TEMPLATE, scripted_model

rendering = Path(sys.modules[ChatTemplate.__module__].__file__ or "").with_name("rendering.py")
PROGRAM = """
import os, signal, sys, time

def answer(request):
    return str(eval(request)).encode()
"""
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "program.py").write_text(PROGRAM)
    made = Worker(str(tmp_path / "program.py"), ())
    yield made
    made.close()


def render(template: str, content: str = "hello") -> str:
    return ChatTemplate(template).render([{"role": "user", "content": content}], {})


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (b"sum(1 for _ in iter(int, 1))", "takes more than 1.0 s"),
        (b"10 ** 10 ** 9", "takes more than 1.0 s"),
        (b"len('x' * (100 << 20))", "more than 64 MB"),
        (b"os._exit(7)", "status 7"),
        (b"os.abort()", "status -6"),
        (b"1 / 0", "status 1"),
    ],
)
def test_what_asks_for_too_much_is_ended_and_the_next_request_answered(
    worker: Worker, request_: bytes, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        worker.ask(request_)
    assert worker.ask(b"1 + 1") == b"2"


def test_a_process_that_does_not_run_is_no_fault_of_the_request(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended, and the next request has another."""
    monkeypatch.setattr("bitnet_runtime.sandbox.worker.PATIENCE", 2)
    with pytest.raises(ThreadError, match=r"no answer within 2 s, and took less than 1\.0 s of CPU time"):
        worker.ask(b"time.sleep(100)")
    assert worker.ask(b"1 + 1") == b"2"


@pytest.mark.parametrize("call", [b"open('/etc/hosts')", b"os.listdir('/')", b"os.pipe()", b"os.open('/tmp/x', 66)"])
def test_it_opens_no_files(worker: Worker, call: bytes) -> None:
    with pytest.raises(WorkerError):
        worker.ask(call)


def test_what_it_knows(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    worker.close()
    assert b"SECRET" not in worker.ask(b"dict(os.environ)")
    assert worker.ask(b"os.getcwd()") == b"/"
    assert int(worker.ask(b"os.getsid(0)")) not in (os.getsid(0), 0)


def test_one_that_has_grown_is_replaced(worker: Worker) -> None:
    first = worker.ask(b"os.getpid()")
    assert worker.ask(b"os.getpid()") == first
    worker.ask(b"len(sys.modules.setdefault('kept', 'x' * (50 << 20)))")
    assert worker.ask(b"os.getpid()") != first


def test_a_long_request_and_a_long_answer(worker: Worker) -> None:
    assert worker.ask(b"'" + b"x" * 5_000_000 + b"'") == b"x" * 5_000_000


def test_it_ends_with_whoever_ends(worker: Worker) -> None:
    pid = int(worker.ask(b"os.getpid()"))
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    pid = int(worker.ask(b"os.getpid()"))
    worker.close()
    assert gone(pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def script(code: str, folder: Path) -> subprocess.Popen[str]:
    code = "import os, sys, time\nfrom bitnet_runtime.chat.template import ChatTemplate\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


HELLO = "HELLO = [{'role': 'user', 'content': 'hello'}]\nECHO = ChatTemplate('{{ messages[0].content }}')\n"
START = HELLO + "assert ECHO.render(HELLO, {}) == 'hello'\nprint(ECHO._worker._process.pid, flush=True)\n"


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)", "1 / 0", "sys.exit(3)"])
def test_no_process_is_left_however_the_program_ends(tmp_path: Path, end: str) -> None:
    with script(START + end, tmp_path) as process:
        out, _ = process.communicate(timeout=60)
    assert gone(int(out))


def test_none_is_left_when_the_program_is_killed_while_a_template_runs(tmp_path: Path) -> None:
    with script(START + f"ChatTemplate({SLOW!r}).render(HELLO, {{}})", tmp_path) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    assert gone(pid)


def test_ctrl_c_is_for_the_program_alone(tmp_path: Path) -> None:
    code = START + (
        f"try:\n    ChatTemplate({SLOW!r}).render(HELLO, {{}})\n"
        "except KeyboardInterrupt:\n    print(ECHO.render(HELLO, {}), flush=True)\n"
    )
    with script(code, tmp_path) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (out, errors, process.returncode) == ("hello\n", "", 0)
    assert gone(pid)


def test_a_folder_with_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("random", "json", "struct", "signal", "datetime", "markupsafe", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    with script(f"os.chdir({str(tmp_path)!r})\n" + START, Path("/")) as process:
        assert process.communicate(timeout=60)[1] == ""


def test_a_forked_child_starts_its_own() -> None:
    template = ChatTemplate("{% if messages[0].content == 'slow' %}" + SLOW + "{% endif %}{{ messages[0].content }}")

    def say(content: str) -> str:
        return template.render([{"role": "user", "content": content}], {})

    assert say("hello") == "hello"

    def hold_the_lock() -> None:
        with pytest.raises(TemplateError, match="takes more than"):
            say("slow")

    busy = threading.Thread(target=hold_the_lock)
    busy.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        os._exit(0 if say("HELLO") == "HELLO" else 1)
    assert os.waitpid(child, 0)[1] == 0
    busy.join()
    assert say("hello") == "hello"


def test_threads_get_their_own_answers() -> None:
    template = ChatTemplate("{{ messages[0].content }}!")
    wrong: list[str] = []

    def ask(name: str) -> None:
        for i in range(50):
            text = template.render([{"role": "user", "content": f"{name}{i}"}], {})
            if text != f"{name}{i}!":
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(f"thread {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python", "/bin/true", "/bin/cat"])
def test_a_program_that_is_not_started_by_python(
    worker: Worker, executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr("bitnet_runtime.sandbox.worker.PATIENCE", 1)
    with pytest.raises(ThreadError, match=r"sys\.executable"):
        worker.ask(b"1")


@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_a_process_that_the_system_refuses_is_no_fault_of_the_template(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(call, refused)
    with pytest.raises(ThreadError, match=r"cannot be started \(\[Errno 24\] Too many open files\)"):
        render("{{ messages[0].content }}")


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="needs the `no_such_library` library"):
        Worker(str(tmp_path), ("no_such_library",)).ask(b"1")


def test_a_signal_handler_asks_within_a_request(worker: Worker) -> None:
    answers: list[bytes] = []
    before = signal.signal(signal.SIGALRM, lambda *_: answers.append(worker.ask(b"1 + 1")))
    try:
        assert worker.ask(b"0")
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert worker.ask(b"time.sleep(1) or 7") == b"7"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert answers == [b"2"]
    assert worker.ask(b"3") == b"3"


def test_a_program_that_ignores_its_children(worker: Worker) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(WorkerError, match="status that is not known: too much time"):
            worker.ask(b"sum(1 for _ in iter(int, 1))", 0.1)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_program_that_blocks_the_signal_of_the_limit(worker: Worker) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        with pytest.raises(WorkerError, match=r"takes more than 0\.1 s"):
            worker.ask(b"sum(1 for _ in iter(int, 1))", 0.1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("end", [Worker.close, Worker._forget])
def test_no_socket_is_left(worker: Worker, end: Callable[[Worker], None]) -> None:
    worker.ask(b"1")
    held, process = worker._socket, worker._process
    assert held is not None
    assert process is not None
    end(worker)
    assert held.fileno() == -1
    os.waitpid(process.pid, 0) if end is Worker._forget else None


def test_a_large_setup_may_keep_more(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys\ndef answer(request): return str(eval(request)).encode()\n")
    worker = Worker(str(tmp_path / "program.py"), (), b"0 #" + b"x" * 5_000_000)
    first = worker.ask(b"os.getpid()")
    worker.ask(b"len(sys.modules.setdefault('kept', 'x' * (50 << 20)))", memory=100 << 20)
    assert worker.ask(b"os.getpid()") == first
    worker.close()


def test_no_filter_needs_a_file() -> None:
    worker = Worker(str(rendering), ("jinja2", "markupsafe"))
    calls = [f"'<b>a b</b> http://x' | {name}{given}" for name in FILTERS for given in ("", "(1)", "('x')")]
    calls += [f"'a'.encode('{name}')" for name in ("cp1252", "idna", "utf-16", "latin-1", "punycode")]
    given: dict[str, object] = {"most": 1 << 20, "variables": {"messages": [], "tools": None, "more": {}}}
    for call in [*calls, "lipsum()", "1.5 | round", "[1] | sum", "strftime_now('%c')"]:
        answer = worker.ask(json.dumps(given | {"source": f"{{{{ {call} }}}}"}).encode())
        assert b"opens a file" not in answer and b'"failed: ' not in answer, call
    refused = given | {"source": "{{ 'a'.encode('cp037') }}"}
    assert b"failed in line 1: it opens a file" in worker.ask(json.dumps(refused).encode())
    worker.close()


def test_a_template_that_takes_long_delays_no_other() -> None:
    slow, fast = ChatTemplate(SLOW), ChatTemplate("{{ messages[0].content }}")
    assert slow._worker is not fast._worker


def test_long_messages_have_the_memory_they_take() -> None:
    text = "🙂" + "a" * 8_000_000
    assert render("{{ messages[0].content | trim }}", text) == text


def running() -> set[int]:
    return {worker._process.pid for worker in worker_module._workers if worker._process}


@pytest.mark.usefixtures("quick_gc")
@pytest.mark.parametrize("held", [False, True])
def test_the_processes_of_a_model_end_with_it(held: bool, tmp_path: Path) -> None:
    gc.collect()
    before = running()
    model: Model | None = Model.load(scripted_model(tmp_path / "m.bitnet", [b"a", b"b"], template=TEMPLATE), threads=1)
    assert model is not None
    model.generate("x", regex="[ab]{3}", max_tokens=2)
    model.chat([{"role": "user", "content": "x"}], max_tokens=1)
    its = running() - before
    assert len(its) == 2
    model.close()
    if not held:
        model = None
    gc.collect()
    assert all(gone(pid) for pid in its)
