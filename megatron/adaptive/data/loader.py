"""Microbatches whose number and order depend only on how many samples were consumed before.

Samples are taken in dataset order in blocks of ``micro_batch_size * dp_size``; each data-parallel
rank takes its part of every block, as in Megatron-LM. With micro-batch size 2 and two ranks::

    sample        0 1 2 3 | 4 5 6 7 | 8 9 ...
    dp_rank 0     0 1     | 4 5     | 8 9           microbatches 0, 1, 2 of this rank
    dp_rank 1         2 3 |     6 7 |     ...

A step of any global batch size is a whole number of blocks, so after each step every shape of the
job (data-parallel size, micro-batch size, global batch size) continues at the same sample.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from megatron.adaptive.config.data import BatchConfig
from megatron.adaptive.errors import DataError
from megatron.adaptive.schedule.dealing import EQUAL, Size

Microbatch = dict[str, torch.Tensor]
Arrays = dict[str, npt.NDArray[Any]]
OnRead = Callable[[int, int, int], None]
"""Receives which microbatch of its step was read, and from when to when (monotonic clock)."""

Deal = Callable[[Sequence[Size]], Sequence[Sequence[int]]]
"""Returns which microbatches of a step each replica works on, given the sizes of all."""

# What a microbatch may hold and the type it travels in from a data worker. Ids fit 32 bits.
_WIRE_DTYPES: dict[str, Any] = {
    "tokens": np.int32,
    "labels": np.int32,
    "loss_mask": np.float32,
    "position_ids": np.int32,
    "attention_mask": np.bool_,
}
_PREFETCH = 4  # microbatches that each worker reads ahead
_INTEGER = ("tokens", "labels", "position_ids")


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


class MicrobatchLoader:
    """Draws the microbatches of one data-parallel rank, step by step.

    Without workers a microbatch is read when it is asked for; with workers they are read ahead, in
    order and across steps, those that come to this rank in turns. Not thread safe.

    Args:
        dataset: samples as dicts, from :func:`megatron.adaptive.data.datasets.build_datasets`.
        consumed_samples: samples that all ranks together took before, over the whole run.
        micro_batch_size: samples a microbatch.
        dp_rank: this rank's position among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        num_workers: processes that read ahead; 0 reads in this process.
        pin_memory: hand out page-locked tensors, for asynchronous copies to a GPU.
        on_read: called for every microbatch that was read.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._dataset = dataset
        self._first_sample = consumed_samples
        self._micro_batch_size, self._dp_rank = micro_batch_size, dp_rank
        self._dp_size = dp_size
        self._block_size = micro_batch_size * dp_size
        self._num_blocks = max(0, len(dataset) - consumed_samples) // self._block_size
        self._pin_memory = pin_memory
        self._on_read = on_read
        self._next_block = 0
        self._read_ahead: Iterator[Arrays] | None = None
        self._read_block = 0
        if num_workers:
            # Both need no more than what they have; torch names its base classes as types.
            samples: Any = dataset
            order: Any = map(self._samples, range(dp_rank, self._num_blocks * dp_size, dp_size))
            self._read_ahead = iter(
                DataLoader(
                    samples,
                    batch_sampler=order,
                    num_workers=num_workers,
                    prefetch_factor=_PREFETCH,
                    collate_fn=_collate,
                    worker_init_fn=_start_worker,
                    # Mapped files and indices are inherited; a fresh process would read them anew.
                    multiprocessing_context="fork",
                )
            )

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together took, those before this loader included."""
        return self._first_sample + self._next_block * self._block_size

    def step(self, num_microbatches: int, deal: Deal | None = None) -> StepMicrobatches:
        """Take the next ``num_microbatches * micro_batch_size * dp_size`` samples.

        Args:
            num_microbatches: microbatches a rank in this step, on the mean; may change from step
                to step.
            deal: gives each rank its microbatches; in turns where ``None``.

        Returns:
            This rank's part, readable until the next call of :meth:`step`.

        Raises:
            DataError: the dataset ends within the step.
        """
        first, count = self._next_block, num_microbatches * self._dp_size
        require_samples(self._dataset, self.consumed_samples, count * self._micro_batch_size)
        end = self._next_block = first + num_microbatches
        own: Sequence[int] = range(self._dp_rank, count, self._dp_size)
        if deal is not None:
            own = deal([EQUAL] * count)[self._dp_rank]

        def read(index: int) -> Microbatch:
            if self._next_block != end:
                raise RuntimeError("a microbatch of an earlier step was asked for after the next")
            return self._fetch(first * self._dp_size + own[index])

        return StepMicrobatches(read, len(own), pin_memory=self._pin_memory, on_read=self._on_read)

    def close(self) -> None:
        """End the data workers, if any. The loader then reads in this process."""
        self._read_ahead = None

    def _samples(self, number: int) -> range:
        """Return the samples of a microbatch, counted over all ranks since the first."""
        start = self._first_sample + number * self._micro_batch_size
        return range(start, start + self._micro_batch_size)

    def _fetch(self, number: int) -> Microbatch:
        block, rank = divmod(number, self._dp_size)
        if self._read_ahead is None or rank != self._dp_rank or block < self._read_block:
            arrays = _collate([self._dataset[index] for index in self._samples(number)])
        else:
            arrays = self._draw(self._read_ahead, block)
        tensors = {}
        for key, array in arrays.items():
            tensor = torch.from_numpy(array)
            if key in _INTEGER:
                tensor = tensor.to(torch.int64)
            tensors[key] = tensor
        return tensors

    def _draw(self, read_ahead: Iterator[Arrays], block: int) -> Arrays:
        """Draw from the workers up to ``block``; what a step left unread is passed over."""
        try:
            while self._read_block < block:
                next(read_ahead)
                self._read_block += 1
            arrays = next(read_ahead)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a data worker ended unexpectedly (killed, or out of memory); lower --num-workers"
            ) from error
        self._read_block += 1
        return arrays


class StepMicrobatches:
    """The microbatches of one step and rank, in any order and as often as needed.

    Each is read once, those before it along with it, and kept until this object goes. A microbatch
    holds ``tokens``, ``labels``, ``position_ids`` ``[b, s] int64``, ``loss_mask [b, s] float32``
    and, where the dataset makes one, ``attention_mask [b, 1, s, s] bool`` (true where hidden).

    Args:
        read: reads one, given its place in the step.
        count: how many there are.
        pin_memory: hand out page-locked tensors.
        on_read: called for every microbatch that was read.
    """

    def __init__(
        self,
        read: Callable[[int], Microbatch],
        count: int,
        *,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._read, self._count = read, count
        self._pin_memory, self._on_read = pin_memory, on_read
        self._ready: list[Microbatch] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Microbatch:
        if not 0 <= index < len(self):
            raise IndexError(f"microbatch {index} is outside 0..{len(self) - 1}")
        for earlier in range(len(self._ready), index + 1):
            start_ns = time.monotonic_ns()
            made = self._read(earlier)
            if self._pin_memory:
                made = {key: tensor.pin_memory() for key, tensor in made.items()}
            self._ready.append(made)
            if self._on_read is not None:
                self._on_read(earlier, start_ns, time.monotonic_ns())
        return self._ready[index]


def require_samples(dataset: Any, first: int, count: int) -> None:
    """Refuse a step of ``count`` samples from ``first`` on that the dataset does not have.

    Raises:
        DataError: it ends before.
    """
    if first + count > len(dataset):
        raise DataError(
            f"the data ends after {len(dataset)} samples, but this step takes samples "
            f"{first} to {first + count - 1}; build the data for more iterations"
        )


def _collate(samples: list[dict[str, Any]]) -> Arrays:
    # Arrays, not tensors: tensors from a worker would need room in /dev/shm, scarce in containers.
    return {
        key: np.stack([np.asarray(sample[key], dtype=dtype) for sample in samples])
        for key, dtype in _WIRE_DTYPES.items()
        if key in samples[0]
    }


def _start_worker(_worker_id: int) -> None:
    # Signals reach the whole process group. The trainer decides what they mean; a worker that dies
    # of one would keep it from finishing its step. Workers end when the trainer does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
