"""The forward pass of a `Source` in torch, one layer in memory at a time: what the engine is held against.

The layers are those of `bitnet.model.transformer`, with the source's ternary codes, or its floats as they are
stored, in place of trainable weights. Several passes run side by side, so that the source is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitnet.model.block import Block
from bitnet.model.layers import norm_of
from bitnet.model.positions import places
from bitnet.quant import activation_codes, embedding_rows, integer_product, output_logits, row_codes, stored_rows
from bitnet_export.foreign.source import Floats, Source, Ternary
from bitnet_export.foreign.source import Tensor as Stored
from bitnet_export.packed import layout, records
from bitnet_export.packed.records import NONE, ROLE, Key

_ROWS = 4096  # of a table in memory at a time

Windows = NDArray[np.int64]  # (n, T) token ids, each row a text of its own
Seen = Callable[[Key, Stored], None]


class Pass(NamedTuple):
    """One forward pass: of which texts, and how it computes."""

    texts: Sequence[Windows]
    dtype: torch.dtype
    head_format: str  # of embedding and head: "int8", "f16", "f32"
    linears: str  # the same of linear layers that are not ternary
    noise: float = 0.0  # relative, on the embedding


class FrozenLinear(nn.Module):
    """A linear layer of ternary codes: x quantized to int8, exact sums, one factor (bitnet.quant)."""

    def __init__(self, weight: Ternary, bias: Tensor | None) -> None:
        super().__init__()
        self.codes, self.scales = torch.from_numpy(weight.codes), torch.from_numpy(weight.scales)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        q, s = activation_codes(x.flatten(0, -2))
        y = integer_product(q, self.codes, self.scales, s).to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else torch.add(y, self.bias)


class StoredLinear(nn.Module):
    """A linear layer of floats as `storage` says they are stored; int8 ones have inputs of int8, as a head has."""

    storage = "f32"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        y = output_logits(x, self.weight if self.storage == "int8" else self.weight.to(x.dtype), self.storage)
        return y if self.bias is None else torch.add(y, self.bias)


def hidden_states(source: Source, passes: Sequence[Pass], seen: Seen | None = None) -> list[list[Tensor]]:
    """Final normed hidden states by pass and texts, each (n, T, D). `seen` gets every tensor of the layers."""
    config = source.config
    embed = _Entering(source, seen)
    states = [[embed(each, windows) for windows in each.texts] for each in passes]
    for layer in range(config.n_layers):
        block = _block(source, layer, seen)
        for each, state in zip(passes, states, strict=True):
            block.to(each.dtype)
            for module in block.modules():
                if isinstance(module, StoredLinear):
                    module.storage = each.linears
            for i, x in enumerate(state):
                state[i] = block(x, *places(block.config, x))
    norm = _norm(source, "final_norm", seen) if config.final_norm else nn.Identity()
    return [[norm.to(each.dtype)(x) for x in state] for each, state in zip(passes, states, strict=True)]


def logits(
    source: Source, passes: Sequence[Pass], states: list[list[Tensor]]
) -> Iterator[tuple[slice, list[list[Tensor]]]]:
    """Logits by pass and texts, each (n, T, rows), for one range of the vocabulary after another."""
    config = source.config
    table = source.load(Key(0, NONE, ROLE["embedding" if config.tie_embeddings else "head"], NONE, 0))
    bias = _vector(source, Key(0, NONE, ROLE["head"], NONE, 1), None) if config.head_bias else None
    inputs = [torch.cat([x.flatten(0, 1) for x in state]) for state in states]
    codes = [activation_codes(x) for x in inputs]
    for first in range(0, config.vocab_size, _ROWS):
        rows = slice(first, min(first + _ROWS, config.vocab_size))
        head = _Head(table, rows)
        parts = []
        for each, x, (q, s), state in zip(passes, inputs, codes, states, strict=True):
            y = head.product(x, q, s, each.head_format)
            if bias is not None:
                y = y + bias[rows].to(y.dtype)
            if config.logit_softcap:
                y = config.logit_softcap * torch.tanh(y / config.logit_softcap)
            texts = torch.split(y, [len(text) * text.shape[1] for text in state])
            parts.append([part.view(*text.shape[:2], -1) for part, text in zip(texts, state, strict=True)])
        yield rows, parts


class _Head:
    """Some rows of the head, quantized once for all passes."""

    def __init__(self, table: Stored, rows: slice) -> None:
        self.weight: Tensor | None = None  # None: ternary
        if isinstance(table, Ternary):
            scales = _rows_of(table.scales, rows)
            self.integers = torch.from_numpy(table.codes[rows]), torch.from_numpy(scales)
        else:
            self.weight = torch.from_numpy(np.ascontiguousarray(table.rows(rows.start, rows.stop)))
            self.integers = row_codes(self.weight)

    def product(self, x: Tensor, q: Tensor, s: Tensor, head_format: str) -> Tensor:
        """x: (M, D), of which q and s are the codes. Returns (M, rows)."""
        if self.weight is None or head_format == "int8":
            return integer_product(q, *self.integers, s).to(x.dtype)
        return nn.functional.linear(x, stored_rows(self.weight, head_format).to(x.dtype))


class _Entering:
    """What enters the first layer, as `Transformer.entering` has it."""

    def __init__(self, source: Source, seen: Seen | None) -> None:
        self.config = source.config
        self.table = source.load(Key(0, NONE, ROLE["embedding"], NONE, 0))
        self.positions: Tensor | None = None
        if self.config.position == "learned":
            key = Key(0, NONE, ROLE["position"], NONE, 0)
            table = source.load(key)
            assert isinstance(table, Floats)
            if seen:
                seen(key, table)
            self.positions = torch.from_numpy(np.array(table.all()))
        self.norm = _norm(source, "embedding_norm", seen) if self.config.embedding_norm else nn.Identity()

    def __call__(self, each: Pass, windows: Windows) -> Tensor:
        x = self.config.embedding_scale * _embed(self.table, each, windows)
        if self.positions is not None:
            x = x + self.positions[: windows.shape[1]].to(x)
        entering: Tensor = self.norm.to(each.dtype)(x)
        return entering


def _embed(table: Stored, each: Pass, windows: Windows) -> Tensor:
    tokens, place = np.unique(windows, return_inverse=True)
    if isinstance(table, Ternary):
        x = torch.from_numpy(dense(Ternary(table.codes[tokens], _rows_of(table.scales, tokens))))
    else:
        some = torch.from_numpy(np.concatenate([table.rows(t, t + 1) for t in tokens.tolist()]))
        x = embedding_rows(torch.arange(len(tokens)), some, each.head_format)
    x = x.to(each.dtype)[torch.from_numpy(place.reshape(windows.shape))]
    if each.noise:
        x = x * (1 + each.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    return x


def _rows_of(scales: NDArray[np.float32], rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
    return scales if scales.size == 1 else scales[rows]


def dense(weight: Ternary) -> NDArray[np.float32]:
    """codes · scales, (N, K)."""
    if weight.scales.ndim == 2:
        return weight.codes * layout.spread_scales(weight.scales, weight.codes.shape[1])
    return weight.codes * weight.scales[:, None]


def _block(source: Source, layer: int, seen: Seen | None) -> Block:
    """Layer `layer` of the source as a module."""
    config = source.config
    with torch.device("meta"):
        block = Block(config.of_layer(layer).replace(ternary=()))
    own, parameters, linears = f"layers.{layer}.", {}, {}
    for spec in records.expected_tensors(config.replace(n_layers=1)):
        if spec.key.layer == NONE:
            continue
        key = spec.key._replace(layer=layer)
        name, tensor = key.name.removeprefix(own), source.load(key)
        if seen:
            seen(key, tensor)
        if spec.form == "linear":
            linears[name.removesuffix(".weight")] = tensor
        else:
            assert isinstance(tensor, Floats)
            parameters[name] = torch.from_numpy(np.array(tensor.all()))
    for name, weight in linears.items():
        bias = parameters.pop(f"{name}.bias", None)
        block.set_submodule(name, _linear(weight, bias))
    block.load_state_dict(parameters, assign=True, strict=False)  # biases of linear layers are there already
    return block


def _linear(weight: Stored, bias: Tensor | None) -> nn.Module:
    if isinstance(weight, Ternary):
        return FrozenLinear(weight, bias)
    return StoredLinear(torch.from_numpy(np.array(weight.all())), bias)


def _norm(source: Source, role: str, seen: Seen | None) -> nn.Module:
    norm = norm_of(source.config, source.config.dim)
    key = Key(0, NONE, ROLE[role], NONE, 0)
    parts = {"weight": _vector(source, key, seen)}
    if source.config.norm_bias:
        parts["bias"] = _vector(source, key._replace(part=1), seen)
    norm.load_state_dict(parts)
    return norm


def _vector(source: Source, key: Key, seen: Seen | None) -> Tensor:
    tensor = source.load(key)
    if seen:
        seen(key, tensor)
    assert isinstance(tensor, Floats)
    return torch.from_numpy(np.array(tensor.all()).reshape(-1))
