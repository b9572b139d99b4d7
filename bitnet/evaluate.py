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

from bitnet import checkpoint, data, tokenizer
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
def evaluate(model: Transformer, tokens: data.Tokens, context: int, batch: int = 16, limit: int = 0) -> Result:
    """Mean loss over windows of `context` tokens, evenly spaced when `limit` > 0 tokens are too few for all.

    Always in fp32 and outside autocast: the loss that the engine will have.
    """
    device = model.embedding.weight.device
    n = tokens.windows(context)
    if n < 1:
        raise data.DataError(f"the text has {len(tokens.ids):,} tokens, one window needs {context + 1:,}")
    wanted = min(n, max(1, limit // context)) if limit else n
    chosen = [i * n // wanted for i in range(wanted)]
    total = 0.0
    for start in range(0, wanted, batch):
        inputs, targets = tokens.window(chosen[start : start + batch], context)
        logits = model(inputs.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, targets.to(device).flatten(), reduction="sum").double().item()
    nats = total / (wanted * context)
    bytes_per_token = tokens.n_bytes / len(tokens.ids)
    return Result(nats, nats / math.log(2) / bytes_per_token, math.exp(min(nats, 700.0)), wanted * context)


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
    if args.data:
        texts = list(data.documents(data.files_of(args.data)))
    else:
        texts = data.split(data.documents(data.files_of(settings.data)), settings.validation)[1]
    with tempfile.TemporaryDirectory() as scratch:
        tokens = data.tokenize(texts, words, Path(scratch), "text")
        context = settings.context or model.config.max_context
        result = evaluate(model, tokens, context, settings.batch, args.tokens)
    if args.json:
        print(json.dumps({"checkpoint": str(folder)} | asdict(result)))
    else:
        print(f"{result.nats_per_token:.4f} nats/token  {result.bits_per_byte:.4f} bits/byte  "
              f"perplexity {result.perplexity:.2f}  ({result.tokens:,} tokens, {folder})")  # fmt: skip
    return 0
