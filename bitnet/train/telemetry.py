"""Telemetry of a ternary model during training, for every layer and role: "layers" in log.jsonl.

    {"zeros": {"q": [of layer 0, of layer 1, ...], "k": ...}, "flips": ..., "near": ..., "gamma": ..., "absmax": ...}

    zeros    share of the codes that are 0
    flips    share of the codes that this one optimizer step changed
    near     share of the weights within 0.05 γ of the threshold at 0.5 γ, whose codes the next steps may change
    gamma    the scale γ; its mean if rows or groups have their own
    absmax   largest |x| among the inputs of the step before quantization; with --compile only of its first
             forward pass in each process

The experts of a layer count together: shares are of all their weights, γ is the mean of theirs. `Probe.loads`,
"experts" in log.jsonl, is for each layer the share of the tokens' choices that each expert got.

Flips are those of one step, not of all since the last record: no codes are kept between records, so that
a resumed run writes the same as an uninterrupted one, and runs with different intervals can be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitnet.bitlinear import BitLinear
from bitnet.config import TERNARY_LINEARS
from bitnet.model import parallel
from bitnet.model.block import Block
from bitnet.model.transformer import Transformer
from bitnet.quant import expand_scale, ternary_codes

Layers = dict[str, dict[str, list[float]]]  # quantity -> role -> value of each layer

QUANTITIES = ("zeros", "flips", "near", "gamma", "absmax")  # of roles
NEAR = 0.05
BEFORE = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "o": "attn_sub_norm"}
BEFORE |= {"gate": "ffn_norm", "up": "ffn_norm", "down": "ffn_sub_norm"}
"""The module of a block whose output is a role's input; linear layers of one input are not called separately."""


class Probe:
    """Watches a model during one optimizer step: create it, run passes within `looking`, make the step, call `record`.

    It holds one byte per ternary weight, its code before the step. Each of several processes holds those of its own
    rows; all of them have to take part.
    """

    def __init__(self, model: Transformer) -> None:
        self.mixtures = [block for block in model.blocks if block.config.n_experts]
        self.roles = {
            role: [pairs for block in model.blocks if (pairs := layers_of(block, role))] for role in TERNARY_LINEARS
        }
        pairs = [pair for of_role in self.roles.values() for of_layer in of_role for pair in of_layer]
        self.before = {layer: parallel.own_rows(codes_of(layer)[1]).clone() for _, layer in pairs}
        self.inputs = list(dict.fromkeys(module for module, _ in pairs))
        self.absmax: dict[nn.Module, Tensor] = {}

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """A context in which passes are watched, by hooks, which compiled layers do not call."""
        with contextlib.ExitStack() as hooks:
            for module in self.inputs:
                hooks.callback(module.register_forward_hook(self._watch).remove)
            yield

    def _watch(self, module: nn.Module, _: object, x: Tensor) -> None:
        if not x.numel():  # an expert that no token chose
            x = x.new_zeros(1)
        low, high = x.detach().float().aminmax()
        largest = torch.maximum(-low, high)
        before = self.absmax.get(module)
        self.absmax[module] = largest if before is None else torch.maximum(before, largest)

    @torch.no_grad()
    def record(self) -> Layers:
        """The quantities of the module's docstring, five significant digits. Empty without ternary layers."""
        values: list[Tensor] = []  # read together at the end: one GPU sync instead of hundreds
        places = [(role, of_layer) for role, of_role in self.roles.items() for of_layer in of_role]
        for _, of_layer in places:
            each = [weight_values(layer, self.before[layer]) for _, layer in of_layer]
            values += [torch.stack(same).double().sum() for same in zip(*each, strict=True)]
            values.append(torch.stack([self.absmax[module] for module, _ in of_layer]).max())
        numbers = torch.stack([value.double() for value in values]).tolist() if values else []
        counts = parallel.total([n for i, n in enumerate(numbers) if i % 5 < 3])
        absmax = parallel.largest(numbers[4::5])
        layers: Layers = {name: {} for name in QUANTITIES} if values else {}
        for i, (role, of_layer) in enumerate(places):
            weights = sum(layer.weight.numel() for _, layer in of_layer)
            shares = [count / weights for count in counts[3 * i : 3 * i + 3]]
            gamma = numbers[5 * i + 3] / len(of_layer)
            for name, value in zip(QUANTITIES, (*shares, gamma, absmax[i]), strict=True):
                layers[name].setdefault(role, []).append(float(f"{value:.5g}"))
        return layers

    def records(self) -> dict[str, Any]:
        """The fields for a line of log.jsonl."""
        return {"layers": self.record()} | ({"experts": self.loads()} if self.mixtures else {})

    def loads(self) -> list[list[float]]:
        """For each layer with experts, the share of the choices of the last pass that each expert got."""
        chosen = [parallel.total(block.load.tolist()) for block in self.mixtures]
        return [[float(f"{share / sum(shares):.5g}") for share in shares] for shares in chosen]


def layers_of(block: Block, role: str) -> list[tuple[nn.Module, BitLinear]]:
    """The ternary layers of a block that have this role, each with the module whose output is its input."""
    experts = block.experts if block.config.n_experts and role in ("gate", "up", "down") else [block]
    found: list[tuple[nn.Module, BitLinear]] = []
    for part in experts:
        layer = getattr(part, role, None)
        if isinstance(layer, BitLinear):
            before = f"{role}_linear_norm" if block.config.linear_norm else BEFORE[role]
            found.append((getattr(part, before, None) or getattr(block, before), layer))
    return found


def codes_of(layer: BitLinear) -> tuple[Tensor, Tensor, Tensor]:
    """The whole weight of a layer, its codes and γ."""
    weight = parallel.whole(layer.weight)
    return weight, *ternary_codes(weight, layer.scope)


def weight_values(layer: BitLinear, before: Tensor) -> tuple[Tensor, ...]:
    """How many of this process's codes are 0, flipped, or near; the mean γ. before: those codes before the step."""
    weight, codes, gamma = codes_of(layer)
    distance = (weight.float().abs() / expand_scale(gamma, *codes.shape) - 0.5).abs()
    codes, distance = parallel.own_rows(codes), parallel.own_rows(distance)
    return (codes == 0).sum(), (codes != before).sum(), (distance < NEAR).sum(), gamma.mean()
