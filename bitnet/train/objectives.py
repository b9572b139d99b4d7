"""What a run learns: the next token, hidden tokens, or which texts belong together. What each needs of model and data.

A sequence of a batch is inputs, targets, and what else the model is told (`Transformer.forward`).
"""

from __future__ import annotations

from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.data import conversations, dataset, masked, pairs, tokenizer
from bitnet.evaluate import contrast, loss
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train.errors import TrainingError

Batches = dataset.Batches | conversations.Batches | pairs.Batches
HeldOut = dataset.Tokens | loss.Overlapping | masked.ViewedTokens | conversations.Dialogues | pairs.Pairs
Result = loss.Result | loss.Hidden | contrast.Contrast

HELD_OUT_SEED = 0  # of hidden tokens and prefixes in evaluations: the same for every run


def check(settings: Settings, config: ModelConfig) -> None:
    """Raises TrainingError: objective, model and options do not go together."""
    objective = settings.objective
    head = f"the model has {'a' if config.has_head else 'no'} head"
    problems = {
        "next": [
            (not config.has_head, head, "add --set has_head=yes, or --objective contrastive"),
            (config.mask == "bidirectional", "mask is bidirectional, so each token sees the one it is to say",
             "add --set mask=causal, or --objective mlm"),
        ],
        "mlm": [
            (not config.has_head, head, "add --set has_head=yes"),
            (config.mask != "bidirectional", f"mask is {config.mask}, so a hidden token sees one side alone",
             "add --set mask=bidirectional"),
        ],
        "contrastive": [
            (config.has_head, head, "add --set has_head=no"),
            (config.pooling == "none", "pooling is none, so a text has no vector", "add --set pooling=mean"),
            (config.mask == "prefix", "mask is prefix", "add --set mask=causal, or bidirectional"),
            (settings.batch < 2, "--batch is 1, so there is no other text to tell from", "raise --batch"),
        ],
    }  # fmt: skip
    problems[objective].append(
        (config.input != "tokens", "input is embeddings, and text has none", "add --set input=tokens")
    )
    plain = objective == "next" and config.mask == "causal"
    problems[objective] += [
        (settings.temperature != Settings().temperature and objective != "contrastive",
         "--temperature is of vectors of texts", "leave it out"),
        (bool(settings.chat) and objective != "next", "--chat is for the next token", "give --data"),
        (settings.distilled and not plain, f"mask is {config.mask}, and only causal models of the next token can be "
         "distilled", "leave --distill and --distill-relations out"),
    ]  # fmt: skip
    for wrong, found, advice in problems[objective]:
        if wrong:
            raise TrainingError(f"--objective {objective}, but {found}; {advice}")


def batches(
    settings: Settings, config: ModelConfig, words: Tokenizer, tokens: dataset.Tokens | pairs.Pairs, context: int
) -> Batches:
    """Those of a run on text."""
    if isinstance(tokens, pairs.Pairs):
        return pairs.Batches(tokens, settings.batch, context, settings.seed)
    view = view_of(settings, config, words, settings.seed)
    if view:
        return masked.ViewedBatches(tokens, settings.batch, context, settings.seed, view)
    return dataset.Batches(tokens, settings.batch, context, settings.seed)


def held_out(
    settings: Settings, config: ModelConfig, words: Tokenizer, tokens: dataset.Tokens | pairs.Pairs, context: int
) -> dataset.Tokens | masked.ViewedTokens | pairs.Pairs:
    """Text to evaluate on."""
    if isinstance(tokens, pairs.Pairs):
        contrast.check(tokens.count(context))
        return tokens
    view = view_of(settings, config, words, HELD_OUT_SEED)
    return masked.ViewedTokens(tokens, view) if view else tokens


def text_of(tokens: HeldOut) -> dataset.Tokens | None:
    """The token ids on disk beneath a view of them; None of conversations."""
    if isinstance(tokens, masked.ViewedTokens | pairs.Pairs):
        return tokens.text
    return tokens if isinstance(tokens, dataset.Tokens) else None


def view_of(settings: Settings, config: ModelConfig, words: Tokenizer, seed: int) -> masked.View | None:
    if settings.objective == "mlm":
        mask = tokenizer.mask_token(words)
        return masked.Masking(mask, mask if mask == words.get_vocab_size() - 1 else words.get_vocab_size(), seed)
    return masked.Prefixing(seed) if config.mask == "prefix" else None


def term(settings: Settings, output: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets that count, in nats. output: logits (B, T, V), or vectors of texts (2n, D)."""
    if settings.objective == "contrastive":
        return contrast.info_nce(output, targets, settings.temperature)
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def evaluate(model: Transformer, text: HeldOut, settings: Settings, context: int, limit: int = 0) -> Result:
    """On held-out text; limit: tokens, 0 for all."""
    if isinstance(text, pairs.Pairs):
        return contrast.evaluate(model, text, context, settings.temperature, settings.batch, limit)
    return loss.evaluate(model, text, context, settings.batch, limit)
