"""`bitnet bench`: speed of one model on this machine, compared with the machine's limits.

The engine is measured in a fresh process (`python -m bitnet_runtime.measuring`), so that its peak memory is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bitnet_runtime import __version__, machine
from bitnet_runtime.errors import BitnetError
from bitnet_runtime.works import COMPUTED

SCATTERED = 0.9  # share of a file in huge pages below which `table` advises to read it into memory instead


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

    A model that generates has `prefill`, `decode` and `rows`, one that turns texts into vectors `embed`; one that sees
    images has `image`, too.

    prompt, gen: tokens; None: USUAL, or as many as fit the context. depth: tokens in the cache before. The first
    COMPUTED of them are computed, the others have copies of their keys and values.
    """
    os.stat(path)  # the process that measures could say it in words only
    load["adapters"] = [os.fspath(file) for file in load.get("adapters", ())]
    job = {"path": os.fspath(path), "prompt": prompt, "gen": gen, "depth": depth, "repeat": repeat, "load": load}
    command = [sys.executable, "-P", "-m", "bitnet_runtime.measuring", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(done.stderr.strip() or f"the measuring process ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    for work in found.values():
        if isinstance(work, dict) and "gb_s" in work:
            work["bandwidth_share"] = work["gb_s"] / found["read_bandwidth_gb_s"]
        if isinstance(work, dict) and "gmac_s" in work:
            work["int8_peak_share"] = work["gmac_s"] / found["int8_peak_gmac_s"]
    return {"cpu": machine.cpu_name(), "version": __version__} | found


def table(found: dict[str, Any]) -> str:
    """The figures of `bench` for people."""
    model, session = found["model"], found["session_mb"]
    own = f"session {session:.1f} + " if session else ""
    huge, large = found["huge_share"], model["file_mb"] * 1e6 > machine.buffer_bytes() / 4  # no cache holds it
    lines = [
        f"{found['cpu']}, {found['isa']}, threads {found['threads']}",
        f"model    {model['ternary_weights'] / 1e6:.1f} M ternary weights, file {model['file_mb']:.1f} MB",
        f"limits   read {found['read_bandwidth_gb_s']:.1f} GB/s, int8 {found['int8_peak_gmac_s']:.0f} GMAC/s",
        f"load     {found['load_ms']:.1f} ms, {found['load_unverified_ms']:.1f} ms without checking the weights",
        f"memory   peak {found['peak_rss_mb']:.1f} MB = file {model['file_mb']:.1f} + {own}"
        f"{found['peak_rss_mb'] - model['file_mb'] - session:.1f}",
    ]
    if large and huge is not None and huge < SCATTERED:
        lines.append(f"pages    {huge:.0%} of the file in huge pages, which are read faster; --no-mmap puts all there")
    return "\n".join(lines + [line(found[work]) for work, line in LINES.items() if work in found])


def _prefill(prefill: dict[str, Any]) -> str:
    return f"prefill  {prefill['n']} tokens: {prefill['tok_s']:.1f} tok/s, {_of_peak(prefill)}"


def _decode(decode: dict[str, Any]) -> str:
    skipped = decode["skipped_bytes_per_token"]
    left_out = f" ({skipped / 1e6:.1f} MB left out)" if skipped else ""
    copied = f" (all but {COMPUTED} of them copies)" if decode["depth"] > COMPUTED else ""
    return (
        f"decode   {decode['n']} tokens at depth {decode['depth']}{copied}: {decode['tok_s']:.1f} tok/s, "
        f"{decode['bytes_per_token'] / 1e6:.1f} MB a token{left_out}, {decode['gb_s']:.1f} GB/s, "
        f"{decode['bandwidth_share']:.0%} of the read bandwidth"
    )


def _rows(rows: dict[str, Any]) -> str:
    ratios = " ".join(f"{ratio:.2f}" for ratio in rows["ratio"])
    return f"rows     {ratios} times one row, for 1 to {len(rows['ratio'])} in a pass"


def _embed(embed: dict[str, Any]) -> str:
    return (
        f"embed    a text of {embed['n']} tokens: {embed['ms']:.1f} ms; {embed['together']} together: "
        f"{embed['tok_s']:.1f} tok/s, {_of_peak(embed)}"
    )


def _image(image: dict[str, Any]) -> str:
    return (
        f"image    one: {image['ms']:.1f} ms; {image['together']} together: {image['images_s']:.1f} a second, "
        f"{_of_peak(image)}"
    )


def _of_peak(work: dict[str, Any]) -> str:
    return f"{work['gmac_s']:.0f} GMAC/s, {work['int8_peak_share']:.0%} of the int8 peak"


LINES = {"prefill": _prefill, "decode": _decode, "rows": _rows, "embed": _embed, "image": _image}
