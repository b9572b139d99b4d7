"""Builds a training run from its settings: model, optimizer and data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bitnet.config import ModelConfig, not_yet
from bitnet.data import tokenizer
from bitnet.data.mixed import Mixed
from bitnet.evaluate.loss import check_vocabulary
from bitnet.model import compiler, parallel
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.setup import building, hardware, own_text
from bitnet.setup.texts import check_text, read_data
from bitnet.train import (
    distill,
    horizon,
    mixtures,
    objective_rules,
    objectives,
    optimizers,
    preferences,
    profiling,
    reporting,
    source_model,
)
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say
from bitnet.train.run import Run
from bitnet.train.state import State, beginning, resumed
from bitnet_runtime import __version__

BEGINNINGS = {"sigmoid": (10.0, -10.0), "softmax": (1 / 0.07, 0.0)}
"""Initial scale and bias of similarities: arXiv 2303.15343 §3.1, 2103.00020 §2.5."""
OF_MACHINES = {
    "out", "device", "threads", "data", "mixture", "chat", "preference", "tokenizer", "source", "teacher", "vision",
}  # fmt: skip
"""Options that may differ between the processes of a run: paths, and what a machine has."""
MANY = 100  # times that tokens are seen, above which a model mostly memorizes them


def begin(
    settings: Settings,
    config: ModelConfig,
    start: source_model.Start | None = None,
    teacher: source_model.Start | None = None,
    tower: source_model.Start | None = None,
) -> Run:
    """A run before its first step.

    start: the model to begin with; teacher: the one to learn from; tower: the one whose vision stack it begins with.
    """
    settings = hardware.settled(settings)
    check_options(settings, config, new_words=not start)
    config = config.with_draft() if settings.draft else config.replace(draft=None)
    known = start or Path(settings.tokenizer).is_file()  # else the text decides the vocabulary
    building.check_memory(config if known else config.replace(vocab_size=1 + config.image_token), settings)
    if teacher and known:
        distill.check_early(teacher, settings, start.words if start else tokenizer.load(settings.tokenizer), config)
    data = read_data(settings, config, None, start, tower)
    if settings.self_written and start:
        data = data._replace(batches=own_text.added(settings, config, data.words, start, data.batches))
    parallel.check_same(_told(settings, config, data))
    asked = config.vocab_size
    config = with_images(settings, with_room(settings, config, data.words, start), data.words)
    run = _assemble(settings, config, data, start, tower)
    run.state["vocab_size"] = asked
    _set_out(run, None, teacher)
    if not start and (context := data.batches.context) < config.max_context:
        say(
            f"training sees {context:,} tokens at a time, but the file will take texts of "
            f"{config.max_context:,}, whose end is untrained; --set max_context={context} limits it"
        )
    _add_references(run, lambda: run.model, {}, teacher)
    return run


def resume(
    settings: Settings,
    config: ModelConfig,
    newest: Checkpoint,
    teacher: source_model.Start | None,
    source: Callable[[], source_model.Start],
) -> Run:
    """A run at the next step after a checkpoint. teacher: the model to learn from; source: reads that to begin with."""
    settings, before = hardware.settled(settings), newest.state_of_run
    check_options(settings, config, new_words=False)
    if (kept := before["settings"].get("optimizer", "adamw")) != settings.optimizer:
        raise TrainingError(
            f"{newest.folder} holds the moments of {kept}; go on without --optimizer {settings.optimizer}"
        )
    building.check_memory(config, settings)
    data = read_data(settings, config, newest)
    check_text(newest.folder, before, data.batches.tokens.digest, objectives.digest(data.held_out))
    parallel.check_same(_told(settings, config, data, before["step"]))
    run = _assemble(settings, config, data)
    newest.load_weights(run.model)
    newest.load_optimizer(run.optimizer, run.model)
    run.state = resumed(run.state, before)
    _set_out(run, before, teacher)
    built = building.build_model
    _add_references(run, lambda: built(settings, config, source(), data.batches)[0], newest.state, teacher)
    return run


def _assemble(
    settings: Settings,
    config: ModelConfig,
    data: objectives.Learnt,
    start: source_model.Start | None = None,
    tower: source_model.Start | None = None,
) -> Run:
    """Model, optimizer and data of a run, in the state before its first step."""
    batches, held_out = data.batches, data.held_out
    check_vocabulary(data.words, config, start.what if start else settings.tokenizer)
    each = objectives.tokens_each(batches.tokens, batches.context)
    sequences = sequences_of_step(settings, each)
    model, forward = building.build_model(settings, config, start, batches, tower)
    model.recompute = settings.recompute
    if settings.compile:
        compiler.compile_layers(model)
        say("the layers will be compiled in the first steps, which takes about a minute")
    sides = batches.tokens.digest, objectives.digest(held_out)
    state = beginning(settings.to_dict(), config.to_dict(), _size(settings, model), *sides)
    state["phased"] = tower.sees_in_floats if tower else not settings.vision
    if parallel.is_first():
        state = {**state, **objectives.record(batches.tokens, held_out)}
    end = horizon.Horizon.of(settings, state, sequences * each)
    return Run(settings, data, sequences, end, model, forward, optimizers.build(model, settings), state)


def _set_out(run: Run, before: State | None, teacher: source_model.Start | None) -> None:
    """Decide where the run ends, and say what it learns. before: the state it resumes from."""
    settings, state = run.settings, run.state
    state["teacher"] = teacher.step if teacher and settings.distilled else ""  # to find it again on resume
    run.horizon, line = horizon.begin(settings, state, run.horizon.each, before)
    if not before:  # a resumed run keeps its options, and may be near its end
        profiling.check(settings.profile, math.inf if run.horizon.seconds else run.horizon.steps(state))
    announce(run)
    if line:
        say(line)


def _add_references(
    run: Run, first: Callable[[], Transformer], before: dict[str, Any], teacher: source_model.Start | None
) -> None:
    """The models that a run is compared with: its beginning, for preferences, and its teacher."""
    settings, data = run.settings, run.data
    if settings.preference:
        sides = data.batches.tokens, data.held_out
        run.state["reference"] = preferences.refer(first, *sides, settings, data.batches.context, before)
    if settings.distilled:
        if teacher is None:
            where = shlex.quote(str(run.folder))
            raise TrainingError(f"a run that is distilled goes on with `bitnet finetune --resume --out {where}`")
        if parallel.size() > 1:
            parallel.check_same({"the teacher": teacher.digest})
        run.distillation = distill.Distillation(teacher, settings, run.model, data.words)


def _told(settings: Settings, config: ModelConfig, data: objectives.Learnt, step: int = 0) -> dict[str, Any]:
    """What has to be the same in all processes of a run, by its name in errors."""
    versions = {"the version of bitnet-edge": __version__, "the version of torch": torch.__version__.partition("+")[0]}
    options = {name: value for name, value in settings.to_dict().items() if name not in OF_MACHINES}
    read = {"what is read": data.batches.tokens.digest, "what is held out": objectives.digest(data.held_out)}
    model = {f"{name} of the model": value for name, value in config.to_dict().items()}
    return versions | options | model | {"the step": step} | read


def _size_of_draft(model: Transformer) -> int:
    return sum(p.numel() for p in model.draft.parameters()) if model.draft else 0


def _size(settings: Settings, model: Transformer) -> int:
    """How many parameters are learned. A draft does not count, so that it does not change the tokens per parameter."""
    if settings.lora:
        return sum(p.numel() for p in optimizers.learnt(model)[0])
    return sum(p.numel() for p in model.parameters()) - _size_of_draft(model)


def announce(run: Run) -> None:
    """Say what is trained on what data, and warn if tokens are seen too often."""
    settings, config, batches, end = run.settings, run.model.config, run.data.batches, run.horizon
    n_tokens, draft = batches.tokens.n_tokens, _size_of_draft(run.model)
    say(
        f"{run.folder}: {run.state['parameters']:,} parameters{' of adapters' if settings.lora else ''}, "
        f"{config.replace(draft=None).ternary_weights:,} ternary; "
        + (f"{draft:,} more of a draft; " if draft else "")
        + f"{n_tokens:,} training tokens, vocabulary {config.vocab_size:,}; "
        f"{settings.precision} on {settings.device}, from step {run.state['step']:,}"
    )
    if isinstance(batches, Mixed):
        say(mixtures.sizes(batches.tokens, end.tokens))
    elif (times := end.tokens / run.horizon.each * run.sequences / batches.per_epoch) > MANY:
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
    objective_rules.check(settings, config)
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
