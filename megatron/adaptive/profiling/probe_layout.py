"""Lists the ranks, links and groups that a probe measures, and divides them into batches.

A measurement is identified by a tuple of global ranks: one rank for a device, two ranks for a link,
or all members of a group. Ranks are numbered as in the trainer::

    rank = tensor + TP * (context + CP * (data + DP * stage))

Measurements are made in batches. The measurements of a batch have no rank in common. A batch uses
at most as many ranks of a machine as the machine has processors, so that measurements do not slow
each other down::

    4 ranks on 2 processors     links  0-1, 1-2, 2-3      batches  [0-1]  [1-2]  [2-3]
    4 ranks on 4 processors     links  0-1, 1-2, 2-3      batches  [0-1, 2-3]  [1-2]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.errors import ConfigError

Ranks = tuple[int, ...]
"""Global ranks of a measured device, link or group."""

TENSOR = "tensor-parallel"
CONTEXT = "context-parallel"
EXPERT = "expert-parallel"
DATA = "data-parallel"


@dataclass(frozen=True, kw_only=True)
class ProbeLayout:
    """Parallel sizes of the job to probe.

    Attributes:
        world_size: Number of ranks.
        tensor: Number of ranks that share each layer's matrices (tensor parallelism).
        context: Number of ranks that share each sequence (context parallelism).
        expert: Number of ranks that share the experts of each layer (expert parallelism).
        pipeline: Number of ranks that share the layers (pipeline parallelism).
        chunks: Number of model chunks per pipeline rank.

    Raises:
        ConfigError: The number of ranks is not divisible by the sizes.
    """

    world_size: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        width = self.tensor * self.context * self.pipeline
        if self.world_size % width:
            raise ConfigError(
                f"the number of ranks must be a multiple of tensor {self.tensor} x context "
                f"{self.context} x pipeline {self.pipeline} = {width}, got {self.world_size} "
                "ranks; use the parallel sizes and the number of processes of the training job"
            )
        if self.context * self.data % self.expert:
            raise ConfigError(
                "--expert-model-parallel-size must divide the product of the context-parallel and "
                f"data-parallel sizes, which is {self.context * self.data}, got {self.expert}"
            )

    @property
    def data(self) -> int:
        """Returns the number of data-parallel replicas."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    def links(self) -> list[Ranks]:
        """Returns the pairs of ranks that send each other activations and gradients."""
        width = self.world_size // self.pipeline
        pairs: list[Ranks] = [(rank, rank + width) for rank in range(self.world_size - width)]
        # If ranks have several chunks, the last rank also sends messages to the first rank.
        if self.chunks > 1 and self.pipeline > 2:
            pairs += [(rank, self.world_size - width + rank) for rank in range(width)]
        return pairs

    def groups(self) -> dict[str, list[Ranks]]:
        """Returns the groups of several ranks in which a job runs collectives, keyed by kind."""
        sizes = {TENSOR: self.tensor, CONTEXT: self.context, DATA: self.data}
        groups: dict[str, list[Ranks]] = {}
        stride = 1
        for kind, size in sizes.items():
            groups[kind] = _groups(self.world_size, stride, size)
            stride *= size
        groups[EXPERT] = _groups(self.world_size, self.tensor, self.expert)
        return {kind: listed for kind, listed in groups.items() if len(listed[0]) > 1}


def _groups(world_size: int, stride: int, size: int) -> list[Ranks]:
    """Divides ``world_size`` ranks into groups of ``size`` ranks that are ``stride`` apart."""
    block = stride * size
    return [
        tuple(range(first + offset, first + block, stride))
        for first in range(0, world_size, block)
        for offset in range(stride)
    ]


def batches(
    subjects: Sequence[Ranks], machines: Sequence[str], most_busy: Sequence[int]
) -> list[list[Ranks]]:
    """Divides ``subjects`` into batches of measurements that can be made at the same time.

    Args:
        subjects: Global ranks of each measurement.
        machines: ID of each rank's machine.
        most_busy: Maximum number of ranks that may measure at the same time, for the machine of
            each rank. A measurement with more ranks is made alone on that machine.

    Returns:
        All elements of ``subjects``, divided into batches. Within a batch, they keep their order.
    """
    left = list(subjects)
    done: list[list[Ranks]] = []
    while left:
        batch: list[Ranks] = []
        taken: set[int] = set()
        busy: Counter[str] = Counter()
        for subject in left:
            needs = Counter(machines[rank] for rank in subject)
            has_room = all(
                not busy[machines[rank]]
                or busy[machines[rank]] + needs[machines[rank]] <= most_busy[rank]
                for rank in subject
            )
            if has_room and taken.isdisjoint(subject):
                batch.append(subject)
                taken.update(subject)
                busy.update(needs)
        done.append(batch)
        chosen = set(batch)
        left = [subject for subject in left if subject not in chosen]
    return done
