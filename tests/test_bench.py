"""What `bitnet bench` measures; tests/test_cli_runtime.py runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from bitnet_export import random_model
from bitnet_runtime import Model, bench, machine
from packed_files import SMALL

AREAS = """\
7f0000000000-7f0000600000 r--p 00000000 fe:00 12 {file}
Size:               6144 kB
Rss:                4096 kB
FilePmdMapped:      2048 kB
VmFlags: rd mr
7f0000600000-7f0000800000 r--p 00600000 fe:00 12 {file}
Rss:                2048 kB
FilePmdMapped:      2048 kB
7f0000800000-7f0000a00000 r--p 00000000 fe:00 13 {file}.other
Rss:                2048 kB
FilePmdMapped:         0 kB
7f0000a00000-7f0000c00000 rw-p 00000000 00:00 0
Rss:                2048 kB
"""


def test_share_of_a_file_in_huge_pages(tmp_path: Path) -> None:
    file, areas = tmp_path / "a model.bitnet", tmp_path / "smaps"
    areas.write_text(AREAS.format(file=file))
    assert machine.huge_share(str(file), areas) == 4096 / 6144
    assert machine.huge_share(str(tmp_path / "another"), areas) is None
    assert machine.huge_share(str(file), tmp_path / "a system without it") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_share_of_a_mapped_model(tmp_path: Path) -> None:
    file = str(tmp_path / "m.bitnet")
    random_model(SMALL, file, 0)
    with Model.load(file):
        share = machine.huge_share(file)
        assert share is not None and 0 <= share <= 1
    with Model.load(file, mmap=False):
        assert machine.huge_share(file) is None


def test_what_is_short_is_measured_with_warm_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that the limits leave a small model is 3 to 25 times as slow."""
    runs: list[float] = []

    def slow_at_first(work: Callable[[], object]) -> float:
        work()
        runs.append(bench.SPAN / (100 if runs else 2))
        return runs[-1]

    monkeypatch.setattr(bench, "_seconds", slow_at_first)
    random_model(SMALL, tmp_path / "m.bitnet", 0)
    with Model.load(tmp_path / "m.bitnet") as model, model.session() as session:
        assert bench._prefill(session, 0, [1, 2, 3]) == runs[-1] < runs[0] and len(runs) > 50
        runs.clear()
        assert bench._decode(session, 0, 1, 4) == (runs[-1], 0) and len(session.tokens) == 5


def test_a_prompt_is_timed_after_a_token_that_reads_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10 million parameters at a depth of 4,096 the first prompt took 8 times as long as the next."""
    calls: list[object] = []
    session = mock.Mock()
    session.rewind.side_effect = lambda depth: calls.append(depth)
    session.feed.side_effect = lambda tokens: calls.append(tokens)

    def timed(work: Callable[[], object]) -> float:
        calls.append("timed")
        work()
        return bench.SPAN

    monkeypatch.setattr(bench, "_seconds", timed)
    assert bench._prefill(session, 5, [1, 2, 3]) == bench.SPAN
    assert calls == [5, [1], 5, "timed", [1, 2, 3]]
