"""Where a model folder has our tensors: their names, slices, and transpositions.

A tensor of ours is a tensor of the folder, or some rows of one; linear layers of GPT-2 are stored as
inputs × outputs, experts of newer programs all in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS
from bitnet_export.foreign.source import Floats, SourceError
from bitnet_export.packed import records
from bitnet_export.packed.records import NONE, Key, Spec

from .shards import Entry

EXPERT = "{expert}"  # in a name: the number of the expert
LINEAR_NORM = "_linear_norm"
LINEAR_ASIDE = ("projector", "pool_o", "pool_up", "pool_down")  # linear layers outside the layers


class Slice(NamedTuple):
    """One of several tensors of ours that are stacked in one tensor of the folder."""

    name: str
    at: int
    of: int
    stacked: bool = False  # a parameter (experts, of · N, K)
    joint: str = "."  # separator between the name and weight or bias


class Parameter(NamedTuple):
    """A tensor that is not a weight of a module; its shape starts with `ones` ones."""

    name: str
    ones: int = 0


Name = str | Slice | Parameter
Names = Mapping[str, Name | list[Name]]  # by role; of a list, the first that layer 0 has

NAMES: dict[str, Name] = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "attn_sub_norm": "self_attn.attn_sub_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "ffn_sub_norm": "mlp.ffn_sub_norm",
    "embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
}  # fmt: skip
"""Llama's names, by role: for layers within the layer, for the rest within the folder."""

_TOKEN_TYPE = "token_type"  # in names: a table whose first row is added to every token
_QUICK = 1.702  # of quick GELU, x · sigmoid(1.702 · x)


class Places(NamedTuple):
    """Tensors of a folder by our keys."""

    tensors: Mapping[str, Entry]
    names: Mapping[str, Name]
    layers: str  # prefix of the number of a layer
    norm: str = ""  # suffix of a projection's name for the norm before it
    one_plus: bool = False  # norms multiply by 1 + weight
    transposed: bool = False  # linear layers are inputs × outputs
    interleaved: int = 0  # size of heads whose pairs for RoPE are neighbours
    skipped: int = 0  # rows of the position table before the first token's
    patch: tuple[int, ...] = ()  # shape of a patch, (channels, y, x)
    quick: bool = False  # its activation is quick GELU, ours SiLU: 1.702 is moved into the matrices around it

    @classmethod
    def of(cls, tensors: Mapping[str, Entry], names: Names, prefixes: tuple[str, ...], layers: str) -> Places:
        """names: those that are not Llama's, with the first prefix. A backbone may have no prefix."""
        given = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in tensors)), "")
        first = f"{given}{layers}0."

        def there(name: Name) -> bool:
            text = _text(name).replace(EXPERT, "0")
            return not tensors.keys().isdisjoint((first + text, f"{first}{text}.weight", f"{text}.weight"))

        chosen: dict[str, Name] = {}
        for role, name in {**NAMES, **names}.items():
            place = next(filter(there, name), name[0]) if isinstance(name, list) else name
            chosen[role] = _with_prefix(place, prefixes[0], given)
        return cls(tensors, chosen, given + layers)

    @classmethod
    def written(cls, names: Names, prefix: str, layers: str, *, whole: bool) -> Places:
        """Places of a folder to be written: of several names the first. whole: with the prefix."""
        first = {role: name[0] if isinstance(name, list) else name for role, name in {**NAMES, **names}.items()}
        given = prefix if whole else ""
        first = {role: _with_prefix(name, prefix, given) for role, name in first.items()}
        return cls({}, first, given + layers, ".rms_norm")

    def module(self, key: Key) -> str:
        role = records.ROLES[key.role]
        base = role.removesuffix(LINEAR_NORM)
        name = _text(self.names[base]) + (self.norm if base != role else "")
        name = name.replace(EXPERT, str(key.expert))
        return name if key.layer == NONE else f"{self.layers}{key.layer}.{name}"

    def name(self, key: Key) -> str:
        """The name of the folder's tensor."""
        place = self.place(key)[1]
        if isinstance(place, Parameter) or (isinstance(place, Slice) and place.stacked):
            return self.module(key)
        joint = place.joint if isinstance(place, Slice) else "."
        return f"{self.module(key)}{joint}{'bias' if key.part else 'weight'}"

    def with_embedding(self) -> Places:
        """The same with a tied head as the embedding, where only the head is there.

        Of tensors that share memory `safetensors.torch.save_model` keeps the first in the order of names.
        """
        table, head = (f"{_text(self.names[role])}.weight" for role in ("embedding", "head"))
        if table in self.tensors or head not in self.tensors:
            return self
        return self._replace(tensors={**self.tensors, table: self.tensors[head]})

    def embedding(self) -> Entry:
        return self.entry(f"{_text(self.names['embedding'])}.weight")

    def entry(self, name: str, why: str = "config.json calls for it") -> Entry:
        if name not in self.tensors:
            other = next((each for each in self.tensors if each.endswith(f".{name}")), "")
            there = f"; there is {other:.120}: save the model without what it was wrapped in" if other else ""
            raise SourceError(f"tensor {name} is missing, {why}{there}")
        return self.tensors[name]

    def shape(self, spec: Spec, experts: int) -> tuple[int, ...]:
        """The required shape of the folder's tensor. experts: how many there are."""
        role, place = self.place(spec.key)
        of = place.of if isinstance(place, Slice) else 1
        ones = (1,) * place.ones if isinstance(place, Parameter) else ()
        if spec.form == "vector":
            return (*ones, of * spec.cols)
        if role == "patch":
            return (spec.rows, *self.patch)
        if isinstance(place, Slice) and place.stacked:
            return experts, of * spec.rows, spec.cols
        rows = spec.rows + (self.skipped if role == "position" else 0)
        return (spec.cols, of * rows) if self._is_transposed(role) else (*ones, of * rows, spec.cols)

    def added(self) -> str | None:
        """A table whose first row is added to every token, if there is one."""
        return f"{_text(self.names[_TOKEN_TYPE])}.weight" if _TOKEN_TYPE in self.names else None

    def is_whole(self, key: Key) -> bool:
        """Whether the folder's tensor is exactly ours."""
        role, place = self.place(key)
        return isinstance(place, str) and not self._is_transposed(role)

    def check_added(self, key: Key, cols: int) -> set[str]:
        """Names of other tensors that a tensor is computed from, checked to have `cols` columns."""
        added = self.added()
        if records.ROLES[key.role] != "position" or added is None:
            return set()
        entry = self.entry(added)
        if len(entry.shape) != 2 or entry.shape[0] < 1 or entry.shape[1] != cols:
            raise SourceError(f"{entry.what} has shape {list(entry.shape)}, expected rows of {cols}")
        entry.floats()
        return {added}

    def floats(self, key: Key) -> Floats:
        """The values of a tensor whose shape was checked."""
        role, place = self.place(key)
        entry = self.entry(self.name(key))
        values = entry.floats()
        if isinstance(place, Parameter):
            values = values._replace(shape=values.shape[place.ones :])
        if role == "patch" and key.part == 0:
            values = _flat(values)
        if self._is_transposed(role) and key.part == 0:
            values = _turned(values)
        if isinstance(place, Slice):
            values = _slice(values, place, key.expert if place.stacked else 0)
        if self.interleaved and role in ("q", "k"):
            values = _halves(values, self.interleaved)
        if role == "position":
            values = self._positions(values)
        if self.one_plus and role.endswith("_norm") and not role.endswith(LINEAR_NORM) and key.part == 0:
            values = mapped(values, lambda w: np.float32(1) + w)
        if self.quick and role in ("up", "pool_up"):
            values = mapped(values, lambda w: (w * np.float64(_QUICK)).astype(np.float32))
        if self.quick and role in ("down", "pool_down") and key.part == 0:
            values = mapped(values, lambda w: (w / np.float64(_QUICK)).astype(np.float32))
        return values

    def place(self, key: Key) -> tuple[str, Name]:
        role = records.ROLES[key.role]
        return role, self.names[role.removesuffix(LINEAR_NORM)]

    def _is_transposed(self, role: str) -> bool:
        return self.transposed and role in TERNARY_LINEARS

    def _positions(self, table: Floats) -> Floats:
        """Positions from the first token on, plus the row that is added to each token, as all are of type 0."""
        ours = _rows(table, self.skipped, table.shape[0] - self.skipped)
        added = self.added()
        if added is None:
            return ours
        types = self.entry(added).floats()
        return mapped(ours, lambda rows: rows + types.rows(0, 1))


def mapped(values: Floats, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Floats:
    """The values, changed row by row."""
    return values._replace(rows=lambda first, last: change(values.rows(first, last)))


def _text(name: Name) -> str:
    return name if isinstance(name, str) else name.name


def _with_prefix(name: Name, canonical: str, given: str) -> Name:
    """A name with the folder's own prefix."""
    text = _text(name)
    changed = given + text.removeprefix(canonical) if text.startswith(canonical) else text
    return changed if isinstance(name, str) else name._replace(name=changed)


def _flat(values: Floats) -> Floats:
    """A convolution (N, C, y, x) as a matrix."""
    n, *inner = values.shape
    k = math.prod(inner)
    last = inner[-1]

    def rows(first: int, end: int) -> NDArray[np.float32]:
        return values.rows(first * k // last, end * k // last).reshape(end - first, k)

    return Floats((n, k), values.dtype, rows)


def _rows(values: Floats, start: int, count: int) -> Floats:
    shape = (count, values.shape[-1])
    return Floats(shape, values.dtype, lambda first, last: values.rows(start + first, start + last))


def _turned(values: Floats) -> Floats:
    inputs, outputs = values.shape
    return Floats((outputs, inputs), values.dtype, lambda first, last: values.rows(0, inputs)[:, first:last].T)


def _slice(values: Floats, place: Slice, expert: int) -> Floats:
    """The rows of a matrix, or the numbers of a bias."""
    count = values.shape[-2 if len(values.shape) > 1 else 0] // place.of
    start = (expert * place.of + place.at) * count
    if len(values.shape) == 1:
        return Floats((count,), values.dtype, lambda first, last: values.rows(first, last)[:, start : start + count])
    return _rows(values, start, count)


def _halves(values: Floats, head: int) -> Floats:
    """Rows (2i, 2i + 1) of a head become (i, i + head/2)."""
    whole = values.all()
    order = np.arange(values.shape[0]).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()
    return Floats.of(np.ascontiguousarray(whole[order]))
