"""Torch models with random weights for which every part matters, with their checkpoints and packed files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint
from runtime_models import byte_tokenizer


def drawn(config: ModelConfig, checkpoint: Path, std: float = 0.2, words: bool = False) -> Transformer:
    """A seeded model in which no gain is 1 and no bias 0, and its checkpoint. std: of its matrices; 0: the initial
    ones. words: with a byte tokenizer."""
    torch.manual_seed(3)
    model = Transformer(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            if std:
                torch.nn.init.normal_(parameter, std=std)
        elif not name.startswith("similarity"):
            torch.nn.init.uniform_(parameter, *((-0.3, 0.3) if name.endswith("bias") else (0.5, 1.5)))
    checkpoint.mkdir()
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(config.to_json())
    if words:
        (checkpoint / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return model


def made(config: ModelConfig, folder: Path, std: float = 0.2, words: bool = False) -> tuple[Transformer, Path]:
    """Such a model and its packed file, next to the checkpoint."""
    model = drawn(config, folder / "checkpoint", std, words)
    pack_checkpoint(Checkpoint.open(folder / "checkpoint"), folder / "m.bitnet")
    return model, folder / "m.bitnet"
