"""Finds flags that have no effect on a run, because they belong to a feature that is off.

The table below uses the notation of :mod:`~megatron.adaptive.config.flag_rules`. It omits flags
that ``flag_checks.py`` rejects if their feature is off, flags whose effect depends on the hardware,
and settings that the trainer itself changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from megatron.adaptive.config.flag_rules import GivenFlags
from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.schedule_specs import ScheduleSpec, selectable_names

_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_LOGGERS = (
    "tensorboard_dir/wandb_project/mlflow_experiment/prometheus_address/prometheus_file/logger"
)

_RULES = f"""\
rotary_base rotary_interleaved acts with position_embedding_type=rope/multi_latent_attention
rotary_percent acts with position_embedding_type=rope/rope_type=rope
rotary_seq_len_interpolation_factor use_rope_scaling acts with position_embedding_type=rope
    multi_latent_attention=False
rope_scaling_factor acts with use_rope_scaling
no_rope_freq acts with position_embedding_type=rope
original_max_position_embeddings beta_fast beta_slow mscale acts with rope_type=yarn
reset_position_ids acts with position_embedding_type=learned_absolute
window_attn_skip_freq acts with window_size
softmax_scale acts with multi_latent_attention=False
glu_linear_offset activation_func_clamp_value acts with swiglu/quick_geglu/geglu
cross_entropy_fusion_impl acts with cross_entropy_loss_fusion
mtp_loss_scaling_factor acts with mtp_num_layers
disable_bf16_reduced_precision_matmul acts with bf16
disable_parameter_transpose_cache acts with transformer_impl=transformer_engine
clone_scatter_output_in_embedding acts with sequence_parallel
moe_router_group_best acts with num_moe_experts moe_router_group_topk
moe_router_num_groups acts with moe_router_group_topk/moe_router_topk_limited_devices
moe_router_pre_softmax acts with moe_router_score_function=softmax
moe_router_bias_update_rate acts with moe_router_enable_expert_bias
moe_router_load_balancing_type=seq_aux_loss,global_aux_loss acts with moe_aux_loss_coeff
moe_aux_loss_coeff acts with moe_router_load_balancing_type!=none
moe_shared_expert_gate moe_shared_expert_overlap acts with moe_shared_expert_intermediate_size
moe_token_drop_policy acts with moe_expert_capacity_factor
moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    acts with moe_token_dispatcher_type=flex
moe_deepep_num_sms acts with moe_flex_dispatcher_backend=deepep
moe_hybridep_num_sms acts with moe_flex_dispatcher_backend=hybridep
moe_use_legacy_grouped_gemm acts with moe_grouped_gemm transformer_impl=transformer_engine
use_fused_weighted_squared_relu acts with squared_relu moe_grouped_gemm
    transformer_impl=transformer_engine
moe_per_layer_logging acts with {_LOGGERS}
cp_comm_type acts with context_parallel_size>1 transformer_impl=transformer_engine
align_grad_reduce ddp_bucket_size acts with overlap_grad_reduce
align_param_gather acts with overlap_param_gather {_CHUNKS}>1
pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
    acts with use_distributed_optimizer
overlap_p2p_comm overlap_p2p_comm_warmup_flush acts with pipeline_schedule=megatron {_CHUNKS}>1
initial_loss_scale min_loss_scale loss_scale_window hysteresis acts with fp16 loss_scale=None
min_lr decoupled_min_lr acts with lr_decay_style!=constant
lr_decay_iters lr_decay_samples acts with lr_decay_style!=constant/lr_warmup_fraction
lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples acts with lr_decay_style=WSD
lr_warmup_init acts with lr_warmup_iters/lr_warmup_samples/lr_warmup_fraction
override_opt_param_scheduler use_checkpoint_opt_param_scheduler acts with load
weight_decay acts with weight_decay_incr_style=constant
adam_beta1 adam_beta2 adam_eps decoupled_weight_decay acts with optimizer=adam,muon
sgd_momentum acts with optimizer=sgd
apply_wd_to_qk_layernorm acts with qk_layernorm
tokenizer_model acts with tokenizer_type!=GPT2BPETokenizer,NullTokenizer
vocab_file merge_file acts with tokenizer_type=GPT2BPETokenizer
tiktoken_pattern tiktoken_num_special_tokens acts with tokenizer_type=TikTokenizer
data_cache_path acts with mock_data=False
mmap_bin_files acts with mock_data=False sft=False
valid_data_path test_data_path eval_interval acts with eval_iters>0
save_interval async_save keep_checkpoints no_save_optim no_save_rng ckpt_fully_parallel_save
    acts with save
ckpt_step trust_checkpoint no_load_optim no_load_rng exit_on_missing_checkpoint
    ckpt_fully_parallel_load acts with load
finetune acts with load/load_hf
timing_log_option barrier_with_L1_time acts with timing_log_level
tensorboard_queue_size acts with tensorboard_dir
tensorboard_log_interval log_timers_to_tensorboard log_batch_size_to_tensorboard
    log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_memory_to_tensorboard
    log_world_size_to_tensorboard acts with {_LOGGERS}
log_validation_ppl_to_tensorboard acts with {_LOGGERS} eval_iters>0
wandb_entity wandb_exp_name wandb_save_dir acts with wandb_project
mlflow_run_name mlflow_tracking_uri acts with mlflow_experiment
repartition_interval acts with repartition=auto
repartition_gain acts with repartition=auto/pipeline_schedule=auto
slice_cut acts with sequence_slices
on_hang acts with hang_after_s!=0
trace_interval trace_iterations trace_detail diagnose_interval acts with trace_dir
transport acts with pipeline_model_parallel_size>1
transport_slot_bytes transport_slots transport_crc acts with transport!=gloo,nccl
    pipeline_model_parallel_size>1 pipeline_schedule!=megatron
transport_gpu acts with transport=auto,shm pipeline_model_parallel_size>1
    pipeline_schedule!=megatron
rdma_queue_pairs acts with transport=auto,rdma pipeline_model_parallel_size>1
    pipeline_schedule!=megatron
sample_tokens acts with sample_prompt
manual_gc_interval acts with manual_gc
use_pytorch_profiler acts with profile
profile_step_start profile_step_end profile_ranks
    acts with profile/profile_execution=True/trace_detail=kernels
profile_name acts with profile_execution=True
"""


def effect_rules(schedule: str) -> str:
    """Returns a table, as text, of the conditions under which flags have an effect.

    Args:
        schedule: Value of ``--pipeline-schedule``, which may name a user's schedule.
    """

    def names(matches: Callable[[ScheduleSpec], object]) -> str:
        return ",".join(sorted(selectable_names(matches, also=[schedule])))

    return f"""{_RULES}\
microbatch_group_size_per_vp_stage acts with pipeline_schedule={
        names(lambda spec: spec.takes_group_size)
    } {_CHUNKS}>1
weight_pieces acts with pipeline_schedule={names(lambda spec: spec.is_rule)} split_backward=True
"""


def effect_warning(flags: GivenFlags, schedule: str) -> str | None:
    """Returns a warning that lists all flags without effect, or ``None`` if there are none.

    Args:
        flags: Effective values of the settings.
        schedule: Value of ``--pipeline-schedule``.
    """
    idle = flags.without_effect(effect_rules(schedule))
    if not idle:
        return None
    if len(idle) == 1:
        return f"warning: {idle[0]} has no effect; remove the flag, or set what it needs"
    listed = ", ".join(idle)
    return f"warning: these flags have no effect: {listed}; remove them, or set what they need"


def effect_notes(specs: Mapping[str, FieldSpec]) -> dict[str, str]:
    """Returns sentences for the help texts of flags that take effect only with another flag.

    Args:
        specs: Specifications of all flags, keyed by the name of the setting.

    Returns:
        Sentences, keyed by the name of the setting to whose help text they belong.
    """
    conditions = GivenFlags({}, specs).conditions(effect_rules(ScheduleConfig.pipeline_schedule))
    notes = {}
    for name, flags in conditions.items():
        parts = [f"without {f[3:]}" if f.startswith("no ") else f"with {f}" for f in flags]
        notes[name] = f"Takes effect only {' and '.join(parts)}."
    return notes


def add_note(spec: FieldSpec, notes: Mapping[str, str]) -> FieldSpec:
    """Appends the note for ``spec`` in ``notes``, if any, to its help text, and returns a copy."""
    if spec.dest not in notes:
        return spec
    return dataclasses.replace(spec, detail=f"{spec.detail or spec.help_text} {notes[spec.dest]}")
