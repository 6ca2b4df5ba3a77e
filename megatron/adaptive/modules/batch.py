"""Checks batches, divides them into microbatches, and describes the content of microbatches.

A batch is a dictionary of tensors whose first dimension indexes the samples, or a list of
microbatches. Each microbatch of a list is a dictionary of tensors of any shape, like the result of
a data collator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.adaptive.accelerator import to_device
from megatron.adaptive.errors import ConfigError

Microbatch = Mapping[str, torch.Tensor]
"""Dictionary that maps the name of each batch entry to the microbatch's tensor."""
Batch = Mapping[str, torch.Tensor] | Sequence[Microbatch]
"""Dictionary of tensors whose first dimension indexes the samples, or a list of microbatches."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Describes the shapes and dtypes of a microbatch, and the values of some of its entries.

    Microbatches with equal signatures share a recording of the model's forward pass.

    Attributes:
        entries: Name, shape and dtype of each entry, ordered by name.
        values: Name and values of each entry in ``decisive_entries``, whose values determine which
            operations the model runs.
    """

    entries: tuple[tuple[str, torch.Size, torch.dtype], ...]
    values: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @classmethod
    def of(cls, microbatch: Microbatch, decisive_entries: Iterable[str] = ()) -> Signature:
        """Returns the signature of a microbatch.

        Args:
            microbatch: Tensors of the microbatch, keyed by name.
            decisive_entries: Names of the entries whose values are part of the signature.
        """
        return cls(
            tuple(
                (name, microbatch[name].shape, microbatch[name].dtype)
                for name in sorted(microbatch)
            ),
            tuple(
                (name, tuple(microbatch[name].flatten().tolist()))
                for name in decisive_entries
                if name in microbatch
            ),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape, _ in self.entries)


class BatchShape:
    """Checks batches against a sample batch, and divides them into microbatches.

    Args:
        sample: Sample batch with at least ``micro_batch_size`` samples.
        micro_batch_size: Number of samples per microbatch.

    Attributes:
        micro_batch_size: Number of samples per microbatch.
        samples: Number of samples in the sample batch.

    Raises:
        ConfigError: If ``sample`` is not a batch, or is smaller than a microbatch.
    """

    def __init__(self, sample: Any, micro_batch_size: int) -> None:
        require_whole(1, micro_batch_size=micro_batch_size)
        self.micro_batch_size = micro_batch_size
        self.samples = samples_in(sample, "sample_batch")
        if self.samples < micro_batch_size:
            raise ConfigError(
                f"sample_batch has {self.samples} samples, fewer than micro_batch_size "
                f"{micro_batch_size}; pass samples for at least one microbatch"
            )
        self._entries = {name: tensor.dtype for name, tensor in sample.items()}

    def num_microbatches(self, batch: Any) -> int:
        """Checks a batch and returns its number of microbatches.

        Raises:
            ConfigError: If ``batch`` is not a dictionary of tensors, cannot be divided into
                microbatches, or differs from the sample batch in entries or dtypes.
        """
        count = samples_in(batch, "batch")
        if count % self.micro_batch_size:
            raise ConfigError(
                f"a batch of {count} samples cannot be divided into microbatches of "
                f"{self.micro_batch_size} samples; pass a multiple of micro_batch_size"
            )
        unmatched = sorted(set(batch) ^ set(self._entries))
        if unmatched:
            lacking = "the sample_batch lacks" if unmatched[0] in batch else "the batch lacks"
            raise ConfigError(
                f"{lacking} {unmatched[0]!r}; a batch must have the same entries as the "
                f"sample_batch: {', '.join(map(repr, self._entries))}"
            )
        for name, dtype in self._entries.items():
            _require_type(f"batch[{name!r}]", batch[name].dtype, dtype)
        return count // self.micro_batch_size

    def microbatches(self, batch: Any) -> list[Microbatch]:
        """Checks a batch and returns its microbatches as views of the batch.

        Raises:
            ConfigError: If :meth:`num_microbatches` rejects the batch.
        """
        size = self.micro_batch_size
        return [
            {name: tensor.narrow(0, number * size, size) for name, tensor in batch.items()}
            for number in range(self.num_microbatches(batch))
        ]

    def examples(self, sample: Microbatch) -> list[Microbatch]:
        """Returns the first two microbatches of ``sample``, or one if it contains only one."""
        size = self.micro_batch_size
        return self.microbatches(
            {name: tensor[: min(2, self.samples // size) * size] for name, tensor in sample.items()}
        )

    def microbatch(
        self, batch: Mapping[str, torch.Tensor], number: int, device: torch.device,
        names: Iterable[str] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Returns a microbatch on ``device``. Its tensors are views if the batch is on this device.

        Args:
            batch: Batch that contains the microbatch.
            number: Index of the microbatch, starting at 0.
            device: Device of the returned tensors.
            names: Names of the batch entries to return; ``None`` for all entries.
        """
        start = number * self.micro_batch_size
        return {
            name: to_device(batch[name].narrow(0, start, self.micro_batch_size), device)
            for name in (batch if names is None else names)
        }


class MicrobatchList:
    """Checks lists of microbatches whose shapes may differ.

    Args:
        examples: Microbatches of the sample batch. Later microbatches must have the same dtypes.
    """

    def __init__(self, examples: Iterable[Microbatch]) -> None:
        self._types = {name: tensor.dtype for part in examples for name, tensor in part.items()}

    def microbatches(self, batch: Any) -> list[Microbatch]:
        """Checks a list of microbatches and returns it.

        Raises:
            ConfigError: If ``batch`` is not a list of dictionaries of tensors, or if the dtype of
                an entry differs from the sample batch.
        """
        listed = microbatch_list(batch, "batch")
        for number, part in enumerate(listed):
            for name, tensor in part.items():
                if name in self._types:
                    _require_type(f"batch[{number}][{name!r}]", tensor.dtype, self._types[name])
        return listed


def _require_type(entry: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    if dtype != expected:
        raise ConfigError(
            f"{entry} has dtype {dtype}, but the sample_batch has {expected}; cast the batch, or "
            "create the Pipeline with a sample_batch of this dtype"
        )


def is_list(batch: Any) -> bool:
    """Returns whether a batch is a list of microbatches."""
    return isinstance(batch, (list, tuple))


def microbatch_list(batch: Any, argument: str) -> list[Microbatch]:
    """Checks that ``batch`` is a valid list of microbatches, and returns the list.

    Args:
        batch: List to check, as the user passed it.
        argument: Name of the argument, for error messages.

    Raises:
        ConfigError: If ``batch`` is not a list of dictionaries of tensors, or is empty.
    """
    if not is_list(batch) or not batch:
        given_text = "is empty" if is_list(batch) else f"is a {type(batch).__name__}"
        raise ConfigError(
            f"{argument} {given_text}; pass a list of microbatches, each a dictionary of tensors"
        )
    for number, part in enumerate(batch):
        if not isinstance(part, Mapping) or not part:
            raise ConfigError(
                f"{argument}[{number}] is "
                f"{'empty' if part == {} else f'a {type(part).__name__}'}; each microbatch must "
                "be a dictionary that maps the names of forward's arguments to tensors"
            )
        for name, entry in part.items():
            if not isinstance(name, str) or not isinstance(entry, torch.Tensor):
                raise ConfigError(
                    f"{argument}[{number}][{name!r}] is a {type(entry).__name__}; each entry "
                    "must be a tensor; omit entries that the microbatch does not have"
                )
    return list(batch)


def check_num_items(num_items: Any, count: int) -> list[float] | None:
    """Checks that ``num_items`` has one number per microbatch, and returns the numbers as floats.

    Args:
        num_items: Value that the user passed as the number of items, such as tokens, in each
            microbatch; may be ``None``.
        count: Number of microbatches.

    Raises:
        ConfigError: If ``num_items`` does not contain ``count`` finite, non-negative numbers.
    """
    if num_items is None:
        return None
    try:
        numbers = [float(number) for number in num_items]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
        raise ConfigError(
            f"num_items must have one non-negative number for each of the {count} microbatches, "
            f"got {num_items!r}"
        )
    return numbers


def stretched(batch: Mapping[str, torch.Tensor], least: int) -> dict[str, torch.Tensor]:
    """Returns ``batch``, with its samples repeated if there are fewer than ``least`` samples."""
    count = len(next(iter(batch.values())))
    times = -(-least // count)
    if times <= 1:
        return dict(batch)
    return {name: torch.cat([tensor] * times)[:least] for name, tensor in batch.items()}


def samples_in(batch: Any, argument: str) -> int:
    """Checks a batch and returns its number of samples.

    Args:
        batch: Batch to check, as the user passed it.
        argument: Name of the argument, for error messages.

    Raises:
        ConfigError: If ``batch`` is not a dictionary of tensors with the same number of samples.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{argument} is a {type(batch).__name__}; pass a dictionary that maps the names of "
            "forward's arguments to tensors"
        )
    counts: dict[str, int] = {}
    for name, entry in batch.items():
        if not isinstance(name, str) or not isinstance(entry, torch.Tensor) or entry.dim() == 0:
            entry_text = (
                "a scalar" if isinstance(entry, torch.Tensor) else f"a {type(entry).__name__}"
            )
            raise ConfigError(
                f"{argument}[{name!r}] is {entry_text}; each entry must be a tensor whose first "
                f"dimension is the samples; use arguments={{...}} to pass a value that is the same "
                "for all samples"
            )
        counts[name] = entry.shape[0]
    if len(set(counts.values())) != 1 or not all(counts.values()):
        counts_text = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise ConfigError(
            f"{argument} has {counts_text or 'no entries'}; all entries must have the same number "
            "of samples, which must be at least 1"
        )
    return next(iter(counts.values()))


def require_whole(least: int, **values: Any) -> None:
    """Checks that all ``values`` are integers of at least ``least``.

    Args:
        least: Smallest valid value of each setting.
        **values: Settings to check, keyed by name.

    Raises:
        ConfigError: If a setting is not an integer or is too small. The message names the first
            invalid setting.
    """
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
