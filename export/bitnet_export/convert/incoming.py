"""A published model to a packed file, and a packed file to the formats of others."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.config import ModelConfig
from bitnet_export.checkpoint.sparsity import require_zeros
from bitnet_export.foreign.source import Progress, Source, SourceError, encode
from bitnet_export.packed import encodings, records
from bitnet_export.packed.recognise import PROBE, recognise
from bitnet_export.packed.records import Spec
from bitnet_export.packed.replacing import kind_of, spare
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime.defaults import whole

if TYPE_CHECKING:
    from bitnet_export.checkpoint.findings import Checked

MOST_TOKENS = 8192
"""Most tokens to compare: the reference computes all of them side by side, of 2B4T at some 50 kB each."""


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Open a published model, whatever its format; the format is told from the content.

    Raises SourceError (or an OSError) that says what was found and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "state.json").exists() or any(path.glob("step-*/state.json")):
            raise SourceError(f"{path} was written by bitnet train; bitnet export makes a packed file of it")
        from bitnet_export.foreign.hf.read import open_folder

        with open_folder(path) as source:
            yield source
        return
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise SourceError(f"{path} is a device or pipe, expected a Hugging Face folder or a GGUF file")
    with open(path, "rb") as file:
        head = file.read(PROBE)
    if head.startswith(b"GGUF"):
        from bitnet_export.foreign.gguf.read import open_gguf

        with open_gguf(path) as source:
            yield source
        return
    if head.startswith(records.MAGIC):
        if kind_of(path) == "adapter":
            raise SourceError(f"{path} is an adapter, expected the model that it belongs to")
        raise SourceError(f"{path} is a packed file already; say what it should become: --to hf, gguf or onnx")
    raise SourceError(
        f"{path} is {recognise(head) or 'a file of an unknown kind'}; "
        "expected a Hugging Face folder (config.json and safetensors) or a GGUF file"
    )


@dataclass(frozen=True)
class Conversion:
    """The report of `bitnet convert` on a converted model."""

    what: str
    assumptions: tuple[str, ...]
    file_bytes: int
    checked: Checked

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"found      {self.what}", *(f"assumed    {line}" for line in self.assumptions)]
        return "\n".join([*lines, f"size       {self.file_bytes / 1e6:.2f} MB", str(self.checked)])


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    encoding: str = "2.0",
    head: str = "int8",
    linears: str | None = None,
    sparse: bool = False,
    tokens: int = 512,
    progress: Progress = lambda _: None,
) -> Conversion:
    """Write a published model as a packed file, and verify it.

    encoding: bits a ternary weight, "2.0" or "1.6". head: how embedding and head are stored unless
    they are ternary, "int8", "f16" or "f32". linears: the same of linear layers that are not ternary;
    None: `stored_floats`. sparse: `up` and `down` in lines, of which the engine
    reads only those that are not multiplied by 0; for FFNs with relu². tokens: how many are scored
    by engine and reference, at most MOST_TOKENS.
    The file appears only if it passes. Raises SourceError: the source cannot be converted;
    VerificationError; ValueError: an option is not for it; OSError.
    """
    from .verify_source import verify_source

    tokens = whole("tokens", tokens, 1, MOST_TOKENS)
    source, out = Path(source), Path(out)
    spare(source, out)
    checks: list[Checked] = []

    def check(file: Path) -> None:
        stored = linears or stored_floats(model.config)
        checks.append(verify_source(model, file, tokens=tokens, linears=stored, progress=progress))

    with open_source(source) as model:
        progress(f"found {model.what}")
        if sparse:
            require_zeros(model.config, source)
        pack_source(
            model, out, encoding=encoding, head=head, linears=linears, sparse=sparse, check=check, progress=progress
        )
        return Conversion(model.what, model.assumptions, os.path.getsize(out), checks[0])


def stored_floats(config: ModelConfig) -> str:
    """How linear layers that are not ternary are stored by default.

    The few of a ternary model as they are. Of a full-precision model f16, which is exact for weights of bf16 from
    2**-17 to 65504 and takes no more bytes than they do; int8 would round the activations too.
    """
    return "f32" if config.ternary else "f16"


def pack_source(
    source: Source,
    out: str | os.PathLike[str],
    *,
    encoding: str = "2.0",
    head: str = "int8",
    linears: str | None = None,
    sparse: bool = False,
    check: Callable[[Path], None] | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Write a Source as a packed file, one tensor in memory at a time. check: as in `write_packed`."""
    from bitnet.model.positions import frequency_tables

    body, floats = encodings.ternary_encoding(encoding), encodings.TABLES[linears or stored_floats(source.config)]
    stacks = [_stored(stack, head) for stack in source.config.stacks]
    tables = [frequency_tables(stack) for stack in stacks]
    total = sum(1 for i, stack in enumerate(stacks) for _ in records.expected_tensors(stack, i))
    done = itertools.count(1)

    def load(spec: Spec) -> Encoded:
        key, stack = spec.key, stacks[spec.key.stack]
        progress(f"writing tensor {next(done)} of {total}, {key.name}")
        if (table := tables[key.stack].get(key._replace(stack=0).name)) is not None:
            return Encoded.f32(table.numpy())
        role = records.ROLES[key.role]
        stored_as = encodings.encoding_of(role, body, sparse and not key.stack)
        return encode(spec, source.load(key), stack, stored_as, floats)

    metadata = {"generation": dict(source.generation), "provenance": dict(source.provenance)}
    write_packed(
        out, stacks, load, metadata=metadata, tokenizer=source.tokenizer, template=source.template, check=check
    )


def _stored(stack: ModelConfig, head: str) -> ModelConfig:
    return stack if stack.head_format == "ternary" else stack.replace(head_format=head)
