"""A folder of token ids, made once and shared by runs: they map its files and read no text.

    tokens.json     what is where: {"train": {"file": ..., "sha256": ...}, "validation": {...}}
    tokenizer.json  what the ids are of
    train-HASH.bin, validation-HASH.bin

Runs take it in place of text, `--data FOLDER`. One without "train" is to measure on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bitnet.data import corpus, dataset, tokenizer
from bitnet.data.corpus import DataError
from bitnet.data.dataset import Tokens

CONTENTS = "tokens.json"


def make(
    folder: Path, data: Sequence[str], validation: float, kind: str, vocab_size: int, say: Callable[[str], object]
) -> dict[str, Tokens]:
    """Token ids of text, split as a run would split it. kind: of tokenizer, or the path of a tokenizer.json."""
    texts = corpus.Documents(data)
    train, held_out = corpus.split(texts, validation, say)
    if texts.left_out:
        say(texts.left_out)
    words = tokenizer.load(kind) if Path(kind).is_file() else tokenizer.build(kind, train, vocab_size)
    write(folder, words, {"train": train, "validation": held_out})
    return dict(zip(("train", "validation"), read(folder, "train", "validation")[1], strict=True))


def write(folder: Path, words: Tokenizer, texts: Mapping[str, Iterable[str]]) -> None:
    """texts: by what they are for, "train" and "validation"."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: dataset.tokenize(text, words, folder, name).to_dict() for name, text in texts.items()}
    words.save(str(folder / "tokenizer.json"))
    (folder / CONTENTS).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def named(data: Sequence[str]) -> Path | None:
    """The folder of token ids that --data names; None when it names text. Raises DataError: it names both."""
    folders = [Path(source) for source in data if (Path(source) / CONTENTS).is_file()]
    if folders and len(data) > 1:
        raise DataError(f"{folders[0]} holds token ids, which cannot be mixed with other --data; give it alone")
    return folders[0] if folders else None


def read(folder: Path, *sides: str) -> tuple[Tokenizer, list[Tokens]]:
    """Its tokenizer, and the token ids that are for `sides`. Raises DataError: it has none, or they are damaged."""
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        words = tokenizer.load(folder / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no folder of token ids: {error}") from None
    found = []
    for side in sides:
        tokens = dataset.recorded({"texts": contents}, side, folder)
        if tokens is None:
            raise DataError(f"{folder / CONTENTS} names no token ids for {side}, or their file is missing")
        if not 0 <= int(tokens.ids.max(initial=0)) < words.get_vocab_size():
            raise DataError(f"{folder} holds token ids beyond its tokenizer's {words.get_vocab_size():,}")
        found.append(tokens)
    return words, found
