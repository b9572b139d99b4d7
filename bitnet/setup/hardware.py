"""Threads, device and precision that a run uses on its machine."""

from __future__ import annotations

import dataclasses
import os

import torch

from bitnet.model import parallel
from bitnet.settings import Settings
from bitnet.train import optimizers
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say


def settled(settings: Settings) -> Settings:
    """The settings with "auto" replaced by the device and precision of this machine."""
    set_threads(settings.threads)
    chosen = choose_device(settings.device)
    if chosen == "cuda" and parallel.launched():
        parallel.take_gpu()
    return dataclasses.replace(settings, device=chosen, precision=choose_precision(settings.precision, chosen))


def set_threads(wanted: int) -> None:
    """Set torch's thread count, at most one per core: more would wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted > cores:
        say(f"--threads {wanted:,}: only {cores} cores are available here, so {cores} threads are used")
    if wanted:
        torch.set_num_threads(min(wanted, cores))


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda, but torch finds no CUDA device; use --device cpu")
    return wanted


def choose_precision(wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "bf16" if optimizers.multiplies_bf16(device) else "fp32"
