"""Samples of different lengths: whole documents, packed or padded into microbatches.

A sample is one document, cut at ``--seq-length`` and never glued to another. The samples of a step
are the next of the dataset, as for equal lengths; what is decided here is which of them share a
microbatch, from their lengths alone. Every rank knows these without reading a token, so that all
ranks of a pipeline agree on number and sizes of the microbatches without a message::

    samples of a step    7 3 9 2 5 4        --pack-to 10, two replicas
    packed               [9] [7 3] [5 4] [2]      one row each, attention within each document
    replica 0            [9]       [5 4]
    replica 1                [7 3]       [2]

Imports megatron-core at its top: on a machine without CUDA import this module only after the
accelerator substitutions are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron.adaptive.config.outside import parse_json
from megatron.adaptive.data.loader import (
    Deal,
    Microbatch,
    OnRead,
    StepMicrobatches,
    require_samples,
)
from megatron.adaptive.data.tokenizer import TAUGHT_ROLE, Tokenizer
from megatron.adaptive.errors import ConfigError, DataError
from megatron.adaptive.schedule.dealing import Size

_ROLES = ("system", "user", "assistant")
_MOCK_DOCUMENTS = 100_000
_MOCK_SIGMA = 0.8  # of the logarithm of a length, as in corpora of the web
_MOCK_MEDIAN = 0.25  # of --seq-length
_MOST_ORDERS = 2  # of passes over the data that are kept


class DocumentDataset(MegatronDataset):  # type: ignore[misc]
    """Samples that are documents, in an order shuffled anew for each pass over the data.

    Attributes:
        num_cut: documents longer than a sample, whose rest is left out.
        num_empty: documents without a token to predict, which are left out.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # The last token of a document is only predicted.
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices].astype(np.int64) - 1
        is_used, longest = lengths > 0, self.config.sequence_length
        self.num_empty = int((~is_used).sum())
        self.num_cut = int((lengths > longest).sum())
        self._documents = self.indices[is_used]
        self._lengths = np.minimum(lengths[is_used], longest)
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        if not self._documents.size:
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} split has no document of two "
                "tokens or more; change --split or the data"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the documents of a file, by which it is split."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
        """Opens a token file, or JSON lines of conversations with ``--sft``; or makes data up."""
        if dataset_path is None:
            return _MadeUp(config.tokenizer, config.sequence_length)
        if config.sft:
            return config.prepare(dataset_path)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self._documents.size if self.num_samples is None else int(self.num_samples)

    def length_of(self, index: int) -> int:
        """Returns the tokens of a sample."""
        return int(self._lengths[self._row(index)])

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        row = self._row(index)
        document, length = int(self._documents[row]), int(self._lengths[row])
        ids = np.asarray(self.dataset.get(document, 0, length + 1), dtype=np.int64)
        sample = {"tokens": ids[:-1], "labels": ids[1:], "position_ids": np.arange(length)}
        taught = getattr(self.dataset, "is_taught", None)
        mask = np.ones(length) if taught is None else taught(document, length + 1)[1:]
        return {**sample, "loss_mask": mask.astype(np.float32)}

    def _row(self, index: int) -> int:
        epoch, place = divmod(int(index), self._documents.size)
        if epoch not in self._orders:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.pop(min(self._orders))
            key = [self.config.random_seed, self.index_split.value, epoch]
            self._orders[epoch] = np.random.default_rng(key).permutation(self._documents.size)
        return int(self._orders[epoch][place])


def length_of(dataset: Any, index: int) -> int:
    """Returns the tokens of a sample of a dataset or of a blend of several."""
    while hasattr(dataset, "dataset_index"):
        part, index = dataset.dataset_index[index], dataset.dataset_sample_index[index]
        dataset = dataset.datasets[part]
    return int(dataset.length_of(index))


def left_out(datasets: Sequence[Any]) -> str:
    """Returns what is left out of the documents in one line, empty where nothing is."""
    parts = [part for one in datasets for part in getattr(one, "datasets", [one]) if part]
    cut, empty = (sum(getattr(p, n, 0) for p in parts) for n in ("num_cut", "num_empty"))
    found = [f"{cut} documents are cut at --seq-length"] * bool(cut)
    found += [f"{empty} without a token to predict are left out"] * bool(empty)
    return ", ".join(found)


class _MadeUp:
    """Documents of lengths drawn from a lognormal distribution, the same in every run."""

    def __init__(self, tokenizer: Tokenizer, seq_length: int) -> None:
        self._tokenizer = tokenizer
        drawn = np.random.default_rng(0).lognormal(0.0, _MOCK_SIGMA, _MOCK_DOCUMENTS)
        most = 1.0 * seq_length
        self.sequence_lengths = 1 + np.clip(drawn * most * _MOCK_MEDIAN, 1, most).astype(np.int32)

    def get(self, index: int, offset: int, length: int) -> npt.NDArray[np.int64]:
        ids = (index + np.arange(offset, offset + length)) % self._tokenizer.eod
        if offset + length == self.sequence_lengths[index]:
            ids[-1] = self._tokenizer.eod
        return ids


class Conversations:
    """Conversations as tokens, with which of them the model learns to say.

    Only what the assistant says, and the end of it, is taught.

    Args:
        ids: tokens of all conversations, one after the other.
        taught: whether each is taught.
        ends: where each conversation begins, and the last one's end.
    """

    def __init__(
        self, ids: npt.NDArray[Any], taught: npt.NDArray[Any], ends: npt.NDArray[Any]
    ) -> None:
        self._ids, self._taught, self._ends = ids, taught, ends
        self.sequence_lengths = np.diff(ends)

    def get(self, index: int, offset: int, length: int) -> npt.NDArray[Any]:
        """Returns tokens of a conversation."""
        start = int(self._ends[index]) + offset
        return self._ids[start : start + length]

    def is_taught(self, index: int, length: int) -> npt.NDArray[Any]:
        """Returns which of a conversation's first tokens are taught."""
        start = int(self._ends[index])
        return self._taught[start : start + length]

    @staticmethod
    def read(path: str, tokenizer: Tokenizer) -> tuple[npt.NDArray[Any], ...]:
        """Tokenizes JSON lines, each ``{"messages": [{"role": ..., "content": ...}, ...]}``.

        Returns:
            The three arrays of a :class:`Conversations`. One without a message of the assistant
            has no token.

        Raises:
            DataError: a line is something else, or the file cannot be read.
        """
        ids: list[int] = []
        taught: list[bool] = []
        ends = [0]
        try:
            with Path(path).open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    messages = _messages(line, f"{path}:{number}")
                    if any(role == TAUGHT_ROLE for role, _ in messages):
                        try:
                            found = tokenizer.conversation(messages)
                        except DataError as error:
                            raise DataError(f"{path}:{number}: {error}") from None
                        ids += found[0]
                        taught += found[1]
                    ends.append(len(ids))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); --sft takes JSON lines of conversations"
            ) from None
        return np.array(ids, np.int32), np.array(taught, np.bool_), np.array(ends, np.int64)


def _messages(line: str, where: str) -> list[tuple[str, str]]:
    try:
        found = [(one["role"], one["content"]) for one in parse_json(line)["messages"]]
    except (ValueError, TypeError, KeyError):
        found = []
    if not found or not all(r in _ROLES and isinstance(c, str) for r, c in found):
        raise DataError(
            f'{where}: is no conversation; write {{"messages": [{{"role": "user", "content": '
            f'"..."}}, ...]}} with the roles {", ".join(_ROLES)}'
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Groups samples of different lengths into microbatches.

    Attributes:
        micro_batch_size: samples of a microbatch where they are padded.
        pack_to: tokens that a microbatch holds at most where they are packed, else ``None``.
        replicas: data-parallel size.
        multiple: number that the tokens of a row are a multiple of.
        group: number that the microbatches of a replica are a multiple of.
        least: microbatches that a replica has at least.
    """

    micro_batch_size: int
    pack_to: int | None
    replicas: int
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


class LengthLoader:
    """Draws the microbatches of one data-parallel rank from samples of different lengths.

    A counterpart of :class:`~megatron.adaptive.data.loader.MicrobatchLoader`: the next samples in
    the dataset's order, whatever the shape of the job. It reads in this process. Not thread safe.

    Args:
        dataset: a :class:`DocumentDataset` or a blend of some.
        consumed_samples: samples that all ranks together took before, over the whole run.
        batching: how they become microbatches.
        dp_rank: this rank's position among the data-parallel ranks.
        reads: whether this rank needs the tokens; it always knows the lengths.
        pin_memory: hand out page-locked tensors.
        on_read: called for every microbatch that was read.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        consumed_samples: int,
        batching: Batching,
        dp_rank: int,
        reads: bool = True,
        pin_memory: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        self._dataset, self._batching, self._dp_rank = dataset, batching, dp_rank
        self.consumed_samples = consumed_samples
        self._reads, self._pin_memory, self._on_read = reads, pin_memory, on_read

    def step(self, num_microbatches: int, deal: Deal | None = None) -> LengthMicrobatches:
        """Takes the next ``num_microbatches * micro_batch_size * replicas`` samples.

        Args:
            num_microbatches: of each replica, if they were padded and dealt in turns.
            deal: gives each replica its microbatches; in turns where ``None``.

        Returns:
            This rank's part; packed microbatches may be fewer than ``num_microbatches``.

        Raises:
            DataError: the dataset ends within the step.
        """
        first, batching = self.consumed_samples, self._batching
        count = num_microbatches * batching.micro_batch_size * batching.replicas
        require_samples(self._dataset, first, count)
        self.consumed_samples += count
        lengths = [length_of(self._dataset, first + n) for n in range(count)]
        return LengthMicrobatches(
            lengths,
            batching,
            self._dp_rank,
            (lambda n: self._dataset[first + n]) if self._reads else None,
            deal=deal,
            pin_memory=self._pin_memory,
            on_read=self._on_read,
        )

    def close(self) -> None:
        """Does nothing: no process reads ahead."""


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
        own: Sequence[int] = range(dp_rank, len(rows), batching.replicas)
        if deal is not None:
            own = deal([batching.size_of([lengths[n] for n in row]) for row in rows])[dp_rank]
        self._own = [rows[number] for number in own]
        self.contents = tuple(
            (self._positions(row), *(lengths[sample] for sample in row)) for row in self._own
        )
        self.load = self._measure(rows)
        super().__init__(
            lambda index: self._make(self._own[index]),
            len(self._own),
            pin_memory=pin_memory,
            on_read=None if read is None else on_read,
        )

    @property
    def sizes(self) -> tuple[float, ...]:
        """Positions of each microbatch."""
        return tuple(float(one[0]) for one in self.contents)

    def _make(self, samples: Sequence[int]) -> Microbatch:
        is_packed, lengths = self._batching.pack_to is not None, self._lengths
        rows = [list(samples)] if is_packed else [[sample] for sample in samples]
        longest = max(sum(lengths[n] for n in row) for row in rows)
        width = self._batching.row_tokens(longest)
        made: Microbatch = {}
        if self._sample is not None:
            arrays: dict[str, npt.NDArray[Any]] = {}
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

    def _measure(self, microbatches: Sequence[Sequence[int]]) -> Load:
        """Counts tokens and positions of the whole step."""
        lengths, positions = self._lengths, [self._positions(samples) for samples in microbatches]
        tokens = sum(lengths)
        each = [sum(lengths[sample] for sample in samples) for samples in microbatches]
        return Load(
            tokens=tokens,
            padding=1.0 - tokens / sum(positions),
            longest=max(lengths),
            mean_length=tokens / len(lengths),
            num_microbatches=len(microbatches),
            least_tokens=min(each),
            most_tokens=max(each),
        )

    def _positions(self, samples: Sequence[int]) -> int:
        """Returns the positions of a microbatch, padding included."""
        lengths, room = [self._lengths[sample] for sample in samples], self._batching.row_tokens
        if self._batching.pack_to is None:
            return len(lengths) * room(max(lengths))
        return room(sum(lengths))


_KEYS = ("tokens", "labels", "position_ids", "loss_mask")
