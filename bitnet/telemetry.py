"""What happens inside a ternary model while it learns, of every layer and role: "layers" in log.jsonl.

    {"zeros": {"q": [of layer 0, of layer 1, ...], "k": ...}, "flips": ..., "near": ..., "gamma": ..., "absmax": ...}

    zeros    share of the codes that are 0
    flips    share of the codes that this one optimizer step changed
    near     share of the weights within 0.05 γ of the threshold at 0.5 γ, whose codes the next steps may change
    gamma    the scale γ; its mean where rows or groups have their own
    absmax   largest |x| among the inputs of the step, before they are quantized

Flips are those of one step, not of all since the last record: no codes are kept between records, so
a resumed run writes what an uninterrupted one does, and figures of runs with other intervals compare.
"""

from __future__ import annotations

import contextlib
from typing import Self

import torch
from torch import Tensor, nn

from bitnet import compiler, parallel
from bitnet.bitlinear import BitLinear
from bitnet.block import Block
from bitnet.config import TERNARY_LINEARS
from bitnet.model import Transformer
from bitnet.quant import expand_scale, ternary_codes

Layers = dict[str, dict[str, list[float]]]  # quantity -> role -> value of each layer

QUANTITIES = ("zeros", "flips", "near", "gamma", "absmax")
NEAR = 0.05
BEFORE = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "o": "attn_sub_norm"}
BEFORE |= {"gate": "ffn_norm", "up": "ffn_norm", "down": "ffn_sub_norm"}
"""The module of a block whose output a role multiplies; linear layers of one input are not called one by one."""


class Probe:
    """Watches a model during one optimizer step: enter it, make the step, leave it, ask for `record`.

    While entered it holds one byte for each ternary weight, its code before the step. Of several processes
    each holds those of its rows; all of them have to watch, and to ask.
    """

    def __init__(self, model: Transformer) -> None:
        blocks = [block for block in model.layers if isinstance(block, Block)]
        self.roles = {
            role: [(block, layer) for block in blocks if isinstance(layer := getattr(block, role, None), BitLinear)]
            for role in TERNARY_LINEARS
        }

    def __enter__(self) -> Self:
        pairs = [pair for of_role in self.roles.values() for pair in of_role]
        self.before = {layer: parallel.own_rows(codes_of(layer)[1]).clone() for _, layer in pairs}
        inputs = {input_of(block, role): block for role, of_role in self.roles.items() for block, _ in of_role}
        self.absmax: dict[nn.Module, Tensor] = {}
        self.watching = contextlib.ExitStack()
        self.watching.enter_context(compiler.eagerly())  # which calls hooks
        for module in inputs:
            self.watching.callback(module.register_forward_hook(self._watch).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.watching.close()

    def _watch(self, module: nn.Module, _: object, x: Tensor) -> None:
        low, high = x.detach().float().aminmax()
        largest = torch.maximum(-low, high)
        before = self.absmax.get(module)
        self.absmax[module] = largest if before is None else torch.maximum(before, largest)

    @torch.no_grad()
    def record(self) -> Layers:
        """The quantities of the module's docstring, five significant digits. Empty without ternary layers."""
        values: list[Tensor] = []  # read together at the end: on a GPU one wait instead of hundreds
        places = [(role, block, layer) for role, of_role in self.roles.items() for block, layer in of_role]
        for role, block, layer in places:
            values += [*weight_values(layer, self.before[layer]), self.absmax[input_of(block, role)]]
        numbers = torch.stack([value.double() for value in values]).tolist() if values else []
        counts = parallel.total([n for i, n in enumerate(numbers) if i % 5 < 3])
        absmax = parallel.largest(numbers[4::5])
        layers: Layers = {name: {} for name in QUANTITIES} if values else {}
        for i, (role, _, layer) in enumerate(places):
            shares = [count / layer.weight.numel() for count in counts[3 * i : 3 * i + 3]]
            for name, value in zip(QUANTITIES, (*shares, numbers[5 * i + 3], absmax[i]), strict=True):
                layers[name].setdefault(role, []).append(float(f"{value:.5g}"))
        return layers


def input_of(block: Block, role: str) -> nn.Module:
    """The module whose output is the input of a linear layer."""
    module: nn.Module = getattr(block, f"{role}_linear_norm" if block.config.linear_norm else BEFORE[role])
    return module


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
