"""Provides microbatches. Their content depends only on the number of samples consumed so far.

Samples are read in the order of the dataset, in blocks of ``micro_batch_size * dp_size``. Each
data-parallel rank gets its part of every block, as in Megatron-LM. With micro-batch size 2 and two
data-parallel ranks::

    sample        0 1 2 3 | 4 5 6 7 | 8 9 ...
    dp_rank 0     0 1     | 4 5     | 8 9           microbatches 0, 1, 2 of this rank
    dp_rank 1         2 3 |     6 7 |     ...

A step always consists of complete blocks. A job that resumes with a different data-parallel size,
micro-batch size or global batch size therefore continues at exactly the next sample.

If samples differ in length, a step uses the same samples, but their lengths determine which of them
share a microbatch. Every rank knows all lengths without reading tokens, so all ranks of a pipeline
agree on the number and sizes of the microbatches without exchanging messages::

    samples of a step    7 3 9 2 5 4        --pack-to 10, two replicas
    packed               [9] [7 3] [5 4] [2]      one row each, attention within each document
    replica 0            [9]       [5 4]
    replica 1                [7 3]       [2]

With ``--slice-tokens`` T, a packed row is divided into slices of T tokens. A row has only as many
slices as its longest sample needs, so most rows consist of one slice. If all rows of a step must
have the same number of slices, this number depends on the longest sample of the step. The number
may be up to a quarter larger than that sample needs, if a larger number reduces padding.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from megatron.adaptive.config.data import BatchConfig
from megatron.adaptive.config.parent_process import end_with_parent
from megatron.adaptive.errors import DataError
from megatron.adaptive.schedule.document_rows import Batching
from megatron.adaptive.schedule.microbatch_assignment import EQUAL, Size

Microbatch = dict[str, torch.Tensor]
Arrays = dict[str, npt.NDArray[Any]]
OnRead = Callable[[int, int, int], None]
"""Callback after each read of a microbatch. Its arguments are the microbatch's index in the step,
and the start and end time of the read, in nanoseconds on the monotonic clock."""

Deal = Callable[[Sequence[Size]], Sequence[Sequence[int]]]
"""Function that distributes a step's microbatches over data-parallel replicas. Given the sizes of
the microbatches, it returns the indices of each replica's microbatches."""

# Data workers send microbatches in these types. Token ids of 32 instead of 64 bits halve the size.
_WIRE_DTYPES: dict[str, Any] = {
    "tokens": np.int32,
    "labels": np.int32,
    "loss_mask": np.float32,
    "position_ids": np.int32,
    "attention_mask": np.bool_,
}
_PREFETCH = 4  # Number of microbatches that each worker prefetches.
_INTEGER = ("tokens", "labels", "position_ids")
_KEYS = (*_INTEGER, "loss_mask")
"""Entries of each sample that are used if samples differ in length."""


class BatchSizes:
    """Computes the global batch size and the number of microbatches for any step of a run.

    With ``--rampup-batch-size START INCREMENT SAMPLES``, the batch size begins at START and grows
    by INCREMENT at regular intervals until SAMPLES samples have been consumed::

        size  global |                  ____________
                     |            ______
                     |      ______
               START |______
                     +-----------------------------> consumed samples
                     0                 SAMPLES

    This class corresponds to ``RampupBatchsizeNumMicroBatchesCalculator`` of megatron-core 0.16,
    but has no global state.

    Args:
        config: Batch settings that ``config.flag_checks`` has already checked.
        data_parallel_size: Number of data-parallel replicas that share each global batch.
    """

    def __init__(self, config: BatchConfig, data_parallel_size: int) -> None:
        self._config = config
        self._samples_per_microbatch = config.micro_batch_size * data_parallel_size
        self._sizes = config.batch_sizes()

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Returns the global batch size of the next step after ``consumed_samples`` samples."""
        if self._config.rampup_batch_size is None or len(self._sizes) == 1:
            return self._config.global_batch_size
        ramp_samples = self._config.rampup_batch_size[2]
        if consumed_samples > ramp_samples:
            return self._config.global_batch_size
        # Use floating-point division, which rounds as in megatron-core. With exact arithmetic, the
        # batch would sometimes grow one step earlier, and a run that was started with Megatron-LM
        # would get different batches here.
        samples_per_increment = ramp_samples / (len(self._sizes) - 1)
        return self._sizes[int(consumed_samples / samples_per_increment)]

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Returns the number of microbatches per replica in the step after ``consumed_samples``."""
        return self.global_batch_size_at(consumed_samples) // self._samples_per_microbatch

    def iterations_for(self, train_samples: int) -> int:
        """Returns the number of iterations of a run, not counting an incomplete last batch.

        Unlike Megatron-LM, this method also supports runs that end before the batch size reaches
        its final value.

        Args:
            train_samples: Number of training samples of the whole run.
        """
        iterations = consumed = 0
        while self.global_batch_size_at(consumed) < self._config.global_batch_size:
            size = self.global_batch_size_at(consumed)
            if consumed + size > train_samples:
                return iterations
            consumed += size
            iterations += 1
        return iterations + max(train_samples - consumed, 0) // self._config.global_batch_size


@dataclass(frozen=True, kw_only=True)
class Load:
    """Statistics on the microbatches of a step, over all data-parallel replicas.

    Attributes:
        tokens: Total number of tokens in the step, without padding.
        padding: Padding as a fraction of all token positions, 0 to 1.
        longest: Number of tokens in the longest document.
        mean_length: Mean number of tokens per document.
        num_microbatches: Number of microbatches in the step.
        least_tokens: Number of tokens in the smallest microbatch.
        most_tokens: Number of tokens in the largest microbatch.
        lengths: Number of tokens of each document.
    """

    tokens: int
    padding: float
    longest: int
    mean_length: float
    num_microbatches: int
    least_tokens: int
    most_tokens: int
    lengths: tuple[int, ...] = ()


def length_of(dataset: Any, index: int) -> int:
    """Returns the number of tokens of the sample ``index``. ``dataset`` may be a blend."""
    while hasattr(dataset, "dataset_index"):
        part = dataset.dataset_index[index]
        index = dataset.dataset_sample_index[index]
        dataset = dataset.datasets[part]
    return int(dataset.length_of(index))


class MicrobatchLoader:
    """Provides the microbatches of one data-parallel rank, step by step.

    Without workers, a microbatch is read when it is requested. With workers, this rank's part of
    each block is prefetched in order, even beyond the current step. The loader is not thread-safe.

    Args:
        dataset: Samples as dicts, from :func:`megatron.adaptive.data.datasets.build_datasets`.
        consumed_samples: Number of samples that all ranks together have consumed so far in the run.
        batching: Object that determines which samples share a microbatch.
        dp_rank: Index of this rank among the data-parallel ranks.
        reads: Whether this rank needs the tokens. A rank that does not need them uses only the
            lengths of the samples.
        num_workers: Number of processes that prefetch, or 0 to read in this process. Samples of
            different lengths are always read in this process.
        pin_memory: Whether tensors are page-locked, for asynchronous copies to a GPU.
        on_read: Callback after each read of a microbatch.

    Attributes:
        consumed_samples: Number of samples that all ranks together have consumed in the whole run.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        consumed_samples: int,
        batching: Batching,
        dp_rank: int,
        reads: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._dataset = dataset
        self._batching = batching
        self._dp_rank = dp_rank
        self.consumed_samples = self._first_sample = consumed_samples
        self._reads = reads
        self._pin_memory = pin_memory
        self._on_read = on_read
        self._read_ahead: Iterator[Arrays] | None = None
        self._read_block = 0
        if num_workers and not batching.varies:
            left = len(dataset) - consumed_samples
            replicas = batching.replicas
            blocks = max(0, left) // (batching.micro_batch_size * replicas)
            # torch declares batch_sampler as a Sampler, but accepts any iterable of lists.
            order: Any = map(self._samples, range(dp_rank, blocks * replicas, replicas))
            self._read_ahead = iter(
                DataLoader(
                    dataset,
                    batch_sampler=order,
                    num_workers=num_workers,
                    prefetch_factor=_PREFETCH,
                    collate_fn=_collate,
                    worker_init_fn=functools.partial(_start_worker, os.getpid()),
                    # A forked worker inherits mapped files and indices, which a spawned worker
                    # would have to read again.
                    multiprocessing_context="fork",
                )
            )

    def step(self, num_microbatches: int, deal: Deal | None = None) -> StepMicrobatches:
        """Returns this rank's microbatches of the next step.

        The step consumes ``num_microbatches * micro_batch_size * replicas`` samples.

        Args:
            num_microbatches: Mean number of microbatches per data-parallel rank in this step,
                before packing. It may differ between steps.
            deal: Function that distributes microbatches over data-parallel ranks, or ``None`` for
                round-robin.

        Returns:
            Microbatches of this rank. They can be read until this method is called again.

        Raises:
            DataError: If the dataset ends within the step.
        """
        batching = self._batching
        first = self.consumed_samples
        dataset = self._dataset
        count = num_microbatches * batching.replicas
        end = first + count * batching.micro_batch_size
        if end > len(dataset):
            raise DataError(
                f"the data ends after {len(dataset)} samples, but this step needs samples "
                f"{first} to {end - 1}; build the datasets for more iterations"
            )
        self.consumed_samples = end
        options: Any = {"pin_memory": self._pin_memory, "on_read": self._on_read}
        if batching.varies:
            lengths = [length_of(dataset, number) for number in range(first, end)]
            read = (lambda number: dataset[first + number]) if self._reads else None
            return LengthMicrobatches(lengths, batching, self._dp_rank, read, deal=deal, **options)
        numbers: Sequence[int] = range(self._dp_rank, count, batching.replicas)
        if deal is not None:
            numbers = deal([EQUAL] * count)[self._dp_rank]
        before = (first - self._first_sample) // batching.micro_batch_size

        def fetch(index: int) -> Microbatch:
            if self.consumed_samples != end:
                raise RuntimeError("a microbatch of an earlier step was requested in a later step")
            return self._fetch(before + numbers[index])

        return StepMicrobatches(fetch, len(numbers), **options)

    def close(self) -> None:
        """Stops the data workers, if there are any. Later reads run in this process."""
        self._read_ahead = None

    def _samples(self, number: int) -> range:
        """Returns the indices of the samples in microbatch ``number``.

        Args:
            number: Index of the microbatch among the microbatches of all ranks. Microbatch 0 begins
                with this loader's first sample.
        """
        size = self._batching.micro_batch_size
        start = self._first_sample + number * size
        return range(start, start + size)

    def _fetch(self, number: int) -> Microbatch:
        block, rank = divmod(number, self._batching.replicas)
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
        """Advances the iterator ``read_ahead`` to ``block``, and returns the block's microbatch.

        The iterator yields this rank's microbatch of each block, in order. A block contains one
        microbatch per data-parallel rank.
        """
        try:
            while self._read_block < block:
                next(read_ahead)
                self._read_block += 1
            arrays = next(read_ahead)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a data worker exited unexpectedly (killed, or out of memory); lower --num-workers"
            ) from error
        self._read_block += 1
        return arrays


class StepMicrobatches:
    """Provides the microbatches of one step and rank. A microbatch can be requested several times.

    A request reads the requested microbatch and all earlier microbatches that have not been read
    yet. Each microbatch is read once and kept. It is a dict with ``tokens``, ``labels``,
    ``position_ids`` ``[b, s] int64``, ``loss_mask [b, s] float32`` and, if the dataset provides it,
    ``attention_mask [b, 1, s, s] bool`` (true for masked tokens).

    Args:
        read: Function that reads a microbatch, given its index in the step.
        count: Number of microbatches of this rank in the step.
        pin_memory: Whether tensors are page-locked, for asynchronous copies to a GPU.
        on_read: Callback after each read of a microbatch.
    """

    def __init__(
        self,
        read: Callable[[int], Microbatch],
        count: int,
        *,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._read = read
        self._count = count
        self._pin_memory = pin_memory
        self._on_read = on_read
        self._ready: list[Microbatch] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Microbatch:
        if not 0 <= index < len(self):
            raise IndexError(f"microbatch {index} is outside 0..{len(self) - 1}")
        for earlier in range(len(self._ready), index + 1):
            start_ns = time.monotonic_ns()
            microbatch = self._read(earlier)
            if self._pin_memory:
                microbatch = {key: tensor.pin_memory() for key, tensor in microbatch.items()}
            self._ready.append(microbatch)
            if self._on_read is not None:
                self._on_read(earlier, start_ns, time.monotonic_ns())
        return self._ready[index]


class LengthMicrobatches(StepMicrobatches):
    """Provides the microbatches of one step and rank, from samples of different lengths.

    A microbatch is a dict with ``tokens``, ``labels``, ``position_ids`` ``[b, s] int64`` and
    ``loss_mask [b, s] float32``. If documents are packed, ``b`` is 1, and ``lengths [n] int32``
    contains the length of each document in the row and, if there is padding, the length of the
    padding. On a rank that does not read tokens, a microbatch contains only ``lengths``, or
    nothing.

    Attributes:
        sizes: Number of token positions of each microbatch, including padding.
        contents: One tuple per microbatch: the number of token positions including padding, then
            the number of tokens of each document.
        load: Statistics on the microbatches of all data-parallel replicas.

    Args:
        lengths: Number of tokens of each sample in the step.
        batching: Settings that determine which samples share a microbatch in any step.
        dp_rank: Index of this rank's data-parallel replica.
        read: Function that reads a sample, given its index in the step, or ``None`` on a rank that
            does not need tokens.
        deal: Function that distributes microbatches over replicas, or ``None`` for round-robin.
        pin_memory: Whether tensors are page-locked, for asynchronous copies to a GPU.
        on_read: Callback after each read of a microbatch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batching: Batching,
        dp_rank: int,
        read: Callable[[int], dict[str, Any]] | None,
        *,
        deal: Deal | None = None,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._lengths = lengths
        self._batching = batching = batching.for_step(lengths)
        self._sample = read
        rows = batching.plan(lengths)
        by_row = [[lengths[sample] for sample in row] for row in rows]
        numbers: Sequence[int] = range(dp_rank, len(rows), batching.replicas)
        if deal is not None:
            numbers = deal([batching.size_of(documents) for documents in by_row])[dp_rank]
        self._rows = [rows[number] for number in numbers]
        tokens = [sum(documents) for documents in by_row]
        positions = [batching.positions(documents) for documents in by_row]
        self.sizes = tuple(positions[number] for number in numbers)
        self.contents = tuple((positions[number], *by_row[number]) for number in numbers)
        self.load = Load(
            tokens=sum(tokens),
            padding=1.0 - sum(tokens) / sum(positions),
            longest=max(lengths),
            mean_length=sum(tokens) / len(lengths),
            num_microbatches=len(rows),
            least_tokens=min(tokens),
            most_tokens=max(tokens),
            lengths=tuple(lengths),
        )
        super().__init__(
            lambda index: self._make(self._rows[index]),
            len(self._rows),
            pin_memory=pin_memory,
            on_read=None if read is None else on_read,
        )

    def _make(self, samples: Sequence[int]) -> Microbatch:
        is_packed = self._batching.pack_to is not None
        lengths = self._lengths
        rows = [list(samples)] if is_packed else [[sample] for sample in samples]
        longest = max(sum(lengths[n] for n in row) for row in rows)
        width = self._batching.row_tokens(longest)
        microbatch: Microbatch = {}
        if self._sample is not None:
            arrays: Arrays = {}
            for number, row in enumerate(rows):
                start = 0
                for sample in row:
                    for key, values in self._sample(sample).items():
                        if key not in _KEYS:
                            continue
                        kind = np.float32 if key == "loss_mask" else np.int64
                        array = arrays.setdefault(key, np.zeros((len(rows), width), kind))
                        array[number, start : start + lengths[sample]] = values
                    start += lengths[sample]
            microbatch = {key: torch.from_numpy(array) for key, array in arrays.items()}
        if is_packed:
            documents = [lengths[n] for n in samples] + [width - longest] * (width > longest)
            microbatch["lengths"] = torch.tensor(documents, dtype=torch.int32)
        return microbatch


def _collate(samples: list[dict[str, Any]]) -> Arrays:
    # Return arrays instead of tensors, which workers would send through /dev/shm. In containers,
    # /dev/shm is often small.
    return {
        key: np.stack([np.asarray(sample[key], dtype=dtype) for sample in samples])
        for key, dtype in _WIRE_DTYPES.items()
        if key in samples[0]
    }


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    # Make this worker exit together with its rank. A worker inherits the rank's connections. If it
    # outlived a killed rank, these connections would stay open, and other ranks would keep waiting
    # for the killed rank.
    end_with_parent()
    if os.getppid() != rank_pid:
        os._exit(1)
    # Ignore signals that are sent to the whole process group, because the trainer handles them. If
    # a worker exited, the trainer could not finish its step. Workers exit when the trainer exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
