"""megatron-core's optimizer and learning-rate schedule from the run's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.adaptive.config.trainer import TrainerConfig


def build_optimizer(config: TrainerConfig, chunks: Sequence[torch.nn.Module]) -> Any:
    """Return megatron-core's optimizer over the parameters of ``chunks``."""
    settings, precision = config.optimizer, config.precision
    core = OptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        decoupled_lr=settings.decoupled_lr,
        decoupled_min_lr=settings.decoupled_min_lr,
        weight_decay=settings.weight_decay,
        fp16=precision.fp16,
        bf16=precision.bf16,
        params_dtype=getattr(torch, precision.dtype_name),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        sgd_momentum=settings.sgd_momentum,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        clip_grad=settings.clip_grad,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
    )
    # No weight decay on biases and norms, and a learning rate of its own for the embedding.
    return get_megatron_optimizer(core, list(chunks), get_standard_config_overrides(core))


def build_scheduler(config: TrainerConfig, optimizer: Any, train_samples: int) -> Any:
    """Return megatron-core's schedule of learning rate and weight decay, counted in samples.

    Args:
        config: the run's settings.
        optimizer: what it steers.
        train_samples: samples of the whole run.
    """
    settings = config.optimizer
    batch = config.batch.global_batch_size

    def samples(iterations: int | None, given: int | None, default: int) -> int:
        if given is not None:
            return given
        return default if iterations is None else iterations * batch

    decay = samples(settings.lr_decay_iters, settings.lr_decay_samples, train_samples)
    if settings.lr_warmup_fraction is not None:
        warmup = int(settings.lr_warmup_fraction * decay)
    else:
        warmup = settings.lr_warmup_samples or settings.lr_warmup_iters * batch
    start_decay = settings.start_weight_decay
    end_decay = settings.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay if start_decay is None else start_decay,
        end_wd=settings.weight_decay if end_decay is None else end_decay,
        wd_incr_steps=train_samples,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=samples(settings.lr_wsd_decay_iters, settings.lr_wsd_decay_samples, 0),
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
