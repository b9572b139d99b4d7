"""A folder of token ids, made once and shared by runs, which map its files and read no text.

    tokens.json     contents: {"first": 0, "train": {"file": ..., "sha256": ...}, "validation": {...}},
                    and the share of the documents that is held out, {"held_out": 0.05}; if the end of a single
                    document is held out, its SHA-256, {"cut": ...}; what a new tokenizer was asked
                    to be, {"kind": "bpe", "vocab_size": 4096}
    tokenizer.json  the tokenizer of the ids
    train-HASH.bin, validation-HASH.bin
    train.documents, validation.documents   SHA-256 of each document, 32 bytes; old folders have none

Runs take it instead of text, `--data FOLDER`. One without "train" is only for evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bitnet.data import corpus, dataset, tokenizer
from bitnet.data.alike import Index
from bitnet.data.corpus import DataError
from bitnet.data.dataset import Tokens
from bitnet.process import written
from bitnet_runtime.errors import json_kind

CONTENTS = "tokens.json"
SHA256 = 32  # bytes


def make(
    folder: Path,
    texts: corpus.Documents,
    validation: float,
    kind: str,
    vocab_size: int,
    say: Callable[[str], object],
    alike: float = 0.0,
    more: Sequence[str] = (),
) -> dict[str, Tokens]:
    """Token ids of text, split as a run would split it. kind: of the tokenizer, or the path of a tokenizer.json.

    alike: similarity of two texts (`Index`) from which on one of them is left out; 0: keep all.
    more: special tokens of a new tokenizer.
    """
    take = Index(alike).add if alike else lambda _: True
    train, held_out = corpus.split(texts, validation, say, take)
    if texts.left_out:
        say(texts.left_out)
    given = Path(kind).is_file()
    words = tokenizer.load(kind) if given else tokenizer.build(kind, train, vocab_size, *more)
    first = tokenizer.separator(words, tokenizer.ends_beside(kind) if given else {})
    sides = {"train": train, "validation": held_out}
    write(
        folder,
        words,
        sides,
        first,
        validation,
        {} if given else {"kind": kind, "vocab_size": vocab_size},
    )
    return dict(zip(("train", "validation"), read(folder, "train", "validation")[1], strict=True))


def write(
    folder: Path, words: Tokenizer, texts: Mapping[str, Iterable[str]], first: int = tokenizer.END_ID,
    share: float | None = None, asked: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """texts: by side, "train" and "validation". first: the token before every document. share: of documents held out.
    asked: kind and vocab_size of a new tokenizer.

    tokens.json is written last and atomically: without it a folder does not count as one of token ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sides = {name: corpus.every(text) for name, text in texts.items()}
    made = {name: dataset.tokenize(side, words, folder, name, first).to_dict() for name, side in sides.items()}
    for name, side in sides.items():
        with written(folder / f"{name}.documents") as out:
            out.write(b"".join(side.digests))
    words.save(str(folder / "tokenizer.json"))
    cut = next((side.cut_digest for side in sides.values()), b"")
    said = {"first": first, "held_out": share} | ({"cut": cut.hex()} if cut else {}) | dict(asked or {})
    with written(folder / CONTENTS) as out:
        out.write(json.dumps(said | made, indent=1).encode() + b"\n")


def named(data: Sequence[str]) -> Path | None:
    """The folder of token ids that --data names; None if it names text. Raises DataError if it names both."""
    folders = [Path(source) for source in data if (Path(source) / CONTENTS).is_file()]
    if folders and len(data) > 1:
        raise DataError(f"{folders[0]} holds token ids, which cannot be mixed with other --data; give it alone")
    return folders[0] if folders else None


def read(folder: Path, *sides: str) -> tuple[Tokenizer, list[Tokens]]:
    """Its tokenizer, and the token ids of `sides`. Raises DataError if they are missing or damaged."""
    words, contents = tokenizer_of(folder), contents_of(folder)
    found = []
    for side in sides:
        tokens = dataset.recorded({"texts": contents}, side, folder)
        if tokens is None:
            raise DataError(f"{folder / CONTENTS} names no token ids for {side}, or their file is missing")
        if tokens.largest >= (size := tokenizer.vocabulary_size(words)):
            raise DataError(f"{folder} holds token ids beyond its tokenizer's {size - 1:,}")
        found.append(tokens)
    return words, found


def check_of(folder: Path, words: Tokenizer, first: int) -> None:
    """Raises DataError if the token ids do not fit a model with this tokenizer, and `first` before texts."""
    if words.to_str() != tokenizer_of(folder).to_str():
        raise DataError(f"{folder} holds token ids of another tokenizer than the model's; give the text itself")
    if (found := contents_of(folder).get("first", tokenizer.END_ID)) != first:
        raise DataError(
            f"{folder} has token {found!r:.20} before every document, and the model {first}; give the text itself"
        )


def check_asked(folder: Path, kind: str, vocab_size: int) -> None:
    """Raises DataError if a run asks for another tokenizer than that of the token ids; "" and 0: it asks for none."""
    contents = contents_of(folder)
    if kind not in ("", contents.get("kind")):
        raise DataError(
            f"{folder} holds token ids of a tokenizer of its own, and --tokenizer {kind} asks for another; leave that "
            "out, or give the text itself"
        )
    found = tokenizer.vocabulary_size(tokenizer_of(folder))
    if vocab_size not in (0, found, contents.get("vocab_size")):  # a text may have had too few pairs for all it asked
        raise DataError(
            f"{folder} holds token ids of a vocabulary of {found:,}, and vocab_size is {vocab_size}; leave that out, "
            "or give the text itself"
        )


def check_read(folder: Path, validation: float | None, column: str | None) -> None:
    """Raises DataError if a run asks to hold out another share than the folder does, or for a column of text; None: it
    asks for none."""
    held_out = contents_of(folder).get("held_out")
    if isinstance(held_out, float) and validation not in (None, held_out):
        raise DataError(
            f"{folder} holds out {held_out:g} of its documents, and --validation is {validation:g}; leave that out, or "
            "give the text itself"
        )
    if column is not None:
        raise DataError(f"{folder} holds token ids, which have no --column; leave that out, or give the text itself")


def check_apart(shared: Mapping[str, Path], others: Mapping[str, float]) -> None:
    """Raises DataError if sources hold out different shares of their documents. With equal shares, a document's hash
    puts it on the same side in all of them.

    shared: folders of token ids, of which old ones do not record their share; others: the shares of other sources.
    """
    said = {name: contents_of(folder).get("held_out") for name, folder in shared.items()}
    shares = {name: share for name, share in (said | dict(others)).items() if isinstance(share, float)}
    if len(set(shares.values())) > 1:
        found = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        raise DataError(
            f"the sources hold out different shares of their documents ({found}), so one may learn what another holds "
            "out; make them with the same --validation"
        )


@dataclass(frozen=True)
class Digests:
    """The documents of one side of a folder, read when they are asked for; none of an old folder."""

    file: Path
    cut_digest: bytes

    @cached_property
    def digests(self) -> list[bytes]:
        raw = self.file.read_bytes() if self.file.is_file() else b""
        if len(raw) % SHA256:
            raise DataError(
                f"{self.file} has {len(raw)} bytes, expected SHA-256 digests of {SHA256}; make the folder again"
            )
        return [raw[i : i + SHA256] for i in range(0, len(raw), SHA256)]


def documents_of(folder: Path) -> tuple[corpus.Side, corpus.Side]:
    """The documents of both sides. Raises DataError."""
    try:
        cut = bytes.fromhex(found := contents_of(folder).get("cut", ""))
    except (TypeError, ValueError):
        raise DataError(f"{folder / CONTENTS} has the cut {found!r:.80}, expected a SHA-256 in hexadecimals") from None
    return Digests(folder / "train.documents", cut), Digests(folder / "validation.documents", cut)


def tokenizer_of(folder: Path) -> Tokenizer:
    try:
        return tokenizer.load(folder / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no folder of token ids: {error}") from None


def contents_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder} is no folder of token ids: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{folder / CONTENTS} holds {json_kind(found)}, expected an object")
    return found
