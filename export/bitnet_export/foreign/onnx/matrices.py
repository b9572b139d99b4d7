"""The matrices of a packed file in a graph: how ternary and int8 codes are stored and multiplied.

In every form the activations are quantized as in `bitnet.quant` and Σ q·T is exact, so the form
changes size and speed but not the result:
- "float": codes as fp32. |Σ q·T| is below 2²⁴ (K up to 132,104), where fp32 adds whole numbers exactly
  in any order.
  Standard operators, large, for anything that runs ONNX.
- "int8": codes as int8, MatMulInteger. Standard operators. Activations are unsigned (q + 128),
  because onnxruntime has fast kernels on x86 only for u8 × i8; their 16-bit steps on machines
  without VNNI cannot overflow on ternary weights (255·1·2 < 2¹⁵).
- "2bit": onnxruntime's MatMulNBits, four codes per byte. See `_two_bits` for why it is exact.

Matrices that are int8 in the file stay int8 in the compact forms, and use u8 × u8 products, which have no 16-bit
steps to overflow. In "float" their sums are exact up to K = 1040.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from bitnet_export.foreign.outgoing import code_rows, value_rows
from bitnet_export.packed import encodings
from bitnet_export.packed.layout import SCALE_GROUP_K
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import ROLES, Record

from .ops import CONTRIB, Graph, Value

FORMS = ("float", "int8", "2bit")

_EPS = 1e-5  # bitnet.quant.EPS, without torch


class Quantized(NamedTuple):
    """x ≈ q / s, with one scale per token."""

    q: Value  # fp32 (B, T, K), whole numbers from -127 to 127
    s: Value  # fp32 (B, T, 1)


class Cut(NamedTuple):
    """How the inputs of a matrix are cut into the blocks of MatMulNBits."""

    span: int  # inputs of one scale, which are cut separately from others
    inputs: int  # most inputs per block
    block: int  # block size, with padding


CUT = Cut(127, 127, 128)
GROUP_CUT = Cut(SCALE_GROUP_K, 43, 64)  # three blocks hold a group of 128


class Matrices:
    """Products with the matrices of a file, and rows of its tables."""

    def __init__(self, graph: Graph, file: PackedFile, form: str) -> None:
        self.graph, self.file, self.form = graph, file, form
        self._made: dict[str, Value] = {}  # weights by name: each is written once
        self._quantized: dict[str, Quantized] = {}
        self._blocks: dict[tuple[str, Cut], Value] = {}

    def linear(self, x: Value, record: Record) -> Value:
        """x · Wᵀ. x: (B, T, K), W: (N, K); returns fp32 (B, T, N)."""
        if not record.quantized:
            return self.graph.op("MatMul", x, self._transposed(record, np.float32))
        x_q = self.quantize(x)
        if self._in_two_bits(record):
            return self._two_bits(x_q, record)
        if self.form == "float":
            sums = self.graph.op("MatMul", x_q.q, self._transposed(record, np.float32))
        elif record.encoding.ternary:
            sums = self._integer(x_q.q, self._transposed(record, np.int8))
        else:
            sums = self._integer(x_q.q, self._transposed(record, np.uint8, 128), 128)
        return self._scaled(sums, x_q, record)

    def head(self, x: Value, record: Record) -> Value:
        """`linear` with a table that `rows` may also read: one copy in the file, transposed in the graph."""
        if self._in_two_bits(record):
            return self._two_bits(self.quantize(x), record)
        table = self._table(record)
        turned = (table.cast(TensorProto.FLOAT) if self._table_type(record) == np.float16 else table).transpose(1, 0)
        if not record.quantized:
            return self.graph.op("MatMul", x, turned)
        x_q = self.quantize(x)
        sums = self.graph.op("MatMul", x_q.q, turned) if self.form == "float" else self._integer(x_q.q, turned, 128)
        return self._scaled(sums, x_q, record)

    def rows(self, ids: Value, record: Record) -> Value:
        """Rows of a table. ids: int64 (B, T); returns fp32 (B, T, K)."""
        if self._in_two_bits(record):
            row = self._two_bit_rows(ids, record)
        else:
            row = self.graph.op("Gather", self._table(record), ids).cast(TensorProto.FLOAT)
            if record.quantized and self.form != "float":
                row = row - 128.0
        if not record.quantized or record.scope == encodings.SCALE_GROUP:
            return row
        scales = self._scales(record)
        if record.scope == encodings.SCALE_ROW:
            scales = self.graph.op("Unsqueeze", self.graph.op("Gather", scales, ids), [-1])
        return row * scales

    def vector(self, record: Record) -> Value:
        """A norm's gain, a bias or frequencies, fp32 (K,)."""
        return self._weight(record.key.name, np.float32, [record.cols], lambda: [self.file.values(record)])

    def quantize(self, x: Value) -> Quantized:
        """s = 127 / max(max|x|, 1e-5), q = round(x·s), ties to even; computed once for all uses of x.

        No clamp: |x·s| is at most 127·(1 + 2⁻²²), which rounds to 127.
        """
        if x.name not in self._quantized:
            op = self.graph.op
            s = op("Div", 127.0, op("Clip", op("ReduceMax", op("Abs", x), [-1], keepdims=1), _EPS))
            self._quantized[x.name] = Quantized(op("Round", x * s), s)
        return self._quantized[x.name]

    # ---- products ----

    def _scaled(self, sums: Value, x: Quantized, record: Record) -> Value:
        """Σ q·c · (scale / s), the one factor of bitnet.quant.integer_product."""
        if record.scope == encodings.SCALE_GROUP:
            return sums / x.s  # the scales are in the weights
        return sums * (self._scales(record) / x.s)

    def _integer(self, q: Value, weight: Value, zero: int = 0) -> Value:
        """Exact Σ q·(weight - zero) as fp32. q: (B, T, K), weight: (K, N)."""
        unsigned = (q + 128.0).cast(TensorProto.UINT8)
        zeros = [np.array(128, np.uint8)] + ([np.array(zero, np.uint8)] if zero else [])
        return self.graph.op("MatMulInteger", unsigned, weight, *zeros).cast(TensorProto.FLOAT)

    def _two_bits(self, x: Quantized, record: Record) -> Value:
        """MatMulNBits, whose fast kernels (accuracy_level 4) quantize the activations of each block again.

        They scale by 127 over the block's largest magnitude, which changes nothing if that is
        127. So every block gets an additional 127 with a weight of 0: q passes unchanged, the
        block's sum is exact, and so is the fp32 sum of all blocks. Kernels without that step
        compute in fp32, exactly as in "float". Group scales go into the kernel, with fp32
        rounding after each block. (Only one 127: the kernel computes Σ(T+2)q - 2Σq, both
        in fp32 when scaled, and a large Σq would cost digits.)
        """
        cut, count = _cut_of(record)
        if cut is CUT:  # one scale per matrix or row is applied outside: one rounding
            ones, shape = [np.ones(count, np.float32)] * record.rows, [record.rows, count]
            scales = self._weight(f"ones.{record.rows}.{count}", np.float32, shape, lambda: ones)
        else:
            scales = self._block_scales(record)
        sums = self.graph.op(
            "MatMulNBits", self._cut_inputs(x.q, record), self._two_bit_codes(record), scales, domain=CONTRIB,
            N=record.rows, K=count * cut.block, bits=2, block_size=cut.block, accuracy_level=4,
        )  # fmt: skip
        return self._scaled(sums, x, record)

    def _two_bit_rows(self, ids: Value, record: Record) -> Value:
        """Rows of codes stored for MatMulNBits, times their group scales: fp32 (B, T, K)."""
        op, (cut, count) = self.graph.op, _cut_of(record)
        bytes_ = op("Unsqueeze", op("Gather", self._two_bit_codes(record), ids), [-1])
        shifted = op("BitShift", bytes_, np.array([0, 2, 4, 6], np.uint8), direction="RIGHT")
        codes = op("BitwiseAnd", shifted, np.array(3, np.uint8)).cast(TensorProto.FLOAT) - 2.0
        row = codes.reshape(0, 0, count, cut.block)
        if cut is GROUP_CUT:
            row = row * op("Unsqueeze", op("Gather", self._block_scales(record), ids), [-1])
        for width, within in ((cut.inputs, cut.span), (cut.span, record.cols)):  # removes the padding of _pack
            row = op("Slice", row, [0], [width], [-1]).reshape(0, 0, -1, -(-within // width) * width)
        return op("Slice", row, [0], [record.cols], [-1]).reshape(0, 0, record.cols)

    def _cut_inputs(self, q: Value, record: Record) -> Value:
        """(B, T, K) to (B, T, blocks · cut.block), padded with 0, and with one 127 in each block."""
        cut, count = _cut_of(record)

        def pad(y: Value, rank: int, count: int, value: float) -> Value:
            return self.graph.op("Pad", y, [0] * (2 * rank - 1) + [count], value) if count else y

        if (q.name, cut) not in self._blocks:
            spans = pad(q, 3, -record.cols % cut.span, 0.0).reshape(0, 0, -1, cut.span)
            blocks = pad(spans, 4, -cut.span % cut.inputs, 0.0).reshape(0, 0, -1, cut.inputs)
            blocks = pad(pad(blocks, 4, 1, 127.0), 4, cut.block - cut.inputs - 1, 0.0)
            self._blocks[q.name, cut] = blocks.reshape(0, 0, count * cut.block)
        return self._blocks[q.name, cut]

    # ---- weights in the file ----

    def _weight(
        self, name: str, dtype: Any, shape: Sequence[int], blocks: Callable[[], Iterable[NDArray[Any]]]
    ) -> Value:
        if name not in self._made:
            self._made[name] = self.graph.weight(name, dtype, shape, blocks())
        return self._made[name]

    def _in_two_bits(self, record: Record) -> bool:
        return self.form == "2bit" and record.encoding.ternary

    def _two_bit_codes(self, record: Record) -> Value:
        """Codes for MatMulNBits, uint8 (N, blocks, cut.block / 4)."""
        cut, count = _cut_of(record)
        shape = [record.rows, count, cut.block // 4]
        return self._weight(record.key.name, np.uint8, shape, lambda: (_pack(c, cut) for c in self._codes(record)))

    def _scales(self, record: Record) -> Value:
        """Scales, (1,) or (N,)."""
        scales = self.file.scales(record)
        return self._weight(f"{record.key.name}.scale", np.float32, [scales.size], lambda: [scales])

    def _block_scales(self, record: Record) -> Value:
        """(N, blocks): the group scale for each of its blocks."""
        per_group = -(-GROUP_CUT.span // GROUP_CUT.inputs)
        scales = np.repeat(self.file.scales(record).reshape(record.rows, -1), per_group, axis=1)
        return self._weight(f"{record.key.name}.scale", np.float32, scales.shape, lambda: [scales])

    def _table(self, record: Record) -> Value:
        """(N, K): floats as stored; codes as fp32 (γ·T with group scales), or as uint8 with the zero point 128."""
        dtype = self._table_type(record)
        blocks = self._codes(record)
        if dtype == np.uint8:
            blocks = (block + np.int16(128) for block in blocks)
        return self._weight(record.key.name, dtype, [record.rows, record.cols], lambda: blocks)

    def _table_type(self, record: Record) -> Any:
        """The dtype; fp32 if a layer norm directly follows the rows: onnxruntime fuses cast and norm, and fails."""
        if record.encoding.kind != "float":
            return np.dtype(np.float32 if self.form == "float" else np.uint8)
        c, stored = self.file.configs[record.key.stack], np.dtype(record.encoding.dtype)
        normed = c.embedding_norm and c.norm == "layer" and c.position not in ("learned", "sinusoidal")
        return np.dtype(np.float32) if normed and ROLES[record.key.role] == "embedding" else stored

    def _transposed(self, record: Record, dtype: Any, zero: int = 0) -> Value:
        """(K, N), otherwise like `_table`; codes plus `zero`."""
        turned = np.empty((record.cols, record.rows), dtype)
        end = 0
        for rows in self._codes(record):
            turned[:, end : end + len(rows)] = rows.T if not zero else rows.T + np.int16(zero)
            end += len(rows)
        return self._weight(record.key.name, dtype, turned.shape, lambda: [turned])

    def _codes(self, record: Record) -> Iterator[NDArray[Any]]:
        """Rows of int8 codes, a few thousand at a time; or of floats, γ·T for group scales in the form "float"."""
        grouped = record.scope == encodings.SCALE_GROUP and self.form == "float"
        floats = not record.quantized or grouped
        return value_rows(self.file, record) if floats else code_rows(self.file, record)


def _cut_of(record: Record) -> tuple[Cut, int]:
    """How the inputs of a matrix are cut, and the number of blocks."""
    cut = GROUP_CUT if record.scope == encodings.SCALE_GROUP else CUT
    return cut, -(-record.cols // cut.span) * -(-cut.span // cut.inputs)


def _pack(codes: NDArray[np.int8], cut: Cut) -> NDArray[np.uint8]:
    """(N, K) codes to MatMulNBits' bytes (N, blocks, cut.block / 4): T + 2, four per byte, lowest bits first."""

    def pad(y: NDArray[np.int8], count: int) -> NDArray[np.int8]:
        return np.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, count)])

    n = len(codes)
    spans = pad(codes, -codes.shape[1] % cut.span).reshape(n, -1, cut.span)
    blocks = pad(spans, -cut.span % cut.inputs).reshape(n, -1, cut.inputs)
    u = (pad(blocks, cut.block - cut.inputs) + np.int8(2)).view(np.uint8).reshape(n, -1, cut.block // 4, 4)
    return np.asarray(u[..., 0] | u[..., 1] << 2 | u[..., 2] << 4 | u[..., 3] << 6, np.uint8)
