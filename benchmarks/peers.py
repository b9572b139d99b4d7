"""This engine and any llama-bench, measured in turn in one run.

    python benchmarks/peers.py --llama-bench PATH --model FILE.gguf --name ik_llama.cpp --option=-rtr --option=1

llama-bench is the program of that name built by llama.cpp, ik_llama.cpp and others; nothing else of theirs is needed.
--model is a GGUF of the shape, made with their tools. Our model is --packed, or has random weights: the time does not
depend on them. Prefill and decode are measured A B A B, each engine in its own process, with the limits of the machine
measured in between.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from shapes import SHAPES
from turns import OURS, panels, summary, table, take_turns

from bitnet_export import random_model
from bitnet_runtime import Model


def run_peer(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """One run of llama-bench: tokens per second, and what it reports about itself and the model."""
    prompts = ",".join(map(str, args.prompt))
    command = [args.llama_bench, "-m", args.model, "-t", threads, "-p", prompts, "-n", args.gen, "-r", 1, "-o", "json"]
    done = subprocess.run([*map(str, command), *args.option], capture_output=True, text=True)
    if done.returncode:
        raise report.BenchmarkError(f"{args.llama_bench} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return read_peer(done.stdout, args.prompt, args.gen)


def read_peer(text: str, prompts: list[int], gen: int) -> dict[str, Any]:
    """What `llama-bench -o json` prints; some builds print something before it."""
    begin = 0 if text.startswith("[") else text.find("\n[") + 1
    try:
        tests = json.loads(text[begin:])
        found = {(test["n_prompt"], test["n_gen"]): float(test["avg_ts"]) for test in tests}
        return {
            "version": f"{tests[0]['build_commit']}, {tests[0]['model_type']}",
            "model_bytes": int(tests[0]["model_size"]),
            "parameters": int(tests[0]["model_n_params"]),
            "prefill": {str(n): found[n, 0] for n in prompts},
            "decode": found[0, gen],
        }
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise report.BenchmarkError(
            f"the output of llama-bench lacks {error}, expected the JSON of prefill {prompts} and decode {gen}:\n"
            f"{text[:500]}"
        ) from None


def compare(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that goes into the JSON file, except its origin."""
    with Model.load(path, verify=False) as model:
        info, cache = model.info, model.kv_bytes(args.gen // 2)  # read on average for each decoded token
    ours = info.ternary_weights + info.vocab_size * info.dim
    theirs = run_peer(args, args.threads[-1])  # loads their file into the page cache, not counted
    if not 0.8 < theirs["parameters"] / ours < 1.25:
        raise report.BenchmarkError(
            f"{args.model.name} has {theirs['parameters']:,} parameters, expected about {ours:,}, as ours has: "
            "name the shape with --shape, or the packed file with --packed"
        )
    runs = take_turns(path, args.name, lambda threads: run_peer(args, threads), args)
    # Some count a tied embedding twice.
    model_bytes = min(theirs["model_bytes"], args.model.stat().st_size)
    read = {OURS: info.bytes_per_token + cache, args.name: model_bytes + cache}
    return {
        "model": args.model.name,
        "versions": {args.name: theirs["version"]},
        "bytes_per_token": read,
        "macs_per_token": info.macs_per_token,
        "rows": [row for n in args.threads for row in summary(n, runs[n], info.macs_per_token, read)],
        "runs": runs,
    }


def markdown(results: dict[str, Any]) -> str:
    """The page of results."""
    (name, version), read = next(iter(results["versions"].items())), results["bytes_per_token"]
    return "\n".join(
        [
            f"# {OURS} and {name}",
            "",
            f"{name}: {version}, {results['model']}. A decoded token reads {read[OURS] / 1e6:.1f} MB here; "
            f"there {read[name] / 1e6:.1f} MB, if it needs all of the file. "
            "Medians of rounds in turn; the limit is read bandwidth for decode, int8 multiply-adds for prefill.",
            "",
            table(results["rows"]),
        ]
    )


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare this engine with any llama-bench.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--llama-bench", type=Path, required=True, metavar="PATH", help="the program")
    add("--model", type=Path, required=True, metavar="FILE", help="a GGUF that it reads")
    add("--option", action="append", default=[], metavar="X", help="an argument more for it; repeatable")
    add("--name", default="llama-bench", help="of that engine, in the tables")
    add("--shape", choices=SHAPES, default="bitnet-2b4t", help="of the random model that is ours")
    add("--packed", type=Path, metavar="FILE", help="this one instead")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="threads")
    add("--prompt", type=int, nargs="+", default=[128, 512], metavar="N", help="tokens of prefill")
    add("--gen", type=int, default=64, metavar="N", help="tokens to decode")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each engine, in turn")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    args = parser.parse_args(line)
    report.check_program(parser, "--llama-bench", args.llama_bench)
    for flag, file in (("--model", args.model), ("--packed", args.packed)):
        if file and not file.is_file():
            parser.error(f"{flag} is {file}, which is no file")
    if args.name == OURS or not re.fullmatch(r"[\w.+-]+", args.name):
        parser.error(f"--name {args.name}, expected letters, digits and .+-_, and not {OURS}")
    return args


def main(line: list[str] | None = None) -> None:
    args = arguments(line)
    ours = f"--packed {args.packed.name}" if args.packed else f"--shape {args.shape}"
    origin = report.origin(  # without the paths of this machine
        f"python benchmarks/peers.py --llama-bench {args.llama_bench.name} --model {args.model.name} "
        f"--name {args.name} {''.join(f'--option={option} ' for option in args.option)}{ours} "
        f"--threads {' '.join(map(str, args.threads))} --prompt {' '.join(map(str, args.prompt))} "
        f"--gen {args.gen} --rounds {args.rounds}"
    )
    (report.ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="peers-") as folder:
        path = args.packed or Path(folder) / "model.bitnet"
        if not args.packed:
            print(f"writing random weights of shape {args.shape} …", file=sys.stderr)
            random_model(SHAPES[args.shape], path)
        results = {"origin": origin} | compare(path, args)
    text = markdown(results)
    report.write(args.out, f"peers-{args.name}", results, text, panels(results))
    print(text)


if __name__ == "__main__":
    report.run(main)
