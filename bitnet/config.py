"""Every hyperparameter of every model family, in one flat record.

`ModelConfig` can say more than this version runs: images, drafts and adapters are refused by name. The packed file
stores the same fields (export/FORMAT.md §2). Imports no torch, so that the runtime and the tools can use it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Self, cast

TERNARY_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")

CHOICES: dict[str, tuple[str, ...]] = {
    "input": ("tokens", "embeddings", "images", "draft"),
    "mask": ("causal", "bidirectional", "prefix"),
    "norm": ("rms", "layer"),
    "ffn": ("gated", "plain"),
    "activation": ("relu2", "silu", "gelu", "relu", "gelu_erf"),
    "position": ("rope", "learned", "sinusoidal", "none"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "pooling": ("none", "last", "mean", "first", "attention"),
    "weight_scale": ("tensor", "row", "group"),
    "head_format": ("int8", "f16", "f32", "ternary"),
}
"""Allowed words; the position in the tuple is the number in the packed file."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One transformer stack. Shapes: D = dim, H = n_heads, G = n_kv_heads, E = head_dim, F = ffn_dim."""

    # size
    vocab_size: int  # tokens
    dim: int  # D, width of the residual stream
    n_layers: int  # blocks of attention and FFN
    n_heads: int  # H, query heads
    n_kv_heads: int  # G, divides H; H: MHA, 1: MQA
    head_dim: int  # E, width of a head
    ffn_dim: int  # F, width between up and down
    max_context: int  # tokens that a sequence may have
    name: str = "decoder"  # of the stack in the packed file

    # input, output, mask
    input: str = "tokens"  # embeddings: the model is given vectors; draft: states of the stack before it, and tokens
    mask: str = "causal"  # what a token sees: those before it, all, or all of a first part and then those before it
    sliding_window: int = 0  # 0: none; else a token sees itself and the window - 1 before it
    global_every: int = 0  # 0: all layers alike; n: of n layers the last has neither window nor local RoPE
    has_head: bool = True  # that predicts tokens
    tie_embeddings: bool = True  # the head is the embedding
    pooling: str = "none"  # of an embedding model: what becomes the vector of a text; attention: a head of its own
    out_dim: int = 0  # width of what a projector behind the last layer or the pooling gives; 0: there is none
    embedding_scale: float = 1.0  # embeddings are multiplied with it
    residual_scale: float = 1.0  # what a block adds is multiplied with it
    logit_softcap: float = 0.0  # c·tanh(x / c) of logits; 0: none
    attention_softcap: float = 0.0  # the same of attention scores
    attention_scale: float = 0.0  # 0: 1/sqrt(E)

    # norms
    norm: str = "rms"  # RMSNorm or LayerNorm
    norm_eps: float = 1e-5  # added below the root
    pre_norm: bool = True  # before attention and before the FFN
    post_norm: bool = False  # after each, before the residual addition
    residual_norm: bool = False  # after each residual addition, of the sum: the transformer of 2017
    sub_norm: bool = True  # before o and before down
    linear_norm: bool = False  # one before every projection
    embedding_norm: bool = False  # of what enters the first layer
    final_norm: bool = True  # of what leaves the last
    norm_bias: bool = False  # norms have a bias
    qk_norm: bool = False  # norms of queries and keys, head by head

    # FFN
    ffn: str = "gated"  # down(act(gate) · up), or down(act(up))
    activation: str = "relu2"  # relu2: relu(x)²; gelu: with tanh, as most models have it; gelu_erf: exact
    n_experts: int = 0  # FFNs of which a token takes some; 0: one for all
    experts_per_token: int = 0  # how many it takes
    normalize_routing: bool = True  # the shares of those it takes add up to 1: with one alone no router learns

    # positions
    position: str = "rope"  # how a token knows its place
    first_position: int = 0  # that of a text's first token, with RoPE; 0 or 1
    rope_theta: float = 10_000.0  # base of the frequencies
    rope_local_theta: float = 0.0  # of layers with a window where global_every > 0, unscaled; 0: as the others
    rope_dim: int = -1  # dimensions of a head that turn; -1: all
    rope_scaling: str = "none"  # of frequencies, for longer contexts
    rope_factor: float = 1.0  # by how much longer
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
    patch_bias: bool = False  # of the matrix that makes patches of an image to vectors

    # images
    image_size: int = 0  # pixels of a side
    patch_size: int = 0  # pixels of a side of what becomes one token; what remains at the edge is left out
    channels: int = 0  # of a pixel, 1 to 3
    pixel_mean: tuple[float, ...] = ()  # of each channel: pixels from 0 to 1 less the mean, divided by the deviation
    pixel_std: tuple[float, ...] = ()  # that deviation
    class_token: bool = False  # a learned vector before the patches
    similarity_scale: float = 0.0  # a vector of an image times one of a text times this, plus the bias; 0: unsaid
    similarity_bias: float = 0.0  # that bias
    image_token: int = 0  # in whose place a decoder is given vectors of an image; 0: it sees no images

    # adapters: W·x + B·(A·x), A (rank, inputs), B (outputs, rank)
    adapter_rank: int = 0  # 0: there are none
    adapters: tuple[str, ...] = ()  # which linears have one

    # numbers
    ternary: tuple[str, ...] = TERNARY_LINEARS  # which linears are ternary; the rest stay float
    weight_scale: str = "tensor"  # scope of the ternary scale γ
    head_format: str = "int8"  # embedding and head: int8 rows, f16, f32, or ternary
    dropout: float = 0.0  # share of values dropped in training: of sublayers' outputs, attention, FFN and what enters

    def __post_init__(self) -> None:
        for field in TUPLES:
            if isinstance(getattr(self, field), list):
                object.__setattr__(self, field, tuple(getattr(self, field)))
        if self.rope_dim == -1:
            object.__setattr__(self, "rope_dim", self.head_dim if self.position == "rope" else 0)
        if self.attention_scale == 0.0 and self.head_dim > 0:
            object.__setattr__(self, "attention_scale", 1.0 / math.sqrt(self.head_dim))
        self._check()

    def _check(self) -> None:
        ranges = {
            "vocab_size": (0 if self.input != "tokens" and not self.has_head else 1, 1 << 21),
            "dim": (1, 65_536),
            "n_layers": (1, 1024),
            "n_heads": (1, 1024),
            "n_kv_heads": (1, self.n_heads),
            "head_dim": (1, 1024),
            "ffn_dim": (1, 262_144),
            "max_context": (1, 1 << 24),
            "sliding_window": (0, 1 << 24),
            "global_every": (0, 1024),
            "n_experts": (0, 65_534),
            "experts_per_token": (0, max(self.n_experts, 0)),
            "rope_dim": (0, self.head_dim),
            "out_dim": (0, 65_536),
            "first_position": (0, 1 if self.position == "rope" else 0),
            "image_token": (0, max(self.vocab_size - 1, 0)),
        }
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{field} is {value!r}, expected an integer from {low} to {high}")
        for field, words in CHOICES.items():
            if getattr(self, field) not in words:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected one of {', '.join(words)}")
        for field in BOOLEANS:
            if type(getattr(self, field)) is not bool:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected true or false")
        for field in POSITIVE:
            value = getattr(self, field)
            if not (_finite(value) and value > 0):
                raise ValueError(f"{field} is {value!r}, expected a finite number above 0")
        if not (type(self.dropout) in (int, float) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout is {self.dropout!r}, expected a share from 0 to below 1")
        if self.residual_norm and self.post_norm:
            raise ValueError("residual_norm and post_norm are both set, expected at most one")
        for field in ("logit_softcap", "attention_softcap", "rope_local_theta"):
            value = getattr(self, field)
            if not (_finite(value) and value >= 0):
                raise ValueError(f"{field} is {value!r}, expected 0 (none) or a positive number")
        if self.global_every == 1 or (self.global_every and not self.sliding_window):
            raise ValueError(
                f"global_every is {self.global_every} with sliding_window = {self.sliding_window}, "
                "expected 0 (all layers alike), or at least 2 and a window"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, expected a multiple of n_kv_heads = {self.n_kv_heads}")
        self._check_rope()
        self._check_images()
        if (self.n_experts > 0) != (self.experts_per_token > 0):
            raise ValueError("n_experts and experts_per_token are both 0 or both positive")
        if type(self.name) is not str:
            raise ValueError(f"name is {self.name!r}, expected a text")
        if len(self.name.encode()) > 63:
            raise ValueError(f"name {self.name!r} is longer than 63 bytes")
        for field in ("ternary", "adapters"):
            roles, known = getattr(self, field), ", ".join(TERNARY_LINEARS)
            if type(roles) is not tuple:
                raise ValueError(f"{field} is {roles!r}, expected a list of some of {known}")
            unknown = [role for role in roles if role not in TERNARY_LINEARS]
            if unknown:
                raise ValueError(f"{field} names {unknown[0]!r}, expected some of {known}")
        if type(self.adapter_rank) is not int or not 0 <= self.adapter_rank < 1 << 16:
            raise ValueError(f"adapter_rank is {self.adapter_rank!r}, expected an integer from 0 to 65535")
        if (self.adapter_rank > 0) != (len(self.adapters) > 0):
            raise ValueError(f"adapter_rank is {self.adapter_rank} and adapters {self.adapters}, expected both or none")

    def _check_rope(self) -> None:
        if self.rope_dim % 2 or (self.rope_dim > 0) != (self.position == "rope"):
            expected = "an even number above 0" if self.position == "rope" else "0"
            raise ValueError(f"rope_dim is {self.rope_dim} with position = {self.position!r}, expected {expected}")
        needs = {
            "llama3": ("rope_low_freq_factor", "rope_high_freq_factor"),
            "yarn": ("rope_beta_slow", "rope_beta_fast"),
        }
        if self.rope_scaling not in needs:
            return
        if type(self.rope_original_context) is not int or self.rope_original_context < 1:
            raise ValueError(
                f"rope_original_context is {self.rope_original_context!r}, expected at least 1 with {self.rope_scaling}"
            )
        low, high = needs[self.rope_scaling]
        if not getattr(self, low) < getattr(self, high):
            raise ValueError(f"{low} is {getattr(self, low)}, expected less than {high}, {getattr(self, high)}")
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}, expected more than 1 with yarn")

    def _check_images(self) -> None:
        of_images = self.input == "images"
        ranges = {
            "image_size": (1, 1 << 14) if of_images else (0, 0),
            "patch_size": (1, max(self.image_size, 1)) if of_images else (0, 0),
            "channels": (1, 3) if of_images else (0, 0),
        }
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"{field} is {value!r} with input = {self.input!r}, expected an integer from {low} to {high}"
                )
        for field in ("pixel_mean", "pixel_std"):
            values = getattr(self, field)
            numbers = type(values) is tuple and all(map(_finite, values))
            if not numbers or len(values) != self.channels or (field == "pixel_std" and not all(v > 0 for v in values)):
                above = " above 0" * (field == "pixel_std")
                raise ValueError(f"{field} is {values!r}, expected {self.channels} finite numbers{above}")
        if of_images and self.max_context != self.patches + self.class_token:
            raise ValueError(
                f"max_context is {self.max_context}, expected {self.patches + self.class_token}, the tokens of an image"
            )
        if self.class_token and not of_images:
            raise ValueError(f"class_token is set with input = {self.input!r}, expected input = 'images'")
        for field in ("similarity_scale", "similarity_bias"):
            value = getattr(self, field)
            least = 0.0 if field == "similarity_scale" else -math.inf
            if not (_finite(value) and value >= least):
                raise ValueError(f"{field} is {value!r}, expected a finite number" + " from 0 on" * (least == 0))

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image_size // self.patch_size) ** 2 if self.patch_size else 0

    def of_layer(self, layer: int) -> Self:
        """What this configuration says of one layer: every layer has its window and its RoPE."""
        if not self.global_every:
            return self
        if (layer + 1) % self.global_every == 0:
            return self.replace(global_every=0, sliding_window=0)
        if not self.rope_local_theta:
            return self.replace(global_every=0)
        return self.replace(global_every=0, rope_theta=self.rope_local_theta, rope_scaling="none")

    @property
    def ternary_weights(self) -> int:
        """Number of ternary weights, of all experts."""
        attention, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        ffn = self.ffn_dim * max(1, self.n_experts)
        sizes = {
            "q": attention, "k": kv, "v": kv, "o": attention,
            "gate": ffn if self.ffn == "gated" else 0, "up": ffn, "down": ffn,
        }  # fmt: skip
        return self.n_layers * self.dim * sum(sizes[role] for role in self.ternary)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary with every field."""
        return dataclasses.asdict(self) | {field: list(getattr(self, field)) for field in TUPLES}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Strict inverse of `to_dict`: an unknown name raises with the nearest valid one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                raise ValueError(f"unknown model option {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"model option {missing[0]!r} is missing")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; unknown names raise as in `from_dict`.

        `rope_dim` and `attention_scale` that followed from `head_dim` follow from the new one.
        """
        values = self.to_dict()
        if self.rope_dim == (self.head_dim if self.position == "rope" else 0):
            values["rope_dim"] = -1
        if self.attention_scale == 1.0 / math.sqrt(self.head_dim):
            values["attention_scale"] = 0.0
        return type(self).from_dict(values | changes)


def _finite(value: object) -> bool:
    """Whether it is a number that fp64 can hold; of integers `math.isfinite` cannot say it."""
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max


BOOLEANS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.type == "bool")
TUPLES = ("ternary", "pixel_mean", "pixel_std", "adapters")
POSITIVE = (
    "norm_eps", "embedding_scale", "residual_scale", "attention_scale", "rope_theta", "rope_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor",
)  # fmt: skip

NOT_YET: dict[str, tuple[object, ...]] = {
    "input": ("tokens", "embeddings"), "pooling": ("none", "last", "mean", "first"), "out_dim": (0,),
    "image_token": (0,), "similarity_scale": (0.0,), "adapter_rank": (0,),
}  # fmt: skip
"""What can be said of images, drafts and adapters and nothing computes yet, by the values that are."""


def not_yet(config: ModelConfig) -> list[str]:
    """What of a configuration belongs to images, drafts or adapters, by name."""
    return [
        f"{field} = {getattr(config, field)!r} (only {' or '.join(repr(value) for value in allowed)})"
        for field, allowed in NOT_YET.items()
        if getattr(config, field) not in allowed
    ]
