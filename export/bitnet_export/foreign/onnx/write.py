"""A packed file to a folder with an ONNX model and what other tools ask for beside it.

    model.onnx          the graph
    model.onnx_data     its weights, mapped by onnxruntime
    config.json         shapes, for Hugging Face optimum
    genai_config.json   names and shapes for onnxruntime-genai, of a model that continues texts as it knows them
    generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja

Always a folder, so that graph and weights appear at once or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import replacing_folder, write_json
from bitnet_export.foreign.side_files import generation_of, special_tokens, write_generation, write_tokenizer
from bitnet_export.packed.reader import PackedFile

from . import graph
from .check import OnnxReport, compare
from .matrices import FORMS
from .ops import Graph

MODEL, WEIGHTS = "model.onnx", "model.onnx_data"


def write_onnx(source: str | os.PathLike[str], out: str | os.PathLike[str], *, form: str = "int8") -> OnnxReport:
    """Write a packed file as an ONNX model for onnxruntime, and compare it with the engine.

    out: a folder to make; one that is there must be empty. form: of the ternary weights, "float",
    "int8" or "2bit" (`matrices`). The folder appears only if the graph passes onnx.checker and
    computes what the engine computes. Memory: the largest tensor, then what onnxruntime needs.

    Raises PackedFormatError for a bad source, ValueError for a form or model that cannot be
    written, VerificationError, FileExistsError.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    file, out = PackedFile.open(source), Path(out)
    if problems := graph.unsupported(file, form):
        raise ValueError(f"{source} cannot be written as ONNX: " + "; ".join(problems))
    with replacing_folder(out) as folder:
        _write_side_files(folder, file)
        with open(folder / WEIGHTS, "xb") as weights:
            model = graph.build(Graph(weights, WEIGHTS), file, form)
        onnx.save(model, folder / MODEL)
        onnx.checker.check_model(folder / MODEL, full_check=True)
        sizes = [(folder / name).stat().st_size for name in (MODEL, WEIGHTS)]
        return OnnxReport(form, file.file_size, sum(sizes), **compare(Path(source), file, folder / MODEL))


def _write_side_files(folder: Path, file: PackedFile) -> None:
    config, generation = file.configs[0], generation_of(file)
    special = special_tokens(generation)
    write_json(folder / "config.json", _describe(config) | special)
    if graph.writes(config) and config.input == "tokens" and config.mask == "causal":
        write_json(folder / "genai_config.json", _describe_for_genai(config, special))
    write_generation(folder, generation)
    write_tokenizer(folder, file, config, generation)


def _describe(config: ModelConfig) -> dict[str, Any]:
    """What programs around onnxruntime read from config.json: the shapes of inputs and cache.

    model_type only tells them under which names they find these; what is computed is in the graph.
    """
    return {
        "model_type": "llama" if graph.writes(config) else "bert",
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
    """The same in the words of onnxruntime-genai, which also wants to be told the names."""
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
