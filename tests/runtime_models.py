"""Packed files for the tests of the runtime: random ones, and scripted ones whose text is known.

A scripted model is a real file in which every ternary weight is 0, so that the residual stream
is the embedding of the last token, and the head's row of a token is the embedding of the token
before it in the script. The logit of the next token is 45, all others are 0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bitnet.config import ModelConfig
from bitnet.presets import PRESETS
from bitnet_export import random_model
from bitnet_export.packed import encodings, records
from bitnet_export.packed.layout import pack_ternary
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.sessions.steps import Entry, step_batch
from bitnet_runtime.tokenizer.text import byte_level_alphabet

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SMALL = ModelConfig(
    vocab_size=512, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, max_context=256,
)  # fmt: skip


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, records how many tokens each pass of an `Entry` gives."""
    found: list[int] = []

    def counted(entries: Sequence[Entry]) -> None:
        step_batch(entries)
        found.append(len(entries[0].chosen))

    monkeypatch.setattr("bitnet_runtime.answers.writer.step_batch", counted)
    monkeypatch.setattr("bitnet_runtime.answers.writer.MOMENT", 0)
    return found


def append_together(sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """Append a token to each session, in one pass; then each has logits."""
    entries = [Entry(session, [token], most=1) for session, token in zip(sessions, tokens, strict=True)]
    step_batch(entries)
    for entry in entries:
        if entry.error:
            raise entry.error


def byte_tokenizer(pieces: Sequence[bytes] = ()) -> Tokenizer:
    """Byte-level: ids 0-255 are the bytes, then `pieces` (which only models generate), then SPECIAL."""
    alphabet = byte_level_alphabet()
    words = list(alphabet) + ["".join(alphabet[byte] for byte in piece) for piece in pieces]
    tokenizer = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


@functools.cache
def small_model(folder: Path, seed: int = 0, config: ModelConfig = SMALL) -> Path:
    """A random model with a byte tokenizer."""
    path = folder / f"small-{seed}-{config.max_context}.bitnet"
    random_model(config, path, seed, tokenizer=byte_tokenizer().to_str().encode())
    return path


def slow_model(folder: Path) -> Path:
    """A model whose context takes seconds to fill."""
    path = folder / "slow.bitnet"
    random_model(PRESETS["tiny"].replace(max_context=1 << 16), path, tokenizer=byte_tokenizer().to_str().encode())
    return path


def scripted_model(
    path: Path,
    script: Sequence[bytes],
    *,
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    max_context: int = 64,
) -> Path:
    """A model that answers every prompt with `script`, one token each, then the end token.

    A piece of one byte is that byte's token, so it must not end the prompt; pieces are distinct.
    """
    pieces = [piece for piece in script if len(piece) > 1]
    tokenizer = tokenizer or byte_tokenizer(pieces)
    end = tokenizer.token_to_id("<|end|>")
    vocab_size = tokenizer.get_vocab_size()
    tokens = [piece[0] if len(piece) == 1 else 256 + pieces.index(piece) for piece in script]
    config = ModelConfig(
        vocab_size=vocab_size, dim=128, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=64, ffn_dim=64,
        max_context=max_context, sub_norm=False, tie_embeddings=False, head_format="f32",
    )  # fmt: skip
    place = dict.fromkeys(range(vocab_size), 0) | {token: 1 + i for i, token in enumerate(tokens)}
    embedding = np.eye(config.dim)[[place[token] for token in range(vocab_size)]]
    head = np.zeros_like(embedding)
    for before, token in enumerate([*tokens, end]):
        head[token, before] = 4

    def source(spec: records.Spec) -> Encoded:
        name = records.ROLES[spec.key.role]
        if name in config.ternary:
            zeros = pack_ternary(np.zeros((spec.rows, spec.cols), np.int8))
            return Encoded(encodings.TERNARY_2BIT, encodings.SCALE_TENSOR, zeros, np.ones(1, np.float32))
        values = {"embedding": embedding, "head": head, "rope_frequencies": np.ones((1, spec.cols))}
        return Encoded.f32(values.get(name, np.ones((spec.rows, spec.cols))))

    write_packed(
        path,
        [config],
        source,
        metadata={"generation": {"eos_token_ids": [end]} | (generation or {})},
        tokenizer=tokenizer.to_str().encode(),
        template=template.encode() if template is not None else None,
    )
    return path


def replace_decoder(tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> Tokenizer:
    """The same tokenizer with another decoder, given as in its JSON."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"decoder": decoder}))
