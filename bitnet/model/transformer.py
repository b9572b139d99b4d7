"""The transformer, to be read from top to bottom like the paper.

Shape letters: B batch, T tokens, D width of the residual stream, H query heads, G key/value
heads, E head size, F width of the feed-forward network, V vocabulary. `q_BHTE` has shape
(B, H, T, E).

Parameter names are the roles of export/FORMAT.md: `layers.{i}.q.weight` is role q of layer i,
`embedding.weight`, `final_norm.weight`, and `head.weight` when it is not the embedding. Those of the stack that
looks at images begin with `vision.`, those of a draft with `draft.`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitnet.bitlinear import BitLinear
from bitnet.config import ModelConfig, not_yet
from bitnet.model.attention import LONGEST
from bitnet.model.block import Block
from bitnet.model.draft import Draft, Steps, unrolled
from bitnet.model.head import Bias, Head, Portion, log_probabilities, portion, summed_cross_entropy
from bitnet.model.images import Images, Shared, Similarity, looked_at, one_batch, patches_of, put_in_place
from bitnet.model.initial import draw_weights
from bitnet.model.layers import norm_of
from bitnet.model.masks import positions
from bitnet.model.pooling import POOLS, Pool, gathered
from bitnet.model.positions import places, sinusoids
from bitnet.straight_through import embedding_rows


class Transformer(nn.Module):
    """A stack of layers: with a head a language model; without one an encoder of texts or images (`embed`).

    `draft` is the draft head of this model; training it (`drafted`) does not affect this model.
    `vision` is the stack that encodes images for this one. Pixels (B, C, S, S) are normalized: (x − mean) / std.
    `Transformer(config).double()` is a reference in fp64 around the same quantizers.
    documents: int (B, T), when a row holds several texts: consecutive equal numbers for the tokens of one. A
    token sees only its own text, at the positions it would have alone. Padding is a document of its own, below 0.
    prefix: int (B,), with the mask "prefix" how many tokens of each row all others see.
    recompute: activation checkpointing: keep only each layer's input, and recompute the layer in the backward pass.
    """

    amount: float | Tensor = 1.0
    drafted: Steps | None = None  # of the last training pass with targets
    in_blocks = False  # compiled layers take masks of long sequences as `masks.blocks`
    draft_only = False  # only the draft is trained: a pass with targets returns its loss

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if problems := not_yet(config):
            raise ValueError("this is not computed yet: " + "; ".join(problems))
        if config.image_token and not config.vision:
            raise ValueError(f"image_token is {config.image_token} without vision, expected a stack that sees images")
        self.config = config
        self._recompute = False
        self.portion: Portion = portion
        own_head = config.has_head and not config.tie_embeddings
        has_table = config.input == "tokens" or (config.has_head and config.tie_embeddings)
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if has_table else None
        self.layers = nn.ModuleList(Block(config.of_layer(i)) for i in range(config.n_layers))
        if config.position == "learned":
            self.position = nn.Embedding(config.max_context, config.dim)
        self.embedding_norm = norm_of(config, config.dim) if config.embedding_norm else nn.Identity()
        self.final_norm = norm_of(config, config.dim) if config.final_norm else nn.Identity()
        self.states: nn.Module = nn.Identity()  # all pass through it, for `bitnet.train.distill_images`
        self.head: nn.Module | None = None
        if own_head:
            self.head = nn.Linear(config.dim, config.vocab_size, config.head_bias)
        elif config.has_head and config.head_bias:
            self.head = Bias(config.vocab_size)
        if config.input == "images":
            self.patch = nn.Linear(config.channels * config.patch_size**2, config.dim, config.patch_bias)
        self.class_embedding = nn.Parameter(torch.empty(config.dim)) if config.class_token else None
        self.pool = Pool(config) if config.pooling == "attention" else None
        self.projector = nn.Linear(config.dim, config.out_dim, config.projector_bias) if config.out_dim else None
        draw_weights(self)
        self.vision = Transformer(config.vision) if config.vision else None
        self.draft: Draft | None = None
        if config.draft:
            with torch.random.fork_rng(devices=[]):  # a run draws the same numbers with a draft as without
                self.draft = Draft(config.draft)
                draw_weights(self.draft)
        self.similarity = Similarity(config) if config.vision and not config.image_token else None
        if self.vision and self.vision.projector and config.image_token:  # its vectors become as large as token rows
            with torch.no_grad():
                self.vision.projector.weight.mul_(config.embedding_scale * config.dim**-0.5)

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    @property
    def stacks(self) -> list[Transformer]:
        """This stack, and its vision stack."""
        return [self, *([self.vision] if self.vision else [])]

    @property
    def recompute(self) -> bool:
        return self._recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        for stack in self.stacks:
            stack._recompute = wanted

    @property
    def balance(self) -> Tensor:
        """Load-balancing loss of the experts in the last pass, mean over the layers: 1 balanced, n_experts at most."""
        return torch.stack([block.balance for block in self.blocks]).mean()

    @contextlib.contextmanager
    def partly_quantized(self, amount: float | Tensor, vision: bool = True) -> Iterator[None]:
        """A context in which every quantizer Q computes v + amount·(Q(v) − v): 0 the float model, 1 the quantized one.

        vision: also the quantizers of the vision stack. With `draft_only` only those of the draft.
        With `recompute` the backward pass also has to be inside.
        """
        if not isinstance(amount, Tensor):  # filled on the device: a copy would make the GPU wait
            if not 0 <= amount <= 1:
                raise ValueError(f"amount is {amount}, expected 0 to 1")
            amount = 1.0 if amount == 1 else torch.full((), amount, device=self.device)
        whole = set() if vision or not self.vision else set(self.vision.modules())
        learning = self.draft if self.draft and self.draft_only else self
        parts = [part for part in learning.modules() if isinstance(part, Transformer | BitLinear) and part not in whole]
        try:
            for part in parts:
                part.amount = amount
            yield
        finally:
            for part in parts:
                part.amount = 1.0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context without dropout."""
        training = self.training
        try:
            self.eval()
            yield
        finally:
            self.train(training)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def hidden(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        prefix_B: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, (B, T, D).

        tokens: ids (B, T), or vectors (B, T, D) instead, or, for a vision stack, pixels (B, C, S, S).
        """
        config = self.config
        if config.input != "images" and (n_tokens := tokens_BT.shape[1]) > config.max_context:
            raise ValueError(f"{n_tokens} tokens do not fit the context of {config.max_context}")
        x_BTD = self.entering(tokens_BT, documents_BT, images)
        in_blocks = self.in_blocks and x_BTD.shape[1] > LONGEST and torch.is_grad_enabled()
        kinds = {layer.config for layer in self.blocks}
        at = {kind: places(kind, x_BTD, documents_BT, prefix_B, in_blocks) for kind in kinds}
        text_BT = documents_BT >= 0 if documents_BT is not None and config.n_experts else None
        for layer in self.blocks:
            inputs = x_BTD, *at[layer.config], text_BT
            if self._recompute and torch.is_grad_enabled():
                keep = config.dropout > 0  # the recomputation needs the same dropout mask
                x_BTD = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=keep)
            else:
                x_BTD = layer(*inputs)
        normed_BTD: Tensor = self.states(self.final_norm(x_BTD))
        return normed_BTD

    def entering(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, images: Images | None = None) -> Tensor:
        """Input of the first layer, (B, T, D): scaled embedding rows, patches or given vectors; then positions.

        Vectors of images replace `image_token`, unscaled.
        """
        config = self.config
        if config.input == "images":
            x_BTD = self.patch(patches_of(config, tokens_BT).to(self.patch.weight.dtype))
            if self.class_embedding is not None:
                x_BTD = torch.cat([self.class_embedding.expand(len(x_BTD), 1, -1).to(x_BTD), x_BTD], 1)
        elif tokens_BT.is_floating_point():
            x_BTD = tokens_BT
        elif self.embedding is None:
            raise ValueError("this model takes vectors (B, T, D), no tokens: it has no embedding")
        else:
            rows_BTD = embedding_rows(
                tokens_BT, self.embedding.weight, config.head_format, self.amount, config.weight_scale
            )
            x_BTD = config.embedding_scale * rows_BTD
            if config.image_token:
                seen = looked_at(images, self.vision.features) if self.vision and images is not None else (None, None)
                x_BTD = put_in_place(x_BTD, tokens_BT, config.image_token, *seen)
        if config.position in ("learned", "sinusoidal"):
            n_tokens = x_BTD.shape[1]
            learned = config.position == "learned"
            table = self.position.weight if learned else sinusoids(n_tokens, config.dim).to(x_BTD)
            x_BTD = x_BTD + (table[:n_tokens] if documents_BT is None else table[positions(documents_BT)])
        x_BTD = self.embedding_norm(x_BTD)
        return F.dropout(x_BTD, config.dropout) if self.training and config.dropout else x_BTD

    def features(self, pixels_BCSS: Tensor) -> Tensor:
        """Vectors of images, one per hidden state, (B, N, out_dim): through the projector, if there is one."""
        hidden_BND = self.hidden(pixels_BCSS)
        out: Tensor = self.projector(hidden_BND) if self.projector else hidden_BND
        return out

    def attention_weights(self, tokens_BT: Tensor, prefix_B: Tensor | None = None) -> list[Tensor]:
        """Attention weights of every layer (B, H, T, T); rows sum to 1."""
        try:
            for block in self.blocks:
                block.keep_weights = True
            with torch.no_grad():
                self.hidden(tokens_BT, prefix_B=prefix_B)
            return [cast(Tensor, block.attention_weights) for block in self.blocks]
        finally:
            for block in self.blocks:
                block.keep_weights, block.attention_weights = False, None

    def embed(self, tokens_BT: Tensor, pooling: str = "", documents_BT: Tensor | None = None) -> Tensor:
        """One vector of length 1 for each text, (B, width): for a row of several documents, of the first.

        tokens: for a vision stack, pixels (B, C, S, S). pooling: "last", "mean" or "first"; "": the model's own.
        """
        pooling = pooling or self.config.pooling
        pools = POOLS | ({"attention": self.pool} if self.pool else {})
        if pooling not in pools:
            raise ValueError(f"pooling is {pooling!r}, expected one of {', '.join(pools)}")
        if not tokens_BT.shape[1]:
            raise ValueError("the texts have no tokens, expected at least one in each")
        x_BD = gathered(self.hidden(tokens_BT, documents_BT), pools[pooling], documents_BT)
        return F.normalize(self.projector(x_BD) if self.projector else x_BD, dim=-1)

    def forward(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        prefix_B: Tensor | None = None,
        images: Images | None = None,
        which_n: Tensor | None = None,
        targets_BT: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) for the token after each position; without a head the vectors of texts or images.

        targets: the tokens to predict, negative where ignored; returns Σ cross-entropy in nats instead of logits,
        which are never all in memory, and in training also runs the draft (`drafted`). each: instead the
        log-probability of each target, and 1 where it is the likeliest token, (2, B, T), 0 where ignored. images:
        those at the places of `image_token`; with `which`, the index of the image at each place. For two towers any,
        (n, C, S, S); their vectors come last.
        """
        config = self.config
        images = images if which_n is None else Shared(cast(Tensor, images), which_n)
        if not config.has_head:
            vectors_BD = self.embed(tokens_BT, documents_BT=documents_BT)
            if images is None or not self.vision:
                return vectors_BD
            return torch.cat([vectors_BD, self.vision.embed(one_batch(images)[0])])
        hidden_BTD, head = self.hidden(tokens_BT, documents_BT, prefix_B, images), self.own_head
        if targets_BT is None:
            return head.logits(hidden_BTD)
        if each:
            return log_probabilities(head, hidden_BTD, targets_BT)
        if self.draft is not None and self.training and torch.is_grad_enabled():
            self.drafted = self.unrolled(hidden_BTD, tokens_BT, targets_BT, documents_BT)
            if self.draft_only:
                return self.drafted.loss
        x_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        return summed_cross_entropy(config, x_ND, head.weight, head.bias, targets_N, self.amount, self.portion)

    @property
    def own_head(self) -> Head:
        weight = cast(nn.Linear, self.embedding if self.config.tie_embeddings else self.head).weight
        bias = cast(nn.Linear, self.head).bias if self.config.head_bias else None
        return Head(self.config, weight, bias, self.amount)

    def unrolled(
        self, hidden_BTD: Tensor, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Steps:
        """The draft at every position of a text, given this model's hidden states."""
        config, head = self.config, self.own_head
        assert self.draft is not None and self.embedding is not None
        table = self.embedding.weight.detach()
        rows_BTD = embedding_rows(tokens_BT, table, config.head_format, self.amount, config.weight_scale)
        head = head._replace(weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())
        return unrolled(self.draft, head, hidden_BTD, rows_BTD, targets_BT, documents_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per target that counts."""
        return cast(Tensor, self(tokens_BT, targets_BT=targets_BT)) / (targets_BT >= 0).sum()
