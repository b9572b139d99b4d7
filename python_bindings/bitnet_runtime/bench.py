"""`bitnet bench`: speed of one model on this machine, compared with the machine's limits.

The engine is measured in a fresh process (`python -m bitnet_runtime.bench`), so that its peak
memory is its own. The limits are measured after each repetition, with the same threads and tier,
because on a shared machine they move as much as the engine's speed does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitnet_runtime import Model, __version__, machine
from bitnet_runtime._native import lib
from bitnet_runtime.abilities import require_head
from bitnet_runtime.defaults import resolve
from bitnet_runtime.errors import BitnetError, InvalidParameterError
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.session import Session

SCATTERED = 0.9  # share of a file in huge pages below which `table` advises to read it into memory instead
USUAL = 128  # tokens of a prompt, and of what follows it
COMPUTED = lib.BN_REPEATED  # tokens of a depth that are computed; the rest are copies, see Session.repeat
SPAN = 0.05  # seconds; what takes less is repeated, as the first time, after the limits were measured, caches are cold
MOST_ROWS, PASSES = 8, 8  # rows in a pass, such as guesses and joint texts; passes measured for each number


class BenchError(BitnetError, RuntimeError):
    """The measuring process failed; the message is its own."""


def bench(
    path: Path,
    *,
    prompt: int | None = None,
    gen: int | None = None,
    depth: int = 0,
    repeat: int = 3,
    **load: Any,
) -> dict[str, Any]:
    """Everything `bitnet bench --json` prints. `load` goes to Model.load; of its list of adapters the first is
    measured. Speeds and limits are medians of `repeat`.

    prompt, gen: tokens; None: USUAL, or as many as fit the context. depth: tokens in the cache before. The first
    COMPUTED of them are computed, the others have copies of their keys and values.
    """
    os.stat(path)  # the process that measures could say it in words only
    load["adapters"] = [os.fspath(file) for file in load.get("adapters", ())]
    job = {"path": os.fspath(path), "prompt": prompt, "gen": gen, "depth": depth, "repeat": repeat, "load": load}
    command = [sys.executable, "-P", "-m", "bitnet_runtime.bench", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(done.stderr.strip() or f"the measuring process ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    found["decode"]["bandwidth_share"] = found["decode"]["gb_s"] / found["read_bandwidth_gb_s"]
    found["prefill"]["int8_peak_share"] = found["prefill"]["gmac_s"] / found["int8_peak_gmac_s"]
    return {"cpu": machine.cpu_name(), "version": __version__} | found


def table(found: dict[str, Any]) -> str:
    """The figures of `bench` for people."""
    decode, prefill, model = found["decode"], found["prefill"], found["model"]
    skipped = decode["skipped_bytes_per_token"]
    left_out = f" ({skipped / 1e6:.1f} MB left out)" if skipped else ""
    copied = f" (all but {COMPUTED} of them copies)" if decode["depth"] > COMPUTED else ""
    huge, large = found["huge_share"], model["file_mb"] * 1e6 > machine.buffer_bytes() / 4  # no cache holds it
    pages = []
    if large and huge is not None and huge < SCATTERED:
        pages = [f"pages    {huge:.0%} of the file in huge pages, which are read faster; --no-mmap puts all there"]
    return "\n".join(
        [
            f"{found['cpu']}, {found['isa']}, threads {found['threads']}",
            f"model    {model['ternary_weights'] / 1e6:.1f} M ternary weights, file {model['file_mb']:.1f} MB",
            f"limits   read {found['read_bandwidth_gb_s']:.1f} GB/s, int8 {found['int8_peak_gmac_s']:.0f} GMAC/s",
            f"load     {found['load_ms']:.1f} ms, {found['load_unverified_ms']:.1f} ms without checking the weights",
            f"memory   peak {found['peak_rss_mb']:.1f} MB = file {model['file_mb']:.1f} + session "
            f"{found['session_mb']:.1f} + {found['peak_rss_mb'] - model['file_mb'] - found['session_mb']:.1f}",
            *pages,
            f"prefill  {prefill['n']} tokens: {prefill['tok_s']:.1f} tok/s, {prefill['gmac_s']:.0f} GMAC/s, "
            f"{prefill['int8_peak_share']:.0%} of the int8 peak",
            f"decode   {decode['n']} tokens at depth {decode['depth']}{copied}: {decode['tok_s']:.1f} tok/s, "
            f"{decode['bytes_per_token'] / 1e6:.1f} MB a token{left_out}, {decode['gb_s']:.1f} GB/s, "
            f"{decode['bandwidth_share']:.0%} of the read bandwidth",
            f"rows     {' '.join(f'{ratio:.2f}' for ratio in found['rows']['ratio'])} times one row, for 1 to "
            f"{len(found['rows']['ratio'])} in a pass",
        ]
    )


def measure(
    path: str, prompt: int | None, gen: int | None, depth: int, repeat: int, load: dict[str, Any]
) -> dict[str, Any]:
    """The measurements of the engine, in this process."""
    Model.load(path, **load).close()  # brings the file into the page cache
    unverified = _seconds(lambda: Model.load(path, **load | {"verify": False}).close())
    begin = time.perf_counter()
    model = Model.load(path, **load)
    verified = time.perf_counter() - begin
    prompt, gen, needed = _lengths(model, prompt, gen, depth)
    adapter = next(iter(model.adapters), None)
    added = sum(os.stat(file).st_size for file in model.files[1:])  # all of which is read for a token
    with model, model.session(n_ctx=needed, adapter=adapter) as session:
        draw = random.Random(0)
        tokens = [draw.randrange(model.vocab_size) for _ in range(needed)]
        if depth:
            session.feed(tokens[: min(depth, COMPUTED)], keep_logits=False)
        if depth > COMPUTED:
            session.repeat(depth)
        runs, memory = _Runs(), 0
        for _ in range(repeat):
            runs.prefill.append(prompt / _prefill(session, depth, tokens[depth : depth + prompt]))
            seconds, skipped = _decode(session, depth, tokens[depth], gen)
            runs.decode.append(gen / seconds)
            runs.skipped.append(skipped / gen)
            memory = memory or machine.peak_memory()  # before the limits need theirs
            runs.rows.append(_rows(model, session, depth, tokens[depth], gen))
            runs.bandwidth.append(machine.read_bandwidth(model.threads))
            runs.int8_peak.append(machine.int8_peak(model.isa, model.threads))
        of_load = {
            "isa": model.isa,
            "threads": model.threads,
            "load_ms": 1e3 * verified,
            "load_unverified_ms": 1e3 * unverified,
            "peak_rss_mb": memory / 1e6,
            "session_mb": session.nbytes / 1e6,
            "huge_share": machine.huge_share(path),
        }
        return of_load | runs.figures(model, added, prompt, gen, depth)


@dataclass
class _Runs:
    """What each repetition measured."""

    prefill: list[float] = field(default_factory=list)  # tokens a second
    decode: list[float] = field(default_factory=list)  # tokens a second
    skipped: list[float] = field(default_factory=list)  # bytes of weights a decoded token did not need
    bandwidth: list[float] = field(default_factory=list)  # GB/s
    int8_peak: list[float] = field(default_factory=list)  # GMAC/s
    rows: list[list[float]] = field(default_factory=list)  # seconds of a pass of 1, 2, … rows

    def figures(self, model: Model, added: int, prompt: int, gen: int, depth: int) -> dict[str, Any]:
        """Their medians. added: bytes of the adapter's file."""
        info, left_out = model.info, statistics.median(self.skipped)
        bytes_per_token = info.bytes_per_token + added + model.kv_bytes(depth + gen // 2) - left_out
        decode, prefill = statistics.median(self.decode), statistics.median(self.prefill)
        seconds = [statistics.median(times) for times in zip(*self.rows, strict=True)]
        return {
            "read_bandwidth_gb_s": statistics.median(self.bandwidth),
            "int8_peak_gmac_s": statistics.median(self.int8_peak),
            "model": {
                "file_mb": (info.file_bytes + added) / 1e6,
                "ternary_weights": info.ternary_weights,
                "weight_bytes_per_token": info.bytes_per_token + added,
            },
            "decode": {
                "n": gen,
                "depth": depth,
                "tok_s": decode,
                "runs": self.decode,
                "read_bandwidth_runs": self.bandwidth,
                "bytes_per_token": bytes_per_token,
                "skipped_bytes_per_token": left_out,
                "gb_s": decode * bytes_per_token / 1e9,
            },
            "prefill": {
                "n": prompt,
                "tok_s": prefill,
                "runs": self.prefill,
                "gmac_s": prefill * info.macs_per_token / 1e9,
            },
            "rows": {"ms": [1e3 * took for took in seconds], "ratio": [took / seconds[0] for took in seconds]},
        }


def _lengths(model: Model, prompt: int | None, gen: int | None, depth: int) -> tuple[int, int, int]:
    """Tokens of the prompt, of what follows, and in all. Raises UnsupportedModelError or
    InvalidParameterError: they cannot be measured."""
    require_head(model)
    if model.mask == "bidirectional":
        raise InvalidParameterError("this model is an encoder; bench measures how fast a model generates text")
    room = model.n_ctx - depth
    asked = [f"--depth {depth}"] if depth else []
    asked += [f"--{word} {n}" for word, n, more in (("prompt", prompt, 0), ("gen", gen, 1)) if n and n + more > room]
    prompt = prompt or max(1, min(USUAL, room))
    gen = gen or max(1, min(USUAL, room - 1))
    needed = depth + max(prompt, gen + 1)
    if needed > model.n_ctx:
        raise InvalidParameterError(
            f"{' with '.join(asked) or 'what is measured'} needs {needed} tokens, the context holds "
            f"{model.n_ctx}; lower {'it' if len(asked) == 1 else 'them'}"
        )
    return prompt, gen, needed


def skipped_bytes(session: Session) -> int:
    """Bytes of weights that the tokens computed here did not need, because all of them are multiplied by 0;
    of models whose FFN is stored by lines (`bitnet export --sparse`)."""
    return session._ask(lib.bn_session_skipped)


def _prefill(session: Session, depth: int, prompt: Sequence[int]) -> float:
    """Seconds of a prompt. What else was measured has emptied the caches: a token reads all that a prompt does."""
    session.rewind(depth)
    session.feed(prompt[:1])
    took: list[float] = []
    while sum(took) < SPAN:
        session.rewind(depth)
        took.append(_seconds(lambda: session.feed(prompt)))
    return statistics.median(took)


def _decode(session: Session, depth: int, first: int, n: int) -> tuple[float, float]:
    """Seconds of `n` tokens, and the bytes of weights that they did not need."""
    took: list[float] = []
    skipped: list[float] = []

    def generate() -> None:
        for _ in range(n):
            session.step(session.sample(temperature=0))

    while sum(took) < SPAN:
        session.rewind(depth)
        session.feed([first])
        before = skipped_bytes(session)
        took.append(_seconds(generate))
        skipped.append(skipped_bytes(session) - before)
    return statistics.median(took), statistics.median(skipped)


def _rows(model: Model, session: Session, depth: int, first: int, gen: int) -> list[float]:
    """Seconds of a pass that computes 1, 2, … rows of a text and chooses a token behind each."""
    greedy = Sampler(resolve({"temperature": 0}), model.vocab_size)

    def begin() -> None:
        session.rewind(depth)
        session.feed([first])

    begin()
    known = [session.advance(greedy)[0] for _ in range(gen)]
    times: list[float] = []
    for n in range(1, min(MOST_ROWS, gen) + 1):
        begin()
        took = []
        for at in range(0, min(PASSES * n, gen - n + 1), n):
            start = time.perf_counter()
            if len(session.advance(greedy, known[at : at + n])) < n:  # a large vocabulary has no room for more
                return times
            took.append(time.perf_counter() - start)
        times.append(statistics.median(took))
    return times


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    try:
        print(json.dumps(measure(**json.loads(sys.argv[1]))))
    except BitnetError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
