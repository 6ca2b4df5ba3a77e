"""Curves of a run in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron.adaptive.training.logging import IterationReport, Speed

__all__ = ["Curves", "perplexity"]

_MAX_EXPONENT = 20.0  # as in Megatron-LM: a perplexity above exp(20) says nothing more


def perplexity(loss: float) -> float:
    # min() passes a NaN on only as its first argument.
    return math.exp(min(loss, _MAX_EXPONENT))


class Curves:
    """Scalars in TensorBoard, under Megatron-LM's names where it has one.

    Speed, bubble and peak memory are ours and always there; ``--log-timers-to-tensorboard``,
    ``--log-memory-to-tensorboard`` and their like add Megatron-LM's.
    """

    def __init__(self, cfg: TrainerConfig) -> None:
        # Slow to import, and only one rank needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._settings = cfg.logging
        self._world_size = cfg.world_size
        folder = cfg.logging.tensorboard_dir
        try:
            self.writer: SummaryWriter = SummaryWriter(
                log_dir=folder, max_queue=cfg.logging.tensorboard_queue_size
            )
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder} cannot be written ({error.strerror}): name a folder "
                "that this user may write"
            ) from None

    def iteration(self, report: IterationReport, speed: Speed) -> None:
        """Add those of an iteration that is logged."""
        settings = self._settings
        step, samples = report.iteration, report.consumed_samples
        against_both: dict[str, float | None] = dict(report.losses)
        if settings.log_learning_rate_to_tensorboard:
            against_both["learning-rate"] = report.learning_rate
        if settings.log_batch_size_to_tensorboard:
            against_both["batch-size"] = report.global_batch_size
        if settings.log_loss_scale_to_tensorboard:
            against_both["loss-scale"] = report.loss_scale
        if settings.log_world_size_to_tensorboard:
            against_both["world-size"] = self._world_size
        against_both["grad-norm"] = report.grad_norm
        against_both["num-zeros"] = report.num_zeros
        against_both["params-norm"] = report.params_norm
        for tag, value in against_both.items():
            self._add(tag, value, step)
            self._add(f"{tag} vs samples", value, samples)
        self._add("tokens-per-s-per-rank", speed.tokens_per_s, step)
        self._add("model-flops-utilization", speed.utilization, step)
        self._add("bubble-fraction", report.bubble_fraction, step)
        self._add("peak-memory-bytes", report.peak_memory_bytes, step)
        if settings.log_timers_to_tensorboard:
            self._add("iteration-time", report.elapsed_s, step)
        if settings.log_throughput and speed.flops_per_s is not None:
            self._add("throughput", speed.flops_per_s / 1e12, step)
        if settings.log_memory_to_tensorboard:
            self._add("mem-allocated-bytes", report.memory_bytes, step)
            self._add("mem-max-allocated-bytes", report.peak_memory_bytes, step)

    def validation(
        self, split: str, losses: Mapping[str, float], iteration: int, samples: int | None
    ) -> None:
        """Add those of a validation or a test, by the name of the split."""
        curves = {f"{name} {split}": loss for name, loss in losses.items()}
        if self._settings.log_validation_ppl_to_tensorboard:
            curves |= {f"{name} {split} ppl": perplexity(loss) for name, loss in losses.items()}
        for tag, value in curves.items():
            self._add(tag, value, iteration)
            if samples is not None:
                self._add(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        """Write what still waits."""
        self.writer.close()

    def _add(self, tag: str, value: float | None, step: int) -> None:
        if value is not None:
            self.writer.add_scalar(tag, value, step)
