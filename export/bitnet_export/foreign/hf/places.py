"""Where the tensors of a model folder hold ours: under which names, in which part, and turned how.

A tensor of ours is a tensor of the folder, or some of the rows of one; linear layers of GPT-2 lie there
inputs × outputs, experts of newer programs all in one tensor.
"""

from __future__ import annotations

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


class Slice(NamedTuple):
    """One of several tensors of ours that are one of the folder, one below the other."""

    name: str
    at: int
    of: int
    stacked: bool = False  # a parameter (experts, of · N, K)


Name = str | Slice
Names = Mapping[str, Name | list[Name]]  # by role; of a list the first that layer 0 has

NAMES: dict[str, Name] = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "attn_sub_norm": "self_attn.attn_sub_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "ffn_sub_norm": "mlp.ffn_sub_norm",
    "embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
}  # fmt: skip
"""Of Llama, by role: of layers within the layer, of the rest within the folder."""

_TOKEN_TYPE = "token_type"  # in names: a table whose first row is added to every token


class Places(NamedTuple):
    """Tensors of a folder by our keys."""

    tensors: Mapping[str, Entry]
    names: Mapping[str, Name]
    layers: str  # what stands before the number of a layer
    norm: str = ""  # what follows the name of a projection in that of the norm before it
    one_plus: bool = False  # norms multiply with 1 + weight
    transposed: bool = False  # linear layers are inputs × outputs
    interleaved: int = 0  # size of heads whose pairs for RoPE are neighbours
    skipped: int = 0  # rows of the table of positions before that of the first token

    @classmethod
    def of(cls, tensors: Mapping[str, Entry], names: Names, prefix: str, layers: str) -> Places:
        """names: where they are not those of Llama. prefix: of all but the head; a backbone may lack it."""
        given = prefix if any(name.startswith(prefix) for name in tensors) else ""
        first = f"{given}{layers}0."

        def there(name: Name) -> bool:
            text = first + _text(name).replace(EXPERT, "0")
            return text in tensors or f"{text}.weight" in tensors

        chosen: dict[str, Name] = {}
        for role, name in {**NAMES, **names}.items():
            place = next(filter(there, name), name[0]) if isinstance(name, list) else name
            chosen[role] = place if given or isinstance(place, Slice) else place.removeprefix(prefix)
        return cls(tensors, chosen, given + layers)

    @classmethod
    def written(cls, names: Names, prefix: str, layers: str, *, head: bool) -> Places:
        """Of a folder that is to be written: of several names the first; without the prefix if it has no head."""
        first = {role: name[0] if isinstance(name, list) else name for role, name in {**NAMES, **names}.items()}
        if not head:
            first = {role: n if isinstance(n, Slice) else n.removeprefix(prefix) for role, n in first.items()}
        return cls({}, first, (prefix if head else "") + layers, ".rms_norm")

    def module(self, key: Key) -> str:
        role = records.ROLES[key.role]
        base = role.removesuffix(LINEAR_NORM)
        name = _text(self.names[base]) + (self.norm if base != role else "")
        name = name.replace(EXPERT, str(key.expert))
        return name if key.layer == NONE else f"{self.layers}{key.layer}.{name}"

    def name(self, key: Key) -> str:
        """Of the folder's tensor."""
        place = self.names[records.ROLES[key.role].removesuffix(LINEAR_NORM)]
        if isinstance(place, Slice) and place.stacked:
            return self.module(key)
        return f"{self.module(key)}.{'bias' if key.part else 'weight'}"

    def embedding(self) -> Entry:
        return self.entry(f"{_text(self.names['embedding'])}.weight")

    def entry(self, name: str) -> Entry:
        if name not in self.tensors:
            raise SourceError(f"tensor {name} is missing, config.json calls for it")
        return self.tensors[name]

    def shape(self, spec: Spec, experts: int) -> tuple[int, ...]:
        """Which shape the folder's tensor has to have. experts: how many there are."""
        role, place = self.place(spec.key)
        of = place.of if isinstance(place, Slice) else 1
        if spec.form == "vector":
            return (of * spec.cols,)
        if isinstance(place, Slice) and place.stacked:
            return experts, of * spec.rows, spec.cols
        rows = spec.rows + (self.skipped if role == "position" else 0)
        return (spec.cols, of * rows) if self._is_transposed(role) else (of * rows, spec.cols)

    def added(self) -> str | None:
        """A table whose first row is added to every token, if there is one."""
        return f"{_text(self.names[_TOKEN_TYPE])}.weight" if _TOKEN_TYPE in self.names else None

    def is_whole(self, key: Key) -> bool:
        """Whether the folder's tensor is ours as it is."""
        role, place = self.place(key)
        return isinstance(place, str) and not self._is_transposed(role)

    def check_added(self, key: Key, cols: int) -> set[str]:
        """Names of what else a tensor is made of, with that number of columns."""
        added = self.added()
        if records.ROLES[key.role] != "position" or added is None:
            return set()
        entry = self.entry(added)
        if len(entry.shape) != 2 or entry.shape[0] < 1 or entry.shape[1] != cols:
            raise SourceError(f"{entry.what} has shape {list(entry.shape)}, expected rows of {cols}")
        entry.floats()
        return {added}

    def floats(self, key: Key) -> Floats:
        """Of shapes that were checked."""
        role, place = self.place(key)
        values = self.entry(self.name(key)).floats()
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
        return values

    def place(self, key: Key) -> tuple[str, Name]:
        role = records.ROLES[key.role]
        return role, self.names[role.removesuffix(LINEAR_NORM)]

    def _is_transposed(self, role: str) -> bool:
        return self.transposed and role in TERNARY_LINEARS

    def _positions(self, table: Floats) -> Floats:
        """From the first token on; with what is added to each token, because every one is of type 0."""
        ours = _rows(table, self.skipped, table.shape[0] - self.skipped)
        added = self.added()
        if added is None:
            return ours
        types = self.entry(added).floats()
        return mapped(ours, lambda rows: rows + types.rows(0, 1))


def mapped(values: Floats, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Floats:
    """Row by row."""
    return values._replace(rows=lambda first, last: change(values.rows(first, last)))


def _text(name: Name) -> str:
    return name if isinstance(name, str) else name.name


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
