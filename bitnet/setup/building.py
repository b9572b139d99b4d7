"""The model at the start of a run: whether it fits, random or from a source, and which parts are trained."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from bitnet.config import ModelConfig
from bitnet.model import parallel
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import memory, objectives, optimizers, source_model
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say


def check_memory(config: ModelConfig, settings: Settings) -> None:
    """Raises TrainingError, before any work, if weights, gradients and optimizer state alone do not fit. (A GPU has its
    own memory, and of several processes each may hold a part.)"""
    if settings.device == "cuda" or parallel.launched():
        return
    with torch.device("meta"):
        model = Transformer(config)
    hold(model, settings)
    (matrices, others), (more, rest) = optimizers.of_layers(model), optimizers.of_draft(model)
    of_parts = [*matrices, *more, *others, *rest], [*others, *rest], model.parameters()
    n, n_others, n_all = (sum(p.numel() for p in parameters) for parameters in of_parts)
    kept = 2 * n if settings.optimizer == "adamw" else n + n_others  # Muon has one number for each weight
    needed, (there, limit) = 4 * (n_all + n + kept), memory.available()
    if needed > there:
        raise TrainingError(
            f"training {n:,} parameters takes at least {needed / 1e9:.1f} GB (4 bytes a weight, 4 a gradient, "
            f"{4 * kept / 1e9:.1f} GB for {settings.optimizer}), {limit} leaves {there / 1e9:.1f} GB; "
            "make the model smaller"
        )


def build_model(
    settings: Settings,
    config: ModelConfig,
    start: source_model.Start | None,
    batches: objectives.Batches,
    tower: source_model.Start | None = None,
) -> tuple[Transformer, nn.Module]:
    """The model at the start of a run, and the module that a training step calls. Processes get the same by seed."""
    sharded = parallel.launched() and settings.parallel == "fsdp"
    torch.manual_seed(settings.seed)
    with torch.device("meta") if sharded and not parallel.is_first() else contextlib.nullcontext():
        if start and (parallel.is_first() or not sharded):
            model = begin(start, config, batches, "cpu" if sharded else settings.device)
        else:
            model = Transformer(config)
        if tower and (parallel.is_first() or not sharded):
            say(source_model.take_vision(model, tower))
    hold(model, settings)
    if sharded:
        rows = min(len(weight) for weight in optimizers.of_layers(model)[0])
        if settings.optimizer == "muon" and rows < parallel.size():
            raise TrainingError(
                f"--optimizer muon cannot share a matrix of {rows} rows among {parallel.size()} processes; "
                "take fewer of them, --parallel ddp, or --optimizer adamw"
            )
        parallel.shard(model, settings.device)
        return model, model
    model = model.to(settings.device)
    return model, parallel.replicated(model, settings.device) if parallel.launched() else model


def begin(start: source_model.Start, config: ModelConfig, batches: objectives.Batches, device: str) -> Transformer:
    """The model that finetuning starts from; added norms are calibrated on the first batch."""
    model, inserted = source_model.build(start, config)
    model = model.to(device)
    if inserted:
        inputs, _, *told = (t.to(device) for t in batches.sequences(0, batches.batch))
        source_model.calibrate(model, inserted, inputs, *told)
    for line in (start.what, *start.assumptions, *[f"added {len(inserted)} norms, calibrated"][: len(inserted)]):
        say(line)
    return model


def hold(model: Transformer, settings: Settings) -> None:
    """Turn off gradients of what is not trained: all but adapters or a draft; a frozen vision stack except its
    projector; a bias that softmax ignores."""
    if settings.lora:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".adapter_" in name)
        return
    model.draft_only = settings.draft_only
    if settings.draft_only:
        model.requires_grad_(False)
        assert model.draft
        model.draft.requires_grad_(True)
    if settings.freeze_vision and model.vision:
        model.vision.requires_grad_(False)
        if model.vision.projector:
            model.vision.projector.requires_grad_(True)
    if model.similarity is not None and settings.contrastive_loss == "softmax":
        model.similarity.bias.requires_grad_(False)
