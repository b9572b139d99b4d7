"""`bitnet train` on a GPU, in five minutes: whether it is correct, whether all features work, how fast it is.

    codes       quantizers and integer products, GPU against CPU, bit for bit
    exactness   50 steps in fp32 against the CPU's, eager and compiled, with AdamW and with Muon
    resume      a compiled run that is stopped by SIGTERM and resumed
    context     memory of evaluation at 4,096 tokens
    chat        fine-tuning on conversations
    distil      a full-precision model made ternary, with the original as its teacher
    speed       steps at 30M, 100M, 300M and 1B: full precision, ternary, phased in; eager, compiled and replayed
    profile     where the time of a 100M step goes, and how often it waits for the GPU

    python benchmarks/gpu.py
    python benchmarks/gpu.py --quick --device cpu    # all but the profile, on tiny models; its speeds mean nothing

A part that fails is reported, and the others still run; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu_checks
import report
import torch
from gpu_steps import Case, Size

PARTS = (*gpu_checks.CHECKS, "speed", "profile")
KINDS = ("full precision", "ternary", "coming in")
FULL, TERNARY, IN = KINDS

CASES = [
    *(Case("100m", kind) for kind in (TERNARY, FULL, IN)),
    *(Case("1b", kind) for kind in (TERNARY, FULL)),
    *(Case("300m", kind) for kind in (TERNARY, FULL)),
    Case("100m", job="profile"),
    *(Case("30m", kind) for kind in (TERNARY, FULL)),
    *(Case("100m", kind, "compiled") for kind in (TERNARY, FULL)),
    *(Case("100m", kind, "eager") for kind in (TERNARY, FULL)),
    Case("1b", TERNARY, recompute=True), Case("100m-4k", TERNARY), Case("100m-4k", TERNARY, documents=1000),
    Case("100m", TERNARY, documents=1000), Case("100m", IN, "eager"),
]  # fmt: skip
"""The most important first: those for which there is no time are skipped."""
QUICK = [*(Case("quick", kind, "eager") for kind in KINDS), Case("quick", TERNARY, "eager", recompute=True)]
QUICK_SIZE = Size(pass_tokens=64, step_tokens=128, steps=2, threads=1)
GRACE = 60  # seconds after the deadline for a started case to finish
WARMERS = 10  # processes that compile in parallel: each takes a core or two, and some 6 GB of the GPU


def chosen(args: argparse.Namespace) -> list[Case]:
    cases = QUICK if args.quick else CASES
    return [case for case in cases if not args.cases or any(word in str(case) for word in args.cases)]


# ---- processes that run steps ----


class Steps:
    """gpu_steps.py in a separate process, which prints a line for each case."""

    def __init__(self, cases: list[Case], args: argparse.Namespace, deadline: float, errors: Path) -> None:
        words = [json.dumps([asdict(case) for case in cases]), "--device", args.device]
        words += ["--size", json.dumps(asdict(QUICK_SIZE if args.quick else Size())), "--deadline", str(deadline)]
        command = [sys.executable, str(Path(__file__).with_name("gpu_steps.py")), *words]
        self._errors = errors
        with errors.open("w") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        self._limit = threading.Timer(max(0.0, deadline - time.time()) + GRACE, self.process.kill)
        self._limit.start()

    def results(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        self.process.wait()
        self._limit.cancel()

    @property
    def said(self) -> str:
        """The end of its output after a failure."""
        return f"exit code {self.process.returncode}: {self._errors.read_text()[-600:].strip()}"


def warm(cases: list[Case], args: argparse.Namespace, scratch: Path) -> None:
    """Compile the graphs of all cases in parallel into the cache, where the measuring processes find them."""
    once = {(c.shape, c.kind, c.documents): replace(c, mode="compiled", recompute=False, job="warm") for c in cases}

    def one(i: int, case: Case) -> None:
        steps = Steps([case], args, args.deadline, scratch / f"warm-{i}")
        errors = [found["error"] for found in steps.results() if "error" in found]
        if errors or steps.process.returncode:
            print(f"       {case}, for the cache: {errors or steps.said}", flush=True)

    with ThreadPoolExecutor(WARMERS) as pool:
        list(pool.map(one, range(len(once)), once.values()))


def measured(cases: list[Case], args: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """A result for each case, one after another. If a process fails, another one runs the remaining cases."""
    left = list(cases)
    while left:
        steps = Steps(left, args, args.deadline, scratch / "measured")
        done = 0
        for found in steps.results():
            yield found
            done += 1
        if steps.process.returncode and done < len(left):
            yield asdict(left[done]) | {"error": steps.said}
            done += 1
        left = left[done:] if done else []


# ---- parts ----


def check(name: str, place: gpu_checks.Place) -> dict[str, Any]:
    start = time.monotonic()
    try:
        passed, said = gpu_checks.CHECKS[name](place)
    except Exception as error:  # whatever fails: the other parts must still run
        passed, said = False, f"{type(error).__name__}: {error}"
    return tell({"part": name, "passed": passed, "said": said, "seconds": time.monotonic() - start})


def tell(part: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{'ok    ' if part['passed'] else 'FAILED'} {part['part']}: {part['said']} ({part['seconds']:.0f} s)",
        flush=True,
    )
    return part


def checks(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """The requested checks, in parallel as far as there are cores."""
    place = gpu_checks.Place(scratch / "runs", args.device, steps=24 if args.quick else 300, threads=1)
    wanted = [name for name in args.parts if name in gpu_checks.CHECKS]
    if set(wanted) - {"codes", "context"}:
        place.text()
    with ThreadPoolExecutor(max(1, min(len(wanted), (os.cpu_count() or 1) // 4))) as pool:
        return list(pool.map(lambda name: check(name, place), wanted))


def speed(args: argparse.Namespace, scratch: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the table, and the outcomes of the parts speed and profile."""
    cases = [case for case in chosen(args) if ("profile" if case.job == "profile" else "speed") in args.parts]
    rows: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    start = time.monotonic()
    print("       timing steps", flush=True)
    for found in measured(cases, args, scratch):
        known = {name: found[name] for name in Case.__dataclass_fields__}
        name = str(Case(**known))
        if found["job"] == "profile":
            parts.append(profile(found, args, time.monotonic() - start))
            continue
        rows.append(found | {"name": name})
        print(f"       {name}: {found.get('error') or figures(found)}", flush=True)
    if "speed" in args.parts:
        failed = [row["name"] for row in rows if "error" in row]
        said = f"{len(rows) - len(failed)} of {len(rows)} cases" + (f", without {', '.join(failed)}" if failed else "")
        left_out = all("error" not in row or row["error"].startswith("left out") for row in rows)
        passed = left_out and len(failed) < len(rows)
        parts.append(tell({"part": "speed", "passed": passed, "said": said, "seconds": time.monotonic() - start}))
    return rows, parts


def figures(row: dict[str, Any]) -> str:
    return (
        f"{row['ms']:,.1f} ms, {row['tok_s']:,.0f} tokens/s, {row['utilisation']:.1%} of {row['peak_tflops']:,.0f} "
        f"TFLOP/s, {row['memory_gb']:.1f} GB"
    )


def profile(found: dict[str, Any], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    if "error" in found:
        return tell({"part": "profile", "passed": False, "said": found["error"], "seconds": seconds})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu-profile.txt").write_text(found["text"] + "\n")
    waits = found["synchronizations"]
    return tell({
        "part": "profile", "passed": waits == 0, "said": f"{waits} synchronizations in 5 steps; gpu-profile.txt",
        "seconds": seconds,
    })  # fmt: skip


def environment() -> None:
    """Let commands in separate processes find the packages of this checkout, after those already on the path."""
    paths = [str(report.ROOT / part) for part in ("", "export", "python_bindings")]
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *paths]).strip(os.pathsep)


# ---- results ----


def ratio(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """Time of a step relative to full precision with the same shape and mode, "" if that was not measured."""
    like = ("shape", "mode", "recompute", "documents")
    full = [r for r in rows if r["kind"] == FULL and "ms" in r and all(r[name] == row[name] for name in like)]
    return f"{row['ms'] / full[0]['ms']:.2f} ×" if full else ""


def how(row: dict[str, Any]) -> str:
    """The mode in which its passes are run."""
    return (
        row["mode"] + ", recomputing" * row["recompute"] + f", documents of {row['documents']}" * bool(row["documents"])
    )


def markdown(results: dict[str, Any]) -> str:
    parts = [[p["part"], "yes" if p["passed"] else "**no**", p["said"], f"{p['seconds']:.0f} s"]
             for p in results["parts"]]  # fmt: skip
    rows = [row for row in results["rows"] if "ms" in row]
    cells = [
        [row["shape"], row["kind"], how(row), row["ms"], row["tok_s"],
         f"{row['utilisation']:.1%}", f"{row['memory_gb']:.1f} GB", ratio(rows, row)]
        for row in sorted(rows, key=lambda row: (row["parameters"], row["mode"], row["recompute"], row["kind"]))
    ]  # fmt: skip
    head = ["model", "kind", "passes", "ms a step", "tokens/s", "utilisation", "peak memory", "over full precision"]
    peak = max((row["peak_tflops"] for row in rows), default=0.0)
    size = results["size"]
    return "\n".join([
        "# Training on a GPU", "", report.table(["part", "passed", "found", "took"], parts), "",
        *([report.table(head, cells), ""] if cells else []),
        f"{results['gpu']}, torch {results['torch']}. Steps of the trainer's own loop with Muon on random tokens: "
        f"{size['step_tokens']:,} a step, {size['pass_tokens']:,} a pass, medians of {size['steps']} steps. "
        "Coming in: at λ = 0.5. Utilisation: products with weights and attention, 6 FLOPs for each multiply-add of a "
        f"forward pass, over the rate of torch's own product of two square matrices in this run, {peak:,.0f} TFLOP/s; "
        "what is recomputed does not count.",
    ])  # fmt: skip


def panels(results: dict[str, Any]) -> list[report.Panel]:
    """Speed and utilisation of each shape in its fastest mode."""
    rows = [
        row
        for row in results["rows"]
        if "ms" in row and not row["recompute"] and not row["documents"] and row["mode"] != "compiled"
    ]
    labels = list(dict.fromkeys((row["shape"], row["mode"]) for row in sorted(rows, key=lambda r: r["parameters"])))

    def series(name: str, factor: float) -> dict[str, list[float]]:
        found = {(r["shape"], r["mode"], r["kind"]): factor * r[name] for r in rows}
        return {kind: [found.get((*label, kind), float("nan")) for label in labels] for kind in KINDS}

    names = [f"{shape}\n{mode}" for shape, mode in labels]
    return [
        report.Panel("thousand tokens a second", names, series("tok_s", 1e-3)),
        report.Panel("share of the bf16 peak, %", names, series("utilisation", 100)),
    ]


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some of the above")
    parser.add_argument("--cases", nargs="+", metavar="WORDS", help="of speed and profile, those with one of these in "
                        "their names, such as '1b ternary'")  # fmt: skip
    parser.add_argument("--budget", type=float, default=300, help="seconds after which no case of speed is begun [300]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; to see that it runs: --quick --device cpu")
    if args.device == "cpu" and not args.quick:
        parser.error("the CPU is for --quick alone")
    if args.device == "cpu":
        args.parts = [part for part in args.parts if part != "profile"]
    args.deadline = time.time() + (3600 if args.quick else args.budget)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    environment()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # many processes compile in parallel
    words = sys.argv[1:] if argv is None else argv
    origin = report.origin(" ".join(["python benchmarks/gpu.py", *words]))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wanted = {"speed", "profile"} & set(args.parts)
        with ThreadPoolExecutor(1) as pool:
            warmed = pool.submit(warm, [] if args.quick or not wanted else chosen(args), args, scratch)
            parts = checks(args, scratch)
            warmed.result()
        rows, more = speed(args, scratch) if wanted else ([], [])
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, quick: the figures mean nothing"
    size = asdict(QUICK_SIZE if args.quick else Size())
    results = {"origin": origin, "gpu": gpu, "torch": torch.__version__, "size": size}
    results |= {"parts": [*parts, *more], "rows": rows}
    report.write(args.out, "gpu", results, markdown(results), panels(results))
    return 0 if all(part["passed"] for part in results["parts"]) else 1


if __name__ == "__main__":
    report.run(main)
