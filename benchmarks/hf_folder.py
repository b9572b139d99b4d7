"""Write a Hugging Face folder with random weights in the shape of microsoft/bitnet-b1.58-2B-4T, as published.

    python benchmarks/hf_folder.py FOLDER [--layers 30] [--shards 1]

Packed ternary weights (AutoBitLinear offline: scales multiply), everything else bfloat16, the head
tied: 1.2 GB for 30 layers. For runs of `bitnet convert` at full size; memory stays below 100 MB.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import report

from bitnet.config import ModelConfig
from bitnet.presets import PRESETS

CHUNK = 1 << 22  # values drawn at a time


class Entry(NamedTuple):
    """A tensor: U8 of packed codes, or BF16 drawn around a mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    mean: float = 0.0
    spread: float = 0.0

    @property
    def size(self) -> int:
        """Size in bytes."""
        values = 1
        for n in self.shape:
            values *= n
        return values * (1 if self.dtype == "U8" else 2)


def entries(c: ModelConfig) -> Iterator[Entry]:
    """The tensors of the folder. Scales keep the variance of each projection's input: codes are ±1 half of the time."""
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    projections = {
        "self_attn.q_proj": (queries, c.dim), "self_attn.k_proj": (keys, c.dim), "self_attn.v_proj": (keys, c.dim),
        "self_attn.o_proj": (c.dim, queries), "mlp.gate_proj": (c.ffn_dim, c.dim), "mlp.up_proj": (c.ffn_dim, c.dim),
        "mlp.down_proj": (c.dim, c.ffn_dim),
    }  # fmt: skip
    norms = {
        "input_layernorm": c.dim, "post_attention_layernorm": c.dim, "self_attn.attn_sub_norm": queries,
        "mlp.ffn_sub_norm": c.ffn_dim,
    }  # fmt: skip
    yield Entry("model.embed_tokens.weight", "BF16", (c.vocab_size, c.dim), spread=c.dim**-0.5)
    for layer in range(c.n_layers):
        for name, (n, k) in projections.items():
            yield Entry(f"model.layers.{layer}.{name}.weight", "U8", (n // 4, k))
            yield Entry(f"model.layers.{layer}.{name}.weight_scale", "BF16", (1,), mean=(2 / k) ** 0.5)
        for name, n in norms.items():
            yield Entry(f"model.layers.{layer}.{name}.weight", "BF16", (n,), mean=1.0, spread=0.1)
    yield Entry("model.norm.weight", "BF16", (c.dim,), mean=1.0, spread=0.1)


def write_shard(path: Path, tensors: list[Entry], random: np.random.Generator) -> None:
    """One safetensors file."""
    header, end = {}, 0
    for entry in tensors:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.size]}
        end += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in tensors:
            write_tensor(file, entry, random)


def write_tensor(file: BinaryIO, entry: Entry, random: np.random.Generator) -> None:
    values = entry.size if entry.dtype == "U8" else entry.size // 2
    for first in range(0, values, CHUNK):
        n = min(CHUNK, values - first)
        if entry.dtype == "U8":
            bits = random.integers(0, 256, n, np.uint8)  # two random bits per field: codes + 1 are 0, 1, 1, 2
            file.write((bits & 0x55) + (bits >> 1 & 0x55))
        else:
            drawn = entry.mean + entry.spread * random.standard_normal(n, np.float32)
            file.write((drawn.astype(np.float32).view(np.uint32) >> 16).astype("<u2"))


def write_folder(folder: Path, c: ModelConfig, shards: int = 1, seed: int = 0) -> None:
    """A new folder: config.json, generation_config.json and weights in `shards` files."""
    folder.mkdir(parents=True)
    tensors, random = list(entries(c)), np.random.Generator(np.random.SFC64(seed))
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = {name: tensors[i::shards] for i, name in enumerate(names)} if shards > 1 else {"model.safetensors": tensors}
    for name, inside in files.items():
        write_shard(folder / name, inside, random)
    if shards > 1:
        places = {entry.name: name for name, inside in files.items() for entry in inside}
        index = {"metadata": {"total_size": sum(entry.size for entry in tensors)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    config = {
        "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size, "hidden_size": c.dim, "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads,
        "max_position_embeddings": c.max_context, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
        "hidden_act": "relu2", "tie_word_embeddings": True, "attention_bias": False,
        "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": c.max_context}
    (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    write_folder(args.folder, PRESETS["bitnet-2b4t"].replace(n_layers=args.layers), args.shards)


if __name__ == "__main__":
    report.run(main)
