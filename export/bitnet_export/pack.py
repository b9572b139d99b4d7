"""A training checkpoint becomes a packed file."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.config import ModelConfig

from . import packed, sparsity
from .content import Content
from .packed import Spec
from .report import Report, ZeroInputs
from .source import SourceError
from .verify import verify
from .writer import Encoded, spare, write_packed

if TYPE_CHECKING:
    import torch


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
    head: how embedding and head are stored, "int8", "f16" or "f32"; as trained when None.
    sparse: `up` and `down` by lines, so that the engine reads only those that matter; where that pays when None.
    The file appears only if it passes. Raises ValueError: a bad checkpoint, or VerificationError.
    """
    from bitnet.checkpoint import find

    spare(Path(checkpoint), Path(out))
    folder = find(Path(checkpoint))
    reports: list[Report] = []
    pack_checkpoint(
        folder,
        out,
        encoding=encoding,
        head=head,
        sparse=sparse,
        check=lambda file: reports.append(verify(folder, file, tokens=tokens)),
    )
    return reports[0]


def pack_checkpoint(
    folder: Path,
    out: str | os.PathLike[str],
    *,
    encoding: str = "2.0",
    head: str | None = None,
    sparse: bool | None = None,
    check: Any = None,
) -> None:
    """Write the packed file, one tensor in memory at a time; `check` as in `write_packed`."""
    import torch

    from bitnet.checkpoint import CheckpointError, load_config, load_template
    from bitnet.positions import frequency_tables

    from .hf.shards import SINGLE, tensors_of

    config, body = load_config(folder), packed.ternary_encoding(encoding)
    if head is not None:
        config = config.replace(head_format=head)
    zeros = sparsity.zero_inputs(folder, config) if sparsity.rectified(config) else None
    if sparse is None:
        sparse = zeros is not None and sparsity.pays(config, zeros, body)
    tables = frequency_tables(config)
    template = load_template(folder)
    tokenizer, generation = _tokenizer(folder, config)
    try:
        tensors = tensors_of(Content.open(folder / SINGLE), str(folder / SINGLE))
    except SourceError as error:
        raise CheckpointError(str(error)) from None
    left = set(tensors)

    def source(spec: Spec) -> Encoded:
        name = spec.key.name
        if name in tables:
            return Encoded.f32(tables[name].numpy())
        if name not in left:
            raise CheckpointError(f"{folder}: tensor {name} is missing, config.json calls for it")
        left.remove(name)
        found, shape = tensors[name].shape, (spec.rows, spec.cols)
        if found != shape and found != shape[1:]:
            raise CheckpointError(f"{folder}: tensor {name} has shape {found}, config.json calls for {shape}")
        weight = torch.from_numpy(tensors[name].floats().all())
        if not weight.isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinity")
        return encode(spec, weight, config, packed.encoding_of(packed.ROLES[spec.key.role], body, sparse))

    def complete(file: Path) -> None:
        if left:
            raise CheckpointError(f"{folder}: tensor {min(left)} is there, config.json does not call for it")
        if check:
            check(file)

    write_packed(
        out,
        [config],
        source,
        metadata={"generation": generation, "provenance": _provenance(folder)} | _shares(zeros),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        check=complete,
    )


def _shares(zeros: ZeroInputs | None) -> dict[str, Any]:
    """For METADATA: the shares by layer, in thousandths."""
    if zeros is None:
        return {}
    return {"zero_inputs": {key: [round(z, 3) for z in share] for key, share in dataclasses.asdict(zeros).items()}}


def encode(spec: Spec, weight: torch.Tensor, config: ModelConfig, body: int = packed.TERNARY_2BIT) -> Encoded:
    """What training's quantizers make of a master weight, as it is stored; `body` for ternary weights."""
    from bitnet.quant import row_codes, ternary_codes

    role = packed.ROLES[spec.key.role]
    if spec.key.part == 0 and role in config.ternary:
        codes, scales = ternary_codes(weight, config.weight_scale)
        scope = packed.SCOPE_NAMES.index(config.weight_scale)
        return Encoded(body, scope, packed.TILES[body].pack(codes.numpy()), scales.numpy())
    if spec.formats == packed.TABLE_FORMATS and config.head_format == "int8":
        codes, scales = row_codes(weight)
        rows = packed.int8_encoding(spec, config)
        return Encoded(rows, packed.SCALE_ROW, packed.TILES[rows].pack(codes.numpy()), scales.numpy())
    values = weight.detach().float().numpy()
    if spec.formats == packed.TABLE_FORMATS and config.head_format == "f16":
        return Encoded.f16(values)
    return Encoded.f32(values)


def _tokenizer(folder: Path, config: ModelConfig) -> tuple[bytes | None, dict[str, Any]]:
    """The tokenizer's JSON and the generation defaults that follow from it."""
    from bitnet import tokenizer
    from bitnet.checkpoint import load_generation

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None, {}
    words = tokenizer.load(file)
    largest = max(words.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(
            f"{file} has token id {largest}, config.json has vocab_size {config.vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    generation = load_generation(folder)
    end = words.token_to_id(tokenizer.END)
    if not generation and end is not None:
        generation = {"eos_token_ids": [end], "bos_token_id": end}
    return file.read_bytes(), generation


def _provenance(folder: Path) -> dict[str, Any]:
    from bitnet.checkpoint import load_state

    state = load_state(folder) if (folder / "state.json").is_file() else {}
    seconds = os.environ.get("SOURCE_DATE_EPOCH")  # the usual way to ask for the same bytes again
    now = (
        datetime.datetime.fromtimestamp(int(seconds), datetime.UTC) if seconds else datetime.datetime.now(datetime.UTC)
    )
    known = {key: state[key] for key in ("step", "tokens") if isinstance(state.get(key), int)}
    return {"source": folder.name, **known, "tool": _version(), "date": now.strftime("%Y-%m-%d")}


def _version() -> str:
    from importlib import metadata

    try:
        return "bitnet-edge " + metadata.version("bitnet-edge")
    except metadata.PackageNotFoundError:
        return "bitnet-edge"
