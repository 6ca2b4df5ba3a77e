"""A batch: a dictionary of tensors whose first axis is that of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.adaptive.errors import ConfigError


class BatchShape:
    """Describes what every batch must look like, taken from a sample.

    Args:
        sample: a batch of at least one microbatch.
        micro_batch_size: samples of a microbatch.

    Attributes:
        micro_batch_size: as given.
        samples: of the sample.

    Raises:
        ConfigError: the sample is no batch, or too small.
    """

    def __init__(self, sample: Any, micro_batch_size: int) -> None:
        require_whole(1, micro_batch_size=micro_batch_size)
        self.micro_batch_size = micro_batch_size
        self.samples = count = samples_in(sample, "sample_batch")
        if count < micro_batch_size:
            raise ConfigError(
                f"sample_batch holds {count} samples, fewer than micro_batch_size "
                f"{micro_batch_size}: give a sample of at least one microbatch"
            )
        self._looks = {name: (one.shape[1:], one.dtype) for name, one in sample.items()}

    def num_microbatches(self, batch: Any) -> int:
        """Check a batch and return how many microbatches it makes.

        Raises:
            ConfigError: it is no dictionary of tensors, does not divide, or does not look like
                the sample.
        """
        count = samples_in(batch, "batch")
        if count % self.micro_batch_size:
            raise ConfigError(
                f"a batch of {count} samples does not divide into microbatches of "
                f"{self.micro_batch_size}: give a multiple"
            )
        odd = sorted(set(batch) ^ set(self._looks))
        if odd:
            where = "the sample_batch lacks" if odd[0] in batch else "the batch lacks"
            raise ConfigError(
                f"{where} {odd[0]!r}: a batch must have the entries "
                f"{', '.join(map(repr, self._looks))} of the sample_batch"
            )
        for name, (shape, dtype) in self._looks.items():
            one = batch[name]
            if one.shape[1:] != shape or one.dtype != dtype:
                raise ConfigError(
                    f"batch[{name!r}] has samples of {list(one.shape[1:])} {one.dtype}, the "
                    f"sample_batch has {list(shape)} {dtype}: pad or cast the batch, or make the "
                    "Pipeline with such a sample"
                )
        return count // self.micro_batch_size

    def microbatch(
        self, batch: Mapping[str, torch.Tensor], number: int, device: torch.device,
        names: Iterable[str] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return entries of one microbatch on ``device``, views where they are there."""
        start = number * self.micro_batch_size
        return {
            name: batch[name].narrow(0, start, self.micro_batch_size).to(device, non_blocking=True)
            for name in (batch if names is None else names)
        }


def stretched(batch: Mapping[str, torch.Tensor], least: int) -> dict[str, torch.Tensor]:
    """Return a batch of at least so many samples: itself, or its samples again and again."""
    count = len(next(iter(batch.values())))
    times = -(-least // count)
    if times <= 1:
        return dict(batch)
    return {name: torch.cat([one] * times)[:least] for name, one in batch.items()}


def samples_in(batch: Any, what: str) -> int:
    """Check a batch and return how many samples it holds.

    Args:
        batch: what a user gave.
        what: its name in messages.

    Raises:
        ConfigError: it is no dictionary of tensors of equally many samples.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{what} is a {type(batch).__name__}: give a dictionary of tensors, by the names of "
            "forward's arguments"
        )
    counts: dict[str, int] = {}
    for name, one in batch.items():
        if not isinstance(name, str) or not isinstance(one, torch.Tensor) or one.dim() == 0:
            given = "a scalar" if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise ConfigError(
                f"{what}[{name!r}] is {given}: each entry must be a tensor with an axis of "
                "samples; what is the same for all belongs into arguments={...}"
            )
        counts[name] = one.shape[0]
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise ConfigError(
            f"{what} has {', '.join(f'{n} of {c}' for n, c in counts.items()) or 'no entries'}: "
            "all entries must have the same number of samples, at least 1"
        )
    return next(iter(counts.values()))


def require_whole(least: int, **values: Any) -> None:
    """Refuse settings that are no whole numbers from ``least`` on.

    Raises:
        ConfigError: the first of them.
    """
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} {value!r}: give a whole number from {least} on")
