"""Lists keys of ``config.json`` that several families share, and checks their values.

Each table maps trainer settings to the ``config.json`` keys that may contain their values. If
several of these keys are present, the first is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.errors import ConfigError

Keys = Mapping[str, tuple[str, ...]]
Settings = dict[str, Any]
"""Values of the trainer's settings, keyed by field name."""

SIZES: Keys = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
}
"""Keys that every model must have, keyed by setting."""
COMMON: Keys = {
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rotary_base": ("rope_theta", "rotary_emb_base"),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop"),
    "mtp_num_layers": ("num_nextn_predict_layers",),
}
"""Keys that a model may have, keyed by setting."""
HEADS: Keys = {"kv_channels": ("head_dim",)}
"""Keys that a model without latent attention may have, keyed by setting."""
LATENT: Keys = {
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Keys that a model with latent attention must have, keyed by setting."""
EXPERTS: Keys = {
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Keys that a model with experts (MoE) must have, keyed by setting."""
ROUTER: Keys = {
    "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "moe_router_score_function": ("scoring_func",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
}
"""Keys that a model with experts (MoE) may have, keyed by setting."""
_SHARED = (SIZES, COMMON, HEADS, LATENT, EXPERTS, ROUTER)
READ = frozenset(key for table in _SHARED for keys in table.values() for key in keys)
"""All keys in the tables above."""
SETTINGS = frozenset(setting for table in _SHARED for setting in table).union(
    """
    q_lora_rank group_query_attention num_query_groups add_qkv_bias openai_gelu
    untie_embeddings_and_output_weights parallel_residual moe_layer_freq moe_router_pre_softmax
    moe_router_enable_expert_bias moe_router_group_best window_size window_attn_skip_freq rope_type
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor
    """.split()
) - {"attention_dropout", "hidden_dropout"}
"""Names of the settings that describe a model. A family may determine their values."""
DEFAULTS: Settings = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
"""Values of settings whose keys are absent. These values differ from the trainer's defaults."""
ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the GELU activation that uses an approximation with a hyperbolic tangent."""

# These integer settings have a decimal point in some files, such as 10000.0.
_BASES = ("rotary_base", "window_rotary_base")
_ABOVE_0 = ("softmax_scale",)
_OTHER_WHOLE = frozenset(
    """
    num_key_value_heads q_lora_rank first_k_dense_replace decoder_sparse_step n_shared_experts
    sliding_window sliding_window_pattern _sliding_window_pattern sliding_window_size
    max_window_layers
    """.split()
)
_OF_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
_OF_ROTATION = (*_OF_YARN, "mscale_all_dim", "low_freq_factor", "high_freq_factor")

# Some of these keys do not affect the layers, for example because they configure text generation.
# The others are read by code that does not use the tables.
WITHOUT_EFFECT = frozenset(
    """
    architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range
    pretraining_tp _name_or_path name_or_path gradient_checkpointing output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux ep_size classifier_dropout summary_type
    summary_first_dropout summary_proj_to_labels summary_use_proj summary_activation
    task_specific_params _attn_implementation attn_implementation is_decoder n_ctx qk_head_dim
    id2label label2id max_window_layers original_max_position_embeddings cache_implementation
    model_type reorder_and_upcast_attn classifier_dropout_prob bos_token_id eos_token_id
    pad_token_id sep_token_id unk_token_id decoder_start_token_id rope_scaling rope_parameters
    num_key_value_heads tie_word_embeddings layer_types sliding_window sliding_window_pattern
    use_sliding_window n_shared_experts first_k_dense_replace decoder_sparse_step mlp_only_layers
    topk_method norm_topk_prob embd_pdrop num_nextn_predict_layers head_dim q_lora_rank
    use_parallel_residual rope_theta partial_rotary_factor scoring_func unsloth_version
    text_config output_hidden_states output_attentions return_dict use_bfloat16 torchscript
    _sliding_window_pattern
    is_llama_config unsloth_fixed tokenizer_class max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens chunk_size_feed_forward tf_legacy_loss problem_type finetuning_task prefix
    use_flash_attn use_flash_attention use_flash_attention_2 _flash_attn_2_enabled
    _attn_implementation_autoset _attn_implementation_internal _commit_hash num_labels
    max_sequence_length max_seq_length max_seq_len seq_length model_max_length bos_token eos_token
    pad_token unk_token transformers.js_config onnx_config optimum_version export_model_type neuron
    _pre_quantization_dtype pre_quantization_dtype quantized_by original_torch_dtype base_model
    base_model_name_or_path trust_remote_code use_gradient_checkpointing model_name model_revision
    nemo_version mergekit mergekit_version keys_to_ignore_at_inference license
    """.split()
)


@functools.cache
def _types() -> Mapping[str, type]:
    """Returns the type of each setting (``int``, ``float``, ``str`` or ``bool``), keyed by name."""
    return {name: spec.base for name, spec in flag_specs().items()}


def whole_keys(*tables: Keys) -> frozenset[str]:
    """Returns the keys of ``config.json`` whose values must be integers.

    Args:
        tables: Tables of the model's family. They are used in addition to the tables of this
            module.
    """
    return _OTHER_WHOLE.union(
        key
        for table in (*_SHARED, *tables)
        for setting, keys in table.items()
        if _types()[setting] is int and setting not in _BASES
        for key in keys
    )


def plain_value(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of ``key`` if the value is a number or a string, otherwise ``None``."""
    value = config.get(key)
    return value if isinstance(value, int | float | str) else None


def read_key(
    config: Mapping[str, Any], setting: str, keys: tuple[str, ...], where: str
) -> int | float | str | None:
    """Returns the value of ``setting`` in ``config``, or ``None`` if none of ``keys`` is present.

    Args:
        config: Contents of ``config.json``.
        setting: Name of the setting.
        keys: Keys that may contain the value of the setting.
        where: Path of the file, shown in error messages.

    Raises:
        ConfigError: The value is not a number, would have to be rounded, or is out of range.
    """
    values = (plain_value(config, key) for key in keys)
    value = next((value for value in values if value is not None), None)
    if value is None or _types()[setting] is str:
        return value
    return _checked(value, setting, next(key for key in keys if key in config), where)


def _checked(value: Any, setting: str, key: str, where: str) -> int | float:
    if not is_number(value):
        kind = "a number" if _types()[setting] is float else "an integer"
        raise ConfigError(f"{where}: {key} must be {kind}, got {value!r}")
    number: int | float = value
    if setting in _BASES:
        if number != int(number):
            raise ConfigError(f"{where}: {key} must be an integer, got {value!r}")
        return int(number)
    if setting in _ABOVE_0 and number <= 0:
        raise ConfigError(f"{where}: {key} must be above 0, got {value!r}")
    return number


def count_of(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    """Returns the number of heads or layers from the first of ``keys`` that is present.

    Raises:
        ConfigError: The value is not an integer from 1 to 10,000.
    """
    number = next((config[key] for key in keys if key in config), None)
    if type(number) is not int or not 0 < number <= 10_000:
        raise ConfigError(f"{where}: {keys[0]} must be an integer from 1 to 10,000, got {number!r}")
    return number


def is_number(value: Any) -> bool:
    """Returns whether ``value`` is a finite number. Booleans do not count as numbers."""
    is_any_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_any_number and abs(value) < math.inf


def check_numbers(config: Mapping[str, Any], whole: frozenset[str], where: str) -> None:
    """Checks that the numbers in ``config`` have the correct types.

    Args:
        config: Contents of ``config.json``.
        whole: Keys whose values must be integers.
        where: Path of the file, shown in error messages.

    Raises:
        ConfigError: A value that must be an integer has another type, a value of the rotary
            embedding is not a number, or a scaled rotary embedding has no scaling factor.
    """
    for key in sorted(whole & config.keys()):
        if config[key] is not None and type(config[key]) is not int:
            raise ConfigError(f"{where}: {key} must be an integer, got {config[key]!r}")
    scaling = scaling_of(config)
    for key in _OF_ROTATION:
        value = scaling.get(key)
        is_whole = key != "original_max_position_embeddings" or type(value) is int
        if value is not None and not (is_number(value) and is_whole):
            kind = "a number" if is_whole else "an integer"
            raise ConfigError(
                f"{where}: {key} of the rotary embedding must be {kind}, got {value!r}"
            )
    if kind_of_rotation(config) != "default" and "factor" not in scaling:
        raise ConfigError(
            f"{where}: factor of the rotary embedding is missing, but scaling requires it"
        )


def scaling_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rotary embedding's settings, which are under one of two keys in ``config``."""
    scaling: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling


def kind_of_rotation(config: Mapping[str, Any]) -> str:
    """Returns the type of rotary frequency scaling in ``config``, for example ``yarn``."""
    scaling = scaling_of(config)
    return str(scaling.get("rope_type", scaling.get("type", "default")))
