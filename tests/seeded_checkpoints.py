"""Checkpoints of small seeded models, as a run saves them."""

from __future__ import annotations

import argparse
import ast
import decimal
import inspect
import shutil
import subprocess
import tarfile
import typing
from pathlib import Path

import torch

from bitnet.config import ModelConfig
from bitnet.data import corpus, dataset, tokenizer
from bitnet.model.transformer import Transformer
from bitnet.train import saving

SMALL = ModelConfig(
    vocab_size=257, dim=40, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=72, max_context=64,
)  # fmt: skip
TEXT = [inspect.getfile(module) for module in (argparse, ast, decimal, inspect, shutil, subprocess, tarfile, typing)]


def make_checkpoint(run: Path, config: ModelConfig = SMALL, *, steps: int = 0, seed: int = 0) -> Path:
    """A seeded model with uneven gains and biases; `steps` of training on Python source."""
    torch.manual_seed(seed)
    model, words = Transformer(config), tokenizer.build("byte", [], 257)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if steps:
        run.mkdir(parents=True, exist_ok=True)
        tokens = dataset.tokenize(list(corpus.Documents(TEXT)), words, run, "text")
        batches = dataset.Batches(tokens, 16, 64, seed)
        for step in range(steps):
            model.loss(*batches.sequences(16 * step, 16 * step + 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"step": steps, "tokens": 1024 * steps, "seconds": 0, "settings": {"data": TEXT, "validation": 0.3}}
    return saving.write(run, saving.Snapshot.of(model, words.to_str(), optimizer, state))
