"""Small random models as GGUF files, and as transformers models.

The container and the ternary types are written from their published layouts, weight by weight and
without the code under test; TQ1_0, TQ2_0 and the types of tables are written by the gguf package.
"""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

RNG = np.random.default_rng
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
GGUF_NAMES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
HF_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, BF16, TQ1_0, TQ2_0, I2_S, Q2_0 = 0, 1, 2, 8, 12, 14, 30, 34, 35, 36, 42
IQ1_BN, IQ2_BN, PQ2_0, IQ2_BN_R4 = 134, 135, 142, 335


# ---- ternary types ----


def _bytes(fields, shifts):
    """Four codes per byte, fields (..., 4) with the code for each of the shifts."""
    return sum((fields[..., i].astype(np.uint8) + 1) << np.uint8(shift) for i, shift in enumerate(shifts)).tobytes()


def i2_s(codes, scale, group=128):
    """Byte j of a group holds weights j, j + g/4, …, the first in the highest bits; one fp32 scale at the end."""
    quarters = codes.reshape(-1, 4, group // 4).swapaxes(1, 2)
    return _bytes(quarters, (6, 4, 2, 0)) + struct.pack("<f", scale) + bytes(28)


def q2_0(codes, scales, group=64):
    """An fp16 scale, then four weights per byte, the first in the lowest bits. scales: (N, K/group)."""
    out = b""
    for row, of_row in zip(codes, scales, strict=True):
        for block, scale in zip(row.reshape(-1, group), of_row, strict=True):
            out += np.float16(scale).tobytes() + _bytes(block.reshape(-1, 4), (0, 2, 4, 6))
    return out


def iq2_bn(codes, scales):
    """An fp32 scale per row, then 64 weights in 16 bytes: byte j holds j, j + 16, j + 32, j + 48."""
    out = b""
    for row, scale in zip(codes, scales, strict=True):
        out += struct.pack("<f", scale) + _bytes(row.reshape(-1, 4, 16).swapaxes(1, 2), (0, 2, 4, 6))
    return out


def iq2_bn_r4(codes, scales):
    """Four rows together: four fp32 scales; of 64 weights byte 16·l + 4·row + i holds 16·l + i + (0, 4, 8, 12)."""
    out = b""
    for first in range(0, len(codes), 4):
        out += struct.pack("<4f", *scales[first : first + 4])
        for column in range(0, codes.shape[1], 64):
            for part in range(column, column + 64, 16):
                for row in codes[first : first + 4, part : part + 16]:
                    out += _bytes(row.reshape(4, 4).T, (0, 2, 4, 6))
    return out


def iq1_bn(codes, scales):
    """An fp16 scale per row, then 64 weights in 13 bytes.

    Of each 16 weights three bytes hold five each, the first as the lowest digit of base 3, stored
    as ceil(256·n / 243); the sixteenths are the digits of the 13th byte.
    """
    out = b""
    for row, scale in zip(codes, scales, strict=True):
        out += np.float16(scale).tobytes()
        for block in row.reshape(-1, 64):
            digits = [[block[16 * part + 5 * k + j] for j in range(5)] for part in range(4) for k in range(3)]
            digits.append([block[16 * part + 15] for part in range(4)])
            for some in digits:
                n = sum(int(code + 1) * 3**place for place, code in enumerate(some))
                out += bytes([-(-256 * n // 243)])
    return out


def dense(codes, scales):
    """codes · scales in fp32; scales (1,), (N,) or (N, groups of 128)."""
    if scales.ndim == 2:
        return codes * np.repeat(scales, 128, axis=1)[:, : codes.shape[1]]
    return codes * scales[:, None]


def encoded(number: int, codes, scales) -> bytes:
    """The bytes of a ternary matrix in a type; scales have the type's scope, or a wider one."""
    rows, cols = codes.shape
    by_row = np.broadcast_to(scales, rows) if scales.ndim == 1 else None
    if number == I2_S:
        return i2_s(codes, scales[0])
    if number in (IQ1_BN, IQ2_BN, IQ2_BN_R4):
        return {IQ1_BN: iq1_bn, IQ2_BN: iq2_bn, IQ2_BN_R4: iq2_bn_r4}[number](codes, by_row)
    if number in (Q2_0, PQ2_0):
        group = 64 if number == Q2_0 else 128
        of_groups = (
            by_row[:, None].repeat(cols // group, axis=1) if scales.ndim == 1 else scales.repeat(128 // group, axis=1)
        )
        return q2_0(codes, of_groups, group)
    return quantized(number, dense(codes, scales).astype(np.float32))


def quantized(number: int, values) -> bytes:
    """Floats in a type that the gguf package writes, or in a plain one."""
    if number == BF16:
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType(number)).tobytes()


# ---- the container ----


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_typed(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def container(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """A GGUF file. tensors: (type, shape (N, K) or (K,), bytes) by name."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    data = b""
    for name, (number, shape, content) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, len(data))
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


# ---- a whole model ----


@dataclass
class Example:
    """A random model: the content of the file, and the same for transformers."""

    path: Path
    codes: dict[str, Any]  # by our names, "layers.0.q.weight", rows in our order
    scales: dict[str, Any]
    floats: dict[str, Any]
    hf: dict[str, Any] = field(default_factory=dict)  # options of a transformers config
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = field(default_factory=dict)  # as `container` takes them

    def write(self) -> None:
        self.path.write_bytes(container(self.metadata, self.tensors))

    def transformer(self, kind: str) -> nn.Module:
        """A transformers model of these weights whose linears quantize their inputs, in fp32."""
        import transformers

        config = getattr(transformers, kind + "Config")(**self.hf)
        model = getattr(transformers, kind + "ForCausalLM")(config).eval()
        for name, value in self.floats.items():
            model.get_parameter(name).data.copy_(torch.from_numpy(np.ascontiguousarray(value)))
        for name, codes in self.codes.items():
            _, layer, role, _ = name.split(".")
            parent, leaf = f"model.layers.{layer}.{HF_NAMES[role]}".rsplit(".", 1)
            linear = getattr(model.get_submodule(parent), leaf)
            setattr(model.get_submodule(parent), leaf, Int8Linear(codes, self.scales[name], linear.bias))
        return model


class Int8Linear(nn.Module):
    """y = Σ over groups of scale · (q · codes) / s, q the int8 codes of x (arXiv 2402.17764)."""

    def __init__(self, codes, scales, bias) -> None:
        super().__init__()
        self.codes = torch.from_numpy(codes.astype(np.float32))  # sums of 127·K < 2^24 are exact in fp32
        self.scales = torch.from_numpy(scales)[None] if scales.ndim == 1 else torch.from_numpy(scales.T.copy())
        self.bias = bias

    def forward(self, x):
        s = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        q = (x * s).round().clamp(-127, 127).float()
        width = self.codes.shape[1] if len(self.scales) == 1 else 128
        parts = zip(q.split(width, -1), self.codes.split(width, 1), self.scales, strict=True)
        y = sum((q_part @ codes.T).to(x.dtype) * (scale / s) for q_part, codes, scale in parts)
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """transformers' RMSNorm in the precision of its input; theirs computes in fp32 even for fp64."""

    def __init__(self, weight, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def in_fp64(model: nn.Module) -> nn.Module:
    """A transformers model with all of its arithmetic in fp64."""
    model = copy.deepcopy(model).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, RMSNorm(module.weight, module.variance_epsilon))
    return model


def example(
    path: Path, arch: str, number: int, *, unit: int, scope: str = "tensor", table: int = F32, tied: bool = True,
    head_dim: int | None = None, ffn: int | None = None, biases: bool = False, seed: int = 0, **metadata: Any,
) -> Example:  # fmt: skip
    """Write a model of 3 layers, 3 heads and 1 kv head; widths are multiples of `unit`."""
    rng, heads = RNG(seed), 3
    head_dim = head_dim or unit
    dim, ffn, vocab, layers = heads * unit, ffn or (2 if unit >= 128 else 5) * unit, 131, 3
    shapes = {
        "q": (heads * head_dim, dim), "k": (head_dim, dim), "v": (head_dim, dim), "o": (dim, heads * head_dim),
        "gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn),
    }  # fmt: skip
    made = Example(path, {}, {}, {})
    tensors = made.tensors

    def floats(gguf_name: str, hf_name: str, values, kind: int = F32):
        tensors[gguf_name] = (kind, values.shape, quantized(kind, values))
        made.floats[hf_name] = values

    table_values = rng.normal(0, 1 / np.sqrt(dim), (vocab, dim)).astype(np.float32)  # logits of order 1
    floats("token_embd.weight", "model.embed_tokens.weight", table_values, table)
    for layer in range(layers):
        blk, hf = f"blk.{layer}.", f"model.layers.{layer}."
        widths = {"attn_norm": dim, "ffn_norm": dim}
        widths |= {"attn_sub_norm": heads * head_dim, "ffn_sub_norm": ffn} if arch.startswith("bitnet") else {}
        widths |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim} if arch == "qwen3" else {}
        for name, width in widths.items():
            floats(f"{blk}{name}.weight", f"{hf}{NORMS[name]}.weight", rng.uniform(0.5, 1.5, width).astype(np.float32))
        for role, (rows, cols) in shapes.items():
            ours, theirs = f"layers.{layer}.{role}.weight", f"{blk}{GGUF_NAMES[role]}"
            codes = rng.integers(-1, 2, (rows, cols)).astype(np.int8)
            codes[:, ::32] = 1  # no block is all zero, which would hide its scale
            count = {"tensor": (1,), "row": (rows,), "group": (rows, -(-cols // 128))}[scope]
            scales = (rng.uniform(0.5, 1.5, count) / np.sqrt(cols)).astype(np.float16).astype(np.float32)
            if number == BF16:
                scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
            made.codes[ours], made.scales[ours] = codes, scales
            order = permuted(rows, heads if role == "q" else 1) if arch == "llama" and role in "qk" else slice(None)
            data = encoded(number, codes[order], scales if scope == "tensor" else scales[order])
            tensors[f"{theirs}.weight"] = (number, (rows, cols), data)
            if biases and role in "qkvo":
                bias = rng.normal(0, 0.1, rows).astype(np.float32)
                made.floats[f"{hf}{HF_NAMES[role]}.bias"] = bias
                tensors[f"{theirs}.bias"] = (F32, (rows,), quantized(F32, bias[order]))
    floats("output_norm.weight", "model.norm.weight", rng.uniform(0.5, 1.5, dim).astype(np.float32))
    if not tied:
        floats(
            "output.weight", "lm_head.weight", rng.normal(0, 1 / np.sqrt(dim), (vocab, dim)).astype(np.float32), table
        )
    made.hf = {
        "vocab_size": vocab, "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": head_dim, "intermediate_size": ffn, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": tied, "attention_bias": biases,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    keys = {
        "block_count": layers, "context_length": 1024, "embedding_length": dim, "feed_forward_length": ffn,
        "attention.head_count": heads, "attention.head_count_kv": 1, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.dimension_count": head_dim, "rope.freq_base": 5e5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    made.metadata = {"general.architecture": arch, "general.name": "example"}
    made.metadata |= {f"{arch}.{key}": value for key, value in keys.items()} | metadata
    made.write()
    return made


def permuted(rows: int, heads: int) -> Any:
    """The order of q or k rows in llama-arch files: dimension i of a head is followed by i + E/2."""
    half = rows // heads // 2
    return [head * 2 * half + i + half * second for head in range(heads) for i in range(half) for second in range(2)]
