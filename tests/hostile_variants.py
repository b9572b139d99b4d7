"""Changes of packed files that have more than the small model: scales of groups, images, sketches, trits."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from bitnet_export.packed import encodings, records
from packed_files import STACK_WORDS, patch, section_start, tensor_entry

Cases = Iterator[tuple[str, bytes, str]]
"""The name of each, its bytes, and the status of bn_model_open_bytes."""


def groups(good: bytes) -> Cases:
    yield "the file itself", good, "BN_OK"
    data = section_start(good, records.DATA)
    for tensor in ("layers.0.q.weight", "embedding.weight"):
        entry = tensor_entry(good, tensor)
        scales, size = struct.unpack_from("<QQ", good, entry + 40)
        for place in (data + scales, data + scales + size - 2):  # of the first row, of a row of padding (embedding)
            for bits in (0, 0x8000, 0x8001, 0x7C00, 0x7E01, 0xFC00, 0xBC00):
                yield f"scale {bits:04x} of {tensor} at {place}", patch(good, place, "H", bits), "BN_ERR_SCALE"
            for bits in (1, 0x03FF, 0x7BFF):
                yield f"scale {bits:04x} of {tensor} at {place}", patch(good, place, "H", bits), "BN_OK"
        for wrong in (0, size - 2, 2 * size, 2**64 - 64):
            yield f"scale_size {wrong} of {tensor}", patch(good, entry + 48, "Q", wrong), "BN_ERR_TENSOR"
        for scope in (0, 1, 4):
            yield f"scope {scope} of {tensor}", patch(good, entry + 10, "B", scope), "BN_ERR_TENSOR"
    for encoding in (encodings.F32, encodings.TERNARY_5TRIT, encodings.INT8_ROWS, encodings.INT8_SKETCH):
        yield f"table of encoding {encoding.name}", patch(good, entry + 9, "B", encoding.number), "BN_ERR_TENSOR"
    start = data + struct.unpack_from("<Q", good, entry + 24)[0]
    yield "code 3 in the table", patch(good, start, "B", 0x03), "BN_ERR_CODE"


def images(good: bytes) -> Cases:
    """Changes of the second stack's record, its tensors and their numbers."""
    yield "the file itself", good, "BN_OK"
    big, nan, inf = (1 << 31, 0xFFFFFFFF), float("nan"), float("inf")
    wrong: dict[str, tuple[float, ...]] = {
        "image_size": (0, 2, (1 << 14) + 1, 9, 1 << 14, *big), "patch_size": (0, 8, 2, *big),
        "channels": (0, 1, 3, 4, *big),
        "max_context": (0, 4, 6, *big), "class_token": (0, 2, *big), "out_dim": (65_537, *big),
        "image_token": (1, *big), "pixel_mean.0": (nan, inf, -inf), "pixel_mean.2": (0.5, -0.0),
        "pixel_std.0": (0.0, -0.5, nan, inf), "pixel_std.2": (0.5, -0.0), "similarity_scale": (-1.0, nan, inf),
        "similarity_bias": (nan, -inf), "bias_flags": (64, *big), "pooling": (5, *big),
        "mask": (0, 2, *big), "has_head": (1, *big),
    }  # fmt: skip
    second = section_start(good, records.STACKS) + records.STACK.size
    for field, values in wrong.items():
        place, fmt = second + 4 * STACK_WORDS.index(field), "f" if isinstance(values[0], float) else "I"
        for value in values:
            yield f"{field} = {value}", patch(good, place, fmt, value), "BN_ERR_CONFIG"
    for field, values in {"out_dim": (0, 23), "bias_flags": (0, 16, 32), "pooling": (4,), "position": (3,)}.items():
        place = second + 4 * STACK_WORDS.index(field)
        for value in values:
            yield f"{field} = {value}, tensors as before", patch(good, place, "I", value), "BN_ERR_TENSOR"
    larger = patch(good, second + 4 * STACK_WORDS.index("image_size"), "I", 8)
    yield "two pixels are left out, not one", larger, "BN_OK"
    for name, numbers in (
        ("patch.weight", (encodings.TERNARY_2BIT, encodings.INT8_ROWS)), ("class_embedding", (encodings.F16,)),
        ("projector.weight", (encodings.INT8_ROWS, encodings.INT8_SKETCH)), ("position.weight", (encodings.INT8_ROWS,)),
    ):  # fmt: skip
        entry = tensor_entry(good, f"stacks.1.{name}")
        for encoding in numbers:
            yield f"{name} as {encoding.name}", patch(good, entry + 9, "B", encoding.number), "BN_ERR_TENSOR"
        for offset, value in ((0, 0), (0, 2)):
            yield f"{name} of stack {value}", patch(good, entry + offset, "H", value), "BN_ERR_TENSOR"
        for value in (0, 21, 0xFFFFFFFF):
            yield f"{name} has {value} columns", patch(good, entry + 20, "I", value), "BN_ERR_TENSOR"
    yield from _not_finite(
        good, ("patch.weight", "patch.bias", "class_embedding", "projector.weight", "projector.bias")
    )


def pool(good: bytes) -> Cases:
    yield "the file itself", good, "BN_OK"
    for name in ("pool_q.weight", "pool_down.weight"):
        entry = tensor_entry(good, f"stacks.1.{name}")
        for number in (encodings.TERNARY_2BIT.number, encodings.INT8_SKETCH.number, 0, 255):
            yield f"{name} of encoding {number}", patch(good, entry + 9, "B", number), "BN_ERR_TENSOR"
        yield f"a bias of {name} that it has not", patch(good, entry + 8, "B", 1), "BN_ERR_TENSOR"
    yield from _not_finite(good, ("pool_probe", "pool_k.weight", "pool_norm.weight", "pool_up.weight"))


def _not_finite(good: bytes, names: tuple[str, ...]) -> Cases:
    for name in names:
        place = struct.unpack_from("<Q", good, tensor_entry(good, f"stacks.1.{name}") + 24)[0]
        for value in (float("nan"), float("inf"), float("-inf")):
            file = patch(good, section_start(good, records.DATA) + place + 4, "f", value)
            yield f"{name} has {value}", file, "BN_ERR_SCALE"


def sketch(good: bytes) -> Cases:
    yield "the file itself", good, "BN_OK"
    e = tensor_entry(good, "embedding.weight")
    start = section_start(good, records.DATA) + struct.unpack_from("<Q", good, e + 24)[0]
    codes, sketch, floats = 19 * 64, 2 * 2 * 64, 32 * 4  # bytes of the parts; floats are steps, then deviations
    yield "of rows that have none", patch(good, e + 9, "B", encodings.INT8_ROWS.number), "BN_ERR_TENSOR"
    for size in (codes, codes + sketch, codes + sketch + floats, codes + sketch + 2 * floats + 64):
        yield f"size {size}", patch(good, e + 32, "Q", size), "BN_ERR_TENSOR"
    for at in (0, codes - 1):
        yield f"int8 code -128 at {at}", patch(good, start + at, "b", -128), "BN_ERR_CODE"
    for byte in {0, 0x80, 0xFF} - {good[start + codes]}:
        yield f"byte {byte} of the sketch", patch(good, start + codes, "B", byte), "BN_ERR_CODE"
        yield f"byte {byte} of its padding", patch(good, start + codes + sketch - 1, "B", byte), "BN_OK"
    yield "another code", patch(good, start + 7, "b", 0 if good[start + 7] else 1), "BN_ERR_CODE"
    steps = start + codes + sketch
    for name, bits in (
        ("nan", 0x7FC00000), ("signalling nan", 0x7F800001), ("inf", 0x7F800000), ("-inf", 0xFF800000),
        ("-0", 0x80000000), ("-1", 0xBF800000),
    ):  # fmt: skip
        for at in (0, floats - 4, floats, 2 * floats - 4):  # of the first row, of padding; of both parts
            yield f"float at {at} is {name}", patch(good, steps + at, "I", bits), "BN_ERR_SCALE"
    for bits in (0, 1, 0x7F7FFFFF):
        for part, at in (("step", 0), ("deviation", floats)):
            yield f"first {part} has bits {bits:x}", patch(good, steps + at, "I", bits), "BN_ERR_CODE"
            yield f"{part} of no row has bits {bits:x}", patch(good, steps + at + floats - 4, "I", bits), "BN_OK"


def trits(good: bytes) -> Cases:
    yield "the file itself", good, "BN_OK"
    q = tensor_entry(good, "layers.1.q.weight")
    for scope in (0, 1, 3):
        yield f"scale scope {scope}", patch(good, q + 10, "B", scope), "BN_ERR_TENSOR"
    start = section_start(good, records.DATA) + struct.unpack_from("<Q", good, q + 24)[0]
    size = struct.unpack_from("<Q", good, q + 32)[0]
    codes = {-(-256 * n // 243) for n in range(243)}
    for byte in sorted({*range(256)} - codes):
        yield f"byte {byte}", patch(good, start, "B", byte), "BN_ERR_CODE"
    for byte in (0, 2, 78, 80, 128, 255):
        yield f"byte {byte}", patch(good, start + 1, "B", byte), "BN_OK"
    yield "a refused byte in padding", patch(good, start + size - 1, "B", 237), "BN_ERR_CODE"
