"""Forward and backward pass of a batch, and the terms of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from bitnet.data import dataset
from bitnet.data.preferences import Preferences
from bitnet.model import compiler, parallel
from bitnet.train import distill, objectives, preferences, telemetry
from bitnet.train.run import Run


def weights_of(run: Run) -> dict[str, float]:
    """The weights of the terms of the loss (`loss_terms`); 0: no part of it, but a metric, or a draft's own loss."""
    settings, model = run.settings, run.model
    if settings.draft_only:
        return {"draft": 1.0}
    found = preferences.WEIGHTS if settings.preference else distill.weights(settings, run.state["sizes"])
    balance = {"balance": settings.balance_loss} if model.config.n_experts else {}
    return found | balance | ({"draft": 0.0} if model.draft else {})


def gradients(run: Run, amount: float, weights: Mapping[str, float]) -> list[Tensor]:
    """Accumulate gradients of the next step. Returns the terms of the loss of each pass, in the order of weights."""
    settings, model, device = run.settings, run.model, torch.device(run.settings.device)
    assert run.ahead is not None
    work = run.ahead.take(run.state["step"])
    (counted,) = parallel.total([work.counted])
    values: list[Tensor] = []
    for i, (number, batch) in enumerate(zip(work.numbers, work.batches, strict=True), start=1):
        if run.probe and settings.compile and i == 1:
            look(run, run.probe, [tensor.to(device) for tensor in batch], amount)
        if model.config.drops:  # dropout, like the data, is a function of seed and sequence number
            torch.manual_seed(dataset.seed_of(settings.seed, number))
        if run.replay:
            terms = run.replay(batch, counted, amount)
        else:
            on_device = [tensor.to(device, non_blocking=True) for tensor in batch]
            seen = run.probe.looking() if run.probe and not settings.compile else contextlib.nullcontext()
            with seen, parallel.gradients_kept(run.forward, keep=i < len(work.batches)):
                terms = passes(run, on_device, counted, amount, weights)
        values.append(torch.stack([terms[name] for name in weights]))
    return values


def passes(
    run: Run, batch: Sequence[Tensor], counted: float | Tensor, amount: float | Tensor, weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """Forward and backward pass. Returns the terms of the loss, in nats per counted token."""
    # The backward pass is inside, too: with --recompute it quantizes again.
    with run.model.partly_quantized(amount, vision=run.state["phased"]):  # if not phased, it is fully quantized
        with autocast(run):
            terms = {name: term / counted for name, term in loss_terms(run, *batch).items()}
        learns = {**weights, "draft": 1.0}  # its gradients reach only the draft
        loss = torch.stack([learns[name] * term for name, term in terms.items()]).sum()
        (loss * parallel.size()).backward()  # DDP averages gradients over the processes; the sum is needed
    return {name: term.detach() for name, term in terms.items()}


def look(run: Run, probe: telemetry.Probe, batch: Sequence[Tensor], amount: float) -> None:
    """Show `probe` a batch in a separate forward pass, so that the training pass runs compiled or replayed."""
    inputs, targets, *told = batch
    quantized = run.model.partly_quantized(amount, vision=run.state["phased"])
    with torch.no_grad(), compiler.eagerly(), run.model.evaluating(), probe.looking(), quantized, autocast(run):
        run.model(inputs, *told, targets_BT=targets, each=True)  # never all logits in memory


def autocast(run: Run) -> torch.autocast:
    return torch.autocast(run.model.device.type, torch.bfloat16, enabled=run.settings.precision == "bf16")


def loss_terms(run: Run, inputs: Tensor, targets: Tensor, *told: Tensor) -> dict[str, Tensor]:
    """Sums over the targets that count: cross-entropy in nats, distillation terms with a teacher, the balance loss of
    experts, the loss of a draft. told: further arguments of the model: documents, prefixes, images."""
    if run.settings.draft_only:
        return {"draft": run.forward(inputs, *told, targets_BT=targets)}
    if run.settings.preference:
        known = cast(Preferences, run.data.batches.tokens).reference
        terms = preferences.terms(run.forward, known, run.settings.beta, inputs, targets, *told)
    elif run.model.config.has_head and not run.distillation:
        terms = {"cross_entropy": run.forward(inputs, *told, targets_BT=targets)}
    else:
        output = run.forward(inputs, *told)
        terms = {"cross_entropy": objectives.term(run.settings, run.model, output, targets)}
    if run.distillation:
        terms |= run.distillation.terms(output, targets, inputs, *told)
    if run.model.config.n_experts:
        count = preferences.counted(told[0]) if run.settings.preference else (targets != dataset.IGNORED).sum()
        terms["balance"] = count * run.model.balance
    if run.model.drafted:
        terms["draft"] = run.model.drafted.loss
    return terms
