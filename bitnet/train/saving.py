"""How checkpoints come to be, are replaced, and go: whole at every moment, whatever ends the process.

Each is written under another name, flushed to disk, and renamed (`bitnet.train.checkpoint` says what is in one).
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

REPLACED = ".replaced"  # ending of a checkpoint while another of the same step takes its place


class Snapshot(NamedTuple):
    """What a checkpoint is made of."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    texts: dict[str, str]  # by the name of the file

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer_json: str,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        template: str | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Snapshot:
        """The tensors are those of the model and the optimizer; what changes them changes the snapshot."""
        texts = {
            CONFIG: model.config.to_json() + "\n",
            TOKENIZER: tokenizer_json,
            STATE: json.dumps(state, indent=2) + "\n",
        }
        texts |= answering(template, generation)
        return cls(state["step"], model.state_dict(), _moments(optimizer, model), texts)

    def may_be_copied(self) -> bool:
        """Whether a copy has room in memory, and is no matter of several processes."""
        tensors = [*self.weights.values(), *self.moments.values()]
        size = sum(tensor.nbytes for tensor in tensors)
        return not any(map(parallel.is_sharded, tensors)) and size < memory.available()[0] / 2

    def copied(self) -> Snapshot:
        """One that stays as it is, in the memory of the CPU."""
        sides = (self.weights, self.moments)
        weights, moments = ({name: t.detach().to("cpu", copy=True) for name, t in side.items()} for side in sides)
        return self._replace(weights=weights, moments=moments)


def answering(template: str | None, generation: Mapping[str, Any] | None) -> dict[str, str]:
    """The files, by name, of how a model answers; none of what is not known."""
    texts = {TEMPLATE: template} if template is not None else {}
    return texts | ({GENERATION: json.dumps(generation, indent=2) + "\n"} if generation else {})


def save(run: Path, *parts: Any) -> Path:
    """`write` a `Snapshot.of` these parts."""
    return write(run, Snapshot.of(*parts))


def write(run: Path, snapshot: Snapshot) -> Path:
    """Write `run/step-<step>` in one atomic move; returns it. Of a sharded model all processes of a run call it."""
    tensors = {WEIGHTS: snapshot.weights, OPTIMIZER: snapshot.moments}
    return put(run / name_of(snapshot.step), tensors, snapshot.texts)


def put(final: Path, tensors: Mapping[str, dict[str, Tensor]], texts: Mapping[str, str]) -> Path:
    """Write files of tensors and of text, by their names, as a checkpoint; returns it."""
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
        for file in work.iterdir():
            flush(file)
        flush(work)
        _move(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def name_of(step: int | None) -> str:
    """Of the folder with the checkpoint of a step."""
    return f"step-{step:06d}" if step is not None else ""


def _move(work: Path, final: Path) -> None:
    """Rename a checkpoint that is on disk. One of the same step is gone only when the new one has its name."""
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
    """A checkpoint that a process was replacing when it was killed."""
    before = final.with_name(f".{final.name}{REPLACED}")
    if before.exists() and not final.exists():
        before.rename(final)


def recover(run: Path) -> None:
    """Put back what a process was replacing when it was killed, and remove what it left of writing or removing."""
    for before in run.glob(f".step-*{REPLACED}"):
        final = run / before.name.removeprefix(".").removesuffix(REPLACED)
        put_back(final)
        if before.exists():  # the new one was in its place
            shutil.rmtree(before)
    for left in run.glob(".step-*.partial"):
        shutil.rmtree(left)


def set_aside(run: Path, newest: Path, why: str = "damaged") -> dict[Path, Path]:
    """Rename what is newer than a checkpoint to step-*.damaged, so that it is never counted as one to keep. Returns the
    new names by the old ones.

    What was renamed before stays.
    """
    renamed = {}
    for later in all_of(run)[all_of(run).index(newest) + 1 :]:
        taken, n = {path.name for path in run.iterdir()}, 1
        while (name := f"{later.name}.{why}{n if n > 1 else ''}") in taken:
            n += 1
        renamed[later] = later.rename(run / name)
    return renamed


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """A safetensors file. The first process writes it; of sharded tensors every process its part."""
    if not any(map(parallel.is_sharded, tensors.values())):
        if parallel.is_first():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    shards = file.with_suffix(".shards")
    # of one element: of a tensor without dimensions the consolidation would write 0, whatever its value
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


def keep_newest(run: Path, n: int, but: Sequence[int | None] = ()) -> None:
    """Remove all checkpoints but the newest n, and those of the steps `but`."""
    others = [each for each in all_of(run) if each.name not in map(name_of, but)]
    for old in others[:-n]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    """Under another name first: a process may be killed at any file, and what has its own name is whole."""
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
