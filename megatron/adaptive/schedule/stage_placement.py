"""Assigns pipeline stages to ranks.

A placement maps stages, numbered in pipeline order, to (rank, chunk) pairs and back. Other modules
determine how many layers a stage has, and in which order a rank runs its actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import ActionKind

PlacementKind = Literal["loop", "v"]
_KINDS = ("loop", "v")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Maps the stages of a pipeline to its ranks.

    Every rank has the same number of chunks.

    ::

        4 ranks, 2 chunks        loop                  v
        rank                 0   1   2   3         0   1   2   3
        chunk 0, stage       0   1   2   3         0   1   2   3
        chunk 1, stage       4   5   6   7         7   6   5   4

    With ``loop``, each chunk index starts again at rank 0, as in megatron-core. With ``v``, the
    direction changes after each chunk index, so the first and the last stage share rank 0 if the
    number of chunks is even. In both placements, a later chunk of a rank is a later stage. The
    memory rule of ``memory_caps`` relies on this.

    Attributes:
        num_ranks: Number of pipeline-parallel ranks, at least 1.
        num_chunks: Number of chunks (virtual stages) per rank, at least 1.
        kind: ``loop`` or ``v``, as in the drawing.

    Raises:
        ScheduleError: A number is less than 1, or the kind is unknown.
    """

    num_ranks: int
    num_chunks: int
    kind: PlacementKind = "loop"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ScheduleError(
                f"a placement needs at least 1 rank and 1 chunk per rank, got {self.num_ranks} "
                f"ranks with {self.num_chunks} chunks each"
            )
        if self.kind not in _KINDS:
            raise ScheduleError(f"placement must be one of {', '.join(_KINDS)}, got {self.kind!r}")

    @property
    def num_stages(self) -> int:
        """Returns the number of stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Returns the pipeline stage that is chunk ``chunk`` of rank ``rank``.

        Raises:
            ScheduleError: The rank or the chunk is out of range.
        """
        if not (0 <= rank < self.num_ranks and 0 <= chunk < self.num_chunks):
            raise ScheduleError(
                f"rank {rank}, chunk {chunk} is outside a placement of {self.num_ranks} ranks"
                f" with {self.num_chunks} chunks each; both are numbered from 0"
            )
        turned = self.kind == "v" and chunk % 2 == 1
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if turned else rank)

    def locate(self, stage: int) -> tuple[int, int]:
        """Returns the ``(rank, chunk)`` to which ``stage`` is assigned.

        Raises:
            ScheduleError: The stage is out of range.
        """
        if not 0 <= stage < self.num_stages:
            raise ScheduleError(
                f"stage {stage} does not exist: the pipeline has {self.num_stages} stages,"
                " which are numbered from 0"
            )
        chunk, offset = divmod(stage, self.num_ranks)
        turned = self.kind == "v" and chunk % 2 == 1
        return (self.num_ranks - 1 - offset if turned else offset), chunk

    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """Returns all pairs of ranks that exchange messages, each with the lower rank first."""
        pairs = set()
        for stage in range(self.num_stages - 1):
            sender = self.locate(stage)[0]
            receiver = self.locate(stage + 1)[0]
            if sender != receiver:
                pairs.add((min(sender, receiver), max(sender, receiver)))
        return tuple(sorted(pairs))

    def neighbours_of(self, rank: int) -> tuple[int, ...]:
        """Returns the sorted ranks with which ``rank`` exchanges messages."""
        return tuple(sorted(a + b - rank for a, b in self.neighbours() if rank in (a, b)))

    def target_of(self, kind: ActionKind, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns the rank and chunk that need the result of an action.

        ``kind`` is the kind of the action, which belongs to ``chunk`` of ``rank``. The result of an
        F is the input of the F on the next stage, and the result of a B is the input of the B on
        the previous stage. Returns ``None`` for an F of the last stage, a B of the first stage, and
        every W, because no other stage needs these results.
        """
        return self._beside(kind, rank, chunk, 1 if kind is ActionKind.F else -1)

    def source_of(self, kind: ActionKind, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns the rank and chunk whose result is the input of an action of ``kind``.

        Returns ``None`` if the input does not come from another stage.
        """
        return self._beside(kind, rank, chunk, -1 if kind is ActionKind.F else 1)

    def _beside(self, kind: ActionKind, rank: int, chunk: int, way: int) -> tuple[int, int] | None:
        stage = self.stage_of(rank, chunk) + way
        exists = kind is not ActionKind.W and 0 <= stage < self.num_stages
        return self.locate(stage) if exists else None


def frozen_stages_of(partition: Sequence[int], frozen_layers: int) -> int:
    """Returns the number of leading stages that contain only frozen layers.

    Args:
        partition: Number of layers of each stage.
        frozen_layers: Number of leading layers of the model through which no gradient flows.
    """
    stages = 0
    layers = 0
    for size in partition[:-1]:
        layers += size
        if layers > frozen_layers:
            break
        stages += 1
    return stages if frozen_layers else 0


def check_frozen_stages(frozen_stages: int, placement: Placement) -> None:
    """Checks that the first ``frozen_stages`` stages of ``placement`` can be frozen.

    No gradient flows through frozen stages, so they run no backward passes.

    Raises:
        ScheduleError: The number is negative, or no stage with a backward pass is left.
    """
    if not 0 <= frozen_stages < placement.num_stages:
        raise ScheduleError(
            f"frozen_stages must be from 0 to {placement.num_stages - 1}, because the last stage "
            f"computes the loss, got {frozen_stages}"
        )
