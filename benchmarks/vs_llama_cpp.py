"""The same random ternary weights in this engine and in llama.cpp, measured in turn in one run.

    python benchmarks/vs_llama_cpp.py            # a build of llama.cpp first, then about 10 minutes

Writes the weights as a packed file and as a GGUF (TQ2_0; its head as --head), checks that both engines compute the same
model from them, then measures prefill and decode A B A B, each engine in its own process, with the limits of the
machine measured in between. The model has SiLU instead of relu² because that is what llama.cpp's `bitnet` graph
computes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
import report
from shapes import SHAPES
from turns import OURS, panels, summary, table, take_turns

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_export.foreign.gguf.graphs import architecture
from bitnet_export.foreign.gguf.write import HEADS, write_gguf
from bitnet_runtime import Model

LLAMA_CPP_PYTHON = "0.3.36"
HERE = Path(__file__).resolve().parent
TOKENS = (7, 77, 210, 5, 130, 42, 99, 3)  # prompt on which the two engines must agree
THEIRS = "llama.cpp"


def llama_python() -> str:
    """An interpreter with llama-cpp-python, compiled for this CPU; made on the first call (10 minutes)."""
    folder = report.ROOT / "build" / f"llama-cpp-python-{LLAMA_CPP_PYTHON}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"building llama-cpp-python {LLAMA_CPP_PYTHON} in {folder.relative_to(report.ROOT)} …", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        package = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
        text_only = os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # not needed here, and a third of the build
        subprocess.run([*pip, *package], env=text_only, check=True)
        (folder / "complete").touch()
    return str(python)


def run_llama(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """One run of llama_speed.py; see there."""
    command = [python, str(HERE / "llama_speed.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise report.BenchmarkError(f"llama.cpp failed with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def agreement(path: Path, gguf: Path, python: str) -> float:
    """Correlation of the two engines' logits. It is not exactly 1, because activations (llama.cpp: a scale per 256,
    ours: one per token) and the head are rounded differently."""
    with Model.load(path) as model, model.session(n_ctx=len(TOKENS)) as session:
        ours = session.append(TOKENS)
    assert ours is not None
    with tempfile.NamedTemporaryFile() as file:
        logits = {"tokens": TOKENS, "to": file.name}
        run_llama(python, {"path": str(gguf), "threads": 1, "prompts": [8], "gen": 1, "logits": logits})
        theirs = np.frombuffer(Path(file.name).read_bytes(), np.float32)
    return float(np.corrcoef(ours, theirs)[0, 1])


def compare(config: ModelConfig, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that goes into the JSON file, except its origin."""
    python = args.llama_python or llama_python()
    path, gguf = folder / "model.bitnet", folder / "model.gguf"
    print("writing the weights twice …", file=sys.stderr)
    random_model(config, path)
    # Scales are rounded, as by llama.cpp's own tools: exact ones would cost it another product per matrix.
    their_bytes = write_gguf(path, gguf, head=args.head, exact_scales=False).token_bytes
    same = agreement(path, gguf, python)
    print(f"correlation of the logits: {same:.4f}", file=sys.stderr)
    if same < 0.9:
        raise report.BenchmarkError(
            f"the logits of the two engines correlate by {same:.3f}, expected 0.9: not the same model"
        )

    def run_theirs(threads: int) -> dict[str, Any]:
        return run_llama(python, {"path": str(gguf), "threads": threads, "prompts": args.prompt, "gen": args.gen})

    runs = take_turns(path, THEIRS, run_theirs, args)
    theirs = runs[args.threads[0]][THEIRS][0]
    with Model.load(path) as model:
        cache = model.kv_bytes(args.gen // 2)  # read on average for each decoded token
        read = {OURS: model.info.bytes_per_token + cache, THEIRS: their_bytes + cache}
        macs = model.info.macs_per_token
    return {
        "shape": args.shape,
        "head": args.head,
        "logit_correlation": same,
        "versions": {"llama.cpp": theirs["version"], "llama.cpp built with": theirs["system"]},
        "bytes_per_token": read,
        "macs_per_token": macs,
        "rows": [row for threads in args.threads for row in summary(threads, runs[threads], macs, read)],
        "runs": runs,
    }


def markdown(results: dict[str, Any]) -> str:
    """The page of results."""
    megabytes = {engine: size / 1e6 for engine, size in results["bytes_per_token"].items()}
    return "\n".join(
        [
            f"# {results['shape']}: {OURS} and {THEIRS}, the same weights",
            "",
            f"TQ2_0 body and {results['head']} head in {results['versions'][THEIRS]}, default packed file here. "
            f"A decoded token reads {megabytes[THEIRS]:.1f} MB there, {megabytes[OURS]:.1f} MB here. "
            f"Logits of the two engines correlate by {results['logit_correlation']:.4f}. "
            "Medians of rounds in turn; the limit is read bandwidth for decode, int8 multiply-adds for prefill.",
            "",
            table(results["rows"]),
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare this engine with llama.cpp on the same weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="bitnet-2b4t", help="size of the model")
    add("--head", choices=HEADS, default="Q6_K", help="type of embedding and head in the GGUF")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="threads")
    add("--prompt", type=int, nargs="+", default=[128, 512], metavar="N", help="tokens of prefill")
    add("--gen", type=int, default=64, metavar="N", help="tokens to decode")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each engine, in turn")
    add("--llama-python", metavar="PATH", help="an interpreter that has llama-cpp-python; none: build it")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    args = parser.parse_args()
    report.check_program(parser, "--llama-python", args.llama_python)
    return args


def main() -> None:
    args = arguments()
    command = (
        f"python benchmarks/vs_llama_cpp.py --shape {args.shape} --head {args.head} "
        f"--threads {' '.join(map(str, args.threads))} --prompt {' '.join(map(str, args.prompt))} "
        f"--gen {args.gen} --rounds {args.rounds}"
    )
    origin = report.origin(command)
    config = SHAPES[args.shape].replace(activation="silu")
    architecture(config)
    (report.ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="vs-llama-cpp-") as folder:
        results = {"origin": origin} | compare(config, args, Path(folder))
    text = markdown(results)
    report.write(args.out, f"vs_llama_cpp-{args.shape}", results, text, panels(results))
    print(text)


if __name__ == "__main__":
    report.run(main)
