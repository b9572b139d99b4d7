"""Trains one model with the Trainer of transformers and prints the results as JSON. versus_trainers.py runs it in an
environment with transformers and torchao; it does not use this project.

The model is the BitNet of transformers, so that all have the same architecture: norms before o and down, gated relu².
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    BitNetQuantConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def inner(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def online(model: Any) -> Any:
    """As for training on the published bf16 weights of BitNet 2B4T, which load with "online" in the configuration."""
    model.config.quantization_config = BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="online")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def torchao_ternary(model: Any) -> Any:
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    quantize_(model, bitnet_training(), filter_fn=inner)
    return model


def torchao_int8(model: Any) -> Any:
    """8-bit weights per row and activations per token."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel")
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"), filter_fn=inner)
    return model


ARMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model, "transformers": online, "torchao-ternary": torchao_ternary,
    "torchao-int8": torchao_int8,
}  # fmt: skip


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids in pieces of one length; a remainder at the end is dropped."""

    def __init__(self, file: str, length: int, step: int) -> None:
        self.ids, self.length, self.step = np.memmap(file, np.uint16, "r"), length, step

    def __len__(self) -> int:
        return (len(self.ids) - self.length) // self.step + 1

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.ids[i * self.step : i * self.step + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Times(TrainerCallback):  # type: ignore[misc]
    """When each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.perf_counter())


@torch.no_grad()
def loss(model: Any, file: str, context: int) -> float:
    """Nats per token of all pieces of a file, in fp32."""
    model.eval()
    total, n = 0.0, 0
    for batch in torch.utils.data.DataLoader(Windows(file, context + 1, context), 16):
        ids = batch["input_ids"]
        logits = model(input_ids=ids[:, :-1]).logits
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
        n += ids[:, 1:].numel()
    return total / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--model", type=json.loads, required=True, help="fields of BitNetConfig")
    parser.add_argument("--train", required=True, help="token ids, 16 bits each")
    parser.add_argument("--validation", required=True, help="the same, to measure on; empty: not measured")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(BitNetConfig(**args.model), dtype=torch.float32)
    model = ARMS[args.arm](model)
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder, use_cpu=True, bf16=True, max_steps=args.steps, per_device_train_batch_size=args.batch,
            learning_rate=args.lr, lr_scheduler_type="cosine", warmup_steps=max(1, args.steps // 50), weight_decay=0.1,
            adam_beta2=0.95, seed=args.seed, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        times = Times()
        pieces = Windows(args.train, args.context + 1, args.context)
        Trainer(model, how, train_dataset=pieces, callbacks=[times]).train()
    linears = [m for name, m in model.named_modules() if inner(m, name)]
    said = {"seconds": np.diff(times.ended).tolist(), "parameters": sum(p.numel() for p in model.parameters())}
    said["linears"] = Counter(f"{type(m).__name__} of {type(m.weight.data).__name__}" for m in linears)
    said |= {"loss": loss(model, args.validation, args.context)} if args.validation else {}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
