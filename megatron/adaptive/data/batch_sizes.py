"""Computes the size of each batch: constant, or ramped up with the samples that were trained on.

Pure functions of the consumed samples, so that a resumed run goes on where it stopped.
"""

from __future__ import annotations

from megatron.adaptive.config.data import BatchConfig


class BatchSizes:
    """Batch size and microbatches at every point of a run.

    With ``--rampup-batch-size START INCREMENT SAMPLES`` the ramp-up's samples are cut into as many
    equal parts as there are increments, and each part adds one::

        size  global |                  ____________
                     |            ______
                     |      ______
               START |______
                     +-----------------------------> consumed samples
                     0                 SAMPLES

    Source: ``RampupBatchsizeNumMicroBatchesCalculator`` of megatron-core 0.16, without its global
    state.

    Args:
        config: the batch settings, whose sizes all suit the job (``config.check``).
        data_parallel_size: copies of the model that share each batch.
    """

    def __init__(self, config: BatchConfig, data_parallel_size: int) -> None:
        self._config = config
        self._samples_per_microbatch = config.micro_batch_size * data_parallel_size
        self._sizes = config.batch_sizes()

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples of the step that follows ``consumed_samples`` samples."""
        if self._config.rampup_batch_size is None or len(self._sizes) == 1:
            return self._config.global_batch_size
        ramp_samples = self._config.rampup_batch_size[2]
        if consumed_samples > ramp_samples:
            return self._config.global_batch_size
        # Divided as megatron-core does, rounding included: exact arithmetic takes some increments
        # one batch earlier, and a run moved over from there would not repeat its batches.
        samples_per_increment = ramp_samples / (len(self._sizes) - 1)
        return self._sizes[int(consumed_samples / samples_per_increment)]

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return the microbatches per model copy of the step after ``consumed_samples``."""
        return self.global_batch_size_at(consumed_samples) // self._samples_per_microbatch

    def iterations_for(self, train_samples: int) -> int:
        """Return the iterations of a run; a last batch that would not be full is left out.

        Unlike Megatron-LM, which assumes that the run outlasts the ramp-up, this also holds for
        runs that end within it.

        Args:
            train_samples: samples of the whole run.
        """
        iterations = consumed = 0
        while self.global_batch_size_at(consumed) < self._config.global_batch_size:
            size = self.global_batch_size_at(consumed)
            if consumed + size > train_samples:
                return iterations
            consumed += size
            iterations += 1
        return iterations + max(train_samples - consumed, 0) // self._config.global_batch_size
