"""Checks batches and cuts them into microbatches.

A batch is a dictionary of tensors. The first axis of each tensor counts the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.adaptive.errors import ConfigError


class BatchShape:
    """Describes the entries, shapes and types that every batch must have, from a sample batch.

    Args:
        sample: Sample batch, with enough samples for a microbatch.
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
                f"sample_batch holds {self.samples} samples, fewer than micro_batch_size "
                f"{micro_batch_size}: give a sample of at least one microbatch"
            )
        self._entries = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in sample.items()}

    def num_microbatches(self, batch: Any) -> int:
        """Checks a batch and returns the number of its microbatches.

        Raises:
            ConfigError: If ``batch`` is not a dictionary of tensors, does not divide into
                microbatches, or differs from the sample batch in entries, shapes or types.
        """
        count = samples_in(batch, "batch")
        if count % self.micro_batch_size:
            raise ConfigError(
                f"a batch of {count} samples does not divide into microbatches of "
                f"{self.micro_batch_size}: give a multiple"
            )
        unmatched = sorted(set(batch) ^ set(self._entries))
        if unmatched:
            lacking = "the sample_batch lacks" if unmatched[0] in batch else "the batch lacks"
            raise ConfigError(
                f"{lacking} {unmatched[0]!r}: a batch must have the entries "
                f"{', '.join(map(repr, self._entries))} of the sample_batch"
            )
        for name, (shape, dtype) in self._entries.items():
            tensor = batch[name]
            if tensor.shape[1:] != shape or tensor.dtype != dtype:
                raise ConfigError(
                    f"batch[{name!r}] has samples of {list(tensor.shape[1:])} {tensor.dtype}, the "
                    f"sample_batch has {list(shape)} {dtype}: pad or cast the batch, or make the "
                    "Pipeline with such a sample"
                )
        return count // self.micro_batch_size

    def microbatch(
        self, batch: Mapping[str, torch.Tensor], number: int, device: torch.device,
        names: Iterable[str] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Returns a microbatch on ``device``, as views if the batch is on this device too.

        Args:
            batch: Batch that contains the microbatch.
            number: Number of the microbatch, from 0.
            device: Device on which the microbatch is needed.
            names: Names of the batch entries to return, ``None`` for all.
        """
        start = number * self.micro_batch_size
        return {
            name: batch[name].narrow(0, start, self.micro_batch_size).to(device, non_blocking=True)
            for name in (batch if names is None else names)
        }


def stretched(batch: Mapping[str, torch.Tensor], least: int) -> dict[str, torch.Tensor]:
    """Repeats the samples of a batch until it has at least ``least`` samples."""
    count = len(next(iter(batch.values())))
    times = -(-least // count)
    if times <= 1:
        return dict(batch)
    return {name: torch.cat([tensor] * times)[:least] for name, tensor in batch.items()}


def samples_in(batch: Any, argument: str) -> int:
    """Checks a batch and returns its number of samples.

    Args:
        batch: Batch from the user, not yet checked.
        argument: Name of the batch in error messages.

    Raises:
        ConfigError: If ``batch`` is not a dictionary of tensors with the same number of samples.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{argument} is a {type(batch).__name__}: give a dictionary of tensors, by the names "
            "of forward's arguments"
        )
    counts: dict[str, int] = {}
    for name, entry in batch.items():
        if not isinstance(name, str) or not isinstance(entry, torch.Tensor) or entry.dim() == 0:
            entry_text = (
                "a scalar" if isinstance(entry, torch.Tensor) else f"a {type(entry).__name__}"
            )
            raise ConfigError(
                f"{argument}[{name!r}] is {entry_text}: each entry must be a tensor with an axis "
                "of samples; a value that is the same for all samples belongs into arguments={...}"
            )
        counts[name] = entry.shape[0]
    if len(set(counts.values())) != 1 or not all(counts.values()):
        counts_text = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise ConfigError(
            f"{argument} has {counts_text or 'no entries'}: all entries must have the same number "
            "of samples, at least 1"
        )
    return next(iter(counts.values()))


def require_whole(least: int, **values: Any) -> None:
    """Checks that settings are whole numbers of at least ``least``.

    Args:
        least: Smallest valid value of each setting.
        **values: Settings to check, by name.

    Raises:
        ConfigError: If a setting is no such number. The message names the first such setting.
    """
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} {value!r}: give a whole number from {least} on")
