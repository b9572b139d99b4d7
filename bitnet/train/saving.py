"""Writes, replaces and removes checkpoints, each complete at every moment, whenever the process is killed.

Each is written under another name, flushed to disk, and renamed (`bitnet.train.checkpoint` describes the content).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bitnet.model import parallel
from bitnet.model.transformer import Transformer
from bitnet.process import flush
from bitnet.train import manifest, memory
from bitnet.train.checkpoint import CONFIG, GENERATION, OPTIMIZER, STATE, TEMPLATE, TOKENIZER, WEIGHTS, all_of
from bitnet.train.state import State

REPLACED = ".replaced"  # suffix of a checkpoint while another of the same step takes its place


class Snapshot(NamedTuple):
    """The content of a checkpoint."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    texts: dict[str, str]  # by file name

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer_json: str,
        optimizer: torch.optim.Optimizer,
        state: State,
        template: str | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Snapshot:
        """The tensors are shared with model and optimizer, so changes there change the snapshot."""
        texts = {
            CONFIG: model.config.to_json() + "\n",
            TOKENIZER: tokenizer_json,
            STATE: json.dumps(state, indent=2) + "\n",
        }
        texts |= answering(template, generation)
        return cls(state["step"], model.state_dict(), _moments(optimizer, model), texts)

    def may_be_copied(self) -> bool:
        """Whether a copy fits in memory, and no tensor is sharded."""
        tensors = [*self.weights.values(), *self.moments.values()]
        size = sum(tensor.nbytes for tensor in tensors)
        return not any(map(parallel.is_sharded, tensors)) and size < memory.available()[0] / 2

    def copied(self) -> Snapshot:
        """A copy in CPU memory, which later steps do not change."""
        sides = (self.weights, self.moments)
        weights, moments = ({name: t.detach().to("cpu", copy=True) for name, t in side.items()} for side in sides)
        return self._replace(weights=weights, moments=moments)


def answering(template: str | None, generation: Mapping[str, Any] | None) -> dict[str, str]:
    """The files, by name, for chat template and generation defaults, as far as known."""
    texts = {TEMPLATE: template} if template is not None else {}
    return texts | ({GENERATION: json.dumps(generation, indent=2) + "\n"} if generation else {})


def write(run: Path, snapshot: Snapshot) -> Path:
    """Write `run/step-<step>` in one atomic move; returns it. All processes call it if the model is sharded."""
    tensors = {WEIGHTS: snapshot.weights, OPTIMIZER: snapshot.moments}
    return put(run / name_of(snapshot.step), tensors, snapshot.texts)


def put(final: Path, tensors: Mapping[str, dict[str, Tensor]], texts: Mapping[str, str]) -> Path:
    """Write tensor files and text files, given by name, as a checkpoint; returns it."""
    work = final.with_name(f".{final.name}.partial")
    if parallel.is_first():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    try:
        for name, each in tensors.items():
            _write_tensors(each, work / name)
        if not parallel.is_first():
            return final
        for name, text in texts.items():
            (work / name).write_text(text, encoding="utf-8")
        manifest.write(work)
        mode = (work / CONFIG).stat().st_mode
        for file in work.iterdir():
            if file.stat().st_mode != mode:  # safetensors lets only the owner read its files, whatever the umask
                file.chmod(mode)
            flush(file)
        flush(work)
        _move(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def name_of(step: int | None) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:06d}" if step is not None else ""


def _move(work: Path, final: Path) -> None:
    """Move a written checkpoint into place. An old one of the same step is removed only after that."""
    before = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    try:
        work.rename(final)
    except BaseException:
        if before.exists():
            before.rename(final)
        raise
    flush(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def put_back(final: Path) -> None:
    """Restore a checkpoint that a process was replacing when it was killed."""
    before = final.with_name(f".{final.name}{REPLACED}")
    if before.exists() and not final.exists():
        before.rename(final)


def recover(run: Path) -> None:
    """Restore checkpoints that a killed process was replacing, and remove its partial writes and removals."""
    for before in run.glob(f".step-*{REPLACED}"):
        final = run / before.name.removeprefix(".").removesuffix(REPLACED)
        put_back(final)
        if before.exists():  # the new one is already in place
            shutil.rmtree(before)
    for left in run.glob(".step-*.partial"):
        shutil.rmtree(left)


def set_aside(run: Path, newest: Path, why: str = "damaged") -> dict[Path, Path]:
    """Rename checkpoints newer than `newest` to step-*.<why>, so that they do not count as ones to keep. Returns the
    new paths by the old ones.

    Earlier renamed ones stay.
    """
    renamed = {}
    for later in all_of(run)[all_of(run).index(newest) + 1 :]:
        taken, n = {path.name for path in run.iterdir()}, 1
        while (name := f"{later.name}.{why}{n if n > 1 else ''}") in taken:
            n += 1
        renamed[later] = later.rename(run / name)
    return renamed


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file: the first process, or for sharded tensors every process its part."""
    if not any(map(parallel.is_sharded, tensors.values())):
        if parallel.is_first():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    shards = file.with_suffix(".shards")
    # scalars get a dimension: consolidation would write 0 for a tensor without any
    tensors = {name: tensor if tensor.dim() else tensor.reshape(1) for name, tensor in tensors.items()}
    parallel.wait_for_first()  # it may still be clearing the folder
    try:
        writer = HuggingFaceStorageWriter(str(shards), save_distributed=True, enable_consolidation=True)
        save_distributed(tensors, storage_writer=writer)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    if parallel.is_first():
        (shards / "model-00001-of-00001.safetensors").rename(file)
        shutil.rmtree(shards)


def keep_newest(run: Path, n: int, but: Sequence[int | None]) -> None:
    """Remove all checkpoints except the newest n, and those of the steps `but`."""
    others = [each for each in all_of(run) if each.name not in map(name_of, but)]
    for old in others[:-n]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    """Rename it first: the process may be killed between files, and a checkpoint with its own name must be whole."""
    work = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(work, ignore_errors=True)
    checkpoint.rename(work)
    shutil.rmtree(work)


def _moments(optimizer: torch.optim.Optimizer, model: Transformer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
