"""Random models that see images, with a tokenizer and a chat template; two pictures; what a model makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from runtime_models import byte_tokenizer
from vision_models import CAUSAL, PALIGEMMA

N = 9  # vectors of an image of these models
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
RNG = np.random.default_rng(4)
CAT, DOG = RNG.integers(0, 256, (2, 40, 30, 3), np.uint8)


def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    made.add_special_tokens(["<|image|>"])
    return made


IMAGE = tokenizer().token_to_id("<|image|>")
VOCAB = tokenizer().get_vocab_size()


def packed(
    path: Path, config: ModelConfig, *, template: str = "", generation: Any = None, words: Tokenizer | None = None
) -> Path:
    """A random model with a tokenizer, a template and settings."""
    definition = (words or tokenizer()).to_str().encode()
    random_model(config, path.with_suffix(".plain"))
    plain = PackedFile.open(path.with_suffix(".plain"))

    def same(spec: Spec) -> Encoded:
        record = plain.tensors[spec.key]
        return Encoded(record.encoding, record.scope, plain.stored(record), plain.scales(record))

    metadata = {"generation": generation or {}}
    write_packed(path, plain.configs, same, metadata=metadata, tokenizer=definition, template=template.encode() or None)
    return path


def decoder_file(folder: Path, kind: str, template: str) -> Path:
    """A decoder; kind: "prefix" or "causal", how its prompts are masked."""
    config = {"prefix": PALIGEMMA, "causal": CAUSAL}[kind].replace(vocab_size=VOCAB, image_token=IMAGE)
    return packed(folder / f"{kind}.bitnet", config, template=template, generation={"bos_token_id": 2})


def logits(model: Model, tokens: list[int], images: list[Any]) -> Any:
    """The logits after a prompt, through session calls: -1 takes the next vector."""
    rows = model.encode_image(images).reshape(-1, model.info.dim)
    with model.session() as session:
        if model.mask == "prefix":
            return session.append_prefix(tokens, rows)
        for token in tokens:
            last = session.append_embeddings(rows[:1]) if token == -1 else session.append([token])
            rows = rows[1:] if token == -1 else rows
    return last
