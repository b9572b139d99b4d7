"""Checkpoints: folders of safetensors and JSON, never pickle.

    runs/tiny/step-001200/
        model.safetensors      fp32 master weights, named as in `bitnet.model`
        config.json            ModelConfig
        tokenizer.json         `tokenizers` library
        optimizer.safetensors  AdamW moments, `{parameter}.exp_avg` and so on   (to resume)
        state.json             step, tokens, seconds, losses, settings          (to resume)
        chat_template.jinja    of a model that answers                          (if there is one)
        generation.json        start and end tokens, sampling defaults          (if there are any)
        manifest.json          size and SHA-256 of the others (`bitnet.manifest`)

A checkpoint is written under another name, flushed to disk, and renamed: under its own name
it is always whole. What happens to it later, the manifest tells: of a run the newest whole one counts.
A run has one from before its first step, of step 0.

It is the same whatever number of processes wrote it, and any number can read it. Of a sharded model
(`bitnet.parallel`) each process writes its own rows, which the first then puts together, tensor by
tensor; each reads tensor by tensor and keeps its rows. None ever holds the whole.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bitnet import manifest, optimizers, parallel
from bitnet.config import ModelConfig
from bitnet.model import Transformer
from bitnet.process import flush
from bitnet_runtime import terminal

TEMPLATE, GENERATION = "chat_template.jinja", "generation.json"
REPLACED = ".replaced"  # ending of a checkpoint while another of the same step takes its place


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what its configuration says."""


def find(path: str | Path, say: Callable[[str], object] = terminal.say) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one of a run folder.

    say: gets a line for each newer one that is damaged. Raises CheckpointError: there is none, or it is damaged;
    OSError: one cannot be read now, and an older one in its place would lose what is in it.
    """
    folder = Path(path)
    if (folder / "model.safetensors").is_file() or (folder / manifest.NAME).is_file():
        if problem := manifest.damage(folder):
            raise CheckpointError(
                f"{folder} is damaged: {problem}; name another checkpoint, or the run folder for its newest whole one "
                f"(if you changed it on purpose, remove {manifest.NAME})"
            )
        return folder
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist, expected a checkpoint or a run folder of `bitnet train`")
    steps = all_of(folder)
    if not steps:
        raise CheckpointError(f"{folder} has no model.safetensors and no step-* folder, expected a checkpoint")
    problems: list[str] = []
    for checkpoint in reversed(steps):
        problem = manifest.damage(checkpoint)
        if not problem:
            for line in problems:
                say(f"{line}; taking {checkpoint.name}")
            return checkpoint
        problems.append(f"{checkpoint} is damaged: {problem}")
    raise CheckpointError(f"no checkpoint is whole: {'; '.join(problems)}")


def _found(path: str | Path) -> Path:
    """`find` for those who need not hear of damage again."""
    return find(path, lambda _: None)


def all_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    found = [p for p in run.iterdir() if re.fullmatch(r"step-\d+", p.name)] if run.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def load_config(path: str | Path) -> ModelConfig:
    values = read_json(_found(path) / "config.json")
    if "architectures" in values:
        raise CheckpointError(
            f"{path} is a Hugging Face folder, expected a checkpoint; bitnet convert and bitnet finetune read those"
        )
    return ModelConfig.from_dict(values)


def load_state(path: str | Path) -> dict[str, Any]:
    """state.json: at least `step`, `tokens`, `seconds` and `settings` of the run that wrote it."""
    return read_json(_found(path) / "state.json")


def load_template(path: str | Path) -> str | None:
    """The chat template, None where there is none."""
    file = _found(path) / TEMPLATE
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 (byte {error.start})") from None


def load_generation(path: str | Path) -> dict[str, Any]:
    """`generation` of the packed file's METADATA (FORMAT.md §5), empty where nothing is known."""
    file = _found(path) / GENERATION
    return read_json(file) if file.is_file() else {}


def load_model(path: str | Path) -> Transformer:
    """The model in evaluation mode, fp32, after checking that file and configuration agree exactly."""
    folder = _found(path)
    model = Transformer(load_config(folder))
    load_weights(model, folder)
    return model.eval()


def load_weights(model: Transformer, folder: Path) -> None:
    """Those of a checkpoint, into a model that may be sharded."""
    expected, seen = model.state_dict(), set()
    for name, tensor in _read_tensors(folder / "model.safetensors"):
        if name not in expected:
            raise CheckpointError(f"{folder}: tensor {name} is there, config.json does not call for it")
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{folder}: tensor {name} is {_shape(tensor)}, config.json calls for {_shape(expected[name])}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinity")
        expected[name].copy_(parallel.like(tensor, expected[name]))
        seen.add(name)
    for name in sorted(expected.keys() - seen):
        raise CheckpointError(f"{folder}: tensor {name} is missing, config.json calls for it")


def load_optimizer(optimizer: torch.optim.Optimizer, model: Transformer, folder: Path) -> None:
    """Restore the moments written by `save`, of a model that may be sharded: all of them, or CheckpointError."""
    parameters, state = dict(model.named_parameters()), load_state(folder)
    updated = state["step"] > state.get("skipped", 0)  # there are none before the first step that was not skipped
    names = {p: name for name, p in parameters.items()}
    missing = {f"{names[p]}.{key}" for p, keys in optimizers.moments(optimizer) for key in keys} if updated else set()
    for name, tensor in _read_tensors(folder / "optimizer.safetensors"):
        owner, _, key = name.rpartition(".")
        if owner not in parameters:
            raise CheckpointError(f"{folder}: optimizer state for {owner}, which the model does not have")
        parameter = parameters[owner]
        if tensor.numel() == 1 and tensor.shape != parameter.shape:  # AdamW's count of steps
            optimizer.state[parameter][key] = tensor.reshape(()).to(parameter.device)
        elif tensor.shape == parameter.shape:
            optimizer.state[parameter][key] = parallel.like(tensor, parameter)
        else:
            raise CheckpointError(f"{folder}: {name} is {_shape(tensor)}, its parameter {_shape(parameter)}")
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{folder}: optimizer.safetensors lacks {min(missing)}; it cannot be gone on from")


def save(
    run: Path,
    model: Transformer,
    tokenizer_json: str,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    template: str | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write `run/step-<state["step"]>` in one atomic move; returns it. All processes of a run call it."""
    final = run / f"step-{state['step']:06d}"
    work = run / f".{final.name}.partial"
    if parallel.is_first():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    try:
        _write_tensors(model.state_dict(), work / "model.safetensors")
        _write_tensors(_moments(optimizer, model), work / "optimizer.safetensors")
        if not parallel.is_first():
            return final
        (work / "config.json").write_text(model.config.to_json() + "\n", encoding="utf-8")
        (work / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (work / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if template is not None:
            (work / TEMPLATE).write_text(template, encoding="utf-8")
        if generation:
            (work / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        manifest.write(work)
        for file in work.iterdir():
            flush(file)
        flush(work)
        _put(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def _put(work: Path, final: Path) -> None:
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


def recover(run: Path) -> None:
    """Put back what a process was replacing when it was killed, and remove what it left of writing or removing."""
    for before in run.glob(f".step-*{REPLACED}"):
        final = run / before.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            shutil.rmtree(before)
        else:
            before.rename(final)
    for left in run.glob(".step-*.partial"):
        shutil.rmtree(left)


def set_aside(run: Path, newest: Path) -> None:
    """Rename what is newer than the newest whole checkpoint, so that it is never counted as one to keep.

    What was renamed before stays.
    """
    for damaged in all_of(run)[all_of(run).index(newest) + 1 :]:
        taken, n = {path.name for path in run.iterdir()}, 1
        while (name := f"{damaged.name}.damaged{n if n > 1 else ''}") in taken:
            n += 1
        damaged.rename(run / name)


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


def keep_newest(run: Path, n: int) -> None:
    """Remove all checkpoints but the newest n."""
    for old in all_of(run)[:-n]:
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


def _read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """One after the other, from a file that is mapped."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                yield name, tensors.get_tensor(name)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError: missing, damaged, or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, expected an object")
    return value


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
