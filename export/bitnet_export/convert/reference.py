"""The forward pass of a `Source` in torch, one layer in memory at a time: what the engine is compared with.

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
from bitnet.model.images import patches_of, put_in_place
from bitnet.model.layers import norm_of
from bitnet.model.positions import places
from bitnet.quant import activation_codes, integer_product, row_codes, stored_rows
from bitnet.straight_through import embedding_rows, output_logits
from bitnet_export.checkpoint.pictures import normalized
from bitnet_export.checkpoint.scoring import Texts
from bitnet_export.foreign.source import Floats, Source, Ternary
from bitnet_export.foreign.source import Tensor as Stored
from bitnet_export.packed import layout, records
from bitnet_export.packed.records import NONE, ROLE, Key

_ROWS = 4096  # of a table in memory at a time

Seen = Callable[[Key, Stored], None]


class Pass(NamedTuple):
    """One forward pass: its texts, and its precision."""

    texts: Sequence[Texts]
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
    """A linear layer of floats, stored as `storage` says; int8 layers take int8 inputs, like a head."""

    storage = "f32"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        y = output_logits(x, self.weight if self.storage == "int8" else self.weight.to(x.dtype), self.storage)
        return y if self.bias is None else torch.add(y, self.bias)


def hidden_states(
    source: Source,
    passes: Sequence[Pass],
    seen: Seen | None,
    stack: int = 0,
    shown: Sequence[Tensor | None] | None = None,
) -> list[list[Tensor]]:
    """Final normed hidden states by pass and texts, each (n, T, D). `seen` gets every tensor of the layers.

    stack: its index; shown: by pass, the vectors (n, N, D) of the images at the beginning of its texts.
    """
    config = source.config.stacks[stack]
    entering = Entering(source, stack, seen)
    states = [
        [entering(each, texts, None if texts.images is None or not shown else shown[i]) for texts in each.texts]
        for i, each in enumerate(passes)
    ]
    for layer in range(config.n_layers):
        block = _block(source, stack, layer, seen)
        for each, state in zip(passes, states, strict=True):
            block.to(each.dtype)
            for module in block.modules():
                if isinstance(module, StoredLinear):
                    module.storage = each.linears
            for i, x in enumerate(state):
                prefixes = each.texts[i].prefixes
                told = None if prefixes is None else torch.from_numpy(prefixes)
                state[i] = block(x, *places(block.config, x, None, told))
    norm = norm_in(source, stack, "final_norm", seen) if config.final_norm else nn.Identity()
    return [[norm.to(each.dtype)(x) for x in state] for each, state in zip(passes, states, strict=True)]


def logits(
    source: Source, passes: Sequence[Pass], states: list[list[Tensor]]
) -> Iterator[tuple[slice, list[list[Tensor]]]]:
    """Logits by pass and texts, each (n, T, rows), for one range of the vocabulary after another."""
    config = source.config
    table = source.load(Key(0, NONE, ROLE["embedding" if config.tie_embeddings else "head"], NONE, 0))
    bias = vector(source, Key(0, NONE, ROLE["head"], NONE, 1), None) if config.head_bias else None
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
            part = table.take(rows)
            self.integers = torch.from_numpy(part.codes), torch.from_numpy(part.scales)
        else:
            self.weight = torch.from_numpy(np.ascontiguousarray(table.rows(rows.start, rows.stop)))
            self.integers = row_codes(self.weight)

    def product(self, x: Tensor, q: Tensor, s: Tensor, head_format: str) -> Tensor:
        """x: (M, D), with codes q and scales s. Returns (M, rows)."""
        if self.weight is None or head_format == "int8":
            return integer_product(q, *self.integers, s).to(x.dtype)
        return nn.functional.linear(x, stored_rows(self.weight, head_format).to(x.dtype))


class Entering:
    """The input of the first layer, as in `Transformer.entering`."""

    def __init__(self, source: Source, stack: int, seen: Seen | None) -> None:
        self.config = source.config.stacks[stack]
        self.table: Stored | None = None
        self.patch: nn.Module | None = None
        self.first: Tensor | None = None
        if self.config.input == "images":
            self.patch = linear_in(source, stack, "patch", self.config.patch_bias, seen)
            if self.config.class_token:
                self.first = vector(source, Key(stack, NONE, ROLE["class_embedding"], NONE, 0), seen)
        else:
            self.table = source.load(Key(stack, NONE, ROLE["embedding"], NONE, 0))
        self.positions: Tensor | None = None
        if self.config.position == "learned":
            self.positions = matrix(source, Key(stack, NONE, ROLE["position"], NONE, 0), seen)
        norm = self.config.embedding_norm
        self.norm = norm_in(source, stack, "embedding_norm", seen) if norm else nn.Identity()

    def __call__(self, each: Pass, texts: Texts, shown: Tensor | None) -> Tensor:
        x = self._patches(each, texts) if self.patch else self._tokens(each, texts, shown)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]].to(x)
        entering: Tensor = self.norm.to(each.dtype)(x)
        return entering

    def _tokens(self, each: Pass, texts: Texts, shown: Tensor | None) -> Tensor:
        assert self.table is not None
        x = self.config.embedding_scale * _noisy(_embed(self.table, each, texts.inputs), each)
        if shown is None:
            return x
        return put_in_place(x, torch.from_numpy(texts.inputs), self.config.image_token, shown, None)

    def _patches(self, each: Pass, texts: Texts) -> Tensor:
        assert self.patch is not None
        pixels = normalized(self.config, texts.inputs, torch.empty(0, dtype=each.dtype))
        x: Tensor = _noisy(self.patch.to(each.dtype)(patches_of(self.config, pixels)), each)
        return x if self.first is None else torch.cat([self.first.to(x).expand(len(x), 1, -1), x], 1)


def _noisy(x: Tensor, each: Pass) -> Tensor:
    return x * (1 + each.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))) if each.noise else x


def _embed(table: Stored, each: Pass, windows: NDArray[np.int64]) -> Tensor:
    tokens, place = np.unique(windows, return_inverse=True)
    if isinstance(table, Ternary):
        x = torch.from_numpy(dense(table.take(tokens)))
    else:
        some = torch.from_numpy(np.concatenate([table.rows(t, t + 1) for t in tokens.tolist()]))
        x = embedding_rows(torch.arange(len(tokens)), some, each.head_format)
    return x.to(each.dtype)[torch.from_numpy(place.reshape(windows.shape))]


def dense(weight: Ternary) -> NDArray[np.float32]:
    """codes · scales, (N, K)."""
    if weight.scales.ndim == 2:
        return weight.codes * layout.spread_scales(weight.scales, weight.codes.shape[1])
    return weight.codes * weight.scales[:, None]


def _block(source: Source, stack: int, layer: int, seen: Seen | None) -> Block:
    """Layer `layer` of a stack of the source as a module."""
    config = source.config.stacks[stack]
    with torch.device("meta"):
        block = Block(config.of_layer(layer).replace(ternary=()))
    own, parameters, linears = f"layers.{layer}.", {}, {}
    for spec in records.expected_tensors(config.replace(n_layers=1)):
        if spec.key.layer == NONE:
            continue
        key = spec.key._replace(layer=layer)
        name = key.name.removeprefix(own)
        tensor = loaded(source, key._replace(stack=stack), seen)
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


def norm_in(source: Source, stack: int, role: str, seen: Seen | None) -> nn.Module:
    config = source.config.stacks[stack]
    norm = norm_of(config, config.dim)
    key = Key(stack, NONE, ROLE[role], NONE, 0)
    parts = {"weight": vector(source, key, seen)}
    if config.norm_bias:
        parts["bias"] = vector(source, key._replace(part=1), seen)
    norm.load_state_dict(parts)
    return norm


def linear_in(source: Source, stack: int, role: str, bias: bool, seen: Seen | None) -> StoredLinear:
    """A matrix outside the layers that stays float."""
    key = Key(stack, NONE, ROLE[role], NONE, 0)
    return StoredLinear(matrix(source, key, seen), vector(source, key._replace(part=1), seen) if bias else None)


def vector(source: Source, key: Key, seen: Seen | None) -> Tensor:
    return matrix(source, key, seen).reshape(-1)


def matrix(source: Source, key: Key, seen: Seen | None) -> Tensor:
    """A tensor that is never ternary."""
    tensor = loaded(source, key, seen)
    assert isinstance(tensor, Floats)
    return torch.from_numpy(np.array(tensor.all()))


def loaded(source: Source, key: Key, seen: Seen | None) -> Stored:
    tensor = source.load(key)
    if seen:
        seen(key, tensor)
    return tensor
