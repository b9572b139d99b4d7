"""What half an hour of `bitnet train` on a folder of code achieves, compared with compressors and n-grams.

    python benchmarks/own_code.py --text build/own-code    # the text: installed Python sources, by project
    bitnet train --data build/own-code/code --fim 0.5 --minutes 30 --compile --out build/own-code/run
    bitnet export build/own-code/run build/own-code/model.bitnet
    python benchmarks/own_code.py --text build/own-code --models half-an-hour=build/own-code/model.bitnet \\
        demo=build/demo/model.bitnet

Everything is measured on projects that no run has seen. The n-gram models learn from the same text as the runs, gzip
and xz only from the measured text. Completions are at the first places drawn by a seed.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report
import sources
import training_runs
from ngrams import Ids, NGrams

from bitnet_runtime import Model

ORDER = 5
PLACES, BEFORE, TOKENS = 3, 400, 48  # completions; characters before each; tokens of each


def make_text(folder: Path, megabytes: float) -> None:
    """code/ and held-out/, with a folder for each project."""
    sides = sources.split(sources.collect(sources.standard_roots(), Counter()), 1_500_000)
    for name, some in (("code", sources.sample(sides["train"], int(megabytes * 1e6))), ("held-out", sides["report"])):
        for i, source in enumerate(some):
            file = folder / name / source.project / f"{i:05d}-{source.path.name}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source.text, encoding="utf-8")


def texts(folder: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]


def compressed(raw: bytes) -> dict[str, float]:
    """Bits per byte of compressors without prior training."""
    packed = {"gzip -9": gzip.compress(raw, 9), "xz -9e": lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(each) / len(raw) for name, each in packed.items()}


def counted(code: list[str], held_out: list[str], model: Model) -> dict[str, float]:
    """Bits per byte of n-gram models over bytes and over the model's tokens. Every document has a start symbol."""
    n_bytes = sum(len(text.encode()) for text in held_out)
    ways: dict[str, tuple[Callable[[str], Ids], int]] = {
        f"{ORDER}-grams of bytes": (lambda text: np.frombuffer(b"\0" + text.encode(), np.uint8), 256),
        f"{ORDER}-grams of tokens": (lambda text: np.array(model.tokenize(text)), model.info.vocab_size),
    }
    found = {}
    for name, (ids, base) in ways.items():
        learnt, seen = (np.concatenate([ids(text) for text in some]).astype(np.int64) for some in (code, held_out))
        found[name] = float(-np.log2(NGrams(learnt, ORDER, base).probabilities(seen)).sum() / n_bytes)
        print(f"{name}: {found[name]:.3f} bits a byte", file=sys.stderr)
    return found


def completions(model: Model, held_out: list[str]) -> list[dict[str, str]]:
    """Greedy completions at line ends drawn by seed 0, and the original text. A prompt stops before the newline, which
    forms one token with the spaces after it and could not be generated otherwise."""
    draw, found = random.Random(0), []
    while len(found) < PLACES:
        text = draw.choice(held_out)
        ends = [i for i, c in enumerate(text) if c == "\n" and i > BEFORE]
        if ends:
            end = draw.choice(ends)
            prompt = text[end - BEFORE : end]
            written = model.generate(prompt, max_tokens=TOKENS, temperature=0).text
            found.append({"prompt": prompt, "written": written, "stood": text[end : end + len(written)]})
    return found


def measure(folder: Path, models: dict[str, Path]) -> dict[str, Any]:
    held_out, code = texts(folder / "held-out"), texts(folder / "code")
    raw = "".join(held_out).encode()
    rows = {}
    for name, file in models.items():
        said = training_runs.bitnet("eval", str(file), "--json", "--data", str(folder / "held-out"))
        rows[name] = {"bits_per_byte": said["bits_per_byte"], "bytes": file.stat().st_size}
    with Model.load(next(iter(models.values()))) as model:
        written = completions(model, held_out)
        rows |= {name: {"bits_per_byte": bits} for name, bits in counted(code, held_out, model).items()}
    rows |= {name: {"bits_per_byte": bits} for name, bits in compressed(raw).items()}
    sizes = {"code": sum(len(text.encode()) for text in code), "held-out": len(raw)}
    return {"rows": rows, "completions": written, "bytes": sizes}


def markdown(results: dict[str, Any]) -> str:
    table = [
        [name, f"{row['bits_per_byte']:.3f}", f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else ""]
        for name, row in sorted(results["rows"].items(), key=lambda item: item[1]["bits_per_byte"])
    ]
    parts = ["# A model of one's own code", "", report.table(["", "bits per byte", "MB"], table), "",
             f"{results['bytes']['code'] / 1e6:.0f} MB to learn from, {results['bytes']['held-out'] / 1e6:.1f} MB of "
             "other projects to measure. gzip and xz learn from the measured text alone.", ""]  # fmt: skip
    for i, place in enumerate(results["completions"], 1):
        parts += [f"## Completion {i}", "", "```text", place["prompt"] + "<<<", place["written"], "```", ""]
        parts += ["There stood:", "", "```text", place["stood"], "```", ""]
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of the text, made if it is not there")
    parser.add_argument("--megabytes", type=float, default=100, help="to learn from, at most [100]")
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="NAME=FILE", help="packed files; tokens: the first's"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, figures and JSON")
    args = parser.parse_args(argv)
    if not (args.text / "held-out").exists():
        make_text(args.text, args.megabytes)
    if not args.models:
        return 0
    models = {name: Path(file) for name, _, file in (each.partition("=") for each in args.models)}
    if missing := [name for name, file in models.items() if not file.is_file()]:
        parser.error(f"--models: {missing[0]} names no file, expected NAME=FILE")
    words = " ".join(["python benchmarks/own_code.py", *(sys.argv[1:] if argv is None else argv)])
    results = {"origin": report.origin(words)} | measure(args.text, models)
    rows = results["rows"]
    bits = {"bits per byte": [row["bits_per_byte"] for row in rows.values()]}
    report.write(args.out, "own_code", results, markdown(results), [report.Panel("bits per byte", [*rows], bits)])
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
