"""GGUF architectures in our terms: keys to a ModelConfig, names of tensors, the order of q and k rows.

Keys and names are those of gguf-py's constants.py; the computation of an architecture is taken from
llama.cpp (src/models) and ik_llama.cpp (src/graphs), the norms of embedding models from
microsoft/BitNet (utils/convert-bitnet-embedding-to-gguf.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.source import Floats, SourceError, Tensor, Ternary, ignored
from bitnet_export.foreign.ternary_values import ternary_values
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import NONE, ROLE, ROLES, Key

from .container import Gguf
from .rope import rope_options


class Family(NamedTuple):
    """Properties that the name of an architecture implies."""

    activation: str
    sub_norm: bool = False
    qk_norm: bool = False
    pairs: bool = False  # RoPE rotates dimensions 2i and 2i + 1, for which the converter has permuted q and k
    scales: bool = False  # projections may have a separate factor, "blk.0.attn_q.scale"


FAMILIES = {
    "bitnet": Family("silu", sub_norm=True, scales=True),
    "bitnet-25": Family("relu2", sub_norm=True),
    "bitnet-b1.58": Family("relu2", sub_norm=True),
    "llama": Family("silu", pairs=True, scales=True),
    "qwen3": Family("silu", qk_norm=True, scales=True),
}

LAYER = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "attn_sub_norm": "attn_sub_norm",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "ffn_sub_norm": "ffn_sub_norm",
}  # fmt: skip
LAYER |= {role + "_linear_norm": LAYER[role] + "_norm_in" for role in TERNARY_LINEARS}
STACK = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}

_ACTIVATIONS = {
    "relu2": "relu2", "relu_sqr": "relu2", "silu": "silu", "swish": "silu", "relu": "relu",
    "gelu_pytorch_tanh": "gelu", "gelu_tanh": "gelu",
}  # fmt: skip
_POOLING = {0: "none", 1: "mean", 2: "first", 3: "last"}
_NEUTRAL = {  # keys that change the computation, and the neutral value
    "expert_count": 0, "attention.sliding_window": 0, "attention.causal": True, "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0, "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0,
}  # fmt: skip
_KNOWN = {  # keys that are read here or in `rope`, or change nothing
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "pooling_type",
    "hidden_activation", "hidden_act", "tensor_data_layout", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", *(f"rope.scaling.{name}" for name in (
        "type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier",
        "yarn_beta_fast", "yarn_beta_slow",
    )),
}  # fmt: skip


class Model:
    """The configuration of a file, and its tensors by our keys."""

    def __init__(self, file: Gguf) -> None:
        self.file = file
        self.assumptions: list[str] = []
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in FAMILIES:
            raise SourceError(f"general.architecture is {arch!r:.80}, expected one of {', '.join(FAMILIES)}")
        self.arch, self.family = arch, FAMILIES[arch]
        if file.value("split.count", int, 1) > 1:
            raise SourceError("the file is one part of several; join them first with: llama-gguf-split --merge")
        for key, neutral in _NEUTRAL.items():
            if (value := file.metadata.get(f"{arch}.{key}", neutral)) != neutral:
                raise SourceError(f"{arch}.{key} is {value!r:.80}, expected {neutral!r} or no such key")
        try:
            self.config = self._config()
        except SourceError:
            raise
        except ValueError as error:
            raise SourceError(f"the metadata describes no model that can be converted: {error}") from None
        self.assumptions += self._unknown()
        self._check_tensors()
        first = [self.load(Key(0, 0, ROLE[role], NONE, 0)) for role in TERNARY_LINEARS]
        scope = max(tensor.scope for tensor in first if isinstance(tensor, Ternary))
        self.config = self.config.replace(weight_scale=encodings.SCOPE_NAMES[scope])
        tables = ["embedding", *(["head"] if self.config.has_head and not self.config.tie_embeddings else [])]
        if all(isinstance(self.load(Key(0, NONE, ROLE[table], NONE, 0)), Ternary) for table in tables):
            self.config = self.config.replace(head_format="ternary")

    def load(self, key: Key) -> Tensor:
        """A tensor in our order of rows; linears are ternary, tables if their values are."""
        name, role = self._name(key), ROLES[key.role]
        tensor = self.file.tensor(name)
        if isinstance(tensor, Floats) and len(tensor.shape) == 2:
            tensor = self._detected(tensor, name, role)
        if isinstance(tensor, Ternary) and self._is_scaled(key):
            tensor = self._scaled(tensor, self._scale_name(name))
        if self.family.pairs and role in ("q", "k"):
            tensor = _in_halves(tensor, self.config.head_dim)
        return tensor

    def linears(self) -> list[str]:
        """Names of the matrices of the layers."""
        specs = records.expected_tensors(self.config)
        return [self._name(s.key) for s in specs if ROLES[s.key.role] in TERNARY_LINEARS and not s.key.part]

    def _detected(self, tensor: Floats, name: str, role: str) -> Tensor:
        try:
            found = ternary_values(tensor)
        except SourceError as error:
            raise SourceError(f"tensor {name}: {error}") from None
        if found is None and role in TERNARY_LINEARS:
            raise SourceError(
                f"tensor {name} ({tensor.dtype}) is not ternary, expected values that are 0 or ± one scale per tensor, "
                "per row or per 128 weights; convert a model of floats from its Hugging Face folder"
            )
        return tensor if found is None else found

    def _is_scaled(self, key: Key) -> bool:
        """Whether the tensor may have a separate factor."""
        return self.family.scales and ROLES[key.role] in TERNARY_LINEARS and not key.part

    def _scaled(self, tensor: Ternary, name: str) -> Ternary:
        if name not in self.file.tensors:
            return tensor
        factor = self.file.tensor(name)
        scales = tensor.scales * factor.all() if isinstance(factor, Floats) and factor.shape == (1,) else None
        if scales is None or not encodings.scales_are_valid(scales):
            raise SourceError(f"tensor {name} is not one finite number above 0")
        return Ternary(tensor.codes, scales)

    def _config(self) -> ModelConfig:
        file, family = self.file, self.family
        dim, heads = file.value(f"{self.arch}.embedding_length", int), self._same_everywhere("attention.head_count")
        if heads < 1:
            raise SourceError(f"{self.arch}.attention.head_count is {heads}, expected at least 1")
        head_dim = file.value(f"{self.arch}.attention.key_length", int, dim // heads)
        if (value_dim := file.value(f"{self.arch}.attention.value_length", int, head_dim)) != head_dim:
            raise SourceError(f"{self.arch}: values have {value_dim} dimensions and keys {head_dim}, expected the same")
        pooling = file.value(f"{self.arch}.pooling_type", int, 0)
        if pooling not in _POOLING:
            raise SourceError(f"{self.arch}.pooling_type is {pooling}, expected 0 to 3")
        rope_dim = file.value(f"{self.arch}.rope.dimension_count", int, head_dim)
        if family.pairs and rope_dim != head_dim:
            raise SourceError(
                f"{self.arch}.rope.dimension_count is {rope_dim}, expected {head_dim}, the size of a head"
            )
        return ModelConfig(
            vocab_size=self._vocab_size(),
            dim=dim,
            n_layers=file.value(f"{self.arch}.block_count", int),
            n_heads=heads,
            n_kv_heads=self._same_everywhere("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_dim=self._same_everywhere("feed_forward_length"),
            max_context=file.value(f"{self.arch}.context_length", int),
            norm_eps=file.value(f"{self.arch}.attention.layer_norm_rms_epsilon", float),
            activation=self._activation(),
            sub_norm=family.sub_norm,
            qk_norm=family.qk_norm,
            linear_norm="blk.0.attn_q_norm_in.weight" in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            ffn_bias="blk.0.ffn_up.bias" in file.tensors,
            tie_embeddings=self._tied(),
            has_head=pooling == 0,
            pooling=_POOLING[pooling],
            rope_dim=rope_dim,
            **rope_options(file, self.arch, rope_dim),
        )

    def _unknown(self) -> list[str]:
        """A line for each key of the architecture that is not known here, unless it is 0 or empty."""
        given = ((key.removeprefix(f"{self.arch}."), key, value) for key, value in self.file.metadata.items() if value)
        known = {*_KNOWN, *_NEUTRAL}
        unknown = [(key, value) for name, key, value in given if name != key and name not in known]
        said = "{} is not known here and was ignored"
        lines = [said.format(f"{ascii(key)[1:-1]:.80} = {value!r:.40}") for key, value in unknown]
        return ignored(lines, "{} more keys are not known here and were ignored")

    def _vocab_size(self) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise SourceError("tensor token_embd.weight is missing or not a matrix")
        return table.shape[0]

    def _activation(self) -> str:
        for name in ("hidden_activation", "hidden_act"):
            word = self.file.value(f"{self.arch}.{name}", str, "")
            if word and word not in _ACTIVATIONS:
                raise SourceError(f"{self.arch}.{name} is {word!r:.80}, expected one of {', '.join(_ACTIVATIONS)}")
            if word:
                return _ACTIVATIONS[word]
        if self.arch == "bitnet" and self.file.metadata.get("tokenizer.ggml.model") == "gpt2":
            # llama.cpp writes BitNetForCausalLM (2B4T: relu², byte-level BPE) and 1bitLLM's BitnetForCausalLM
            # (SiLU, SentencePiece) under one architecture; only the tokenizer tells them apart.
            self.assumptions.append(
                "no key bitnet.hidden_activation: relu2, as in BitNet 2B4T, because the tokenizer is byte-level BPE"
            )
            return "relu2"
        if self.arch.startswith("bitnet"):
            self.assumptions.append(f"no key {self.arch}.hidden_activation: {self.family.activation}")
        return self.family.activation

    def _tied(self) -> bool:
        return "output.weight" not in self.file.tensors or self.file.same("output.weight", "token_embd.weight")

    def _check_tensors(self) -> None:
        """Check that there are exactly the tensors that the configuration requires, with the right shapes."""
        left = dict(self.file.tensors)
        left.pop("rope_freqs.weight", None)
        if self.config.tie_embeddings:
            left.pop("output.weight", None)  # the same bytes once more
        for spec in records.expected_tensors(self.config):
            if ROLES[spec.key.role].startswith("rope_"):
                continue
            name, shape = self._name(spec.key), (spec.rows, spec.cols)
            entry = left.pop(name, None)
            if entry is None:
                raise SourceError(f"tensor {name} is missing, the metadata calls for it")
            if entry.shape != shape and (1, *entry.shape) != shape:
                raise SourceError(f"tensor {name} has shape {list(entry.shape)}, the metadata calls for {list(shape)}")
            if spec.form == "vector" and not entry.type.floats:
                raise SourceError(f"tensor {name} is {entry.type.name}, expected floats")
            scaled = self._is_scaled(spec.key) and left.pop(self._scale_name(name), None) is not None
            if scaled and self.config.ffn_bias and ROLES[spec.key.role] in ("gate", "up", "down"):
                raise SourceError(f"tensor {self._scale_name(name)} would multiply a bias too, which is not supported")
        if left:
            raise SourceError(f"tensor {min(left)!a} is there, a model of architecture {self.arch} does not have it")

    def _name(self, key: Key) -> str:
        part = "bias" if key.part else "weight"
        role = ROLES[key.role]
        return f"{STACK[role]}.{part}" if key.layer == NONE else f"blk.{key.layer}.{LAYER[role]}.{part}"

    @staticmethod
    def _scale_name(name: str) -> str:
        return name.removesuffix("weight") + "scale"

    def _same_everywhere(self, name: str, default: int | None = None) -> int:
        """A number that may be given per layer; it has to be the same for all."""
        value = self.file.metadata.get(f"{self.arch}.{name}")
        if isinstance(value, list):
            if not value or any(type(each) is not int or each != value[0] for each in value):
                raise SourceError(f"{self.arch}.{name} differs between layers, expected the same number in all")
            return int(value[0])
        return self.file.value(f"{self.arch}.{name}", int, default)


def _in_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k, within a head, from the order 0, E/2, 1, E/2 + 1, … of llama files to 0, 1, …, E − 1."""
    rows = np.arange(tensor.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    if isinstance(tensor, Ternary):
        return tensor.take(rows)
    return Floats.of(tensor.all()[rows])
