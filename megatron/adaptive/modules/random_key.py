"""Seeds torch's random generators before each recorded call that draws random numbers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from megatron.adaptive.accelerator import default_generator


class RandomKey:
    """Seeds random generators from the seed of the training run, the step, microbatch and call.

    Therefore, random numbers do not depend on the schedule, the partition, or the distribution of
    microbatches over replicas. A call that runs again draws the same numbers. The generator of the
    CPU is always seeded, because a model on a GPU may also draw numbers on the CPU.

    Args:
        seed: Seed of the training run.
        device: Device whose random generator is seeded.

    Attributes:
        seed: Seed of the training run. A new value takes effect at the next call of :meth:`apply`.
        step: Index of the training step.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self._generators = [default_generator(device)]
        if self._generators[0] is not torch.default_generator:
            self._generators.append(torch.default_generator)
        self.step = 0
        # Before begin() is called, apply() uses the index of the microbatch in this replica.
        self._numbers: Sequence[int] = range(1 << 31)

    def begin(self, step: int, numbers: Sequence[int]) -> None:
        """Sets the training step, and the indices of this replica's microbatches.

        Args:
            step: Index of the training step.
            numbers: Index of each microbatch of this replica among the microbatches of all
                replicas, in execution order.
        """
        self.step = step
        self._numbers = numbers

    def apply(self, microbatch: int, call: int) -> None:
        """Seeds the random generators before a call. ``call`` is the index of the call."""
        source = struct.pack("<qqqq", self.seed, self.step, self._numbers[microbatch], call)
        digest = hashlib.blake2b(source, digest_size=8).digest()
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest, "little"))

    def states(self) -> list[torch.Tensor]:
        """Returns the states of the random generators, to be passed to :meth:`restore`."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Restores the random generators to ``states``."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
