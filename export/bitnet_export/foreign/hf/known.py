"""Fields of config.json that are known, and those that are refused because they would change the computation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bitnet_export.foreign.source import SourceError, ignored

from .fields import Fields

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0), "attn_logit_softcapping": (), "use_bidirectional_attention": (False,),
    "num_experts": (0,), "num_local_experts": (0, 1), "n_routed_experts": (0,), "add_cross_attention": (False,),
    "scale_emb": (1, 1.0), "scale_depth": (), "dim_model_base": (), "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0), "attention_multiplier": (), "logits_scaling": (1, 1.0), "logit_scale": (1, 1.0),
    "clip_qkv": (), "no_rope_layers": (), "parallel_attn": (False,), "vision_config": (), "text_config": (),
    "weight_bits": (1,), "input_bits": (8,), "use_qk_norm": (False,), "is_encoder_decoder": (False,),
    "decoder_sparse_step": (1,), "mlp_only_layers": ([],), "position_embedding_type": ("absolute",),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "embedding_size": (),
    "shared_expert_intermediate_size": (0,), "rope_interleaved": (False,),
}  # fmt: skip
"""Fields that change the computation in unsupported ways, and their neutral values."""

_MAPPED = {
    "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_local_base_freq", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
    "sliding_window_pattern", "quantization_config", "original_max_position_embeddings", "bos_token_id",
    "eos_token_id", "type_vocab_size", "is_causal",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "pad_token_id", "attention_dropout", "pretraining_tp", "id2label", "label2id", "return_dict", "output_attentions",
    "output_hidden_states", "chunk_size_feed_forward", "problem_type", "_name_or_path",
    "_attn_implementation_autoset", "cache_implementation", "is_decoder", "unsloth_version", "name_or_path",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "tokenizer_class", "task_specific_params", "attn_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "n_ctx", "reorder_and_upcast_attn",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "qa_dropout", "seq_classif_dropout", "tie_weights_",
    "is_bitnet_config",  # of onebitllms, beside a quantization_config
    # of vision models
    "initializer_factor", "logit_scale_init_value", "num_image_tokens", "projector_hidden_act", "projection_dim",
    "ignore_index", "encoder_stride", "pooler_act", "pooler_output_size", "image_size", "patch_size", "num_channels",
    # written by older programs into every object, for `generate`
    "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "tf_legacy_loss", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
    # of a Thinker, for its training
    "dropout", "lr", "wd", "warmup_steps", "max_steps", "batch_size", "max_grad_norm", "val_split", "seed", "data_path",
    "save_dir", "save_every", "val_freq", "checkpoint_freq", "print_freq", "num_workers", "gradient_accumulation_steps",
    "use_amp", "use_flash", "use_compile", "tokenizer_path", "shuffle_buffer_size", "max_epochs", "num_epochs",
}  # fmt: skip


def refuse(config: Fields, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Raises SourceError for a field that is not supported; returns a line for each unknown one.

    read: fields that have a meaning in this family. neutral: neutral values of its own fields.
    """
    neutral = {name: values for name, values in _NEUTRAL.items() if name not in read} | dict(neutral)
    for name, values in neutral.items():
        if name in config and config[name] not in values:
            found = f"{config.name(name)} = {config[name]!r:.80}"
            raise SourceError(f"{config.what}: {found} changes the computation and is not supported")
    known = {*neutral, *read, *_MAPPED, *_WITHOUT_EFFECT}
    unknown = [name for name in sorted(config.keys() - known) if name[:1] != "_" and config[name] is not False]
    said = "config.json has {}, which is not known here and was ignored"
    lines = [said.format(f"{name:.80} = {config[name]!r:.40}") for name in unknown]
    return ignored(lines, "config.json has {} more fields that are not known here and was ignored")
