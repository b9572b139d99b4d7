"""A published model to a packed file, and a packed file to the formats of others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import packed
from .foreign import PROBE, recognise
from .packed import Spec
from .source import Source, SourceError, encode
from .writer import Encoded, write_packed


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Open a published model, whatever its format; the format is told from the content.

    Raises SourceError (or an OSError) that says what was found and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        from .hf.read import open_folder

        with open_folder(path) as source:
            yield source
        return
    with open(path, "rb") as file:
        head = file.read(PROBE)
    if head.startswith(b"GGUF"):
        from .gguf.read import open_gguf

        with open_gguf(path) as source:
            yield source
        return
    if head.startswith(packed.MAGIC):
        raise SourceError(f"{path} is a packed file already; say what it should become: --to hf, gguf or onnx")
    raise SourceError(
        f"{path} is {recognise(head) or 'a file of an unknown kind'}; "
        "expected a Hugging Face folder (config.json and safetensors) or a GGUF file"
    )


def pack_source(
    source: Source,
    out: str | os.PathLike[str],
    *,
    encoding: str = "2.0",
    head: str = "int8",
    check: Callable[[Path], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a Source as a packed file, one tensor in memory at a time.

    check: as in `write_packed`. progress: called with (tensors done, of all).
    """
    from bitnet.model import frequency_tables

    config, body = source.config.replace(head_format=head), packed.ternary_encoding(encoding)
    tables = frequency_tables(config)
    total = sum(1 for _ in packed.expected_tensors(config))
    done = itertools.count()

    def load(spec: Spec) -> Encoded:
        if progress:
            progress(next(done), total)
        if spec.key.name in tables:
            return Encoded.f32(tables[spec.key.name].numpy())
        return encode(spec, source.load(spec.key), head, body)

    metadata = {"generation": dict(source.generation), "provenance": dict(source.provenance)}
    write_packed(
        out, [config], load, metadata=metadata, tokenizer=source.tokenizer, template=source.template, check=check
    )
