"""Names that options have in other trainers, and what an error says of these and of names in the wrong place."""

from __future__ import annotations

import dataclasses

from bitnet.config import WITHIN, ModelConfig
from bitnet.settings_rules import flag_of

OWN = frozenset(f.name for f in dataclasses.fields(ModelConfig)) - set(WITHIN)
"""The options of the model."""

ELSEWHERE = {  # transformers and TRL, then nanoGPT, then others
    "lr": "learning_rate",
    "steps": "max_steps max_iters",
    "tokens": "num_train_epochs num_epochs epochs",
    "batch": "per_device_train_batch_size batch_size micro_batch_size",
    "accumulate": "gradient_accumulation_steps",
    "context": "max_length max_seq_length block_size sequence_length seq_len",
    "warmup": "warmup_steps warmup_ratio warmup_iters",
    "schedule": "lr_scheduler_type",
    "optimizer": "optim",
    "clip": "max_grad_norm grad_clip",
    "beta": "dpo_beta",
    "recompute": "gradient_checkpointing",
    "precision": "bf16 fp16 dtype torch_dtype",
    "compile": "torch_compile",
    "lora": "lora_r lora_rank",
    "lora_linears": "lora_target_modules target_modules",
    "data": "dataset dataset_name train_file",
    "column": "dataset_text_field",
    "out": "output_dir out_dir",
    "eval_every": "eval_steps eval_interval",
    "save_every": "save_steps save_interval",
    "keep": "save_total_limit",
    "patience": "early_stopping_patience",
    "dim": "hidden_size n_embd d_model",
    "n_layers": "num_hidden_layers n_layer num_layers",
    "n_heads": "num_attention_heads n_head num_heads",
    "n_kv_heads": "num_key_value_heads n_kv_head",
    "ffn_dim": "intermediate_size d_ff",
    "max_context": "max_position_embeddings n_ctx",
}
"""Options, and the names of each in other trainers."""

UNITS = {
    "tokens": "those of the text, times the passes over it",
    "warmup": "a share of the run, or tokens",
}
"""What the number means here, where it means something else there."""


def placed(name: str) -> str:
    """The end of an error about an option that has another name here, or was given as one of training and is of the
    model; "" for any other name."""
    ours = next((here for here, others in ELSEWHERE.items() if name in others.split()), name)
    known = [f"{ours if ours in OWN else flag_of(ours)} here"] if ours != name else []
    known += [f"of the model: --set {ours}=VALUE, or [model] in a file"] if ours in OWN else []
    unit = f": {UNITS[ours]}" if ours != name and ours in UNITS else ""
    return f", which is {', '.join(known)}{unit}" if known else ""
