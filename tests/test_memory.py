"""Memory: what cannot fit is refused before any work, with both numbers, the limit, and what would fit."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet.presets import PRESETS
from bitnet_export import random_model
from runtime_models import SMALL, scripted_model, small_model

LONG = SMALL.replace(max_context=2**22)

CHILD = """
import resource, sys
from pathlib import Path
from bitnet_runtime import Model, ModelTooLargeError
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
path, limit, more = sys.argv[1], getattr(resource, sys.argv[2]), int(sys.argv[3])
data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
def restrict():
    used = data if limit == resource.RLIMIT_DATA else size
    resource.setrlimit(limit, (used + more, resource.RLIM_INFINITY))
def too_large(call):
    try:
        call()
    except ModelTooLargeError as error:
        print(error)
"""


def child(code: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"), config=LONG)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
needs_own_memory = pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer maps terabytes")


@linux
@needs_own_memory
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_session_beyond_a_limit(path: Path, limit: str) -> None:
    """The context that the error suggests works; the refused session leaves nothing behind."""
    code = """
with Model.load(path, threads=1) as model:
    restrict()
    too_large(model.session)
    too_large(lambda: model.generate([1, 2, 3], max_tokens=None))
    assert model.generate([1, 2, 3], max_tokens=2).usage.total_tokens == 5  # needs no more context
    import re
    try:
        model.session()
    except ModelTooLargeError as error:
        largest = int(re.search(r"fits is (\\d+)", str(error))[1])
    with model.session(largest) as session:
        session.feed([1, 2, 3])
        print(session.position)
"""
    first, second, position = child(code, path, limit, 128 << 20)
    pattern = (
        r"a session with n_ctx 4194304 takes (\S+) MB, expected at most (\S+) MB: "
        rf".*{limit}.*; the largest that fits is \d+ .*"
    )
    for line in (first, second):
        found = re.fullmatch(pattern, line)
        assert found, line
        needed, available = (float(number.replace(",", "")) for number in found.groups())
        assert needed > 2**22 * 256 / 1e6 and 64 < available < 135
    assert position == "3"


@linux
@needs_own_memory
def test_file_beyond_a_limit(tmp_path: Path) -> None:
    """It begins like a packed file, and only its beginning is read."""
    large = tmp_path / "large.bitnet"
    with open(large, "wb") as file:
        file.write(b"\x89BITNET\n")
        file.truncate(1 << 30)
    code = "restrict()\ntoo_large(lambda: Model.load(path))\ntoo_large(lambda: Model.load(path, mmap=False))"
    mapped, read = child(code, large, "RLIMIT_AS", 256 << 20)
    for line in (mapped, read):
        assert re.search(r"large\.bitnet: the file has 1073\.7 MB, expected at most \S+ MB: .*RLIMIT_AS", line), line


TOWER = """
import sys
import numpy as np
from bitnet_runtime import Model
from bitnet_runtime.images import vision
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
pixels = np.full((2, 3, 224, 224), 0.5, np.float32)
before = peak()
with Model.load(sys.argv[1], threads=2) as model:
    vision.encode(model, pixels)
print(peak() - before)
"""


@linux
@needs_own_memory
def test_a_tower_takes_64_mb_beside_its_file(tmp_path: Path) -> None:
    """So400m/14. One layer is enough, as layers share the same memory."""
    tower = PRESETS["siglip-so400m"].stacks[1].replace(n_layers=1, pooling="none")
    random_model(tower, tmp_path / "tower.bitnet")
    done = subprocess.run([sys.executable, "-c", TOWER, tmp_path / "tower.bitnet"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (tmp_path / "tower.bitnet").stat().st_size + (64 << 20)


def limited() -> None:
    """As with `ulimit -v`: room for Python, its libraries and the model, but not for a session of a gigabyte."""
    resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))


def bitnet(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("bitnet"), *map(str, words)]
    restrict = None if "LD_PRELOAD" in os.environ else limited
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, preexec_fn=restrict)


@linux
@needs_own_memory
def test_command_line_says_it_in_one_line(path: Path) -> None:
    """For a context that was asked for; a session of 256 tokens fits."""
    assert bitnet("generate", path, "-p", "abc", "-n", "none", "-c", "256").returncode == 0
    done = bitnet("generate", path, "-p", "abc", "-n", "none", "-c", LONG.max_context)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the largest that fits is" in done.stderr.splitlines()[-1]


@linux
@needs_own_memory
def test_the_command_line_takes_what_fits_where_no_context_is_asked_for(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = scripted_model(tmp_path / "m", [b"yes"], template=template, max_context=2**24)
    for verb, more in (("generate", ["-p", "abc", "-n", "none"]), ("chat", [])):
        done = bitnet(verb, model, *more, stdin="abc")
        assert (done.returncode, done.stdout) == (0, "yes\n"), done.stderr
        (line,) = (line for line in done.stderr.splitlines() if "do not fit in memory" in line)
        found = re.fullmatch(
            r"\[a context of (\S+) tokens, as the model's 16,777,216 do not fit in memory; -c N sets another\]", line
        )
        assert found and 1000 < int(found[1].replace(",", "")) < 2**24
        assert not bitnet(verb, model, *more, "--quiet", stdin="abc").stderr
        assert bitnet(verb, model, *more, "-c", 2**24, stdin="abc").returncode == 1
    short = bitnet("generate", model, "-p", "abc", "-n", "5")  # needs no more context than that
    assert short.stdout == "yes\n" and "do not fit" not in short.stderr
