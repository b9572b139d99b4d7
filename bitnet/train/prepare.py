"""Builds a training run from its settings: model, optimizer and data."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer

from bitnet.config import ModelConfig, not_yet
from bitnet.data import tokenizer
from bitnet.data.mixed import Mixed
from bitnet.evaluate.loss import check_vocabulary
from bitnet.model import compiler, parallel
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import (
    building,
    distill,
    hardware,
    horizon,
    memory,
    mixtures,
    objectives,
    optimizers,
    own_text,
    preferences,
    profiling,
    reporting,
    source_model,
)
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say
from bitnet.train.run import Run
from bitnet.train.state import State, beginning
from bitnet.train.texts import check_text, read_data
from bitnet_runtime import __version__

BEGINNINGS = {"sigmoid": (10.0, -10.0), "softmax": (1 / 0.07, 0.0)}
"""Initial scale and bias of similarities: arXiv 2303.15343 §3.1, 2103.00020 §2.5."""
OF_MACHINES = {
    "out", "device", "threads", "data", "mixture", "chat", "preference", "tokenizer", "source", "teacher", "vision",
}  # fmt: skip
"""Options that may differ between the processes of a run: paths, and what a machine has."""
MANY = 100  # times that tokens are seen, above which a model mostly memorizes them


def prepare(
    settings: Settings,
    config: ModelConfig,
    newest: Checkpoint | None,
    start: source_model.Start | None = None,
    teacher: source_model.Start | None = None,
    tower: source_model.Start | None = None,
    source: Callable[[], source_model.Start] | None = None,
) -> Run:
    """A run at its next step. A new one has no checkpoint yet.

    newest: the checkpoint to resume from; start: the model to begin with; teacher: the one to learn from; tower: the
    one whose vision stack it begins with; source: reads the model that a resumed run began with.
    """
    settings = hardware.settled(settings)
    check_options(settings, config, new_words=not (newest or start))
    before = newest.state if newest else {}
    if newest is None:
        config = config.with_draft() if settings.draft else config.replace(draft=None)
    elif (kept := before["settings"].get("optimizer", "adamw")) != settings.optimizer:
        raise TrainingError(
            f"{newest.folder} holds the moments of {kept}; go on without --optimizer {settings.optimizer}"
        )
    if settings.device == "cpu" and not parallel.launched():
        known = newest or start or Path(settings.tokenizer).is_file()  # else the text decides the vocabulary
        memory.check(config if known else config.replace(vocab_size=1 + config.image_token), settings)
    words, template, generation, batches, held_out = read_data(settings, config, newest, before, start, tower)
    if settings.self_written and start and newest is None:
        batches = own_text.added(settings, config, words, start, batches)
    if newest:
        check_text(newest.folder, before, batches.tokens.digest, objectives.digest(held_out))
    parallel.check_same(_told(settings, config, newest, batches, held_out))
    most = before.get("vocab_size", config.vocab_size)
    if newest is None:
        config = with_images(settings, with_room(settings, config, words, start), words)
    check_vocabulary(words, config, start.what if start else settings.tokenizer)

    each = objectives.tokens_each(batches.tokens, batches.context)
    sequences = sequences_of_step(settings, each)
    model, forward = building.build_model(settings, config, None if newest else start, batches, tower)
    model.recompute = settings.recompute
    if settings.compile:
        compiler.compile_layers(model)
        say("the layers will be compiled in the first steps, which takes about a minute")
    optimizer = optimizers.build(model, settings)
    phased = tower.sees_in_floats if tower else not settings.vision
    sides = batches.tokens.digest, objectives.digest(held_out)
    state = beginning(settings.to_dict(), config.to_dict(), most, _size(settings, model), *sides, phased)
    if newest is not None:
        newest.load_weights(model)
        newest.load_optimizer(optimizer, model)
        kept = {name: before[name] for name in state.keys() & before.keys() - {"settings", "model"}}
        state = {**state, **cast(State, kept)}
    state["teacher"] = teacher.step if teacher and settings.distilled else ""  # to find it again on resume
    end, line = horizon.begin(settings, state, sequences * each, newest.state_of_run if newest else None)
    if newest is None:  # a resumed run keeps its options, and may be near its end
        profiling.check(settings.profile, math.inf if end.seconds else end.steps(state))
    if parallel.is_first():
        state = {**state, **objectives.record(batches.tokens, held_out)}
    announce(settings, config, model, state, batches, end)
    if line:
        say(line)
    if not (newest or start):
        _note_context(config, batches.context)
    parts = words, batches, held_out, sequences, end, model, forward, optimizer
    run = Run(settings, settings.run_folder, *parts, state, template, generation)
    _add_references(run, before, teacher, source)
    return run


def _add_references(
    run: Run,
    before: dict[str, Any],
    teacher: source_model.Start | None,
    source: Callable[[], source_model.Start] | None,
) -> None:
    """The models that a run is compared with: its beginning, for preferences, and its teacher."""
    settings, batches = run.settings, run.batches
    if settings.preference:

        def first() -> Transformer:
            return building.build_model(settings, run.model.config, source(), batches)[0] if source else run.model

        data = batches.tokens, run.held_out, settings, batches.context
        run.state["reference"] = preferences.refer(first, *data, before)
    if settings.distilled:
        if teacher is None:
            raise TrainingError(f"a run that is distilled goes on with `bitnet finetune --resume --out {run.folder}`")
        run.distillation = distill.Distillation(teacher, settings, run.model, run.words)


def _note_context(config: ModelConfig, context: int) -> None:
    if context < config.max_context:
        say(
            f"training sees {context:,} tokens at a time, but the file will take texts of "
            f"{config.max_context:,}, whose end is untrained; --set max_context={context} limits it"
        )


def _told(
    settings: Settings, config: ModelConfig, newest: Checkpoint | None, batches: objectives.Batches,
    held_out: objectives.HeldOut,
) -> dict[str, Any]:  # fmt: skip
    """What has to be the same in all processes of a run, by its name in errors."""
    versions = {"the version of bitnet-edge": __version__, "the version of torch": torch.__version__.partition("+")[0]}
    options = {name: value for name, value in settings.to_dict().items() if name not in OF_MACHINES}
    read = {"what is read": batches.tokens.digest, "what is held out": objectives.digest(held_out)}
    model = {f"{name} of the model": value for name, value in config.to_dict().items()}
    return versions | options | model | {"the step": newest.state["step"] if newest else 0} | read


def _size_of_draft(model: Transformer) -> int:
    return sum(p.numel() for p in model.draft.parameters()) if model.draft else 0


def _size(settings: Settings, model: Transformer) -> int:
    """How many parameters are learned."""
    learnt = optimizers.learnt(model)[0] if settings.lora else model.parameters()
    # A draft does not count, so that it does not change the tokens per parameter.
    return sum(p.numel() for p in learnt) - (0 if settings.lora else _size_of_draft(model))


def announce(
    settings: Settings,
    config: ModelConfig,
    model: Transformer,
    state: State,
    batches: objectives.Batches,
    end: horizon.Horizon,
) -> None:
    """Say what is trained on what data, and warn if tokens are seen too often."""
    n_tokens, draft = batches.tokens.n_tokens, _size_of_draft(model)
    say(
        f"{settings.run_folder}: {state['parameters']:,} parameters{' of adapters' if settings.lora else ''}, "
        f"{config.replace(draft=None).ternary_weights:,} ternary; "
        + (f"{draft:,} more of a draft; " if draft else "")
        + f"{n_tokens:,} training tokens, vocabulary {config.vocab_size:,}; "
        f"{settings.precision} on {settings.device}, from step {state['step']:,}"
    )
    if isinstance(batches, Mixed):
        say(mixtures.sizes(batches.tokens, end.tokens))
    elif (times := end.tokens / n_tokens) > MANY:
        say(f"each of the {n_tokens:,} training tokens is seen about {times:,.0f} times; add data, or train for less")


def check_options(settings: Settings, config: ModelConfig, new_words: bool) -> None:
    """Raises, before the text is read, errors that would otherwise appear only later."""
    if problems := not_yet(config):
        raise TrainingError("this is not trained yet: " + "; ".join(problems))
    if config.adapters and not settings.lora:
        raise TrainingError(
            "the model has adapters, which are not trained together with it; begin with a model without them, and for "
            "adapters take bitnet finetune SRC --lora RANK"
        )
    objectives.check(settings, config)
    if config.vision and not config.has_head and parallel.launched() and settings.parallel == "fsdp":
        raise TrainingError("--parallel fsdp cannot shard two stacks whose vectors are compared; take ddp")
    if settings.draft and parallel.launched() and settings.parallel == "fsdp":
        without = "" if settings.draft_only else ", or --no-draft"  # a source may have brought it
        raise TrainingError(f"--parallel fsdp cannot shard a model with a draft; take ddp{without}")
    if settings.balance_loss and not config.n_experts:
        raise TrainingError(
            f"balance_loss is {settings.balance_loss:g}, but this model has no experts to balance; "
            "leave it out, or add --set n_experts=8 --set experts_per_token=2"
        )
    if config.experts_per_token == 1 and config.normalize_routing:
        raise TrainingError(
            "experts_per_token is 1 with normalize_routing, so the share of that expert is always 1 and no gradient "
            "reaches the router; add --set normalize_routing=no, or take more experts"
        )
    if settings.context > config.max_context:
        raise TrainingError(
            f"--context is {settings.context:,}, the model has at most {config.max_context:,}; "
            f"lower it, or add --set max_context={settings.context}"
        )
    context, least = settings.context or config.max_context, 3 if settings.draft else 2
    if settings.objective == "next" and context < least:  # one token has no next one, nor have two a guess
        raise TrainingError(
            f"{'--context' if settings.context else 'max_context'} is {context}, expected {least} or more to learn "
            f"the next token{' and a draft' * settings.draft}; raise it"
        )
    if new_words and not Path(settings.tokenizer).is_file():
        tokenizer.check_kind(settings.tokenizer)
    reporting.check(settings)


def with_room(
    settings: Settings, config: ModelConfig, words: Tokenizer, start: source_model.Start | None
) -> ModelConfig:
    """The model with room for all tokens of the tokenizer. Raises TrainingError: there are too many."""
    size = tokenizer.vocabulary_size(words)
    if not start and not Path(settings.tokenizer).is_file():
        return config.replace(vocab_size=size)
    if start or settings.chat:  # a template may have brought tokens
        most = max(config.vocab_size, size)
        stays = "--lora" if settings.lora else "--draft-only" if settings.draft_only else ""
        if stays and start and most != start.config.vocab_size:
            raise TrainingError(
                f"{stays} leaves the model as it is, with {start.config.vocab_size:,} tokens, but --chat, --preference "
                f"or --fim needs {most:,}; finetune it so without {stays} first"
            )
        return config.replace(vocab_size=most)
    if size > config.vocab_size:
        raise TrainingError(
            f"{settings.tokenizer} needs {size:,} tokens, the model has {config.vocab_size:,}; "
            f"add --set vocab_size={size}"
        )
    return config


def with_images(settings: Settings, config: ModelConfig, words: Tokenizer) -> ModelConfig:
    """The model with its image token, or with the initial scale and bias of similarities."""
    if not config.vision:
        return config
    if config.has_head:
        return config.replace(image_token=tokenizer.image_token(words))
    scale, bias = BEGINNINGS[settings.contrastive_loss]
    if config.similarity_scale:
        scale, bias = config.similarity_scale, config.similarity_bias if bias else 0.0
    return config.replace(similarity_scale=scale, similarity_bias=bias)


def sequences_of_step(settings: Settings, context: int) -> int:
    """The sequences of an optimizer step. Raises TrainingError: they cannot be divided among the processes."""
    tokens, processes = settings.batch_tokens or settings.batch * settings.accumulate * context, parallel.size()
    if tokens % (context * processes):
        what = "--batch-tokens" if settings.batch_tokens else "--batch or --accumulate"
        dealt = f", dealt out to {processes} processes" if processes > 1 else ""
        raise TrainingError(
            f"an optimizer step has {tokens:,} tokens, expected a multiple of {context * processes:,}: "
            f"sequences of {context:,} tokens{dealt}; change {what}"
        )
    pairs = tokens // context // processes
    if settings.objective == "contrastive" and pairs % settings.batch == 1:
        raise TrainingError(
            f"an optimizer step has {pairs:,} pairs in each process, in batches of "
            f"{settings.batch:,}, so the last one would have no other text to tell from; change --batch or --accumulate"
        )
    return tokens // context
