"""The data that a checkpoint is evaluated on: given data, or what its run held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bitnet.config import ModelConfig
from bitnet.data import conversations, corpus, dataset, finding, pairs, pictures, tokenized, tokenizer
from bitnet.data.dialogues import Dialogues, Encoder, with_template
from bitnet.data.picture_rows import Answers, Captions
from bitnet.settings import Settings
from bitnet.setup import sights, texts
from bitnet.train import mixtures, objectives, preferences
from bitnet.train.checkpoint import Checkpoint


def of_checkpoint(
    checkpoint: Checkpoint,
    settings: Settings,
    data: Sequence[str] | None,
    context: int,
    scratch: Path,
    say: Callable[[str], object],
    column: str = "",
) -> objectives.HeldOut:
    """The data to evaluate a checkpoint on: `data`, or by default what its run held out.

    scratch: a folder for token ids. column: the text column of `data`; "": the run's.
    """
    config, state = checkpoint.config, checkpoint.state_if_any
    files = conversations.among(data or [], column)
    if files or (settings.chat and not data):
        if config.vision:
            shown = sights.talks_of_checkpoint(settings, config.vision, checkpoint.generation, files, scratch)
            template, generation = sights.with_template(checkpoint.words, checkpoint.template, checkpoint.generation)
            return sights.talks(config, checkpoint.words, template, generation, *shown, context)
        return _talks_of_checkpoint(checkpoint, settings, files, context, say)
    if settings.preference and not data and not config.vision:
        more = checkpoint.generation, state, checkpoint.run, context
        return preferences.of_checkpoint(settings, checkpoint.words, checkpoint.template, *more)
    measured: objectives.Kept
    if config.vision:
        measured = _images_of_checkpoint(checkpoint, settings, config.vision, data, context, scratch)
    elif settings.mixture and not data:
        measured = mixtures.of_checkpoint(checkpoint, settings, scratch)
    else:
        measured = _text_of_checkpoint(checkpoint, settings, data, scratch, say, column)
    texts.note_cut(measured, context, say)
    return objectives.held_out(settings, config, checkpoint.words, measured, context)


def _talks_of_checkpoint(
    checkpoint: Checkpoint, settings: Settings, files: Sequence[Path], context: int, say: Callable[[str], object]
) -> Dialogues:
    talks = list(conversations.read(files or finding.files_of(settings.chat)))
    if checkpoint.template is None:
        raise corpus.DataError(
            f"{talks[0].where} is a conversation, and {checkpoint.folder} has no chat template; give it text, or "
            "teach it conversations: bitnet finetune --chat"
        )
    template, generation = with_template(checkpoint.words, checkpoint.template, checkpoint.generation)
    talks = talks if files else conversations.split(talks, settings.validation)[1]
    encoder, prefix = Encoder(checkpoint.words, template, generation), checkpoint.config.mask == "prefix"
    dialogues = Dialogues(talks, encoder, checkpoint.words, prefix, context)
    texts.note_long(dialogues, context, say)
    return dialogues


def _images_of_checkpoint(
    checkpoint: Checkpoint,
    settings: Settings,
    vision: ModelConfig,
    data: Sequence[str] | None,
    context: int,
    scratch: Path,
) -> Captions | Answers:
    words, generation = checkpoint.words, checkpoint.generation
    seen = None if data else pictures.recorded(checkpoint.state_if_any, "validation", checkpoint.run)
    seen = seen or sights.of_checkpoint(settings, vision, words, generation, data, scratch)
    return sights.rows(settings, vision, words, generation, seen, context)


def _text_of_checkpoint(
    checkpoint: Checkpoint,
    settings: Settings,
    data: Sequence[str] | None,
    scratch: Path,
    say: Callable[[str], object],
    column: str,
) -> dataset.Tokens | pairs.Pairs:
    words, generation, state = checkpoint.words, checkpoint.generation, checkpoint.state_if_any
    contrastive, given = settings.objective == "contrastive", bool(state.get("pairs"))
    kept = None if data else dataset.recorded(state, "validation", checkpoint.run)
    if kept is None and (shared := tokenized.named(data or settings.data)):
        (kept,) = texts.read_shared(shared, words, generation, settings, "validation")[1]
    if kept is None:
        found, given = texts.source_of(data or settings.data, column or settings.column, contrastive)
        side: Iterable[str]
        if data:
            side = pairs.Separate(found) if given else found
        else:
            split = corpus.split(found, settings.validation)
            side = pairs.separate(*split)[1] if given else split[1]
        kept = dataset.tokenize(side, words, scratch, "text", tokenizer.separator(words, generation))
        texts.note(found, say)
    return texts.pairs_of(kept, words, generation, given) if contrastive else kept
