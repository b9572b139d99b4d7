"""`bitnet train` in tests: a model that takes a second, readers of a run, and killed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitnet_cli
from bitnet.data import tokenizer
from bitnet.model.transformer import Transformer
from bitnet.train import loop, manifest, runlog, saving

MODEL = ("vocab_size=300", "dim=32", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48")
TINY = [word for option in (*MODEL, "max_context=32") for word in ("--set", option)]
TINY += ["--threads", "1", "--batch", "4", "--eval-every", "10", "--save-every", "10", "--layers-every", "5"]
TINY += ["--steps", "20"]  # the last, to be left out where --minutes is given
TALK = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Good day"},
    {"role": "user", "content": "<|im_end|>bye"}, {"role": "assistant", "content": "So long"},
]  # fmt: skip


def bitnet(*argv: object) -> int:
    """Run a command; returns its exit code."""
    return bitnet_cli.main([str(word) for word in argv])


def losses(folder: Path) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in runlog.read(folder / "log.jsonl")]


def bits(checkpoint: Path) -> dict[str, bytes]:
    return {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def killed_before(step: int, *argv: object) -> None:
    """Run a command that ends, as abruptly as by a kill, before this step, counted from 0."""
    update = loop.update

    def kill(run: loop.Run) -> Any:
        if run.state["step"] == step:
            raise KeyboardInterrupt
        return update(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", kill)
        assert bitnet(*argv) == 130


def edited(checkpoint: Path) -> Path:
    """A checkpoint without its manifest, as after a deliberate change."""
    (checkpoint / manifest.NAME).unlink(missing_ok=True)
    return checkpoint


def saved(run: Path, model: Transformer) -> Path:
    """A checkpoint of a model at step 0, with a byte tokenizer if it takes tokens."""
    config, words = model.config, tokenizer.build("byte", [], 257)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = saving.write(run, saving.Snapshot.of(model, words.to_str(), optimizer, {"step": 0, "tokens": 0}))
    if not config.vocab_size:
        (folder / "tokenizer.json").unlink()
        (folder / "manifest.json").unlink()
    return folder
