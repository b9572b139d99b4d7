"""Text that is named and cannot be read is an error, not less text; and what a file holds before its text is left
out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bitnet.data import corpus, finding
from bitnet.setup.python import fit
from bitnet.train.runlog import read as log_of
from training import TINY, bitnet


@pytest.mark.parametrize("named", ["", "b.txt", "*.txt"])
def test_a_link_to_nothing(named: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".#b.txt").symlink_to("nobody@nowhere")  # an editor's lock is no text
    (tmp_path / "c").symlink_to("nothing")
    others: Counter[str] = Counter()
    assert len(finding.files_of([str(tmp_path)], others=others)) == 1
    assert others == {"no suffix": 1}  # of which a line tells
    (tmp_path / "b.txt").symlink_to("/not/mounted")
    with pytest.raises(corpus.DataError, match=r"b\.txt is a link to /not/mounted, which does not exist"):
        finding.files_of([str(tmp_path / named)])


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir = os.scandir

    def refused(path: str) -> object:  # root may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(corpus.DataError, match="closed cannot be read: Permission denied; a part of the text would be"):
        finding.files_of([str(tmp_path)])


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa text")
    (tmp_path / "b.txt").write_text("a text")
    assert list(corpus.Documents([str(tmp_path)])) == ["a text"] * 2


def test_an_empty_list_is_not_the_default(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data is an empty list, expected files, folders or globs"):
        fit(data=[], steps=1, out=tmp_path / "run")
    (tmp_path / "run.toml").write_text("[train]\nchat = []\n")
    assert bitnet("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "run") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["the terminal is closed", "nobody reads"])
def test_a_run_that_nobody_hears(how: str, sentences: str, tmp_path: Path) -> None:
    """It saves and ends at SIGHUP, as at SIGTERM; and goes on where what it says has no reader."""
    steps = 40 if how == "nobody reads" else 400
    words = [*TINY[:-2], "--steps", str(steps), "--data", sentences, "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "bitnet", "train", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        while b"step 1 of" not in (line := process.stderr.readline()):
            assert line
        if how == "nobody reads":
            process.stderr.close()
            assert process.wait(100) == 0
        else:
            process.send_signal(signal.SIGHUP)
            assert process.wait(100) == 128 + signal.SIGHUP
    last = log_of(tmp_path / "run" / "log.jsonl")[-1]["step"]
    assert last == steps if how == "nobody reads" else 0 < last < steps
    assert (tmp_path / "run" / f"step-{last:06}").is_dir()
