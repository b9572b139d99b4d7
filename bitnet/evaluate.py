"""Loss of a model on text: nats per token, bits per byte, perplexity."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from bitnet import chat, checkpoint, data, tokenizer
from bitnet.config import ModelConfig
from bitnet.model import Transformer
from bitnet.settings import Settings


@dataclass(frozen=True)
class Result:
    nats_per_token: float
    bits_per_byte: float  # does not depend on the tokenizer
    perplexity: float  # per token
    tokens: int  # predicted


@torch.no_grad()
def evaluate(
    model: Transformer, tokens: data.Tokens | chat.Dialogues, context: int, batch: int = 16, limit: int = 0
) -> Result:
    """Mean loss of text, or of the answers in conversations, over windows of `context` tokens.

    They are evenly spaced when `limit` > 0 tokens are too few for all.

    Always in fp32 and outside autocast: the loss that the engine will have.
    """
    device = model.embedding.weight.device
    n = tokens.windows(context)
    if n < 1:
        raise data.DataError(
            f"the text has {tokens.n_tokens:,} tokens, one window needs {context + 1:,}, or an answer within them"
        )
    wanted = min(n, max(1, limit // context)) if limit else n
    chosen = [i * n // wanted for i in range(wanted)]
    total, counted = 0.0, 0
    for start in range(0, wanted, batch):
        inputs, targets, *documents = (t.to(device) for t in tokens.window(chosen[start : start + batch], context))
        logits = model(inputs, *documents).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum").double().item()
        counted += int((targets != data.IGNORED).sum())
    nats = total / counted
    return Result(nats, nats / math.log(2) / tokens.bytes_per_token, math.exp(min(nats, 700.0)), counted)


def check_vocabulary(tokens: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raises ValueError when token ids would not fit the model."""
    if tokens.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has {tokens.get_vocab_size():,} tokens, the model {config.vocab_size:,}; "
            "they do not belong together"
        )


def command(args: argparse.Namespace) -> int:
    """`bitnet eval`."""
    folder = checkpoint.find(args.checkpoint)
    model = checkpoint.load_model(folder)
    words = tokenizer.load(folder / "tokenizer.json")
    check_vocabulary(words, model.config, str(folder))
    settings = Settings.from_dict(checkpoint.load_state(folder)["settings"])
    generation = checkpoint.load_generation(folder)
    with tempfile.TemporaryDirectory() as scratch:
        tokens: data.Tokens | chat.Dialogues
        if settings.chat and not args.data:
            encoder = chat.Encoder(words, checkpoint.load_template(folder) or chat.CHATML, generation)
            held_out = chat.split(chat.read(data.files_of(settings.chat)), settings.validation)[1]
            tokens = chat.Dialogues(held_out, encoder, words)
        else:
            texts = list(data.documents(data.files_of(args.data or settings.data)))
            if not args.data:
                texts = data.split(texts, settings.validation)[1]
            tokens = data.tokenize(texts, words, Path(scratch), "text", tokenizer.separator(words, generation))
        context = settings.context or model.config.max_context
        result = evaluate(model, tokens, context, settings.batch, args.tokens)
    if args.json:
        print(json.dumps({"checkpoint": str(folder)} | asdict(result)))
    else:
        print(f"{result.nats_per_token:.4f} nats/token  {result.bits_per_byte:.4f} bits/byte  "
              f"perplexity {result.perplexity:.2f}  ({result.tokens:,} tokens, {folder})")  # fmt: skip
    return 0
