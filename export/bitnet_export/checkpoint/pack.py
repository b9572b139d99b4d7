"""A training checkpoint becomes a packed file."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.config import ModelConfig
from bitnet.settings import SOURCES
from bitnet_export.packed import encodings, records
from bitnet_export.packed.encodings import Encoding
from bitnet_export.packed.records import Spec
from bitnet_export.packed.replacing import spare
from bitnet_export.packed.writer import Encoded, write_packed

from . import sparsity
from .findings import Report, ZeroInputs
from .quantized import quantized
from .verify import compare

if TYPE_CHECKING:
    import torch

    from bitnet.train.checkpoint import Checkpoint


TRIES = 3
"""Tries to export from a running run, which may remove the checkpoint meanwhile for a newer one."""


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokens: int = 50_000,
    encoding: str = "2.0",
    head: str | None = None,
    sparse: bool | None = None,
) -> Report:
    """Write a checkpoint (or the newest one of a run folder) as a packed file, and verify it.

    tokens: how many tokens of real text the engine and torch both score.
    encoding: bits a ternary weight, "2.0" or "1.6".
    head: how embedding and head are stored, "int8", "f16" or "f32"; None: as trained.
    sparse: `up` and `down` in lines, of which the engine reads only relevant ones; None: if that is faster.
    The file appears only if it passes. Raises ValueError: a bad checkpoint, or VerificationError.
    """
    from bitnet.train.checkpoint import Checkpoint, CheckpointError

    spare(Path(checkpoint), Path(out))
    reports: list[Report] = []
    for left in reversed(range(TRIES)):
        source = Checkpoint.open(checkpoint)

        def check(file: Path, source: Checkpoint = source) -> None:
            report = compare(source, file, tokens=tokens)
            source.check_kept()  # else it may have been read without its tokenizer
            reports.append(report)

        try:
            pack_checkpoint(source, out, encoding=encoding, head=head, sparse=sparse, check=check)
            break
        except CheckpointError:
            if not left or source.folder.exists():
                raise
    return reports[0]


def pack_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    encoding: str = "2.0",
    head: str | None = None,
    sparse: bool | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the packed file, one tensor in memory at a time; `check` as in `write_packed`."""
    from bitnet.model.positions import position_tables
    from bitnet.train.checkpoint import CheckpointError

    folder, config, body = checkpoint.folder, checkpoint.config, encodings.ternary_encoding(encoding)
    if head is not None:
        config = config.replace(head_format=head)
    if sparse:
        sparsity.require_zeros(config, folder)
    zeros = sparsity.zero_inputs(checkpoint) if sparsity.rectified(config) else None
    if sparse is None:
        sparse = zeros is not None and sparsity.pays(config, zeros, body)
    template = checkpoint.template
    tokenizer, generation = _tokenizer(checkpoint)
    left = set(checkpoint.tensor_names())
    stacks = _with_similarity(checkpoint, config, left).stacks
    tables = [position_tables(stack) for stack in stacks]

    def source(spec: Spec) -> Encoded:
        name, stack = spec.key.parameter(stacks), stacks[spec.key.stack]
        if (table := tables[spec.key.stack].get(spec.key._replace(stack=0).name)) is not None:
            return Encoded.f32(table.numpy())
        if name not in left:
            raise CheckpointError(f"{folder}: tensor {name} is missing, config.json calls for it")
        left.remove(name)
        weight = checkpoint.tensor(name)
        found, shape = tuple(weight.shape), (spec.rows, spec.cols)
        if found != shape and found != shape[1:]:
            raise CheckpointError(f"{folder}: tensor {name} has shape {found}, config.json calls for {shape}")
        if not weight.isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinity")
        lines = sparse and spec.key.stack == 0
        return encode(spec, weight, stack, encodings.encoding_of(records.ROLES[spec.key.role], body, lines))

    def complete(file: Path) -> None:
        if left:
            raise CheckpointError(f"{folder}: tensor {min(left)} is there, config.json does not call for it")
        if check:
            check(file)

    write_packed(
        out,
        stacks,
        source,
        metadata={"generation": generation, "provenance": _provenance(checkpoint)} | _shares(zeros),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        check=complete,
    )


def _with_similarity(checkpoint: Checkpoint, config: ModelConfig, left: set[str]) -> ModelConfig:
    """The configuration with the learnt scale and bias of two towers, which are not tensors of the file."""
    from bitnet.train.checkpoint import CheckpointError

    learnt = {}
    fields = {"similarity.log_scale": "similarity_scale", "similarity.bias": "similarity_bias"}
    for name, field in fields.items() if config.vision and not config.image_token else ():
        if name not in left:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing, config.json calls for it")
        left.remove(name)
        value = checkpoint.tensor(name).double()
        value = value.exp() if field == "similarity_scale" else value
        if value.shape != (1,) or not value.float().isfinite().all():
            raise CheckpointError(f"{checkpoint.folder}: {name} is {value.tolist()}, expected one finite number")
        learnt[field] = value.item()
    return config.replace(**learnt)


def _shares(zeros: ZeroInputs | None) -> dict[str, Any]:
    """For METADATA: the shares by layer, rounded to thousandths."""
    if zeros is None:
        return {}
    return {"zero_inputs": {key: [round(z, 3) for z in share] for key, share in dataclasses.asdict(zeros).items()}}


def encode(spec: Spec, weight: torch.Tensor, config: ModelConfig, body: Encoding = encodings.TERNARY_2BIT) -> Encoded:
    """A master weight quantized as in training, in its stored form; `body`: the encoding of ternary weights."""
    stored = records.stored_as(spec, config, body)
    numbers, scales, scope = quantized(weight, stored, config)
    return Encoded(stored, scope, stored.encode(numbers), scales)


def _tokenizer(checkpoint: Checkpoint) -> tuple[bytes | None, dict[str, Any]]:
    """The tokenizer's JSON and the generation defaults that follow from it."""
    from bitnet.data import tokenizer
    from bitnet.train.checkpoint import TOKENIZER

    if not checkpoint.has_tokenizer:
        return None, {}
    file, words, size = checkpoint.folder / TOKENIZER, checkpoint.words, checkpoint.config.vocab_size
    largest = max(words.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= size:
        raise ValueError(
            f"{file} has token id {largest}, config.json has vocab_size {size}; "
            "use the tokenizer that the model was trained with"
        )
    return file.read_bytes(), dict(tokenizer.defaults(words, checkpoint.generation))


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    from bitnet_runtime import __version__

    state = checkpoint.state_if_any
    known: dict[str, Any] = {key: state[key] for key in ("step", "tokens") if isinstance(state.get(key), int)}
    if isinstance(state.get("settings"), dict):
        known["training"] = _training(state["settings"])
    if measured := checkpoint.measured:
        known["validation"] = {name: value for name, value in measured.items() if isinstance(value, int | float)}
    made = {"tool": f"bitnet-edge {__version__}", "date": _now().strftime("%Y-%m-%d")}
    return {"source": checkpoint.folder.name, **known, **made}


def _now() -> datetime.datetime:
    seconds = os.environ.get("SOURCE_DATE_EPOCH")  # the usual way to ask for the same bytes again
    if not seconds:
        return datetime.datetime.now(datetime.UTC)
    try:
        return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"SOURCE_DATE_EPOCH is {seconds!a:.60}, expected seconds since 1970, a whole number, up to the year 9999; "
            "correct it or unset it"
        ) from None


_TOLD = (
    "objective", "optimizer", "lr", "schedule", "warmup", "warmdown", "weight_decay", "quantize_warmup", "precision",
    "seed", "distill", "beta", "lora",
)  # fmt: skip
_NAMED = (*SOURCES, "source", "teacher")


def _training(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's options and the names of its data, without the folders of this machine."""
    told = {name: settings[name] for name in _TOLD if isinstance(settings.get(name), str | int | float)}
    for name in _NAMED:
        value = settings.get(name)
        paths = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if names := [_name_of(str(path)) for path in paths if path]:
            told[name] = names
    return told


def _name_of(path: str) -> str:
    """The name of a file or folder; for a data set on the hub the whole source."""
    kind, colon, name = path.partition(":")
    on_hub = colon and kind.startswith("hf") and not Path(name).is_absolute()
    return path if on_hub else Path(path).name
