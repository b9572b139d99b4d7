"""A GGUF file as a Source: the container's content in our terms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitnet_export.foreign.source import Source, SourceError
from bitnet_export.packed.content import Content

from .container import Gguf
from .families import Model
from .sampling import read_sampling
from .tokenizer import tokenizer_of


@contextmanager
def open_gguf(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Open a GGUF file as a Source. Raises SourceError or OSError."""
    path = Path(path)
    content = Content.open(path)
    if content.size == 0:
        raise SourceError(f"{path} is empty, expected a GGUF file")
    try:
        yield _source(Gguf(content), path)
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from None


def _source(file: Gguf, path: Path) -> Source:
    """A GGUF file as a Source. Raises SourceError for an unknown architecture or option, or tensors that do not fit."""
    model = Model(file)
    tokenizer, template, generation, words = _tokenizer(file.metadata, model.config.vocab_size)
    sampling, left = read_sampling(file.metadata)
    kinds = sorted({file.tensors[name].type.name for name in model.linears()})
    if "I2_S" in kinds:
        model.assumptions.append(
            "I2_S is assumed to be in the layout of x86 (128 weights in 32 bytes), as in all published files; files "
            "quantized on ARM (64 in 16), or with four rows in a byte, have the same type and size and give nonsense"
        )
    return Source(
        what=f"GGUF {file.version}, {model.arch}, {' and '.join(kinds)}, one scale per {model.config.weight_scale}",
        config=model.config,
        load=model.load,
        assumptions=(*model.assumptions, *words, *left),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        generation={**generation, **sampling},
        provenance={"source": path.name, "format": f"GGUF {file.version}", "architecture": model.arch},
    )


def _tokenizer(
    metadata: Mapping[str, Any], vocab_size: int
) -> tuple[bytes | None, str | None, Mapping[str, Any], list[str]]:
    """`tokenizer_of` the vocabulary, if there is one."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None, None, {}, ["no tokenizer in the file: text cannot be used, token ids can"]
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        found = f"{len(tokens)} tokens" if isinstance(tokens, list) else repr(tokens)
        raise SourceError(f"tokenizer.ggml.tokens has {found:.80}, token_embd.weight has {vocab_size} rows")
    return tokenizer_of(metadata)
