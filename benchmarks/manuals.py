r"""A second text for benchmarks/qat_gap.py: the prose of installed manual pages, English without code.

    python benchmarks/manuals.py build/manuals
    python benchmarks/qat_gap.py --name manuals --data build/manuals --size 1m --models full ternary \
        --tokens 1000000 --jobs 2

Skipped: synopses, examples, tables, mdoc pages and pages with little text. Of pages whose names share their first word,
such as `git-rebase`, ten are taken, so that no program dominates the text.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import sys
from collections import defaultdict
from pathlib import Path

ALIKE, LEAST, MOST = 10, 1000, 8_000_000  # pages per first word; least characters per page; most in all
BREAKS = {".PP", ".P", ".LP", ".IP", ".TP", ".HP", ".sp", ".RS", ".RE"}
FONTS = {".B", ".I", ".R", ".BR", ".BI", ".IR", ".IB", ".RB", ".RI", ".SM", ".SB"}
WITHOUT = {".nf": ".fi", ".EX": ".EE", ".TS": ".TE", ".de": "..", ".ie": "", ".el": "", ".if": ""}
"""Start of what is skipped: the line that ends it; "": only this line."""
MARKS = {"\\-": "-", "\\&": "", "\\e": "\\", "\\ ": " ", "\\~": " ", "\\(aq": "'", "\\*(Aq": "'", "\\(dq": '"',
         "\\(cq": "'", "\\(oq": "'", "\\(lq": '"', "\\(rq": '"', "\\(em": "-", "\\(en": "-", "\\(bu": "-"}  # fmt: skip
ESCAPED = re.compile(r"\\(f\[.*?\]|f\(..|f.|\*?\[.*?\]|\*?\(..|s[-+]?\d|\*?.)?")


def prose(page: str) -> str:
    """The paragraphs of a page of `man` macros, one per line."""
    paragraphs: list[list[str]] = [[]]
    until, synopsis = "", False
    for line in page.splitlines():
        macro, _, words = line.partition(" ")
        if until:
            until = "" if line.startswith(until) else until
        elif macro in WITHOUT:
            until = WITHOUT[macro]
        elif macro in (".SH", ".SS"):
            synopsis = "SYNOPSIS" in words
            paragraphs += [[words.replace('"', "")], []]
        elif macro in BREAKS or not line.strip():
            paragraphs.append([])
        elif macro in FONTS:
            paragraphs[-1] += [] if synopsis else [words.replace('" "', "").replace('"', "")]
        elif line[0] not in ".'" and not synopsis:
            paragraphs[-1].append(line)
    lines = (" ".join(" ".join(map(plain, words)).split()) for words in paragraphs)
    return "\n".join(line for line in lines if line) + "\n"


def plain(line: str) -> str:
    return ESCAPED.sub(lambda found: MARKS.get(found[0], ""), line)


def chosen(folder: Path) -> list[Path]:
    """Pages of sections 1 to 8, ordered by a hash of their names, and the first of those that begin alike."""
    families: dict[str, list[Path]] = defaultdict(list)
    for file in folder.glob("man[1-8]/*.gz"):
        families[re.split(r"[-_.:]", file.name.lower())[0]].append(file)
    taken = [file for pages in families.values() for file in sorted(pages, key=_order)[:ALIKE]]
    return sorted(taken, key=_order)


def _order(file: Path) -> bytes:
    return hashlib.sha256(file.name.encode()).digest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make: a text of each page")
    parser.add_argument("--manuals", type=Path, default=Path("/usr/share/man"), help="[/usr/share/man]")
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"{args.out} exists; name a new folder")
    texts: dict[str, str] = {}
    for file in chosen(args.manuals):
        if sum(map(len, texts.values())) > MOST:
            break
        page = gzip.decompress(file.read_bytes()).decode(errors="replace")
        text = "" if "\n.Dd " in page else prose(page)
        if len(text) >= LEAST and "\ufffd" not in text:
            texts[f"{file.parent.name}-{file.name.removesuffix('.gz')}.txt"] = text
    if not texts:
        parser.error(f"no page in {args.manuals}; install manual pages, or name a folder that has man1/*.gz")
    args.out.mkdir(parents=True)
    for name, text in texts.items():
        (args.out / name).write_text(text, encoding="utf-8")
    print(f"{len(texts):,} pages, {sum(map(len, texts.values())):,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
