"""Training data of vision models: records of images and texts (`bitnet.data.picture_files`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet.data import dialogues, finding, picture_files, picture_talks, pictures, tokenizer
from bitnet.data.frames import Frame
from bitnet.data.picture_rows import Answers, Captions
from bitnet.settings import Settings
from bitnet.train.progress import say

Sides = tuple[pictures.Pictures, pictures.Pictures]


def read(
    settings: Settings,
    vision: ModelConfig,
    before: dict[str, Any],
    generation: dict[str, Any],
    choose: Callable[[Iterable[str]], Tokenizer],
) -> tuple[Tokenizer, Sides]:
    """Tokenizer, and the records of training and validation: already in the run folder, or read again."""
    folder = settings.run_folder
    if before and all(before["settings"].get(name) == getattr(settings, name) for name in ("data", "validation")):
        kept = [pictures.recorded(before, side, folder) for side in ("train", "validation")]
        if kept[0] and kept[1]:
            return choose([]), (kept[0], kept[1])
    say(f"{folder}: reading the records, tokenizing texts and decoding images")
    sides = pictures.split(_records(settings, settings.data), settings.validation, say)
    words = choose(text for record in sides[0].records for text in (record.prefix + "\n", record.suffix))
    if settings.objective == "next":
        tokenizer.image_token(words)
    first = tokenizer.separator(words, generation)
    train, held_out = (
        pictures.store(side, words, pictures.Sight.of(vision, generation), folder, name, first)
        for side, name in zip(sides, ("train", "validation"), strict=True)
    )
    return words, (train, held_out)


def of_checkpoint(
    settings: Settings,
    vision: ModelConfig,
    words: Tokenizer,
    generation: dict[str, Any],
    data: Sequence[str] | None,
    scratch: Path,
) -> pictures.Pictures:
    """The records to evaluate a checkpoint on: `data`, or by default what its run held out."""
    records = _records(settings, data or settings.data)
    side = pictures.every(records) if data else pictures.split(records, settings.validation)[1]
    return pictures.store(
        side, words, pictures.Sight.of(vision, generation), scratch, "text", tokenizer.separator(words, generation)
    )


def _records(settings: Settings, data: Sequence[str]) -> Iterable[picture_files.Record]:
    records = picture_files.read(data, say)
    return picture_files.captions(records) if settings.objective == "contrastive" else records


def template(words: Tokenizer, generation: dict[str, Any]) -> str:
    """The chat template of a model that was trained on records: the last message, framed as a question of `Answers`."""
    frame = Frame.of(words, tokenizer.defaults(words, generation))
    before, behind = (
        "".join(words.id_to_token(token) or "" for token in side) for side in (frame.before, frame.behind)
    )
    return f"{{{{ {json.dumps(before)} + messages[-1]['content'] + {json.dumps(chr(10) + behind)} }}}}"


def read_talks(
    settings: Settings, vision: ModelConfig, generation: dict[str, Any], choose: Callable[[Iterable[str]], Tokenizer]
) -> tuple[Tokenizer, list[tuple[pictures.Side, Path]]]:
    """Tokenizer, and the conversations of training and validation with the file of their pictures."""
    folder, sight = settings.run_folder, pictures.Sight.of(vision, generation)
    say(f"{folder}: reading the conversations, decoding images")
    sides = pictures.split(picture_talks.read(finding.files_of(settings.chat)), settings.validation, say)
    words = choose(picture_talks.texts(sides[0]))
    tokenizer.image_token(words)
    names = ("train", "validation")
    return words, [(side, pictures.decode(side, sight, folder, n)) for side, n in zip(sides, names, strict=True)]


def talks_of_checkpoint(
    settings: Settings, vision: ModelConfig, generation: dict[str, Any], files: Sequence[Path], scratch: Path
) -> tuple[pictures.Side, Path]:
    """The conversations to evaluate a checkpoint on: those of `files`, or by default what its run held out."""
    records = picture_talks.read(files or finding.files_of(settings.chat))
    side = pictures.every(records) if files else pictures.split(records, settings.validation)[1]
    return side, pictures.decode(side, pictures.Sight.of(vision, generation), scratch, "text")


def with_template(words: Tokenizer, given: str | None, generation: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Like `dialogues.with_template`, but a template that is for records is replaced, as it has no conversations."""
    plain = given == template(words, generation)
    image = words.id_to_token(tokenizer.image_token(words)) or ""
    default = picture_talks.CHATML.replace("IMAGE", image)
    return dialogues.with_template(words, None if plain else given, generation, default)


def talks(
    config: ModelConfig, words: Tokenizer, chat: str, generation: dict[str, Any], side: pictures.Side, file: Path,
    context: int,
) -> picture_talks.Talks:  # fmt: skip
    """Conversations as training rows. chat: the template."""
    assert config.vision
    sight, image = pictures.Sight.of(config.vision, generation), tokenizer.image_token(words)
    found = picture_talks.Talks(side, file, sight, words, chat, generation, image, config.mask == "prefix")
    if long := found.total - found.count(context):
        say(f"{long:,} of {found.total:,} rows have more than {context:,} tokens and are left out; see --context")
    return found


def rows(
    settings: Settings,
    vision: ModelConfig,
    words: Tokenizer,
    generation: dict[str, Any],
    kept: pictures.Pictures,
    context: int,
) -> Captions | Answers:
    """Records as training rows."""
    first, sight = tokenizer.separator(words, generation), pictures.Sight.of(vision, generation)
    frame = Frame.of(words, tokenizer.defaults(words, generation))
    if settings.objective == "contrastive":
        return Captions(kept, sight, first, frame)
    rows = Answers(kept, sight, first, frame, tokenizer.end_token(words, generation), tokenizer.image_token(words))
    if long := len(rows.lengths) - rows.count(context):
        n = len(rows.lengths)
        say(f"{long:,} of {n:,} records have more than {context:,} tokens and are left out; see --context")
    return rows
