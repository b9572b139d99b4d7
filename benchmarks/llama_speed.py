"""Speed of llama.cpp on one GGUF file, measured in this process. Runs in the interpreter that has llama-cpp-python,
without this project:

    python llama_speed.py '{"path": "model.gguf", "threads": 2, "prompts": [128, 512], "gen": 64}'

Prints one JSON object. The C functions are called directly, without sampling, so that a figure is the time of
llama_decode alone. Defaults of llama.cpp: f16 cache, flash attention if possible.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as api

BATCH = 512  # prompt tokens per llama_decode, which computes the logits of the last one


class Llama:
    """A model with one context."""

    def __init__(self, path: str, threads: int, n_ctx: int) -> None:
        api.llama_backend_init()
        begin = time.perf_counter()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        self.load_ms = 1e3 * (time.perf_counter() - begin)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context of {n_ctx} tokens")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def feed(self, tokens: Sequence[int]) -> float:
        """Append tokens; returns the seconds it took."""
        array = (api.llama_token * len(tokens))(*tokens)
        address, width = ctypes.addressof(array), ctypes.sizeof(api.llama_token)
        begin = time.perf_counter()
        for start in range(0, len(tokens), BATCH):
            part = ctypes.cast(address + start * width, ctypes.POINTER(api.llama_token))
            status = api.llama_decode(self.context, api.llama_batch_get_one(part, min(BATCH, len(tokens) - start)))
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        api.llama_synchronize(self.context)
        return time.perf_counter() - begin

    def clear(self) -> None:
        """Forget all tokens."""
        api.llama_memory_clear(api.llama_get_memory(self.context), False)

    def logits(self) -> bytes:
        """float32[vocab_size] after the last token."""
        row = api.llama_get_logits_ith(self.context, -1)
        return ctypes.string_at(row, 4 * self.vocab_size)


def measure(
    path: str, threads: int, prompts: Sequence[int], gen: int, logits: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Tokens per second. logits: {"tokens": [...], "to": PATH} also writes the logits after these tokens."""
    llama = Llama(path, threads, max(*prompts, gen + 1))
    draw = random.Random(0)
    tokens = [draw.randrange(llama.vocab_size) for _ in range(max(*prompts, gen + 1))]
    llama.feed(tokens[:8])  # maps every page of the weights, allocates every buffer
    prefill = {}
    for n in prompts:
        llama.clear()
        prefill[str(n)] = n / llama.feed(tokens[:n])
    llama.clear()
    llama.feed(tokens[:1])
    decode = gen / sum(llama.feed([token]) for token in tokens[1 : gen + 1])
    if logits:
        llama.clear()
        llama.feed(logits["tokens"])
        Path(logits["to"]).write_bytes(llama.logits())
    return {
        "version": f"llama-cpp-python {api.__version__}",
        "system": api.llama_print_system_info().decode(),
        "load_ms": llama.load_ms,
        "prefill": prefill,
        "decode": decode,
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
