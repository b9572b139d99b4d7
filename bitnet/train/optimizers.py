"""The optimizer of a run: AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import schedule
from bitnet.train.muon import Muon


class Chained(torch.optim.Optimizer):
    """Several optimizers of different parameters, used as one: joint groups and state, one step of each."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def build(model: Transformer, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer. Its groups have "decays", whether weight decay applies; with adapters also "rate", a learning-rate
    factor.

    Muon's orthogonal updates are scaled so that AdamW's learning rate and weight decay serve both.
    """
    if settings.lora:
        return adamw(of_adapters(model, settings))
    parts: list[torch.optim.Optimizer] = []
    for matrices, others in (of_layers(model), of_draft(model)):  # separate: Muon stacks matrices of one shape
        groups: list[dict[str, Any]] = [{"params": matrices, "decays": True}, {"params": others, "decays": False}]
        if not matrices and not others:
            continue
        if settings.optimizer == "muon":
            parts.append(Muon(groups[:1], precise=not multiplies_bf16(model.device.type)))
        parts.append(adamw(groups[1:] if settings.optimizer == "muon" else groups))
    return parts[0] if len(parts) == 1 else Chained(*parts)


def of_adapters(model: Transformer, settings: Settings) -> list[dict[str, Any]]:
    """alpha / rank is a learning-rate factor of adapter_out, not a factor in the model. With AdamW, whose steps do not
    depend on the size of gradients, that is equivalent (arXiv 2106.09685 §4.1), if their decay has no factor."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    outwards = [p for name, p in learnt if name.endswith("adapter_out")]
    inwards = [p for name, p in learnt if name.endswith("adapter_in")]
    assert len(outwards) + len(inwards) == len(learnt)
    rate = settings.lora_alpha / settings.lora if settings.lora_alpha else 2.0
    return [{"params": inwards, "decays": True, "rate": 1.0}, {"params": outwards, "decays": True, "rate": rate}]


def set_rates(optimizer: torch.optim.Optimizer, settings: Settings, at: schedule.Place) -> None:
    """Set learning rate and weight decay of the groups that `build` made."""
    rate, others = schedule.learning_rate(settings, at), settings.embedding_lr / settings.lr
    for group in optimizer.param_groups:
        of_group, factor = 1.0 if group["decays"] or not settings.embedding_lr else others, group.get("rate", 1.0)
        group["lr"] = rate * of_group * factor
        group["weight_decay"] = schedule.weight_decay(settings, at) / factor if group["decays"] else 0.0


def clip(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Scale gradients so that their norm is at most `limit`. Returns the norm before, (): that of an adapter whose
    output has the factor that is "rate" here (`of_adapters`)."""
    rates = {p: group.get("rate", 1.0) for group in optimizer.param_groups for p in group["params"]}
    gradients = [p.grad if rates[p] == 1 else rates[p] * p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def multiplies_bf16(device: str) -> bool:
    """Whether the device has bf16 instructions; without them bf16 is slower than fp32."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return probe is not None and bool(probe())


def moments(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Each parameter, and the keys of its optimizer state after its first update."""
    found: list[tuple[nn.Parameter, tuple[str, ...]]] = []
    for part in optimizer.parts if isinstance(optimizer, Chained) else (optimizer,):
        muon = isinstance(part, Muon)
        keys: tuple[str, ...] = ("momentum_buffer",) if muon else ("step", "exp_avg", "exp_avg_sq")
        found += [(p, keys) for group in part.param_groups for p in group["params"]]
    return found


def of_layers(model: Transformer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters: matrices of the layers; and all others, such as gains, biases and embeddings."""
    in_layers = {p for stack in model.stacks for p in stack.layers.parameters() if p.dim() == 2}
    parameters = learnt(model)[0]
    return [p for p in parameters if p in in_layers], [p for p in parameters if p not in in_layers]


def of_draft(model: Transformer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same for its draft, whose projection counts as a matrix of its layers."""
    parameters = learnt(model)[1]
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def learnt(model: Transformer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters of the model and of its draft."""
    of_draft = set(model.draft.parameters()) if model.draft else set()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [p for p in parameters if p not in of_draft], [p for p in parameters if p in of_draft]
