"""A packed file as a Hugging Face folder that `transformers` loads and that gives the same logits.

    config.json, generation_config.json, model.safetensors
    tokenizer.json, tokenizer_config.json, chat_template.jinja    when the packed file has them

Every ternary projection becomes an `AutoBitLinear` in mode offline: y = (Σ x_q·W + b)·weight_scale.
It multiplies by the scale, so that γ is stored as it is; the older `BitLinear` divides by it, and for
half of all fp32 numbers γ no fp32 number has γ as its reciprocal. Two forms of the weight:
- uint8 [N/4, K], four codes a byte, weight_scale = γ: where there is one γ and N is a multiple of 4;
- fp32 [N, K] = scale · code, weight_scale = 1: scales of rows and groups, other N, and the head.
The head quantizes its inputs where the engine's does, with int8 or ternary rows.
transformers 5 wants `accelerate` for either, and runs them on the CPU as anywhere.
Source: integrations/bitnet.py, core_model_loading.py and modeling_*.py of transformers 5.23.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.outgoing import (
    SIZES,
    Graph,
    Written,
    nearest,
    open_decoder,
    refuse,
    replacing_folder,
    value_rows,
    write_json,
)
from bitnet_export.foreign.side_files import generation_of, special_tokens, write_generation, write_tokenizer
from bitnet_export.packed import encodings
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLES, Record

from .places import NAMES

ACTIVATIONS = {"relu2": "relu2", "silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}


class _Entry(NamedTuple):
    """A tensor of model.safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[NDArray[Any]]]  # its bytes, in order


_MATRICES = (*TERNARY_LINEARS, "embedding", "head")
# A quantized model is not converted when it is loaded, so that floats are those it computes in.
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "F32": np.dtype("<f4")}


def write_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a packed file as a Hugging Face folder, one tensor in memory at a time.

    out: a folder to make; one that is there must be empty. progress: called with (tensors done, of all).
    Raises PackedFormatError for a bad source, ValueError naming what no architecture of transformers
    computes, FileExistsError, OSError. Nothing is left behind then.
    """
    file, config, problems = open_decoder(source)
    graph, differences = _architecture(file, config)
    refuse(f"{source} cannot become a Hugging Face folder", problems + differences)
    out = Path(out)
    entries, generation = list(_entries(file)), generation_of(file)
    with replacing_folder(out) as folder:
        _write_tensors(folder / "model.safetensors", entries, progress)
        write_json(folder / "config.json", _describe(file, config, graph) | special_tokens(generation))
        write_generation(folder, generation)
        write_tokenizer(folder, file, config, generation)
        size = sum(path.stat().st_size for path in folder.iterdir())
    notes = [
        'for the same logits load it with dtype float32, and run the engine with --kv-type f32 (kv_type="f32"): '
        "its cache of f16 moves log-probabilities by up to 0.1"
    ]
    if unpacked := sum(_is_ternary(r) and not _is_packed(r) for r in file.tensors.values()):
        notes.append(f"{unpacked} ternary matrices are stored as fp32: packed ones have one scale, rows in fours")
    return Written(f"Hugging Face folder, {graph.name}, quant_method bitnet", len(entries), size, tuple(notes))


# ---- which architecture ----


def _graphs(c: ModelConfig) -> list[tuple[str, Graph]]:
    """model_type and architecture; what each computes, from its modeling file."""
    rope = (name for name in c.to_dict() if name.startswith("rope_"))
    more = ("activation", "tie_embeddings", "linear_norm", "ternary", "weight_scale", "head_format")
    free: tuple[str, ...] = (*SIZES, *more, *rope)
    attention = {"qkv_bias": (False, True), "o_bias": (c.qkv_bias,)}  # one switch for all four
    kinds: dict[str, tuple[str, dict[str, tuple[Any, ...]], tuple[str, ...]]] = {
        "bitnet": ("BitNetForCausalLM", {"sub_norm": (True,), **attention}, ()),
        "llama": ("LlamaForCausalLM", {"ffn_bias": (False, True), **attention}, ()),
        "qwen3": ("Qwen3ForCausalLM", {"qk_norm": (True,), **attention}, ()),
        "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": (True,)}, ()),
        "mistral": ("MistralForCausalLM", {}, ("sliding_window",)),
    }
    return [(kind, Graph(name, computes, free + also)) for kind, (name, computes, also) in kinds.items()]


def _architecture(file: PackedFile, c: ModelConfig) -> tuple[Graph, list[str]]:
    """The architecture that computes this model, or the nearest; and why it does not, a phrase each."""
    candidates = []
    for kind, graph in _graphs(c):
        found = graph.differences(c)
        if kind == "bitnet" and c.n_heads * c.head_dim != c.dim:
            found.append(f"n_heads · head_dim is {c.n_heads * c.head_dim}, its norm before o has dim = {c.dim} inputs")
        if kind == "llama" and c.dim % c.n_heads:
            found.append(f"dim is {c.dim}, it wants a multiple of n_heads = {c.n_heads}")
        candidates.append((graph, found))
    graph, problems = nearest("transformers", candidates)
    if c.linear_norm and _left_alone(file):
        problems.append("linear_norm with projections of floats, transformers has the norms only in quantized ones")
    if c.linear_norm and _head_is_quantized(file):
        problems.append(
            "linear_norm with a quantized head, transformers would put a norm before the head too: "
            "convert the model with --head f16 or f32 first"
        )
    return graph, problems


def _describe(file: PackedFile, c: ModelConfig, graph: Graph) -> dict[str, Any]:
    """config.json."""
    kind = next(kind for kind, other in _graphs(c) if other.name == graph.name)
    skipped = _left_alone(file) + ([] if _head_is_quantized(file) else ["lm_head"])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        rope |= {"rope_type": c.rope_scaling, "factor": c.rope_factor}
    if c.rope_scaling in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = c.rope_original_context
    if c.rope_scaling == "llama3":
        rope |= {"low_freq_factor": c.rope_low_freq_factor, "high_freq_factor": c.rope_high_freq_factor}
    if c.rope_scaling == "yarn":
        rope |= {"beta_fast": c.rope_beta_fast, "beta_slow": c.rope_beta_slow}
        rope["attention_factor"] = c.rope_attention_factor
    description = {
        "architectures": [graph.name],
        "model_type": kind,
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": ACTIVATIONS[c.activation],
        "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,  # where programs older than rope_parameters look
        "rope_parameters": rope,
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.ffn_bias,
        "tie_word_embeddings": c.tie_embeddings,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "use_rms_norm": c.linear_norm,
            "rms_norm_eps": c.norm_eps,
            "modules_to_not_convert": skipped,
        },
    }
    if c.rope_scaling != "none":
        description["rope_scaling"] = rope
    return description | ({"sliding_window": c.sliding_window or None} if kind == "mistral" else {})


def _left_alone(file: PackedFile) -> list[str]:
    """Projections of floats, which do not quantize their inputs."""
    return [
        _module(record)
        for record in file.tensors.values()
        if ROLES[record.key.role] in TERNARY_LINEARS and record.key.part == 0 and record.scope == encodings.SCALE_NONE
    ]


def _head_is_quantized(file: PackedFile) -> bool:
    tables = {ROLES[r.key.role]: r for r in file.tensors.values() if ROLES[r.key.role] in ("embedding", "head")}
    return tables.get("head", tables["embedding"]).scope != encodings.SCALE_NONE


# ---- tensors ----


def _module(record: Record) -> str:
    role = ROLES[record.key.role]
    base = role.removesuffix("_linear_norm")
    name = str(NAMES[base]) + (".rms_norm" if base != role else "")
    return name if record.key.layer == NONE else f"model.layers.{record.key.layer}.{name}"


def _entries(file: PackedFile) -> Iterator[_Entry]:
    """The tensors of the folder, in the order of the packed file."""
    scale = np.ones(1, np.float32)  # weight_scale of the projection whose bias comes next
    for record in file.tensors.values():
        role = ROLES[record.key.role]
        if role == "rope_frequencies":
            continue
        name = _module(record)
        if record.key.part == 1:  # transformers adds the bias before it multiplies by the scale
            yield _vector(f"{name}.bias", file.values(record)[0] / scale)
        elif role not in _MATRICES:
            yield _vector(f"{name}.weight", file.values(record)[0])
        elif _is_packed(record):
            scale = file.scales(record)
            yield _Entry(f"{name}.weight", "U8", (record.rows // 4, record.cols), _packed_rows(file, record))
            yield _vector(f"{name}.weight_scale", scale)
        else:
            scale = np.ones(1, np.float32)
            rows = functools.partial(value_rows, file, record)
            yield _Entry(f"{name}.weight", "F32", (record.rows, record.cols), rows)
            if role != "embedding" and record.scope != encodings.SCALE_NONE:
                yield _vector(f"{name}.weight_scale", scale)
    if file.configs[0].tie_embeddings and _head_is_quantized(file):
        yield _vector("lm_head.weight_scale", np.ones(1, np.float32))


def _vector(name: str, values: NDArray[np.float32]) -> _Entry:
    return _Entry(name, "F32", values.shape, lambda: [values])


def _is_ternary(record: Record) -> bool:
    return record.encoding.ternary


def _is_packed(record: Record) -> bool:
    """Whether the packed form of transformers can hold it: one scale, whole bytes."""
    projection = ROLES[record.key.role] in TERNARY_LINEARS
    return projection and _is_ternary(record) and record.scope == encodings.SCALE_TENSOR and record.rows % 4 == 0


def _packed_rows(file: PackedFile, record: Record) -> Callable[[], Iterable[NDArray[Any]]]:
    """Bits 2i, 2i + 1 of byte row r hold code + 1 of row i·N/4 + r."""

    def parts() -> Iterator[NDArray[Any]]:
        fields = (file.codes(record) + 1).view(np.uint8).reshape(4, record.rows // 4, record.cols)
        yield fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6

    return parts


def _write_tensors(path: Path, entries: list[_Entry], progress: Callable[[int, int], None] | None) -> None:
    """A safetensors file: u64 length of a JSON header, the header, the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + _DTYPES[entry.dtype].itemsize * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, entry in enumerate(entries):
            if progress:
                progress(done, len(entries))
            for part in entry.parts():
                file.write(np.ascontiguousarray(part, _DTYPES[entry.dtype]).data)
        assert file.tell() == 8 + len(text) + end
