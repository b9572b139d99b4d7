"""Building blocks of a graph's layers: linear layers, norms, activations, found in the file by their roles."""

from __future__ import annotations

import numpy as np

from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLE, Key, Record

from .matrices import Matrices
from .ops import Graph, Value

LOWEST = float(np.finfo(np.float32).min)  # a score with zero weight; finite, so that fully masked rows are not NaN


class Parts:
    """Building blocks of one stack. layer, expert: NONE if a tensor has none."""

    def __init__(self, graph: Graph, file: PackedFile, form: str, stack: int = 0) -> None:
        self.g, self.file, self.stack = graph, file, stack
        self.config = file.configs[stack]
        self.matrices = Matrices(graph, file, form)

    def project(self, x: Value, role: str, layer: int = NONE, expert: int = NONE) -> Value:
        """A linear layer with its bias, and the norm before it if the model has one."""
        normed = x if layer == NONE else self.norm(x, f"{role}_linear_norm", layer, expert)
        y = self.matrices.linear(normed, self.record(role, layer, expert))
        bias = self.find(role, layer, expert, part=1)
        return y + self.matrices.vector(bias) if bias else y

    def norm(self, x: Value, role: str, layer: int = NONE, expert: int = NONE) -> Value:
        """RMS or layer norm over the last dimension; x itself if the model has none."""
        gain, bias = (self.find(role, layer, expert, part) for part in (0, 1))
        if gain is None:
            return x
        g = self.g
        if self.config.norm == "layer":
            x = x - g.op("ReduceMean", x, [-1], keepdims=1)
        square = g.op("ReduceMean", g.op("Pow", x, 2.0), [-1], keepdims=1)
        y = x / g.op("Sqrt", square + self.config.norm_eps) * self.matrices.vector(gain)
        return y + self.matrices.vector(bias) if bias else y

    def activation(self, x: Value) -> Value:
        g, kind = self.g, self.config.activation
        if kind == "silu":
            return x * g.op("Sigmoid", x)
        if kind in ("gelu", "gelu_erf"):
            return g.op("Gelu", x, approximate="tanh" if kind == "gelu" else "none")
        y = g.op("Relu", x)
        return y * y if kind == "relu2" else y

    def softcap(self, x: Value, cap: float) -> Value:
        return self.g.op("Tanh", x / cap) * cap if cap else x

    def find(self, role: str, layer: int = NONE, expert: int = NONE, part: int = 0) -> Record | None:
        return self.file.tensors.get(Key(self.stack, layer, ROLE[role], expert, part))

    def record(self, role: str, layer: int = NONE, expert: int = NONE, part: int = 0) -> Record:
        return self.file.tensors[Key(self.stack, layer, ROLE[role], expert, part)]
