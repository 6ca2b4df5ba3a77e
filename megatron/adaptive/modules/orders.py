"""The order of work of a rank: its policy and the state that it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.adaptive.config.schedule import SEVERAL_CHUNKS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.memory import default_cap
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.registry import (
    is_rule,
    make_policies,
    placement_for,
    splits_backward,
)
from megatron.adaptive.schedule.state import RankState

__all__ = ["Orders", "choose_placement"]

_PIECES = 4  # of a weight gradient, under a rule
_SPLITTING_RULES = ("adaptive", "hinted")


def choose_placement(schedule: str, num_ranks: int, chunks: int | None) -> Placement:
    """Return where stages live under a schedule.

    Args:
        schedule: its name.
        num_ranks: ranks of the pipeline.
        chunks: stages of each rank, chosen by the schedule where ``None``.

    Raises:
        ConfigError: the schedule has another number.
        ScheduleError: there is no such schedule.
    """
    if schedule == "forward-only":
        raise ConfigError("schedule forward-only trains nothing: eval() uses it; choose another")
    wanted = (2 if schedule in SEVERAL_CHUNKS else 1) if chunks is None else chunks
    placement = placement_for(schedule, num_ranks, wanted)
    if chunks is not None and placement.num_chunks != chunks:
        raise ConfigError(
            f"chunks {chunks} was given with schedule {schedule}, which has "
            f"{placement.num_chunks} per rank: leave chunks out"
        )
    return placement


@dataclass(kw_only=True)
class Orders:
    """Makes policies and states of one rank.

    Attributes:
        schedule: name of a schedule or rule.
        placement: where stages live.
        pp_rank: position of the rank.
        cap: most activations of a rank, in microbatches over all its chunks; ``None`` for the
            default.
        split: backwards leave weight gradients; chosen by the schedule where ``None``.
    """

    schedule: str
    placement: Placement
    pp_rank: int
    cap: float | None = None
    split: bool | None = None
    _policies: dict[tuple[int, bool], Policy] = field(default_factory=dict)

    @property
    def weight_pieces(self) -> int:
        """Parts of each weight gradient, 0 for whole backwards."""
        if is_rule(self.schedule):
            several = self.placement.num_ranks > 1 and self.schedule in _SPLITTING_RULES
            return _PIECES if (several if self.split is None else self.split) else 0
        if self.split is not None and self.split != splits_backward(self.schedule):
            says = "has" if splits_backward(self.schedule) else "has no"
            raise ConfigError(
                f"split_backward={self.split} was given, but schedule {self.schedule} {says} "
                "weight gradients as work of their own: leave it out"
            )
        return int(splits_backward(self.schedule))

    def policy(self, num_microbatches: int, *, forward_only: bool) -> Policy:
        """Return the rule or order of a step.

        Raises:
            ScheduleError: the schedule refuses that number of microbatches.
        """
        key = (num_microbatches, forward_only)
        if key not in self._policies:
            policies = make_policies(
                "forward-only" if forward_only else self.schedule,
                self.placement,
                num_microbatches,
                cap=self._cap_for(num_microbatches),
                weight_pieces=self.weight_pieces,
            )
            self._policies[key] = policies[self.pp_rank]
        return self._policies[key]

    def state(self, num_microbatches: int, *, forward_only: bool) -> RankState:
        """Return a fresh state of a step."""
        return RankState(
            placement=self.placement,
            rank=self.pp_rank,
            num_microbatches=num_microbatches,
            cap=None if forward_only else self._cap_for(num_microbatches),
            forward_only=forward_only,
            weight_pieces=self.weight_pieces,
        )

    def _cap_for(self, num_microbatches: int) -> float:
        return default_cap(self.placement, num_microbatches) if self.cap is None else self.cap
