"""Chooses the order of work of one rank: its policy, the state that it looks at, its cap.

Every program on the engine takes these from here: megatron-core's GPT, plain modules, and a user's
Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.adaptive.config.schedule_specs import ScheduleSpec, schedule_spec
from megatron.adaptive.engine.schedule_record import Replay
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule import unequal_widths
from megatron.adaptive.schedule.catalog import ANNEALED, Candidate, is_rule, make_schedule
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.schedule_file import load
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths


class Orders:
    """Makes policies and states of one rank, one policy per number of microbatches.

    Args:
        schedule: name of a schedule or rule; ``auto`` is ``adaptive`` until something is measured.
        placement: where stages live.
        pp_rank: position of this rank in the pipeline.
        cap: most activations a rank may hold, in whole-rank microbatches; chosen from the shape of
            the pipeline where ``None``.
        splits: backwards leave weight gradients.
        pieces: parts of each of them under a rule, which fills short waits with them; a fixed order
            does each in one go.
        schedule_file: the order to follow where ``schedule`` is ``file``.
        group_size: microbatches that a chunk runs in a row under ``interleaved``; the size of the
            pipeline where ``None``.
        widths: of the stages where they are unequal.
        auto_candidates: Names of further schedules that ``auto`` tries.
        beside: in training steps an action may start while another, of another kind, trades tokens.

    Attributes:
        replay: recorded orders to take in training steps; the caller says which step begins.

    Raises:
        ConfigError: the given order is for another pipeline, or needs split backwards.
        ScheduleError: the file has no order, or there is no such schedule.
    """

    def __init__(
        self,
        *,
        schedule: str,
        placement: Placement,
        pp_rank: int,
        cap: float | None = None,
        splits: bool = False,
        pieces: int = 1,
        schedule_file: str | None = None,
        group_size: int | None = None,
        widths: Widths | None = None,
        beside: bool = False,
        auto_candidates: Sequence[str] = (),
    ) -> None:
        self.placement = placement
        self.pp_rank = pp_rank
        self.widths = widths
        self.beside = beside
        self.auto_candidates = tuple(auto_candidates)
        self._given: Schedule | None = None
        weight_pieces = 0
        if schedule_file is not None:
            self._given = _given_schedule(schedule_file, placement, splits=splits)
            weight_pieces = self._given.weight_pieces
        elif splits:
            weight_pieces = pieces if is_rule(_simulated_name(schedule)) else 1
        # Under the name that was asked for; without a cap the default one is meant.
        self._chosen = Candidate(
            name=schedule, placement=placement, weight_pieces=weight_pieces, cap=cap
        )
        self._group_size = group_size
        self.replay: Replay | None = None
        self._policies: dict[tuple[int, bool], Policy] = {}

    @property
    def schedule(self) -> str:
        """Name of the schedule or rule."""
        return self._chosen.name

    @property
    def _spec(self) -> ScheduleSpec | None:
        """Description of the schedule, ``None`` for an order that ``auto`` made."""
        return None if self.schedule == ANNEALED else schedule_spec(self.schedule)

    @property
    def weight_pieces(self) -> int:
        """Parts of each weight gradient, 0 for whole backwards."""
        return self._chosen.weight_pieces

    def policy(self, num_microbatches: int, *, forward_only: bool) -> Policy:
        """Returns the rule or order of a step.

        Raises:
            ConfigError: the given or recorded order has another number of microbatches.
            ScheduleError: the schedule refuses that number.
        """
        if self.replay is not None and not forward_only:
            return self.replay.policy(num_microbatches)
        key = (num_microbatches, forward_only)
        if key not in self._policies:
            self._policies[key] = self._make_policy(num_microbatches, forward_only)
        return self._policies[key]

    def state(
        self, num_microbatches: int, *, forward_only: bool, sizes: Sequence[float] | None = None
    ) -> RankState:
        """Returns a fresh state of a step.

        Args:
            num_microbatches: of this rank.
            forward_only: evaluation.
            sizes: positions of each microbatch, which their activations are in proportion to;
                ``None`` where all are alike. The cap then counts these: so many times their mean,
                and never less than the largest, which else could not start.
        """
        cap = None if forward_only else self._cap_for(num_microbatches)
        if sizes is not None and cap is not None:
            mean = sum(sizes) / len(sizes)
            sizes = [size / mean for size in sizes]
            cap = max(cap, *sizes)
        return RankState(
            placement=self.placement,
            rank=self.pp_rank,
            num_microbatches=num_microbatches,
            cap=cap,
            sizes=sizes,
            forward_only=forward_only,
            weight_pieces=self.weight_pieces,
            beside=self.beside,
        )

    def use(self, candidate: Candidate) -> None:
        """Takes another schedule or rule from the next step on; all ranks must do so alike."""
        self._chosen = candidate
        self._policies.clear()

    def candidate(self, num_microbatches: int) -> Candidate:
        """Returns what runs in steps of so many microbatches, in the words of the simulator."""
        name = _simulated_name(self.schedule)
        cap = self._cap_for(num_microbatches) if is_rule(name) else None
        return replace(self._chosen, name=name, cap=cap)

    def inputs_in_flight(self, num_microbatches: int, *, smallest: float = 1.0) -> int:
        """Returns the most inputs that a rank keeps at a time, for the size of its channels.

        Args:
            num_microbatches: microbatches of a step; of the whole job where stages are unequal.
            smallest: size of those that fill the cap with the most inputs, in mean ones.
        """
        keeps_all = self._spec is not None and (
            self._spec.keeps_all or (self._spec.is_own and not self._spec.is_rule)
        )
        if (widths := self.widths) is not None:
            # Channels are alike on both sides: the most that any rank keeps.
            own = [widths.own_microbatches(s, num_microbatches) for s in range(widths.num_stages)]
            if keeps_all:
                return max(own)
            caps = [
                unequal_widths.default_cap(widths, stage, count)
                if self._chosen.cap is None
                else self._chosen.cap
                for stage, count in enumerate(own)
            ]
            return max(min(count, math.ceil(cap)) for count, cap in zip(own, caps, strict=True))
        everything = num_microbatches * self.placement.num_chunks
        if keeps_all:
            return everything
        return min(
            everything,
            math.ceil(self._cap_for(num_microbatches) * self.placement.num_chunks / smallest),
        )

    def _cap_for(self, num_microbatches: int) -> float:
        if self._chosen.cap is not None:
            return self._chosen.cap
        if self.widths is not None:
            return unequal_widths.default_cap(self.widths, self.pp_rank, num_microbatches)
        return default_cap(self.placement, num_microbatches)

    def _make_policy(self, num_microbatches: int, forward_only: bool) -> Policy:
        takes_size = self._spec is not None and self._spec.takes_group_size
        if takes_size and self._group_size and not forward_only:
            schedule = make_schedule(
                self.schedule, self.placement, num_microbatches, group_size=self._group_size
            )
            return Follow(schedule.orders[self.pp_rank], schedule.name)
        if self._given is not None and not forward_only:
            given = self._given
            if given.num_microbatches != num_microbatches:
                raise ConfigError(
                    f"schedule {given.name} is one of {given.num_microbatches} microbatches and "
                    f"this step has {num_microbatches}; set --global-batch-size to match it"
                )
            return Follow(given.orders[self.pp_rank], given.name)
        name = "forward-only" if forward_only else _simulated_name(self.schedule)
        if self.widths is not None:
            return unequal_widths.make_policy(name, self.widths, self.pp_rank, num_microbatches)
        cap = self._cap_for(num_microbatches)
        return replace(self._chosen, name=name, cap=cap).policies(num_microbatches)[self.pp_rank]


def _given_schedule(path: str, placement: Placement, *, splits: bool) -> Schedule:
    """Reads the order of ``--schedule-file`` and holds it against the run."""
    given = load(Path(path))
    its = given.placement
    if its != placement:
        raise ConfigError(
            f"--schedule-file {path} is for {its.num_ranks} pipeline ranks with {its.num_chunks} "
            f"chunks in a {its.kind}, this run has {placement.num_ranks} with "
            f"{placement.num_chunks} in a {placement.kind}: set --pipeline-model-parallel-size, "
            "--num-virtual-stages-per-pipeline-rank and --pipeline-placement to match"
        )
    if given.weight_pieces and not splits:
        raise ConfigError(
            f"--schedule-file {path} has weight gradients as work of their own, which this run's "
            "layers do within the backward: give --split-backward True"
        )
    return given


def _simulated_name(schedule: str) -> str:
    """Returns what runs under a schedule's name as long as nothing is measured."""
    return "adaptive" if schedule == "auto" else schedule
