"""Every hyperparameter of every model family, in one record; a model's draft or vision stack is a second one within.

`ModelConfig` can say more than is computed, which `not_yet` names. The packed file stores the same fields
(export/FORMAT.md §2). Imports no torch, so that the runtime and the tools can use it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from bitnet.config_rules import CHOICES as CHOICES
from bitnet.config_rules import TERNARY_LINEARS as TERNARY_LINEARS
from bitnet.config_rules import check, check_types


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One transformer stack. Shapes: D = dim, H = n_heads, G = n_kv_heads, E = head_dim, F = ffn_dim."""

    # size
    vocab_size: int  # tokens
    dim: int  # D, width of the residual stream
    n_layers: int  # blocks of attention and FFN
    n_heads: int  # H, query heads
    n_kv_heads: int  # G, divides H; H: MHA, 1: MQA, else GQA
    head_dim: int  # E, width of a head
    ffn_dim: int  # F, width between up and down
    max_context: int  # most tokens of a sequence; -1 with images: those of an image
    name: str = "decoder"  # of the stack in the packed file

    # input, output, mask
    input: str = "tokens"  # embeddings: vectors; draft: states of the stack before it, and tokens
    mask: str = "causal"  # what a token sees: those before it; all; or all of a prefix, and then those before it
    sliding_window: int = 0  # 0: none; else a token sees itself and the window - 1 tokens before it
    global_every: int = 0  # 0: all layers alike; n: of n layers the last has neither window nor local RoPE
    has_head: bool = True  # whether it predicts tokens
    tie_embeddings: bool = True  # the head is the embedding
    pooling: str = "none"  # of an embedding model: what becomes the vector of a text; attention: a head of its own
    out_dim: int = 0  # width of a projector's output after the last layer or the pooling; 0: no projector
    embedding_scale: float = 1.0  # factor of the embeddings
    residual_scale: float = 1.0  # factor of what a block adds
    logit_softcap: float = 0.0  # c·tanh(x / c) of logits; 0: none
    attention_softcap: float = 0.0  # the same of attention scores
    attention_scale: float = 0.0  # 0: 1/sqrt(E)

    # norms
    norm: str = "rms"  # RMSNorm or LayerNorm
    norm_eps: float = 1e-5  # added below the root
    pre_norm: bool = True  # norms before attention and before the FFN
    post_norm: bool = False  # after each, before the residual addition
    residual_norm: bool = False  # after each residual addition, of the sum: the transformer of 2017
    sub_norm: bool = True  # before o and before down
    linear_norm: bool = False  # one before every projection
    embedding_norm: bool = False  # norm of the input of the first layer
    final_norm: bool = True  # norm of the output of the last
    norm_bias: bool = False  # norms have a bias
    qk_norm: bool = False  # norms of queries and keys, head by head

    # FFN
    ffn: str = "gated"  # down(act(gate) · up), or down(act(up))
    activation: str = "relu2"  # relu2: relu(x)²; gelu: with tanh, as most models have it; gelu_erf: exact
    n_experts: int = 0  # FFNs of which a token uses some; 0: one for all
    experts_per_token: int = 0  # how many a token uses: the k of top-k routing
    normalize_routing: bool = True  # the shares of the chosen ones add up to 1; with only one, no router learns

    # positions
    position: str = "rope"  # how a token's position is encoded
    first_position: int = 0  # position of a text's first token, with RoPE; 0 or 1
    rope_theta: float = 10_000.0  # base of the frequencies
    rope_local_theta: float = 0.0  # base for layers with a window if global_every > 0, unscaled; 0: as the others
    rope_dim: int = -1  # dimensions of a head that RoPE rotates; -1: all
    rope_scaling: str = "none"  # scaling of frequencies, for longer contexts
    rope_factor: float = 1.0  # how many times longer
    rope_original_context: int = 0  # before scaling; llama3, yarn
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0  # llama3
    rope_beta_fast: float = 32.0  # yarn
    rope_beta_slow: float = 1.0  # yarn
    rope_attention_factor: float = 1.0  # scores are scaled by its square; yarn

    # biases
    qkv_bias: bool = False  # of q, k and v
    o_bias: bool = False  # of o
    ffn_bias: bool = False  # of gate, up and down
    head_bias: bool = False  # of the head
    projector_bias: bool = False  # of the projector (out_dim)
    patch_bias: bool = False  # of the matrix that turns patches of an image into vectors

    # images
    image_size: int = 0  # pixels of a side
    patch_size: int = 0  # pixels of a side of a patch, which becomes one token; the rest at the edge is left out
    channels: int = 0  # of a pixel: 1 (grey) or 3 (RGB)
    pixel_mean: tuple[float, ...] = ()  # of each channel: pixels from 0 to 1 minus the mean, divided by the deviation
    pixel_std: tuple[float, ...] = ()  # that deviation
    class_token: bool = False  # a learned vector before the patches
    similarity_scale: float = 0.0  # factor of cosines of images and texts, before the bias is added; 0: not given
    similarity_bias: float = 0.0  # that bias
    image_token: int = 0  # token that a decoder replaces with vectors of an image; 0: it sees no images
    vision: ModelConfig | None = None  # the vision stack of this one: a table of options
    draft: ModelConfig | None = None  # the draft head of this stack (`bitnet.model.draft`)

    # LoRA adapters: W·x + Bᵀ·(A·x), A (rank, inputs), B (rank, outputs)
    adapter_rank: int = 0  # 0: there are none
    adapters: tuple[str, ...] = ()  # which linear layers have one

    # numbers
    ternary: tuple[str, ...] = TERNARY_LINEARS  # which linear layers are ternary; the rest stay float
    weight_scale: str = "tensor"  # scope of the ternary scale γ; group: 128 inputs
    head_format: str = "int8"  # embedding and head: int8 rows, f16, f32, or ternary
    dropout: float = 0.0  # share of values dropped in training: of sublayers' outputs, attention, FFN and the input

    def __post_init__(self) -> None:
        check_types(self)
        for field in TUPLES:
            if isinstance(getattr(self, field), list):
                object.__setattr__(self, field, tuple(getattr(self, field)))
        if self.rope_dim == -1:
            object.__setattr__(self, "rope_dim", self.head_dim if self.position == "rope" else 0)
        if self.attention_scale == 0.0 and self.head_dim > 0:
            object.__setattr__(self, "attention_scale", 1.0 / math.sqrt(self.head_dim))
        if self.input == "images" and self.max_context == -1:
            object.__setattr__(self, "max_context", self.patches + self.class_token)
        check(self)

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2 if self.patch_size > 0 else 0

    def of_layer(self, layer: int) -> Self:
        """The configuration of one layer, with its own window and RoPE."""
        if not self.global_every:
            return self
        if (layer + 1) % self.global_every == 0:
            return self.replace(global_every=0, sliding_window=0)
        if not self.rope_local_theta:
            return self.replace(global_every=0)
        return self.replace(global_every=0, rope_theta=self.rope_local_theta, rope_scaling="none")

    def with_draft(self) -> Self:
        """This model with a draft, if it has none: one ternary layer of the kind of its last one."""
        if self.draft:
            return self
        layer = self.of_layer(self.n_layers - 1).replace(vision=None)
        position = layer.position if layer.position == "rope" else "none"  # a state knows its place
        none: dict[str, Any] = {
            "vocab_size": 0,
            "has_head": False,
            "tie_embeddings": False,
            "embedding_norm": False,
            "image_token": 0,
        }
        none |= {"pooling": "none", "head_bias": False, "logit_softcap": 0.0, "embedding_scale": 1.0, "dropout": 0.0}
        none |= {"adapter_rank": 0, "adapters": ()}
        draft = layer.replace(
            name="draft", input="draft", n_layers=1, position=position, ternary=TERNARY_LINEARS, **none
        )
        return self.replace(draft=draft)

    @property
    def ternary_weights(self) -> int:
        """Number of ternary weights, of all experts and all stacks."""
        attention, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        ffn = self.ffn_dim * max(1, self.n_experts)
        sizes = {
            "q": attention, "k": kv, "v": kv, "o": attention,
            "gate": ffn if self.ffn == "gated" else 0, "up": ffn, "down": ffn,
        }  # fmt: skip
        within = sum(stack.ternary_weights for stack in (self.draft, self.vision) if stack)
        within += 2 * self.dim**2 if self.input == "draft" and self.ternary else 0  # draft_projection
        return within + self.n_layers * self.dim * sum(sizes[role] for role in self.ternary)

    @property
    def width(self) -> int:
        """The width of the vectors of a model without a head."""
        return self.out_dim or self.dim

    @property
    def stacks(self) -> tuple[ModelConfig, ...]:
        """The stacks in the order of a packed file: this one, then its draft or its vision stack."""
        within = [stack for stack in (self.draft, self.vision) if stack]
        return (self.replace(draft=None, vision=None), *within) if within else (self,)

    @property
    def quantized(self) -> bool:
        """Whether any weight is not as in training: ternary ones, or those of an embedding or head."""
        return any(stack.ternary or stack.head_format != "f32" for stack in self.stacks)

    @property
    def drops(self) -> bool:
        """Whether any stack has dropout."""
        return any(stack.dropout for stack in self.stacks)

    @classmethod
    def of_stacks(cls, stacks: Iterable[Self]) -> Self:
        """Inverse of `stacks`. Raises ValueError: they do not fit together."""
        main, *others = stacks
        fields = {"draft": "draft", "images": "vision"}
        if len(others) > 1 or (others and others[0].input not in fields):
            inputs = ", ".join(f"{stack.name!r} of {stack.input}" for stack in (main, *others))
            raise ValueError(f"the stacks are {inputs}; expected one, or one followed by its draft or its vision stack")
        return main.replace(**{fields[others[0].input]: others[0]}) if others else main

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary with every field."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {field: list(values[field]) for field in TUPLES}
        return values | {name: within.to_dict() if (within := getattr(self, name)) else None for name in WITHIN}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Strict inverse of `to_dict`: an unknown name raises with the nearest valid one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                from bitnet_runtime.errors import did_you_mean  # loads the engine

                raise ValueError(f"unknown model option {key!r}{did_you_mean(key, names)}")
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"model option {missing[0]!r} is missing")
        for name in WITHIN:
            if isinstance(within := values.get(name), dict):
                if deeper := next((field for field in WITHIN if within.get(field) is not None), None):
                    raise ValueError(f"{name}.{deeper} is given, expected none: it has no stack within")
                values = values | {name: _within(name, cls.from_dict, within)}
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; unknown names raise as in `from_dict`. vision: a dictionary of changes, too.

        `rope_dim` and `attention_scale` that followed from `head_dim` follow from the new one, and `max_context` from
        the size of images and patches. What is done to the pixels of all channels is done to those of more or fewer.
        A draft is as wide as the model, and its context as long.
        """
        values = self.to_dict() | {name: getattr(self, name) for name in WITHIN}
        if self.draft and (shared := {name: changes[name] for name in ("dim", "max_context") if name in changes}):
            values["draft"] = self.draft.replace(**shared)
        if self.rope_dim == (self.head_dim if self.position == "rope" else 0):
            values["rope_dim"] = -1
        if self.attention_scale == 1.0 / math.sqrt(self.head_dim):
            values["attention_scale"] = 0.0
        if self.input == "images":
            values["max_context"] = -1
        if (channels := changes.get("channels")) in (1, 2, 3):
            for field in ("pixel_mean", "pixel_std"):
                if len(same := set(getattr(self, field))) == 1:
                    values[field] = [*same] * channels
        if (before := self.vision) and isinstance(seeing := changes.get("vision"), dict):
            changes = changes | {"vision": _within("vision", lambda changes: before.replace(**changes), seeing)}
        return type(self).from_dict(values | changes)


def _within(name: str, make: Callable[[dict[str, Any]], ModelConfig], values: dict[str, Any]) -> ModelConfig:
    """A vision stack or a draft from a table; errors name it."""
    try:
        return make(values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


BOOLEANS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.type == "bool")
TUPLES = ("ternary", "pixel_mean", "pixel_std", "adapters")
WITHIN = ("vision", "draft")
"""The fields that hold another stack."""


def not_yet(config: ModelConfig) -> list[str]:
    """What a configuration can express but nothing computes, by name: some adapters, a draft without its model."""
    first, *others = config.stacks
    found = [f"adapters of {role}, which is not ternary" for role in first.adapters if role not in first.ternary]
    found += [f"adapters of the stack {stack.name!r} (only of that of texts)" for stack in others if stack.adapters]
    found += ["adapters of images"] * (config.input == "images" and config.adapter_rank > 0)
    return found + ["input = 'draft' (only of a stack behind one of text)"] * (config.input == "draft")
