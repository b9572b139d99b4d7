"""The text of benchmarks/scaling.py: Python sources installed on a machine, as token ids.

    python benchmarks/sources.py --out build/sources                          # this interpreter's
    python benchmarks/sources.py --roots /usr/lib ~/.pyenv --out build/sources  # and others' below folders

Skipped: files that are not UTF-8, generated, minified or very large; this project; and near-duplicates, which share
most lines with an earlier file. The rest is split by project: a top-level package, wherever it is installed or
vendored; the standard libraries are one project. By a hash of their names, some projects are for choosing learning
rates, some for the reported figures, and all others for training.

--out becomes a folder for `bitnet train --data`. It contains report/, a folder for `bitnet eval --data`, and
manifest.json: what was taken and skipped, and which project is where.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import site
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import report

from bitnet.data import alike, tokenized, tokenizer

INSTALLED = {"site-packages", "dist-packages", "third_party", "_vendor", "vendor", "vendored"}
"""Folders in which each entry is a project."""
LEFT_OUT = {"bitnet", "bitnet_cli", "bitnet_export", "bitnet_runtime", "encodings", "pydoc_data"}
"""This project, and tables of the standard library."""
ALIASES = {"cloudsdk": "google-cloud-sdk"}
"""Packages that belong to another project without metadata that says so."""
STDLIB = re.compile(r"python\d\.\d+")
GENERATED = re.compile(rb"auto-?generated|generated (by|from|with|using|client)|do not edit|@generated", re.I)
ALIKE = 0.6  # share of equal lines of near-duplicates
SMALL, LARGE = 200, 200_000  # bytes of a file
SHARED = range(100_000, 1_500_000)  # bytes of a project that may be held out, so that none dominates a figure


@dataclass(frozen=True)
class Source:
    path: Path
    project: str
    n_bytes: int
    order: int  # hash of its text

    @property
    def text(self) -> str:
        return self.path.read_bytes().decode()


class Texts:
    """Sources as texts, read from disk each time."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[str]:
        return (source.text for source in self.sources)

    @property
    def n_bytes(self) -> int:
        return sum(source.n_bytes for source in self.sources)


def standard_roots() -> list[Path]:
    """The folders of this interpreter's library and installed packages."""
    paths = sysconfig.get_paths()
    return [Path(p) for p in dict.fromkeys([paths["stdlib"], paths["purelib"], *site.getsitepackages()])]


def distributions(root: Path) -> dict[str, str]:
    """Top-level packages by name, and the distribution that installed each: attr and attrs are one project."""
    found = dict(ALIASES)
    for record in sorted(root.rglob("*.dist-info/RECORD")):
        name = record.parent.name.partition("-")[0].lower()
        tops = {line.partition("/")[0] for line in record.read_text(errors="replace").splitlines() if ".py," in line}
        found |= {package_of(top): name for top in tops if top not in ("..", "tests", "test", "docs")}
    return found


def package_of(entry: str) -> str:
    return re.split(r"[-.]", entry.lower())[0].strip("_")


def project_of(path: Path, root: Path, of: Mapping[str, str]) -> str:
    """The distribution, or the top-level package, that a file belongs to."""
    parts = path.parts
    place = max((i for i, part in enumerate(parts[:-1]) if part in INSTALLED), default=None)
    if place is not None:
        package = package_of(parts[place + 1])
        return of.get(package, package)
    return "stdlib" if any(STDLIB.fullmatch(part) for part in parts) else root.name


def wrong_with(raw: bytes) -> str:
    """Why a file is skipped; "" if it is taken."""
    if not SMALL <= len(raw) <= LARGE:
        return "small" if len(raw) < SMALL else "large"
    if GENERATED.search(raw[:1500]):
        return "generated"
    lines = raw.split(b"\n")
    digits = sum(raw.count(b"%d" % digit) for digit in range(10))
    if len(raw) > 100 * len(lines) or max(map(len, lines)) > 1000 or digits > 0.2 * len(raw):
        return "minified, or data"
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return ""


def collect(roots: Sequence[Path], count: Counter[str]) -> list[Source]:
    """The files to take, each text once; of near-duplicates the first, in the newest version by path."""
    found, seen = [], set()
    known = alike.Index(ALIKE, alike.lines)
    of = {package: name for root in roots for package, name in distributions(root).items()}
    for root in roots:
        for path in sorted(root.rglob("*.py"), key=newest_first):
            if not path.is_file() or path.is_symlink():
                continue
            count["found"] += 1
            project, raw = project_of(path, root, of), path.read_bytes()
            digest = hashlib.sha256(raw).digest()
            reason = wrong_with(raw)
            if {project, *path.parts} & LEFT_OUT:
                reason = "left out"
            elif digest in seen:
                reason = "equal"
            elif not reason and not known.add(raw.decode()):
                reason = "alike"
            seen.add(digest)
            count[reason or "taken"] += 1
            if not reason:
                found.append(Source(path, project, len(raw), int.from_bytes(digest[:8])))
    return sorted(found, key=lambda source: (source.project, str(source.path)))


def newest_first(path: Path) -> list[tuple[int, str]]:
    """Sort key of paths in which larger numbers come first."""
    pieces = re.split(r"(\d+)", str(path))
    return [(-int(piece), "") if piece.isdigit() else (0, piece) for piece in pieces]


def split(sources: Sequence[Source], held_out: int) -> dict[str, list[Source]]:
    """train, selection and report; the last two of about `held_out` bytes each, no project in two."""
    sizes: dict[str, int] = defaultdict(int)
    for source in sources:
        sizes[source.project] += source.n_bytes
    drawn = sorted((p for p in sizes if sizes[p] in SHARED), key=lambda p: hashlib.sha256(p.encode()).digest())
    side, total = dict.fromkeys(sizes, "train"), Counter[str]()
    for project in drawn:
        name = next((name for name in ("report", "selection") if total[name] < held_out), "train")
        side[project] = name
        total[name] += sizes[project]
    return {name: [s for s in sources if side[s.project] == name] for name in ("train", "selection", "report")}


def sample(sources: Sequence[Source], n_bytes: int) -> list[Source]:
    """About `n_bytes` of them, chosen by a hash of their text, in their original order."""
    total, chosen = 0, set()
    for source in sorted(sources, key=lambda source: source.order):
        if total >= n_bytes:
            break
        total += source.n_bytes
        chosen.add(source)
    return [source for source in sources if source in chosen]


def bytes_by_project(sources: Iterable[Source]) -> dict[str, int]:
    total = Counter[str]()
    for source in sources:
        total[source.project] += source.n_bytes
    return dict(total.most_common())


def write(folder: Path, sides: dict[str, list[Source]], vocabulary: int, fit: int) -> None:
    """Write token ids of all parts, with one tokenizer fitted to about `fit` bytes of the training text."""
    words = tokenizer.build("bpe", Texts(sample(sides["train"], fit)), vocabulary)
    both, asked = {"train": Texts(sides["train"]), "validation": Texts(sides["selection"])}, {"vocab_size": vocabulary}
    tokenized.write(folder, words, both, asked=asked | {"kind": "bpe"})
    tokenized.write(folder / "report", words, {"validation": Texts(sides["report"])})


def compressed(texts: Iterable[str]) -> dict[str, float]:
    """Bits per byte of general compressors, without prior training."""
    raw = "".join(texts).encode()
    return {name: 8 * len(pack(raw)) / len(raw) for name, pack in (("gzip", gzip.compress), ("xz", lzma.compress))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roots", type=Path, nargs="+", help="folders, the preferred copies first [this interpreter]")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens of the tokenizer [2048]")
    parser.add_argument("--train", type=float, default=1000, help="MB to learn from, at most [1000]")
    parser.add_argument("--held-out", type=float, default=4, help="MB to choose rates by, and MB to report [4]")
    args = parser.parse_args(argv)
    count, started = Counter[str](), time.monotonic()
    sources = collect([root.expanduser() for root in args.roots or standard_roots()], count)
    print(f"{time.monotonic() - started:.0f} s: {dict(count)}", file=sys.stderr)
    sides = split(sources, int(args.held_out * 1e6))
    sides["train"] = sample(sides["train"], int(args.train * 1e6))
    if empty := [name for name, side in sides.items() if not side]:
        raise report.BenchmarkError(
            f"no project is left for {empty[0]}; name more folders with --roots, or lower --held-out"
        )
    write(args.out, sides, args.vocabulary, 40_000_000)
    texts = {
        name: {
            "files": len(side), "bytes": sum(s.n_bytes for s in side), "projects": bytes_by_project(side),
            "sha256": hashlib.sha256(b"".join(s.order.to_bytes(8) for s in side)).hexdigest(),
        } for name, side in sides.items()
    }  # fmt: skip
    manifest = {"files": count, "texts": texts, "compressed": compressed(Texts(sides["report"]))}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, said in texts.items():
        print(f"{name}: {said['files']:,} files, {said['bytes']:,} bytes, {len(said['projects'])} projects")
    return 0


if __name__ == "__main__":
    report.run(main)
