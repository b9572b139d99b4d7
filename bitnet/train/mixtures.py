"""How a run reads the sources of a mixture, and how their weights change during it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bitnet.data import corpus, dataset, mixture, tokenized, tokenizer
from bitnet.data.dataset import Tokens
from bitnet.data.mixed import Mixed
from bitnet.data.mixture import Mixture, Source, Sources
from bitnet.settings import Settings
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say
from bitnet.train.run import Run

SIDES = "train", "validation"


def read(
    settings: Settings,
    before: dict[str, Any],
    generation: dict[str, Any],
    choose: Callable[[Iterable[str]], Tokenizer],
    check: Callable[[str], None],
) -> tuple[Tokenizer, tuple[Sources, Sources]]:
    """Tokenizer, and token ids of all sources: shared, already in the run folder, or from the text read again.

    check: is given the digest of all text before any is tokenized, which takes most of the time; raises to refuse it.
    """
    found = _mixture(settings, before)
    shared = _shared(found)
    parts = {name: tokenized.read(where, *SIDES)[1] for name, where in shared.items()}
    texts = {}
    for name, source in found.sources.items():
        kept = [_recorded(settings, before, name, side) for side in SIDES]
        if name not in parts and kept[0] and kept[1]:
            parts[name] = [kept[0], kept[1]]
        elif name not in parts:
            say(f"{settings.run_folder}: reading and tokenizing source {name}")
            with _of(name):
                texts[name] = _split(source, settings, say)
    corpus.check_apart(texts | {name: tokenized.documents_of(where) for name, where in shared.items()})
    tokenized.check_apart(shared, dict.fromkeys(texts, settings.validation))
    if shared and not (before or settings.source or Path(settings.tokenizer).is_file()):
        words = tokenized.tokenizer_of(next(iter(shared.values())))
    else:
        words = choose(itertools.chain.from_iterable(train for train, _ in texts.values()))
    first = tokenizer.separator(words, generation)
    for where in shared.values():
        tokenized.check_of(where, words, first)
    digests = {name: train.digest for name, (train, _) in parts.items()}
    digests |= {name: dataset.digest_of(train, words, first) for name, (train, _) in texts.items()}
    check(mixture.digest_of(digests))
    for name, of_sides in texts.items():
        pairs = zip(of_sides, SIDES, strict=True)
        parts[name] = [dataset.tokenize(text, words, settings.run_folder, side, first) for text, side in pairs]
    train, held_out = ({name: parts[name][side] for name in found.sources} for side in range(2))
    return words, (Sources(found, train), Sources(found, held_out))


def of_checkpoint(checkpoint: Checkpoint, settings: Settings, scratch: Path) -> Sources:
    """What the run of a checkpoint held out of each source. scratch: a folder for token ids."""
    words = checkpoint.words
    if kept := mixture.recorded(checkpoint.state, "validation", checkpoint.run):
        return kept
    found, first = Mixture.of(checkpoint.state["mixture"]), tokenizer.separator(words, checkpoint.generation)
    parts = {}
    for name, source in found.sources.items():
        if where := tokenized.named(source.data):
            tokenized.check_of(where, words, first)
            parts[name] = tokenized.read(where, "validation")[1][0]
        else:
            text = _split(source, settings, lambda _: None)[1]
            parts[name] = dataset.tokenize(text, words, scratch, "text", first)
    return Sources(found, parts)


def ids_of(settings: Settings) -> list[Path | None]:
    """The folder of token ids of each source that a new run reads; None: that source is text."""
    sources = Mixture.read(Path(settings.mixture)).sources.values() if settings.mixture else [settings]
    return [tokenized.named(source.data) for source in sources]


def _shared(found: Mixture) -> dict[str, Path]:
    """The sources that are folders of token ids."""
    return {name: where for name, source in found.sources.items() if (where := tokenized.named(source.data))}


def _mixture(settings: Settings, before: dict[str, Any]) -> Mixture:
    """The mixture in the file; if the file of a resumed run is gone, the one it recorded."""
    file = Path(settings.mixture)
    kept = Mixture.of(before["mixture"]) if "mixture" in before else None
    if kept and not file.is_file():
        return kept
    found = Mixture.read(file)
    if kept and found.sources != kept.sources:
        raise TrainingError(f"{file} has other sources than the run, which keeps them; start another run with --out")
    return Mixture(kept.sources, found.stages) if kept else found  # in the order that decides the sequences


def _recorded(settings: Settings, before: dict[str, Any], name: str, side: str) -> Tokens | None:
    if not before or before["settings"]["validation"] != settings.validation:
        return None
    return mixture.recorded_part(before, name, side, settings.run_folder)


@contextlib.contextmanager
def _of(name: str) -> Iterator[None]:
    """A context in which data errors name the source."""
    try:
        yield
    except corpus.DataError as error:
        raise corpus.DataError(f"source {name}: {error}") from None


def _split(source: Source, settings: Settings, say: Callable[[str], object]) -> tuple[corpus.Texts, corpus.Texts]:
    texts = corpus.Documents(source.data, source.column)
    sides = corpus.split(texts, settings.validation, say)
    if texts.left_out:
        say(texts.left_out)
    return sides


def parts_of(side: object) -> dict[str, Tokens]:
    """The token ids of held-out text, by their names in errors."""
    if isinstance(side, Sources):
        return {f" of source {name}": part for name, part in side.parts.items()}
    return {"": side} if isinstance(side, Tokens) else {}


def sizes(tokens: Sources, planned: int) -> str:
    """A line about the sources of a run, and the stages that it does not reach. planned: tokens of the whole run; 0:
    seconds count."""
    times = tokens.times(planned)
    seen = {name: f", seen {times[name]:.3g} times" if planned else "" for name in tokens.parts}
    line = "sources: " + "; ".join(
        f"{name} {part.n_tokens:,} tokens{seen[name]}" for name, part in tokens.parts.items()
    )
    stages = tokens.mixture.stages
    for number, (before, _) in enumerate(itertools.pairwise(stages), start=2):
        if planned and before.until >= mixture.LEAST_TOKENS and before.until >= planned:
            return (
                f"{line}\nstage {number} of the mixture is not reached: stage {number - 1} lasts until "
                f"{before.until:,.0f} tokens, and the run has {planned:,}; lower its until"
            )
    return line


def advance(run: Run) -> None:
    """Set the weights of the mixture for the next step."""
    batches = run.data.batches
    if not isinstance(batches, Mixed):
        return
    course, place = run.state["course"], run.place
    weights = batches.tokens.mixture.weights_at(place.whole, place.tokens)
    if not course or course[-1]["weights"] != weights:
        course = [*course, {"step": run.state["step"], "tokens": run.state["tokens"], "weights": weights}]
        run.state["course"] = course
        shares = ", ".join(f"{name} {weight:.1%}" for name, weight in weights.items())
        say(f"from step {run.state['step']:,} on the sequences are {shares}")
    each_step = run.horizon.each  # tokens; a resumed run may have longer sequences
    wanted = tuple((each["tokens"] * run.sequences // each_step, each["weights"]) for each in course)
    if batches.course != wanted:
        batches.course = wanted
        assert run.ahead is not None
        run.ahead.drop()
