"""What damaged, forged and foreign files may cost, and what is refused by name.

test_readers.py and the C tests hold which status each file gets. Here: every file ends in one
documented exception within a second and 64 MiB, leaves nothing open, and the process goes on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_runtime import Model, ModelFileError, UnsupportedModelError
from hostile_packed import hostile_files
from packed_files import SEEING, SMALL, packed_bytes

PROBE = """
import json, os, resource, sys, time
from pathlib import Path
from bitnet_runtime import BitnetError, Model

def score():
    with Model.load(good, threads=2) as model, model.session() as session:
        return [float(x) for x in session.score([1, 2, 3])[1:]]

def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

good, *paths = [Path(path) for path in sys.argv[1:]]
before, at_start, memory = score(), held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slowest, wrong = 0.0, []
for path in paths:
    for mmap in (True, False):
        began = time.perf_counter()
        try:
            Model.load(path, threads=2, mmap=mmap).close()
            wrong.append(f"{path} was opened")
        except BitnetError as error:
            if str(path) not in str(error) or "\\n" in str(error):
                wrong.append(f"{path}: {error}")
        slowest = max(slowest, time.perf_counter() - began)
print(json.dumps({
    "slowest_s": slowest,
    "grown_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory,
    "wrong": wrong,
    "held": [at_start, held()],
    "same_scores": score() == before,
}))
"""


def special_files(folder: Path) -> list[Path]:
    """File system entries that are not files, and files that cannot be read."""
    (folder / "directory").mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    (folder / "unreadable").write_bytes(packed_bytes())
    (folder / "unreadable").chmod(0)
    root_reads_it = os.access(folder / "unreadable", os.R_OK)
    return sorted(p for p in folder.iterdir() if not (root_reads_it and p.name == "unreadable"))


def test_what_refusing_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, good = tmp_path / "hostile", tmp_path / "good"
    folder.mkdir()
    good.write_bytes(packed_bytes())
    files = special_files(folder)
    for i, case in enumerate(hostile_files()):
        if case.status != "BN_OK":
            files.append(folder / str(i))
            files[-1].write_bytes(case.file)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    flags = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *flags, "-c", PROBE, str(good), *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["wrong"] == []
    assert found["same_scores"]
    assert found["held"][0] == found["held"][1], "descriptors and threads, before and after"
    assert found["slowest_s"] < 1
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # which keeps what was freed for a while
        assert found["grown_kb"] < 64 * 1024


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (SEEING.stacks[1].to_dict() | {"adapter_rank": 2, "adapters": ["q"]}, "adapters of images"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_the_engine_cannot_run_is_named(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Valid files for a more capable engine: neither called damaged nor run wrongly."""
    path = tmp_path / "model.bitnet"
    random_model(ModelConfig.from_dict(SMALL.to_dict() | changes), path)
    with pytest.raises(UnsupportedModelError, match=name):
        Model.load(path)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("missing", "No such file"), ("directory", "a directory"), ("fifo", "a FIFO"), ("zero", "a character device")],
)
def test_what_is_no_file_is_named(kind: str, text: str, tmp_path: Path) -> None:
    special_files(tmp_path)
    with pytest.raises(ModelFileError, match=text) as caught:
        Model.load(tmp_path / kind)
    assert isinstance(caught.value, OSError)
    assert kind in str(caught.value)
