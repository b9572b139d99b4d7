"""A packed file to a folder with an ONNX model and the files that other tools need.

    model.onnx          the graph
    model.onnx_data     its weights, mapped by onnxruntime
    vision_model.onnx, vision_model.onnx_data, preprocessor_config.json     of its vision stack
    config.json         shapes, for Hugging Face optimum
    genai_config.json   names and shapes for onnxruntime-genai, if it supports the model
    generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja

Always a folder, so that graph and weights appear at once or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx

from bitnet.config import ModelConfig
from bitnet_export.foreign.hf.image_architectures import preprocessor
from bitnet_export.foreign.outgoing import DRAFT_LEFT_OUT, replacing_folder, write_json
from bitnet_export.foreign.side_files import (
    generation_of,
    pad_token_id,
    special_tokens,
    write_generation,
    write_tokenizer,
)
from bitnet_export.packed.reader import PackedFile

from . import graph
from .check import compare
from .matrices import FORMS
from .ops import Graph
from .report import OnnxReport

MODEL = "model.onnx"
VISION = "vision_model.onnx"


def write_onnx(source: str | os.PathLike[str], out: str | os.PathLike[str], *, form: str = "int8") -> OnnxReport:
    """Write a packed file as an ONNX model for onnxruntime, and compare it with the engine.

    out: the folder to create; an existing one must be empty. form: of the ternary weights, "float",
    "int8" or "2bit" (`matrices`). The folder appears only if the graph passes onnx.checker and
    computes the same as the engine. Memory: the largest tensor, then as much as onnxruntime needs.

    Raises PackedFormatError for a bad source, ValueError for a form or model that cannot be
    written, VerificationError, FileExistsError.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    file, out = PackedFile.open(source).without_draft(), Path(out)
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{str(out)!a} is not UTF-8, which the onnx package requires of names; give another") from None
    if problems := graph.unsupported(file, form):
        raise ValueError(f"{source} cannot be written as ONNX: " + "; ".join(problems))
    with replacing_folder(out) as folder:
        notes = [*_write_side_files(folder, file), *[DRAFT_LEFT_OUT] * file.draft_left_out]
        models = [folder / name for name in (MODEL, VISION)[: len(file.configs)]]
        sizes = [_write_graph(file, form, stack, model) for stack, model in enumerate(models)]
        compared = compare(Path(source), file, models)
        return OnnxReport(form, file.file_size, sum(sizes), notes=tuple(notes), **compared)


def _write_graph(file: PackedFile, form: str, stack: int, path: Path) -> int:
    """Write the graph of one stack, and its weights next to it. Returns the bytes of both."""
    beside = path.with_name(f"{path.name}_data")
    with open(beside, "xb") as weights:
        model = graph.build(Graph(weights, beside.name), file, form, stack)
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    return path.stat().st_size + beside.stat().st_size


def _write_side_files(folder: Path, file: PackedFile) -> list[str]:
    """Returns notes on what they cannot hold."""
    config, generation = file.configs[0], generation_of(file)
    special = special_tokens(generation)
    seeing = [stack for stack in file.configs if stack.input == "images"]
    described = _describe(config) | special | pad_token_id(generation)
    if seeing and config.input != "images":
        described |= {"image_token_index": config.image_token or None, "vision_config": _describe(seeing[0])}
    write_json(folder / "config.json", described)
    for stack in seeing:
        write_json(folder / "preprocessor_config.json", preprocessor(stack, generation))
    if graph.writes(config) and config.input == "tokens" and config.mask == "causal" and not config.image_token:
        write_json(folder / "genai_config.json", _describe_for_genai(config, special))
    write_tokenizer(folder, file, config, generation)
    return write_generation(folder, generation)


def _describe(config: ModelConfig) -> dict[str, Any]:
    """The part of config.json that programs around onnxruntime read: the shapes of inputs and cache.

    model_type only determines the names of these fields; the computation is in the graph.
    """
    if config.input == "images":
        more = {"model_type": "siglip_vision_model", "image_size": config.image_size, "patch_size": config.patch_size}
        more |= {"num_channels": config.channels, "projection_dim": config.width}
    else:
        more = {"model_type": "llama" if graph.writes(config) else "bert"}
    return more | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _describe_for_genai(config: ModelConfig, special: dict[str, Any]) -> dict[str, Any]:
    """The same in the format of onnxruntime-genai, which also needs the names of inputs and outputs."""
    decoder = {
        "filename": MODEL,
        "session_options": {"provider_options": []},
        "hidden_size": config.dim,
        "head_size": config.head_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")}
        | {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")},
        "outputs": {"logits": "logits"} | {f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")},
    }
    known = {name: token for name, token in special.items() if token is not None}
    sizes = {"type": "llama", "vocab_size": config.vocab_size, "context_length": config.max_context}
    search = {"max_length": config.max_context, "past_present_share_buffer": False}
    return {"model": sizes | known | {"decoder": decoder}, "search": search}
