"""The process that `bitnet bench` starts: it loads the model, lets it work and measures the machine's limits.

The limits are measured after each repetition, with the same threads and tier, because on a shared machine they move as
much as the engine's speed does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from bitnet_runtime import Model, machine
from bitnet_runtime.errors import BitnetError
from bitnet_runtime.works import seconds, works_of


def measure(
    path: str, prompt: int | None, gen: int | None, depth: int, repeat: int, load: dict[str, Any]
) -> dict[str, Any]:
    """The measurements of the engine, in this process."""
    Model.load(path, **load).close()  # brings the file into the page cache
    unverified = seconds(lambda: Model.load(path, **load | {"verify": False}).close())
    begin = time.perf_counter()
    model = Model.load(path, **load)
    verified = time.perf_counter() - begin
    added = sum(os.stat(file).st_size for file in model.files[1:])  # all of which is read for a token
    bandwidth, int8_peak, memory = list[float](), list[float](), 0
    with model:
        works = works_of(model, prompt, gen, depth, added)
        for _ in range(repeat):
            for work in works:
                work.run()
            memory = memory or machine.peak_memory()  # before the limits need theirs
            bandwidth.append(machine.read_bandwidth(model.threads))
            int8_peak.append(machine.int8_peak(model.isa, model.threads))
        found = {
            "isa": model.isa,
            "threads": model.threads,
            "load_ms": 1e3 * verified,
            "load_unverified_ms": 1e3 * unverified,
            "peak_rss_mb": memory / 1e6,
            "session_mb": 0.0,
            "huge_share": machine.huge_share(path),
            "read_bandwidth_gb_s": statistics.median(bandwidth),
            "read_bandwidth_runs": bandwidth,
            "int8_peak_gmac_s": statistics.median(int8_peak),
            "model": {
                "file_mb": (model.info.file_bytes + added) / 1e6,
                "ternary_weights": model.info.ternary_weights,
                "weight_bytes_per_token": model.info.bytes_per_token + added,
            },
        }
        for work in works:
            found |= work.figures()
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(measure(**json.loads(sys.argv[1]))))
    except BitnetError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
