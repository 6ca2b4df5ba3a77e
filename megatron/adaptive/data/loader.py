"""Microbatches whose number and order depend only on how many samples were consumed before.

Samples are taken in dataset order in blocks of ``micro_batch_size * dp_size``; each data-parallel
rank takes its part of every block, as in Megatron-LM. With micro-batch size 2 and two ranks::

    sample        0 1 2 3 | 4 5 6 7 | 8 9 ...
    dp_rank 0     0 1     | 4 5     | 8 9           microbatches 0, 1, 2 of this rank
    dp_rank 1         2 3 |     6 7 |     ...

A step of any global batch size is a whole number of blocks, so after each step every shape of the
job (data-parallel size, micro-batch size, global batch size) continues at the same sample.

Where samples differ in length, those of a step are the same; which of them share a microbatch is
decided from their lengths alone. Every rank knows these without reading a token, so that all ranks
of a pipeline agree on number and sizes of the microbatches without a message::

    samples of a step    7 3 9 2 5 4        --pack-to 10, two replicas
    packed               [9] [7 3] [5 4] [2]      one row each, attention within each document
    replica 0            [9]       [5 4]
    replica 1                [7 3]       [2]
"""

from __future__ import annotations

import ctypes
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
from megatron.adaptive.errors import ConfigError, DataError
from megatron.adaptive.schedule.microbatch_assignment import EQUAL, Size

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
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_PREFETCH = 4  # microbatches that each worker reads ahead
_INTEGER = ("tokens", "labels", "position_ids")
_KEYS = (*_INTEGER, "loss_mask")  # of samples of different lengths


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
        config: the batch settings, whose sizes all suit the job (``config.flag_checks``).
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


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Groups samples into microbatches.

    Attributes:
        micro_batch_size: samples of a microbatch where they are padded.
        replicas: data-parallel size.
        varies: whether samples differ in length.
        pack_to: tokens that a microbatch holds at most where they are packed, else ``None``.
        multiple: number that the tokens of a row are a multiple of.
        group: number that the microbatches of a replica are a multiple of.
        least: microbatches that a replica has at least.
    """

    micro_batch_size: int
    replicas: int
    varies: bool = False
    pack_to: int | None = None
    multiple: int = 1
    group: int = 1
    least: int = 1

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns the microbatches of all replicas, each a list of positions in ``lengths``."""
        if self.pack_to is not None:
            unit, least = self.replicas * self.group, self.replicas * self.least
            return first_fit(lengths, self.pack_to, unit, least)
        size = self.micro_batch_size
        return [list(range(n, n + size)) for n in range(0, len(lengths), size)]

    def size_of(self, lengths: Sequence[int]) -> Size:
        """Returns the size of a microbatch of samples of these lengths."""
        if self.pack_to is None:
            lengths = [self.row_tokens(max(lengths))] * len(lengths)
        return float(sum(lengths)), float(sum(length * length for length in lengths))

    def positions(self, lengths: Sequence[int]) -> int:
        """Returns the positions of a microbatch of samples of these lengths, padding included."""
        if self.pack_to is None:
            return len(lengths) * self.row_tokens(max(lengths))
        return self.row_tokens(sum(lengths))

    def row_tokens(self, tokens: int) -> int:
        """Returns the length of a row of so many tokens."""
        return -(-tokens // self.multiple) * self.multiple


def first_fit(lengths: Sequence[int], room: int, unit: int = 1, least: int = 1) -> list[list[int]]:
    """Packs samples into rows: the longest first, each into the first row that has room.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973: first fit decreasing, at
    most 11/9 of the fewest rows and one.

    Args:
        lengths: tokens of each sample.
        room: tokens that a row holds; samples are no longer.
        unit: number that the rows are a multiple of; rows with the most samples are divided.
        least: rows at least, divided likewise.

    Returns:
        Positions in ``lengths``, ascending within a row; rows ascend by their first sample.

    Raises:
        ConfigError: there are fewer samples than rows to fill.
    """
    rows: list[list[int]] = []
    left: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = lengths[sample]
        row = next((n for n, free in enumerate(left) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(sample)
        left[row] -= length
    wanted = -(-max(len(rows), least) // unit) * unit
    if wanted > len(lengths):
        raise ConfigError(
            f"{len(lengths)} samples of a step cannot fill a multiple of {unit} microbatches, "
            f"{wanted} here; use a --global-batch-size of so many at least, a multiple of {unit}"
        )
    while len(rows) < wanted:
        largest = max(rows, key=lambda row: (len(row), sum(lengths[n] for n in row)))
        rows.append(largest[1::2])
        del largest[1::2]
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Holds the sizes of a step's microbatches, over all replicas.

    Attributes:
        tokens: tokens of documents.
        padding: share of the positions that hold none.
        longest: tokens of the longest document.
        mean_length: mean tokens of a document.
        num_microbatches: microbatches.
        least_tokens: tokens of the microbatch with the fewest.
        most_tokens: tokens of the one with the most.
    """

    tokens: int
    padding: float
    longest: int
    mean_length: float
    num_microbatches: int
    least_tokens: int
    most_tokens: int


def length_of(dataset: Any, index: int) -> int:
    """Returns the tokens of a sample of a dataset or of a blend of several."""
    while hasattr(dataset, "dataset_index"):
        part, index = dataset.dataset_index[index], dataset.dataset_sample_index[index]
        dataset = dataset.datasets[part]
    return int(dataset.length_of(index))


class MicrobatchLoader:
    """Draws the microbatches of one data-parallel rank, step by step.

    Without workers a microbatch is read when it is asked for; with workers they are read ahead, in
    order and across steps, those that come to this rank in turns. Not thread safe.

    Args:
        dataset: samples as dicts, from :func:`megatron.adaptive.data.datasets.build_datasets`.
        consumed_samples: samples that all ranks together took before, over the whole run.
        batching: how they become microbatches.
        dp_rank: this rank's position among the data-parallel ranks.
        reads: whether this rank needs the tokens; it always knows the lengths.
        num_workers: processes that read samples of one length ahead; 0 reads in this process.
        pin_memory: hand out page-locked tensors, for asynchronous copies to a GPU.
        on_read: called for every microbatch that was read.

    Attributes:
        consumed_samples: samples that all ranks together took, those before included.
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
        self._dataset, self._batching, self._dp_rank = dataset, batching, dp_rank
        self.consumed_samples = self._first_sample = consumed_samples
        self._reads, self._pin_memory, self._on_read = reads, pin_memory, on_read
        self._read_ahead: Iterator[Arrays] | None = None
        self._read_block = 0
        if num_workers and not batching.varies:
            left, replicas = len(dataset) - consumed_samples, batching.replicas
            blocks = max(0, left) // (batching.micro_batch_size * replicas)
            # torch names a base class as type, and needs no more than what this has.
            order: Any = map(self._samples, range(dp_rank, blocks * replicas, replicas))
            self._read_ahead = iter(
                DataLoader(
                    dataset,
                    batch_sampler=order,
                    num_workers=num_workers,
                    prefetch_factor=_PREFETCH,
                    collate_fn=_collate,
                    worker_init_fn=functools.partial(_start_worker, os.getpid()),
                    # Mapped files and indices are inherited; a fresh process would read them anew.
                    multiprocessing_context="fork",
                )
            )

    def step(self, num_microbatches: int, deal: Deal | None = None) -> StepMicrobatches:
        """Take the next ``num_microbatches * micro_batch_size * replicas`` samples.

        Args:
            num_microbatches: microbatches a rank in this step, on the mean; may change from step
                to step. Packed ones may be fewer.
            deal: gives each rank its microbatches; in turns where ``None``.

        Returns:
            This rank's part, readable until the next call of :meth:`step`.

        Raises:
            DataError: the dataset ends within the step.
        """
        batching, first, dataset = self._batching, self.consumed_samples, self._dataset
        count = num_microbatches * batching.replicas
        end = first + count * batching.micro_batch_size
        if end > len(dataset):
            raise DataError(
                f"the data ends after {len(dataset)} samples, but this step takes samples "
                f"{first} to {end - 1}; build the data for more iterations"
            )
        self.consumed_samples = end
        more: Any = {"pin_memory": self._pin_memory, "on_read": self._on_read}
        if batching.varies:
            lengths = [length_of(dataset, number) for number in range(first, end)]
            read = (lambda number: dataset[first + number]) if self._reads else None
            return LengthMicrobatches(lengths, batching, self._dp_rank, read, deal=deal, **more)
        own: Sequence[int] = range(self._dp_rank, count, batching.replicas)
        if deal is not None:
            own = deal([EQUAL] * count)[self._dp_rank]
        before = (first - self._first_sample) // batching.micro_batch_size

        def fetch(index: int) -> Microbatch:
            if self.consumed_samples != end:
                raise RuntimeError("a microbatch of an earlier step was asked for after the next")
            return self._fetch(before + own[index])

        return StepMicrobatches(fetch, len(own), **more)

    def close(self) -> None:
        """End the data workers, if any. The loader then reads in this process."""
        self._read_ahead = None

    def _samples(self, number: int) -> range:
        """Return the samples of a microbatch, counted over all ranks since the first."""
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


class LengthMicrobatches(StepMicrobatches):
    """The microbatches of one step and rank, of samples of different lengths.

    A microbatch holds ``tokens``, ``labels``, ``position_ids`` ``[b, s] int64`` and ``loss_mask
    [b, s] float32``, and where documents are packed, with ``b`` = 1, ``lengths [n] int32``: those
    of the documents one after the other, padding as a last one. A rank that does not read holds
    ``lengths`` alone, or nothing.

    Attributes:
        contents: by microbatch its positions and the tokens of each of its documents.
        load: what the microbatches of all replicas hold.

    Args:
        lengths: tokens of the step's samples.
        batching: how they become microbatches.
        dp_rank: this rank's replica.
        read: reads a sample of the step, ``None`` on a rank that needs no tokens.
        deal: gives each replica its microbatches; in turns where ``None``.
        pin_memory: hand out page-locked tensors.
        on_read: called for every microbatch that was read.
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
        self._lengths, self._batching, self._sample = lengths, batching, read
        rows = batching.plan(lengths)
        each = [[lengths[sample] for sample in row] for row in rows]
        own: Sequence[int] = range(dp_rank, len(rows), batching.replicas)
        if deal is not None:
            own = deal([batching.size_of(documents) for documents in each])[dp_rank]
        self._own = [rows[number] for number in own]
        tokens = [sum(documents) for documents in each]
        positions = [batching.positions(documents) for documents in each]
        self.contents = tuple((positions[number], *each[number]) for number in own)
        self.load = Load(
            tokens=sum(tokens),
            padding=1.0 - sum(tokens) / sum(positions),
            longest=max(lengths),
            mean_length=sum(tokens) / len(lengths),
            num_microbatches=len(rows),
            least_tokens=min(tokens),
            most_tokens=max(tokens),
        )
        super().__init__(
            lambda index: self._make(self._own[index]),
            len(self._own),
            pin_memory=pin_memory,
            on_read=None if read is None else on_read,
        )

    def _make(self, samples: Sequence[int]) -> Microbatch:
        is_packed, lengths = self._batching.pack_to is not None, self._lengths
        rows = [list(samples)] if is_packed else [[sample] for sample in samples]
        longest = max(sum(lengths[n] for n in row) for row in rows)
        width = self._batching.row_tokens(longest)
        made: Microbatch = {}
        if self._sample is not None:
            arrays: Arrays = {}
            for number, row in enumerate(rows):
                place = 0
                for sample in row:
                    for key, values in self._sample(sample).items():
                        if key not in _KEYS:
                            continue
                        kind = np.float32 if key == "loss_mask" else np.int64
                        array = arrays.setdefault(key, np.zeros((len(rows), width), kind))
                        array[number, place : place + lengths[sample]] = values
                    place += lengths[sample]
            made = {key: torch.from_numpy(array) for key, array in arrays.items()}
        if is_packed:
            documents = [lengths[n] for n in samples] + [width - longest] * (width > longest)
            made["lengths"] = torch.tensor(documents, dtype=torch.int32)
        return made


def _collate(samples: list[dict[str, Any]]) -> Arrays:
    # Arrays, not tensors: tensors from a worker would need room in /dev/shm, scarce in containers.
    return {
        key: np.stack([np.asarray(sample[key], dtype=dtype) for sample in samples])
        for key, dtype in _WIRE_DTYPES.items()
        if key in samples[0]
    }


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    # A worker holds the rank's connections too. If it outlived a killed rank, other ranks would
    # wait for one that is gone.
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != rank_pid:
        os._exit(1)
    # Signals reach the whole process group. The trainer decides what they mean; a worker that dies
    # of one would keep it from finishing its step. Workers end when the trainer does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
