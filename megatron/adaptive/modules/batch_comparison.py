"""Checks that all processes of a replica pass the same batch to a step or an evaluation.

::

    batch ──> digest of its entries ──> all ranks ──> equal on the ranks of each replica?
                                                          │ if not
              names of the entries that differ <──────────┘

The first stage uses the inputs of a batch, and the last stage uses its labels. If the ranks' data
loaders shuffle differently, inputs are paired with the labels of other samples, and training
continues without an error.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import Microbatch
from megatron.adaptive.modules.mesh import Mesh

_FIRST_CALLS = 3
"""Number of initial steps, and of initial evaluations, in which batches are compared.

Data loaders with different seeds usually differ in the first batch. The next two comparisons
detect loaders whose first batches happen to be equal, for example because only one rank reads the
sample batch from its loader.
"""
_INTERVAL = 64
"""Number of steps, or of evaluations, between two comparisons after the first calls.

A comparison makes the ranks wait for each other, and takes about a millisecond. With this interval,
comparisons add less than 0.1 ms to the mean step time, and still detect data loaders that begin to
differ later, for example in the second epoch.
"""
_DIGEST_BYTES = 6
"""Size of a digest in bytes, small enough for a 64-bit float to represent the digest exactly."""
_SAME_BATCH = (
    "pass the same batch on all processes of a replica, for example with the same seed of the "
    "sampler: DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0))"
)
_ON_PURPOSE = "; or pass compare_batches=False if batches differ on purpose"


@dataclass(frozen=True, kw_only=True)
class EntryDigest:
    """Describes the tensors of a batch entry for comparison with the tensors of another rank.

    Attributes:
        kinds: Dtype and shape of the entry's tensor in each microbatch; ``None`` for a microbatch
            without the entry.
        values: Digest of the entry's values; empty if the values were not read.
    """

    kinds: tuple[str | None, ...]
    values: bytes = b""


def entries_of(
    parts: Sequence[Microbatch],
    *,
    unused: Collection[str] = (),
    with_values: bool = True,
    with_device: bool = False,
) -> dict[str, EntryDigest]:
    """Returns a description of each entry of a batch, keyed by the name of the entry.

    The values of floating-point entries are not read, because random augmentation may make them
    differ between ranks.

    Args:
        parts: Microbatches of a list, or the whole batch as a single item.
        unused: Names of the entries to leave out.
        with_values: Whether to read the values of integer and boolean entries.
        with_device: Whether to also read values in GPU memory, which synchronizes with the GPU.
    """
    names = {name for part in parts for name in part} - set(unused)
    kinds: dict[str, tuple[str | None, ...]] = {}
    read: dict[str, list[torch.Tensor]] = {}
    for name in sorted(names):
        tensors = [part.get(name) for part in parts]
        kinds[name] = tuple(None if each is None else _kind_of(each) for each in tensors)
        passed = [each for each in tensors if each is not None]
        if with_values and all(_is_readable(each, with_device) for each in passed):
            read[name] = passed
    digests = {name: hashlib.blake2b(digest_size=_DIGEST_BYTES) for name in read}
    order = [name for name, tensors in read.items() for _ in tensors]
    for name, content in zip(order, _bytes_of(itertools.chain(*read.values())), strict=True):
        digests[name].update(content.numpy().data)
    return {
        name: EntryDigest(
            kinds=kinds[name], values=digests[name].digest() if name in digests else b""
        )
        for name in kinds
    }


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_readable(tensor: torch.Tensor, with_device: bool) -> bool:
    """Returns whether ``tensor`` contains integers or booleans that can be read.

    Values in GPU memory are read only if ``with_device`` is true.
    """
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized:
        return False
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return with_device or tensor.device.type == "cpu"


def _bytes_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the content of ``tensors`` as bytes in host memory.

    Tensors on the same device are copied in one transfer, because each transfer waits for the
    device.
    """
    contents = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, content in enumerate(contents):
        if content.device.type != "cpu":
            by_device.setdefault(content.device, []).append(number)
    for numbers in by_device.values():
        sizes = [len(contents[number]) for number in numbers]
        copied = torch.cat([contents[number] for number in numbers]).cpu()
        for number, content in zip(numbers, copied.split(sizes), strict=True):
            contents[number] = content
    return contents


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Contains hash values that show whether two batches are equal.

    Attributes:
        kinds: Digest of the names, shapes and dtypes of the entries, and of the other objects
            passed to :meth:`of`; 0 if nothing was hashed.
        read: Digest of the names of the entries whose values were read.
        values: Digest of the values that were read.
    """

    kinds: int = 0
    read: int = 0
    values: int = 0

    @classmethod
    def of(cls, entries: Mapping[str, EntryDigest], *others: object) -> Digest:
        """Returns the digest of a batch and of the ``repr`` of each object in ``others``.

        Args:
            entries: Result of :func:`entries_of`.
            others: Other objects to include in the digest.
        """
        kinds, read, values = (hashlib.blake2b(digest_size=_DIGEST_BYTES) for _ in range(3))
        for name, entry in entries.items():
            kinds.update(f"{name} {entry.kinds};".encode())
            if entry.values:
                read.update(f"{name};".encode())
                values.update(entry.values)
        for other in others:
            kinds.update(repr(other).encode())
        numbers = (int.from_bytes(each.digest(), "little") for each in (kinds, read, values))
        return cls(kinds=next(numbers) or 1, read=next(numbers), values=next(numbers))

    def is_alike(self, other: Digest) -> bool:
        """Returns whether this digest and ``other`` may belong to equal batches.

        Values are compared only if both digests read the values of the same entries.
        """
        if self.kinds != other.kinds:
            return False
        return self.read != other.read or self.values == other.values


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Describes the next step on one rank. Ranks compare these descriptions before the step.

    Attributes:
        step: Index of the training step; -1 in an evaluation.
        replica: Index of the rank's replica.
        refused: Whether the rank rejects its batch.
        is_listed: Whether the batch is a list of microbatches.
        has_items: Whether ``num_items`` was passed.
        dealt: Digest of the whole batch and its distribution over replicas; an empty digest if the
            batch is not distributed by cost.
        count: Number of microbatches of the replica.
        content: Digest of the replica's batch.
        order: Digest of the order in which the replica runs its microbatches.
    """

    step: int
    replica: int = 0
    refused: bool = False
    is_listed: bool = False
    has_items: bool = False
    dealt: Digest = Digest()
    count: int = 0
    content: Digest = Digest()
    order: int = 0

    def encoded(self) -> list[float]:
        """Returns all fields, including the fields of digests, as a flat list of numbers."""
        values: list[float] = []
        for value in vars(self).values():
            values += vars(value).values() if isinstance(value, Digest) else [value]
        return [float(value) for value in values]

    def decoded(self, numbers: Iterable[float]) -> Declared:
        """Decodes another rank's description from the beginning of ``numbers``."""
        rest = map(int, numbers)
        size = len(vars(Digest()))
        facts: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Digest):
                parts = zip(vars(value), itertools.islice(rest, size), strict=True)
                facts[name] = Digest(**dict(parts))
            else:
                facts[name] = type(value)(next(rest))
        return Declared(**facts)


_OF_REPLICA = ("count", "content", "order")
"""Fields of :class:`Declared` that may differ between replicas."""
_DISAGREEMENTS = {
    "step": "are in different steps; call step() and eval() the same number of times on all "
    "processes",
    "is_listed": "have different kinds of batches; pass a list of microbatches on all processes, "
    "or a dictionary on all",
    "has_items": "disagree on num_items; pass it on all processes, or on none",
    "dealt": "distributed different batches, or called share() before different steps; pass the "
    "same whole batch to share() the same number of times on all processes",
    "count": f"of one replica have different numbers of microbatches; {_SAME_BATCH}",
    "content": f"of one replica have different batches; {_SAME_BATCH}",
    "order": "would run the microbatches of one replica in different orders, because their "
    "recordings or measured times differ; build the same model on all processes, and create a new "
    "Pipeline",
}
"""Error messages, keyed by the field of :class:`Declared` that differs between two ranks.

The fields are compared in the order of this dict.
"""


class BatchComparison:
    """Compares the steps that ranks are about to run, and the batches of a replica's ranks.

    Unless microbatches are ordered or distributed by cost, ranks compare only the first few steps
    and evaluations, and then one in every 64. All ranks take part in each comparison. A rank can
    also use it to notify the others that it rejects its batch.

    Args:
        mesh: Replica and pipeline position of this process, and its process groups.
        is_on: Whether the ranks of a replica must have the same batches (``compare_batches``).
        is_by_cost: Whether microbatches are ordered or distributed by cost. If they are, ranks
            compare every call, because a microbatch could otherwise be lost or trained twice.
        unused: Names of batch entries that no stage uses. They are not compared.

    Attributes:
        mesh: Replica and pipeline position of this process, and its process groups.
        is_due: Whether the ranks compare the current call.
    """

    def __init__(
        self, *, mesh: Mesh, is_on: bool, is_by_cost: bool, unused: Collection[str] = ()
    ) -> None:
        self.mesh = mesh
        self._compares_values = is_on
        self._is_on = is_on and mesh.pipeline_size > 1
        self._is_by_cost = is_by_cost
        self._unused = frozenset(unused)
        self.is_due = self._is_early = False
        self.restart()

    def restart(self) -> None:
        """Resets the numbers of steps and evaluations so far. All ranks must call this."""
        self._num_calls = {"training": 0, "evaluation": 0}

    def begin_call(self, *, is_training: bool) -> None:
        """Decides whether ranks compare their batches in the next step or evaluation.

        All ranks must call this.

        Steps and evaluations are counted separately, because they usually use different data
        loaders.
        """
        mode = "training" if is_training else "evaluation"
        number = self._num_calls[mode]
        self._num_calls[mode] += 1
        self._is_early = number < _FIRST_CALLS
        is_chosen = self._is_early or number % _INTERVAL == 0
        self.is_due = self._is_by_cost or (self._is_on and is_chosen)

    def entries_of(
        self, parts: Sequence[Microbatch], *, with_device: bool | None = None
    ) -> dict[str, EntryDigest]:
        """Returns descriptions of those entries of a batch that are compared, keyed by name.

        Args:
            parts: Microbatches of a list, or the whole batch as a single item.
            with_device: Whether to also read values in GPU memory; ``None`` reads them only in the
                first calls.
        """
        return entries_of(
            parts,
            unused=self._unused,
            with_values=self._compares_values,
            with_device=self._is_early if with_device is None else with_device,
        )

    def refuse(self, step: int, error: Exception, extra: Sequence[float] = ()) -> NoReturn:
        """Notifies all ranks that this rank rejects its batch, and raises ``error``.

        Args:
            step: Index of the training step; -1 in an evaluation.
            error: Error to raise, which contains the reason.
            extra: Numbers to send to all ranks, as in :meth:`agree`.
        """
        if self.is_due:
            self._exchange(Declared(step=step, refused=True), extra)
            self._raise_refusal(error)
        raise error

    def agree(
        self, declared: Declared, entries: Mapping[str, EntryDigest], extra: Sequence[float] = ()
    ) -> list[list[float]]:
        """Compares all ranks' descriptions of the next step.

        If :attr:`is_due` is true, every rank must call either this method or :meth:`refuse`.

        Args:
            declared: Description of the step on this rank.
            entries: Description of each entry of this rank's batch.
            extra: Numbers to send to all ranks. All ranks must pass lists of the same length.

        Returns:
            The ``extra`` numbers of each rank, as one list per rank.

        Raises:
            ConfigError: If a rank rejects its batch, or the descriptions differ. The error is
                raised on all ranks.
        """
        rows = self._exchange(declared, extra)
        answers = [declared.decoded(row) for row in rows]
        if any(answer.refused for answer in answers):
            self._raise_refusal(None)
        self.require_equal(answers, entries)
        return [row[len(row) - len(extra) :] for row in rows]

    def _exchange(self, declared: Declared, extra: Sequence[float]) -> list[list[float]]:
        message = torch.tensor([*declared.encoded(), *extra], dtype=torch.float64)
        gathered = [message.clone() for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, message, group=self.mesh.control_group)
        return [of_rank.tolist() for of_rank in gathered]

    def _raise_refusal(self, error: Exception | None) -> None:
        """Raises ``error``, or the error of another rank if ``error`` is ``None``.

        All ranks must call this.
        """
        texts = self.mesh.gather(None if error is None else str(error))
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise ConfigError(f"rank {rank} rejected its batch: {text}")

    def require_equal(
        self, answers: Sequence[Declared], entries: Mapping[str, EntryDigest]
    ) -> None:
        """Checks that the ranks' descriptions of the next step (``answers``) agree.

        ``entries`` describes this rank's batch, and is sent to all ranks if batches differ.

        Raises:
            ConfigError: If a field differs between two ranks.
        """
        for field, text in _DISAGREEMENTS.items():
            groups: dict[int, list[int]] = {}
            for rank, answer in enumerate(answers):
                group = answer.replica if field in _OF_REPLICA else 0
                groups.setdefault(group, []).append(rank)
            for ranks in groups.values():
                differing = _differing([getattr(answers[rank], field) for rank in ranks])
                if differing is not None:
                    first, second = (ranks[index] for index in differing)
                    if field == "content":
                        text = self._difference(first, second, entries)
                    raise ConfigError(f"ranks {first} and {second} {text}")

    def _difference(self, first: int, second: int, entries: Mapping[str, EntryDigest]) -> str:
        """Describes how the batches of two ranks differ. All ranks must call this.

        ``first`` and ``second`` are the two ranks, and ``entries`` describes this rank's batch.
        """
        batches = self.mesh.gather(dict(entries))
        text = _difference_of(batches[first], batches[second], (first, second))
        remedy = _SAME_BATCH + _ON_PURPOSE if self._compares_values else _SAME_BATCH
        return f"of one replica have different {text}; {remedy}"


def _difference_of(
    first: Mapping[str, EntryDigest], second: Mapping[str, EntryDigest], ranks: tuple[int, int]
) -> str:
    """Describes the difference between ``first`` and ``second``, the batches of two ``ranks``."""
    names = sorted(first.keys() | second.keys())
    for name in names:
        kinds = [batch[name].kinds if name in batch else (None,) for batch in (first, second)]
        for number, pair in enumerate(itertools.zip_longest(*kinds)):
            if pair[0] == pair[1]:
                continue
            where = f" in microbatch {number}" if max(map(len, kinds)) > 1 else ""
            if None in pair:
                owner = ranks[1] if pair[0] is None else ranks[0]
                return f"entries: only rank {owner} has {name}{where}"
            return f"shapes in {name}{where}: {pair[0]} and {pair[1]}"
    differing = [
        name
        for name in names
        if first[name].values and second[name].values and first[name] != second[name]
    ]
    return f"values in {', '.join(differing)}"


def _differing(values: Sequence[object]) -> tuple[int, int] | None:
    """Returns the indices of two items in ``values`` that differ, or ``None`` if all match.

    Digests are compared by :meth:`Digest.is_alike`.
    """
    first_of: dict[int, int] = {}
    for index, value in enumerate(values):
        if not isinstance(value, Digest):
            if value != values[0]:
                return 0, index
            continue
        # Compare each digest with two earlier ones: the first digest of all, and the first digest
        # for which the values of the same entries were read.
        for earlier in (0, first_of.setdefault(value.read, index)):
            other = values[earlier]
            if not isinstance(other, Digest) or not other.is_alike(value):
                return earlier, index
    return None
