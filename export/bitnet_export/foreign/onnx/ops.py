"""A small builder of ONNX graphs: values with arithmetic, and weights in a separate file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 21  # this and IR 10 run in onnxruntime 1.18 and later
IR_VERSION = 10
CONTRIB = "com.microsoft"  # onnxruntime's own operators
INLINE = 1024  # bytes below which a weight stays in the graph, where shape inference sees it
PAGE = 4096  # weights start at multiples of it, so that the file can be memory-mapped


class Value:
    """A tensor of the graph. Arithmetic adds nodes; a Python number becomes an fp32 constant."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name

    def __add__(self, other: Value | float) -> Value:
        return self._with("Add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("Sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self if other == 1.0 else self._with("Mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with("Div", other)

    def _with(self, kind: str, other: Value | float) -> Value:
        return self.graph.op(kind, self, other if isinstance(other, Value) else float(other))

    def cast(self, dtype: int) -> Value:
        return self.graph.op("Cast", self, to=dtype)

    def reshape(self, *shape: int) -> Value:
        """Reshape: 0 keeps a dimension, one -1 is inferred from the others."""
        return self.graph.op("Reshape", self, list(shape))

    def transpose(self, *order: int) -> Value:
        return self.graph.op("Transpose", self, perm=order)


Operand = Value | float | Sequence[int] | NDArray[Any]


class Graph:
    """Nodes in the order of their creation. `part`: name prefix of the next ones, such as "layers.0/attention"."""

    def __init__(self, weights: BinaryIO, location: str) -> None:
        """weights: file for the bytes of large weights; location: its name next to the model."""
        self.part = ""
        self._weights, self._location = weights, location
        self._nodes: list[onnx.NodeProto] = []
        self._numbers = itertools.count()
        self._domains = {"": OPSET}
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}

    def op(self, kind: str, *inputs: Operand, domain: str = "", **attributes: Any) -> Value:
        """One node with one output. A float is an fp32 constant, a sequence of int an int64 vector."""
        return self._node(kind, inputs, 1, domain, attributes)[0]

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        """Parts of the last dimension."""
        return self._node("Split", (x, sizes), len(sizes), "", {"axis": -1})

    def largest(self, x: Value, k: int) -> tuple[Value, Value]:
        """The k largest values of the last dimension, in order, ties by index; and their indices, int64."""
        values, indices = self._node("TopK", (x, [k]), 2, "", {"axis": -1})
        return values, indices

    def either(self, condition: Value, then: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """The fp32 result of one of two functions; only that one is computed. Both may use earlier values."""
        return self._node(
            "If", (condition,), 1, "", {"then_branch": self._branch(then), "else_branch": self._branch(otherwise)}
        )[0]

    def _branch(self, make: Callable[[], Value]) -> onnx.GraphProto:
        outer, self._nodes = self._nodes, []
        try:
            result = make()
            output = helper.make_tensor_value_info(result.name, TensorProto.FLOAT, None)
            return helper.make_graph(self._nodes, result.name, [], [output])
        finally:
            self._nodes = outer

    def _node(
        self, kind: str, inputs: Sequence[Operand], outputs: int, domain: str, attributes: dict[str, Any]
    ) -> tuple[Value, ...]:
        name = f"{self.part}/{kind}.{next(self._numbers)}"
        self._domains.setdefault(domain, 1)
        names = [name if outputs == 1 else f"{name}.{i}" for i in range(outputs)]
        sources = [self._operand(x).name for x in inputs]
        self._nodes.append(helper.make_node(kind, sources, names, name, domain=domain, **attributes))
        return tuple(Value(self, output) for output in names)

    def _operand(self, x: Operand) -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, np.ndarray):
            return self.constant(x)
        return self.constant(np.array(x, np.float32 if isinstance(x, float) else np.int64))

    def constant(self, values: NDArray[Any]) -> Value:
        """A small constant; equal ones are shared."""
        key = (values.dtype.str, values.shape, values.tobytes())
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._constants[key] = self.weight(name, values.dtype, values.shape, [values])
        return self._constants[key]

    def weight(self, name: str, dtype: Any, shape: Sequence[int], blocks: Iterable[NDArray[Any]]) -> Value:
        """A named constant whose bytes come in consecutive blocks; each block is freed before the next."""
        dtype, size = np.dtype(dtype), np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        if size < INLINE:
            values = np.concatenate([np.asarray(block, dtype).reshape(-1) for block in blocks]).reshape(shape)
            self._initializers.append(numpy_helper.from_array(values, name))
            return Value(self, name)
        self._weights.write(bytes(-self._weights.tell() % PAGE))
        offset = self._weights.tell()
        for block in blocks:
            self._weights.write(np.ascontiguousarray(block, dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)
        written = self._weights.tell() - offset
        if written != size:
            raise ValueError(f"{name}: {written} bytes, expected {size} for shape {list(shape)}")
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._location), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self._initializers.append(tensor)
        return Value(self, name)

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> Value:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return Value(self, name)

    def output(self, name: str, x: Value, dtype: int, shape: Sequence[int | str]) -> None:
        self._nodes.append(helper.make_node("Identity", [x.name], [name], name))
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def model(self, name: str, **producer: str) -> onnx.ModelProto:
        """The finished model; `producer` as in onnx.helper.make_model."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._domains.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, **producer)
