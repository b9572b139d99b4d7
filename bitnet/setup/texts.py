"""The data of a run: tokenizer, training batches, and what is held out. For images: `bitnet.setup.sights`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet.data import (
    conversations,
    corpus,
    dataset,
    finding,
    packing,
    pairs,
    picture_talks,
    tokenized,
    tokenizer,
)
from bitnet.data.dialogues import Dialogues, Encoder, unwritten, with_template
from bitnet.data.frames import Frame
from bitnet.data.picture_rows import Captions
from bitnet.model import parallel
from bitnet.settings import Settings
from bitnet.setup import sights
from bitnet.train import mixtures, objectives, preferences, source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.objectives import Learnt
from bitnet.train.progress import say


class Asked(NamedTuple):
    """The arguments of the readers of each kind of data."""

    settings: Settings
    config: ModelConfig
    before: dict[str, Any]  # the state of a run that goes on
    template: str | None
    generation: dict[str, Any]
    context: int
    choose: Callable[[Iterable[str]], Tokenizer]
    newest: Path  # the checkpoint of a resumed run


def read_data(
    settings: Settings,
    config: ModelConfig,
    newest: Checkpoint | None,
    start: source_model.Start | None = None,
    tower: source_model.Start | None = None,
) -> Learnt:
    """Read the data of a run."""
    before = newest.state if newest else {}
    template, generation = (start.template, start.generation) if start else (None, {})
    if newest is not None:
        template, generation = newest.template, newest.generation
    elif not start and Path(settings.tokenizer).is_file():
        generation = tokenizer.ends_beside(settings.tokenizer)
    if tower:  # its preprocessing of pictures goes with it
        generation = {name: value for name, value in generation.items() if name != "pictures"}
        generation |= {name: value for name, value in tower.generation.items() if name == "pictures"}

    def choose(texts: Iterable[str]) -> Tokenizer:
        words = start.words if start and newest is None else choose_tokenizer(settings, config, texts, newest)
        if settings.fim:
            words.add_special_tokens(list(tokenizer.FIM))  # adds only missing ones
        return words

    context = settings.context or config.max_context
    asked = Asked(settings, config, before, template, generation, context, choose, newest.folder if newest else Path())
    if settings.preference:
        words = parallel.from_first(lambda: choose([]))
        words.encode_special_tokens = True  # which does not go from one process to another
        return Learnt(words, *preferences.read(settings, words, template, generation, context))
    if config.vision:
        return (_talks_on_images if settings.chat else _images)(asked, config.vision)
    return (_talks if settings.chat else _texts)(asked)


def _talks_on_images(asked: Asked, vision: ModelConfig) -> Learnt:
    settings, context = asked.settings, asked.context
    words, said = parallel.from_first(lambda: sights.read_talks(settings, vision, asked.generation, asked.choose))
    words.encode_special_tokens = True
    template, generation = sights.with_template(words, asked.template, asked.generation)
    seen, unseen = (sights.talks(asked.config, words, template, generation, *side, context) for side in said)
    answered = picture_talks.Batches(seen, settings.batch, context, settings.seed, settings.augment)
    return Learnt(words, template, generation, answered, unseen)


def _talks(asked: Asked) -> Learnt:
    settings, context = asked.settings, asked.context
    talks = conversations.split(conversations.read(finding.files_of(settings.chat)), settings.validation, say)
    words = parallel.from_first(lambda: asked.choose(conversations.said_in(talks[0])))
    words.encode_special_tokens = True
    template, generation = with_template(words, asked.template, asked.generation)
    encoder, prefix = Encoder(words, template, generation), asked.config.mask == "prefix"
    dialogues, others = (Dialogues(side, encoder, words, prefix, context) for side in talks)
    if not others.windows(context):
        raise corpus.DataError(
            f"no held-out conversation has an answer within {context:,} tokens; raise --context, or --validation"
        )
    note_long(dialogues, context, say)
    if lost := unwritten(talks[0] + talks[1], template):
        say(lost)
    batches = packing.Batches(dialogues, settings.batch, context, settings.seed)
    return Learnt(words, template, generation, batches, others)


def note_long(dialogues: Dialogues, context: int, say: Callable[[str], object]) -> None:
    if cut := dialogues.too_long(context):
        none = dialogues.answerless(context)
        lost = f"lose their end, {none:,} of them every answer" if none else "lose their end"
        say(f"{cut:,} conversations are longer than {context:,} tokens and {lost}; see --context")


def note_cut(learnt: object, context: int, say: Callable[[str], object]) -> None:
    """Say how many pairs do not fit a row, if the data are pairs."""
    if isinstance(learnt, pairs.Pairs | Captions) and (cut := learnt.too_long(context)):
        n = learnt.count(context)
        say(f"{cut:,} of {n:,} pairs have a text of more than {context:,} tokens, which loses its end; see --context")


def _images(asked: Asked, vision: ModelConfig) -> Learnt:
    settings, config, before, template, generation, context, choose, _ = asked
    words, kept = parallel.from_first(lambda: sights.read(settings, vision, before, generation, choose))
    words.encode_special_tokens = True
    train, held_out = (sights.rows(settings, vision, words, generation, side, context) for side in kept)
    batches = objectives.batches(settings, config, words, train, context)
    note_cut(train, context, say)
    if settings.objective == "next":
        template = template or sights.template(words, generation)
    unseen = objectives.held_out(settings, config, words, held_out, context)
    return Learnt(words, template, generation, batches, unseen)


def _texts(asked: Asked) -> Learnt:
    settings, config, before, template, generation, context, choose, newest = asked
    read = mixtures.read if settings.mixture else read_text
    check = functools.partial(check_text, newest, before)
    words, sides = parallel.from_first(lambda: read(settings, before, generation, choose, check))
    words.encode_special_tokens = True
    learnt = sides[0]  # the other processes map the files
    check(learnt.digest)
    batches = objectives.batches(settings, config, words, learnt, context, generation)
    note_cut(learnt, context, say)
    for name, side in mixtures.parts_of(sides[1]).items():
        if not side.windows(context):  # said before the first step, not after
            raise corpus.DataError(
                f"the validation text{name} has {side.n_tokens:,} tokens, one window needs {context + 1:,}; add data, "
                "raise --validation, or lower --context"
            )
    unseen = objectives.held_out(settings, config, words, sides[1], context)
    return Learnt(words, template, generation, batches, unseen)


def check_text(newest: Path, before: Mapping[str, Any], digest: str, held_out: str | None = None) -> None:
    """Raises DataError: a resumed run was trained or measured on other data."""
    if before and (before["data"] != digest or held_out not in (None, before.get("held_out", held_out))):
        raise corpus.DataError(
            f"{newest} was trained on other text, or with another --validation; start another run with --out, from its "
            f"weights with `bitnet finetune {shlex.quote(str(newest))}`"
        )


Sides = tuple[dataset.Tokens, dataset.Tokens] | tuple[pairs.Pairs, pairs.Pairs]


def read_text(
    settings: Settings,
    before: dict[str, Any],
    generation: dict[str, Any],
    choose: Callable[[Iterable[str]], Tokenizer],
    check: Callable[[str], None],
) -> tuple[Tokenizer, Sides]:
    """Tokenizer, and the token ids of training and validation: those the run has, or from the text read again.

    check: is given the digest of text before it is tokenized, which takes most of the time; raises to refuse it.
    """
    folder, contrastive = settings.run_folder, settings.objective == "contrastive"
    kept_so = ("data", "column", "validation")
    if before and all(
        getattr(Settings.from_dict(before["settings"]), name) == getattr(settings, name) for name in kept_so
    ):
        kept = [dataset.recorded(before, side, folder) for side in ("train", "validation")]
        if kept[0] and kept[1]:
            words = choose([])
            return words, _in_pairs(contrastive, words, generation, before.get("pairs", False), kept[0], kept[1])
    if shared := tokenized.named(settings.data):
        known = choose([]) if before or settings.source else None
        words, (train, held_out) = read_shared(shared, known, generation, settings, "train", "validation")
        if not before:
            say(f"{shared}: its tokenizer, of {words.get_vocab_size():,} tokens, and its validation text are used")
        return words, _in_pairs(contrastive, words, generation, False, train, held_out)
    texts, given = source_of(settings.data, settings.column, contrastive)
    say(f"{folder}: reading and tokenizing {_shown(settings.data)}")
    split = corpus.split(texts, settings.validation, say)
    note(texts, say)
    sides: tuple[Iterable[str], Iterable[str]] = pairs.separate(*split) if given else split
    words = choose(sides[0])
    first = tokenizer.separator(words, generation)
    learnt = corpus.every(sides[0])
    check(dataset.digest_of(learnt, words, first))
    train = dataset.tokenize(learnt, words, folder, "train", first)
    held_out = dataset.tokenize(sides[1], words, folder, "validation", first)
    return words, _in_pairs(contrastive, words, generation, given, train, held_out)


def read_shared(
    folder: Path, words: Tokenizer | None, generation: dict[str, Any], settings: Settings, *sides: str
) -> tuple[Tokenizer, list[dataset.Tokens]]:
    """Tokenizer and ids of a folder of token ids. words: the model's tokenizer, which must match; None: none yet."""
    made, found = tokenized.read(folder, *sides)
    if words is None:
        words = tokenizer.load(settings.tokenizer) if Path(settings.tokenizer).is_file() else made
    tokenized.check_of(folder, words, tokenizer.separator(words, generation))
    return made, found


def source_of(data: Sequence[str], column: str, contrastive: bool) -> tuple[corpus.Documents | pairs.Joined, bool]:
    """The texts that sources name, and whether they are joined pairs."""
    files = pairs.files_of(data) if contrastive else []
    return (pairs.Joined(files), True) if files else (corpus.Documents(data, column), False)


def _shown(data: Sequence[str]) -> str:
    """The names of the data, for people."""
    more = f" and {len(data) - 2} more" if len(data) > 3 else ""
    return ", ".join(data[:2] if more else data) + more or "Python's standard library (no --data)"


def note(texts: corpus.Documents | pairs.Joined, say: Callable[[str], object]) -> None:
    if isinstance(texts, pairs.Joined) and texts.names:
        say('the pairs are "{}" and "{}"'.format(*texts.names))
    if isinstance(texts, corpus.Documents) and texts.left_out:
        say(texts.left_out)


def _in_pairs(
    wanted: bool,
    words: Tokenizer,
    generation: dict[str, Any],
    given: bool,
    train: dataset.Tokens,
    held_out: dataset.Tokens,
) -> Sides:
    if not wanted:
        return train, held_out
    return pairs_of(train, words, generation, given), pairs_of(held_out, words, generation, given)


def pairs_of(kept: dataset.Tokens, words: Tokenizer, generation: Mapping[str, Any], given: bool) -> pairs.Pairs:
    frame = Frame.of(words, tokenizer.defaults(words, generation))
    return pairs.Pairs(kept, tokenizer.separator(words, generation), given, frame)


def choose_tokenizer(
    settings: Settings, config: ModelConfig, texts: Iterable[str], newest: Checkpoint | None
) -> Tokenizer:
    """The tokenizer of the checkpoint, of the given file, or a new one."""
    if newest is not None:
        return newest.words
    if Path(settings.tokenizer).is_file():
        return tokenizer.load(settings.tokenizer)
    answers = settings.objective == "next" and config.vision
    more = {"mlm": [tokenizer.MASK]}.get(settings.objective, [tokenizer.IMAGE] if answers else [])
    more += tokenizer.FIM if settings.fim else ()
    words = tokenizer.build(settings.tokenizer, texts, config.vocab_size, *more)
    if settings.tokenizer.endswith("bpe") and (found := words.get_vocab_size()) < 0.9 * config.vocab_size:
        say(f"the text has enough pairs of tokens for a vocabulary of {found:,}, not of {config.vocab_size:,}")
    return words
