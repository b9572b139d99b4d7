"""The transformer, read from top to bottom like the paper.

Shape letters: B batch, T tokens, D width of the residual stream, H query heads, G key/value
heads, E head size, F width of the feed-forward network, V vocabulary. `q_BHTE` has shape
(B, H, T, E).

Parameter names are the roles of export/FORMAT.md: `layers.{i}.q.weight` is role q of layer i,
`embedding.weight`, `final_norm.weight`, and `head.weight` when it is not the embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitnet.bitlinear import BitLinear
from bitnet.config import ModelConfig, not_yet
from bitnet.model.block import Block
from bitnet.model.layers import norm_of
from bitnet.model.masks import attention_mask, begins, positions
from bitnet.model.positions import rope_tables, sinusoids
from bitnet.quant import embedding_rows, output_logits

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: x[:, -1], "mean": lambda x: x.mean(1), "first": lambda x: x[:, 0],
}  # fmt: skip


def pooled(hidden_BTD: Tensor, pooling: str, documents_BT: Tensor | None = None) -> Tensor:
    """One vector of length 1 for each text, (B, D), of its hidden states: those of a row's first document."""
    if documents_BT is None:
        return F.normalize(POOLS[pooling](hidden_BTD), dim=-1)
    lengths = (begins(documents_BT).cumsum(1) == 1).sum(1).tolist()
    texts = [POOLS[pooling](row[None, :n]) for row, n in zip(hidden_BTD, lengths, strict=True)]
    return F.normalize(torch.cat(texts), dim=-1)


def places(
    config: ModelConfig, x_BTD: Tensor, documents_BT: Tensor | None = None, prefix_B: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Where the tokens of x stand and what they see, for layers with this configuration: cos, sin and mask."""
    n_tokens = x_BTD.shape[1]
    mask = attention_mask(config, n_tokens, documents_BT, prefix_B, x_BTD)
    if config.position != "rope":
        return None, None, mask
    cos, sin = rope_tables(config, n_tokens, like=x_BTD)
    if documents_BT is not None:
        at = positions(documents_BT)[:, None]  # the same for all heads
        cos, sin = cos[at], sin[at]
    return cos, sin, mask


class Bias(nn.Module):
    """All that a head has for itself when its matrix is the embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))


class Transformer(nn.Module):
    """A stack of layers, with a head a model of tokens; without one, of vectors of texts (`embed`).

    `Transformer(config).double()` is a reference in fp64 around the same quantizers.
    documents: int (B, T), when a row holds several texts: equal numbers in a row for the tokens of one. A
    token sees its own text only, at the positions it would have alone. Filling is a document of its own.
    prefix: int (B,), with the mask "prefix" how many tokens of each row all others see.
    recompute: keep only the input of each layer for the backward pass, and compute the layer there again.
    """

    amount: float | Tensor = 1.0
    recompute = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if problems := not_yet(config):
            raise ValueError("images, drafts and adapters are not computed yet: " + "; ".join(problems))
        self.config = config
        own_head = config.has_head and not config.tie_embeddings
        has_table = config.input == "tokens" or (config.has_head and config.tie_embeddings)
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if has_table else None
        self.layers = nn.ModuleList(Block(config.of_layer(i)) for i in range(config.n_layers))
        if config.position == "learned":
            self.position = nn.Embedding(config.max_context, config.dim)
        self.embedding_norm = norm_of(config, config.dim) if config.embedding_norm else nn.Identity()
        self.final_norm = norm_of(config, config.dim) if config.final_norm else nn.Identity()
        self.head: nn.Module | None = None
        if own_head:
            self.head = nn.Linear(config.dim, config.vocab_size, config.head_bias)
        elif config.has_head and config.head_bias:
            self.head = Bias(config.vocab_size)
        self.init_weights()

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def init_weights(self) -> None:
        """Normal weights, gains 1, biases 0.

        Ternary codes do not depend on the deviation, but the learning rate counts in its units,
        and γ does: o and down begin small, so that the token itself, of size D**-0.5, is not
        drowned in the residual stream by what random layers add to it. (Against 0.02 everywhere:
        5.3 nats instead of 5.8 after 150,000 tokens, three layers of width 128.)
        """
        small = 0.02 / (2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                role = name.split(".")[-2]
                row = self.config.dim**-0.5
                std = {"embedding": row, "position": row, "o": small, "down": small}.get(role, 0.02)
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def balance(self) -> Tensor:
        """How unevenly the experts were taken in the last pass, the mean of the layers: 1 evenly, n_experts at most."""
        return torch.stack([block.balance for block in self.blocks]).mean()

    @contextlib.contextmanager
    def partly_quantized(self, amount: float) -> Iterator[None]:
        """Inside, every quantizer Q computes v + amount·(Q(v) − v): 0 is the float model, 1 the quantized one.

        With `recompute` the backward pass has to be inside, too.
        """
        value = 1.0 if amount == 1 else torch.tensor(amount, device=self.device)
        parts: list[Transformer | BitLinear] = [self]
        parts += [module for module in self.modules() if isinstance(module, BitLinear)]
        try:
            for part in parts:
                part.amount = value
            yield
        finally:
            for part in parts:
                part.amount = 1.0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, nothing is dropped out."""
        training = self.training
        try:
            self.eval()
            yield
        finally:
            self.train(training)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, prefix_B: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, (B, T, D). tokens: ids (B, T), or vectors (B, T, D) in their place."""
        config = self.config
        n_tokens = tokens_BT.shape[1]
        if n_tokens > config.max_context:
            raise ValueError(f"{n_tokens} tokens do not fit the context of {config.max_context}")
        x_BTD = self.entering(tokens_BT, documents_BT)
        of_layers = [config.of_layer(i) for i in range(config.n_layers)]
        at = {of_layer: places(of_layer, x_BTD, documents_BT, prefix_B) for of_layer in set(of_layers)}
        for layer, of_layer in zip(self.layers, of_layers, strict=True):
            inputs = x_BTD, *at[of_layer]
            if self.recompute and torch.is_grad_enabled():
                keep = config.dropout > 0  # the same values are to be dropped again
                x_BTD = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=keep)
            else:
                x_BTD = layer(*inputs)
        normed_BTD: Tensor = self.final_norm(x_BTD)
        return normed_BTD

    def entering(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """What enters the first layer, (B, T, D): rows of the embedding, scaled, or the vectors given; positions."""
        config = self.config
        if tokens_BT.is_floating_point():
            x_BTD = tokens_BT
        elif self.embedding is None:
            raise ValueError("this model takes vectors (B, T, D), no tokens: it has no embedding")
        else:
            rows_BTD = embedding_rows(
                tokens_BT, self.embedding.weight, config.head_format, self.amount, config.weight_scale
            )
            x_BTD = config.embedding_scale * rows_BTD
        if config.position in ("learned", "sinusoidal"):
            n_tokens = tokens_BT.shape[1]
            learned = config.position == "learned"
            table = self.position.weight if learned else sinusoids(n_tokens, config.dim).to(x_BTD)
            x_BTD = x_BTD + (table[:n_tokens] if documents_BT is None else table[positions(documents_BT)])
        x_BTD = self.embedding_norm(x_BTD)
        return F.dropout(x_BTD, config.dropout) if self.training and config.dropout else x_BTD

    def attention_weights(
        self, tokens_BT: Tensor, documents_BT: Tensor | None = None, prefix_B: Tensor | None = None
    ) -> list[Tensor]:
        """What each token takes of each, of every layer (B, H, T, T): rows add up to 1."""
        try:
            for block in self.blocks:
                block.keep_weights = True
            with torch.no_grad():
                self.hidden(tokens_BT, documents_BT, prefix_B)
            return [cast(Tensor, block.attention_weights) for block in self.blocks]
        finally:
            for block in self.blocks:
                block.keep_weights, block.attention_weights = False, None

    def embed(self, tokens_BT: Tensor, pooling: str = "", documents_BT: Tensor | None = None) -> Tensor:
        """One vector of length 1 for each text, (B, D): of a row's first document, where more follow.

        pooling: "last", "mean" or "first"; "": the model's own.
        """
        pooling = pooling or self.config.pooling
        if pooling not in POOLS:
            raise ValueError(f"pooling is {pooling!r}, expected one of {', '.join(POOLS)}")
        return pooled(self.hidden(tokens_BT, documents_BT), pooling, documents_BT)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, prefix_B: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each position; without a head the vectors of the texts (B, D)."""
        config = self.config
        if not config.has_head:
            return self.embed(tokens_BT, documents_BT=documents_BT)
        weight = cast(nn.Linear, self.embedding if config.tie_embeddings else self.head).weight
        hidden_BTD = self.hidden(tokens_BT, documents_BT, prefix_B)
        logits_BTV = output_logits(hidden_BTD, weight, config.head_format, self.amount, config.weight_scale)
        if config.head_bias:
            logits_BTV = logits_BTV + cast(nn.Linear, self.head).bias
        if config.logit_softcap:
            logits_BTV = config.logit_softcap * torch.tanh(logits_BTV / config.logit_softcap)
        return logits_BTV

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        return F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())
