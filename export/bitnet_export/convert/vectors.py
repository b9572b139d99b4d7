"""The outputs of a `Source`'s stacks: vectors of texts and images, with one module in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet.model.pooling import POOLS, Pool
from bitnet_export.foreign.source import Source
from bitnet_export.packed.records import NONE, ROLE, Key

from .reference import Pass, Seen, StoredLinear, linear_in, norm_in, vector


def leaving(
    source: Source, stack: int, passes: Sequence[Pass], states: Sequence[Sequence[Tensor]], seen: Seen | None
) -> list[list[Tensor]]:
    """The output of a stack without a head: a vector for each text or image, or for each patch without pooling."""
    config = source.config.stacks[stack]
    found = features if config.input == "images" and config.pooling == "none" else vectors
    return found(source, stack, passes, states, seen)


def features(
    source: Source, stack: int, passes: Sequence[Pass], states: Sequence[Sequence[Tensor]], seen: Seen | None
) -> list[list[Tensor]]:
    """States (n, T, D) through the projector, if there is one, by pass and texts."""
    config = source.config.stacks[stack]
    leaving = linear_in(source, stack, "projector", config.projector_bias, seen) if config.out_dim else nn.Identity()
    return [[leaving.to(each.dtype)(x) for x in state] for each, state in zip(passes, states, strict=True)]


def vectors(
    source: Source, stack: int, passes: Sequence[Pass], states: Sequence[Sequence[Tensor]], seen: Seen | None
) -> list[list[Tensor]]:
    """One vector of length 1 of each text or image, (n, width), by pass and texts."""
    pooling = source.config.stacks[stack].pooling
    pool = _pool(source, stack, seen) if pooling == "attention" else None
    found = []
    for each, state in zip(passes, states, strict=True):
        if pool:
            for module in pool.modules():
                if isinstance(module, StoredLinear):
                    module.storage = "f16" if each.linears == "int8" else each.linears  # as `source.encode` has it
        found.append([pool.to(each.dtype)(x) if pool else POOLS[pooling](x) for x in state])
    return [[F.normalize(x, dim=-1) for x in state] for state in features(source, stack, passes, found, seen)]


def _pool(source: Source, stack: int, seen: Seen | None) -> Pool:
    config = source.config.stacks[stack]
    with torch.device("meta"):
        pool = Pool(config)
    pool.probe = nn.Parameter(vector(source, Key(stack, NONE, ROLE["pool_probe"], NONE, 0), seen))
    biases = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    for name in ("q", "k", "v", "o", "up", "down"):
        linear = linear_in(source, stack, f"pool_{name}", biases.get(name, config.ffn_bias), seen)
        pool.set_submodule(name, linear)
    pool.norm = norm_in(source, stack, "pool_norm", seen)
    return pool
