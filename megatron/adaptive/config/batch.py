"""Samples of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["BatchConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch.

    ``rampup_batch_size`` is ``(start, increment, samples)`` or ``None``.
    """

    micro_batch_size: int = flag("Samples of each microbatch.", minimum=1, unit="SAMPLES")
    global_batch_size: int = flag(
        "Samples of each optimizer step over all ranks.",
        minimum=1,
        unit="SAMPLES",
        derived="micro batch size x data parallel size",
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        "Grow the batch from START by INCREMENT up to --global-batch-size over SAMPLES; needs "
        "--train-samples.",
        default=None,
        minimum=1,
        unit="START INCREMENT SAMPLES",
    )

    def batch_sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run in order, one unless it is ramped up."""
        if self.rampup_batch_size is None:
            return (self.global_batch_size,)
        start, increment, _ = self.rampup_batch_size
        return tuple(range(start, self.global_batch_size + 1, increment))
