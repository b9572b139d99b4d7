"""benchmarks/manuals.py: the text of manual pages."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import manuals


def test_manuals(tmp_path: Path) -> None:
    """Paragraphs of text without markup, synopses and code; at most ten pages of one program, and none with little
    text."""
    page = [
        '.TH X 1', '.SH "NAME"', r"git\-x \- \fIdo\fR it", ".SH SYNOPSIS", ".B git-x", "[a]", ".SH DESCRIPTION",
        r"Say \(lqyes\(rq,", ".BR git (1)", ".nf", "int main", ".fi", ".PP", r"no\&.", ".\\\" said",
    ]  # fmt: skip
    found = manuals.prose("\n".join(page))
    assert found == 'NAME\ngit-x - do it\nSYNOPSIS\nDESCRIPTION\nSay "yes", git (1)\nno.\n'
    (tmp_path / "man1").mkdir()
    for name, times in [("short", 1), *((f"git-{i}", 100) for i in range(12))]:
        text = "\n".join([*page, *["It does much, and well."] * times])
        (tmp_path / "man1" / f"{name}.1.gz").write_bytes(gzip.compress(text.encode()))
    out = tmp_path / "text"
    assert manuals.main([str(out), "--manuals", str(tmp_path)]) == 0
    assert len(list(out.iterdir())) == 10 and all(file.name.startswith("man1-git-") for file in out.iterdir())
    for folder in (out, tmp_path / "other"):  # there is a folder; there are no pages
        with pytest.raises(SystemExit):
            manuals.main([str(folder), "--manuals", str(tmp_path / "text")])
