"""Creates the policy of one rank, and the rank state from which the policy chooses actions.

The training programs for megatron-core's GPT, for plain modules, and for a user's Megatron-LM all
use this module.
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
from megatron.adaptive.schedule.action import SliceCounts, item_count, mean_slices, most_slices_of
from megatron.adaptive.schedule.catalog import ANNEALED, Candidate, is_rule, make_schedule
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.rank_state import RankState, whole_sizes
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.schedule_file import load
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths


class Orders:
    """Creates the policy and the state with which one rank runs each step.

    The policy depends on the number of microbatches, and is reused in later steps with the same
    number.

    Args:
        schedule: Name of a static schedule or run-time scheduling rule. With ``auto``, ``adaptive``
            runs until times have been measured.
        placement: Assignment of pipeline stages to ranks.
        pp_rank: Pipeline rank of this process.
        cap: Limit on the activations that a rank keeps, or ``None`` for the default limit of this
            pipeline. The unit is the activation memory of one microbatch in all chunks of the rank.
        splits: Whether weight gradients are separate actions (W) instead of part of the backward
            pass.
        pieces: Number of W actions into which a weight gradient is split under a run-time rule. The
            rule fills short waits with these actions. Under a static schedule, each weight gradient
            is a single W.
        schedule_file: Path of the schedule file if ``schedule`` is ``file``, otherwise ``None``.
        group_size: Number of consecutive microbatches that a chunk runs under ``interleaved``, or
            ``None`` for the number of ranks of the pipeline.
        widths: Number of data-parallel ranks of each stage if the numbers differ, otherwise
            ``None``.
        auto_candidates: Names of additional schedules that ``auto`` tries.
        slice_shares: Length of each slice into which sequences are cut, as a fraction of the
            sequence. The fractions must add up to 1. By default, sequences are not cut.
        beside: Whether an action of a training step may start while an action of another kind
            exchanges tokens with experts on other ranks.

    Attributes:
        replay: Recorded orders of actions to follow in training steps, or ``None``. The caller must
            call ``Replay.begin`` before each step.

    Raises:
        ConfigError: The schedule file is for a different pipeline or number of slices, or contains
            W actions although ``splits`` is false.
        ScheduleError: The schedule file contains no orders, or the schedule does not exist.
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
        slice_shares: Sequence[float] = (1.0,),
    ) -> None:
        self.placement = placement
        self.pp_rank = pp_rank
        self.widths = widths
        self.beside = beside
        self.auto_candidates = tuple(auto_candidates)
        self._shares = tuple(slice_shares)
        self._counts: SliceCounts = len(self._shares)
        self._from_file: Schedule | None = None
        weight_pieces = 0
        if schedule_file is not None:
            self._from_file = _load_schedule(
                schedule_file, placement, splits=splits, num_slices=len(self._shares)
            )
            weight_pieces = self._from_file.weight_pieces
        elif splits:
            weight_pieces = pieces if is_rule(_simulated_name(schedule)) else 1
        # This candidate has the name that the user selected, possibly ``auto``. If its cap is
        # ``None``, the default limit on activations is used.
        self._chosen = Candidate(
            name=schedule,
            placement=placement,
            weight_pieces=weight_pieces,
            cap=cap,
            num_slices=len(self._shares),
        )
        self._group_size = group_size
        self.replay: Replay | None = None
        self._policies: dict[tuple[int, SliceCounts, bool, int], Policy] = {}

    @property
    def schedule(self) -> str:
        """Returns the name of the schedule or run-time rule in use, which may be ``auto``."""
        return self._chosen.name

    @property
    def num_slices(self) -> int:
        """Returns the number of slices of each microbatch, or 1 for whole microbatches.

        If this number differs between microbatches, the result is the largest number of slices of
        any microbatch in the last step.
        """
        return most_slices_of(self._counts)

    @property
    def _spec(self) -> ScheduleSpec | None:
        """Returns the specification of the schedule, or ``None`` if ``auto`` made the schedule."""
        return None if self.schedule == ANNEALED else schedule_spec(self.schedule)

    @property
    def weight_pieces(self) -> int:
        """Returns the number of W actions per weight gradient, or 0 if there are no W actions."""
        return self._chosen.weight_pieces

    def recut(self, num_slices: SliceCounts) -> None:
        """Changes the number of slices of each microbatch to ``num_slices``, from the next step on.

        All ranks of a pipeline must call this method with the same number before the same step. The
        slices then have equal lengths, unless the caller passes the size of each slice to
        :meth:`state`.

        Raises:
            ScheduleError: The number of slices differs between microbatches, but the schedule
                requires equal numbers.
        """
        self._counts = num_slices
        if not isinstance(num_slices, int):
            return
        if num_slices != len(self._shares):
            self._shares = (1 / num_slices,) * num_slices
        # Update the candidate, because :meth:`use` may have set one with a different number.
        if num_slices != self._chosen.num_slices:
            self._chosen = replace(self._chosen, num_slices=num_slices)

    def policy(
        self, num_microbatches: int, *, forward_only: bool, frozen_stages: int = 0
    ) -> Policy:
        """Returns the policy that chooses this rank's actions in a step.

        Args:
            num_microbatches: Number of microbatches that this rank runs in the step.
            forward_only: Whether the step is an evaluation, which has only forward passes.
            frozen_stages: Number of frozen stages at the start of the model.

        Raises:
            ConfigError: The schedule file, or the record to replay, was made for a different number
                of microbatches.
            ScheduleError: The schedule does not support this number of microbatches.
        """
        if self.replay is not None and not forward_only:
            return self.replay.policy(num_microbatches)
        key = (num_microbatches, self._counts, forward_only, frozen_stages)
        if key not in self._policies:
            if len(self._policies) >= _MOST_POLICIES:
                self._policies.pop(next(iter(self._policies)))
            self._policies[key] = self._make_policy(num_microbatches, forward_only, frozen_stages)
        return self._policies[key]

    def state(
        self,
        num_microbatches: int,
        *,
        forward_only: bool,
        sizes: Sequence[float] | None = None,
        frozen_stages: int = 0,
    ) -> RankState:
        """Returns this rank's state at the start of a step.

        Args:
            num_microbatches: Number of microbatches that this rank runs in the step.
            forward_only: Whether the step is an evaluation, which has only forward passes.
            sizes: Number of token positions in each microbatch or in each slice, or ``None`` if all
                are equal. The size of the activations is proportional to this number. If sizes are
                passed, the limit on activations is relative to the mean size, and is raised to the
                largest size if necessary, so that every microbatch can start.
            frozen_stages: Number of frozen stages at the start of the model.
        """
        cap = None if forward_only else self._cap_for(num_microbatches)
        num_slices = self._counts
        num_items = item_count(num_microbatches, num_slices)
        is_each_slice = sizes is not None and len(sizes) == num_items
        if sizes is not None and cap is not None:
            mean = sum(sizes) / len(sizes)
            sizes = [size / mean for size in sizes]
            counts = num_slices if is_each_slice else 1
            cap = max(cap, *whole_sizes(sizes, counts))
        if is_each_slice or not isinstance(num_slices, int):
            pass
        elif len(set(self._shares)) > 1:
            sizes = [
                size * share * num_slices
                for size in sizes or [1.0] * num_microbatches
                for share in self._shares
            ]
        elif sizes is not None:
            sizes = [size for size in sizes for _ in self._shares]
        skipped = 0
        if frozen_stages:
            skipped = self.candidate(num_microbatches, frozen_stages).skipped_stages
        return RankState(
            placement=self.placement,
            rank=self.pp_rank,
            num_microbatches=num_microbatches,
            cap=cap,
            sizes=sizes,
            forward_only=forward_only,
            weight_pieces=self.weight_pieces,
            beside=self.beside,
            num_slices=num_slices,
            frozen_stages=skipped,
        )

    def use(self, candidate: Candidate) -> None:
        """Switches to the schedule or run-time rule of ``candidate``, starting with the next step.

        All ranks must call this method with the same candidate before the same step.
        """
        self._chosen = candidate
        self._policies.clear()

    def candidate(self, num_microbatches: int, frozen_stages: int = 0) -> Candidate:
        """Returns the schedule and settings to simulate for ``num_microbatches`` per step.

        Args:
            num_microbatches: Number of microbatches per step.
            frozen_stages: Number of frozen stages at the start of the model.
        """
        name = _simulated_name(self.schedule)
        cap = self._cap_for(num_microbatches) if is_rule(name) else None
        return replace(self._chosen, name=name, cap=cap, frozen_stages=frozen_stages)

    def inputs_in_flight(self, num_microbatches: int, *, smallest: float = 1.0) -> int:
        """Returns the maximum number of received inputs that a rank keeps at the same time.

        Each slice of a microbatch is a separate input. The result determines the size of the
        receive buffers, which cannot change later when ``auto`` chooses a schedule. For ``auto``
        without a cap, the result therefore counts the inputs of all microbatches, because no
        schedule keeps more.

        Args:
            num_microbatches: Number of microbatches per step of this rank, or of the whole job if
                stages have different numbers of ranks.
            smallest: Size of the smallest microbatch, relative to the mean size. The limit on
                activations allows the most microbatches if all of them have this size.
        """
        keeps_all = self._spec is not None and (
            self._spec.keeps_all
            or (self._spec.is_own and not self._spec.is_rule)
            or (self._spec.kind == "auto" and self._chosen.cap is None)
        )
        if (widths := self.widths) is not None:
            # Both ends of a channel need buffers of the same size, so take the maximum over all
            # stages.
            counts = [
                widths.own_microbatches(s, num_microbatches) for s in range(widths.num_stages)
            ]
            if keeps_all:
                return max(counts)
            caps = [
                unequal_widths.default_cap(widths, stage, count)
                if self._chosen.cap is None
                else self._chosen.cap
                for stage, count in enumerate(counts)
            ]
            return max(min(count, math.ceil(cap)) for count, cap in zip(counts, caps, strict=True))
        everything = num_microbatches * self.placement.num_chunks
        if not keeps_all:
            most = math.ceil(self._cap_for(num_microbatches) * self.placement.num_chunks / smallest)
            everything = min(everything, most)
        return everything * len(self._shares)

    def _cap_for(self, num_microbatches: int) -> float:
        if self._chosen.cap is not None:
            return self._chosen.cap
        if self.widths is not None:
            return unequal_widths.default_cap(self.widths, self.pp_rank, num_microbatches)
        return default_cap(self.placement, num_microbatches, mean_slices(self._counts))

    def _make_policy(self, num_microbatches: int, forward_only: bool, frozen_stages: int) -> Policy:
        takes_size = self._spec is not None and self._spec.takes_group_size
        if takes_size and self._group_size and not forward_only:
            schedule = make_schedule(
                self.schedule, self.placement, num_microbatches, group_size=self._group_size
            )
            return Follow(schedule.orders[self.pp_rank], schedule.name)
        if self._from_file is not None and not forward_only:
            schedule = self._from_file
            if schedule.num_microbatches != num_microbatches:
                raise ConfigError(
                    f"schedule {schedule.name} is for {schedule.num_microbatches} microbatches, "
                    f"but this step has {num_microbatches}; set --global-batch-size to match"
                )
            order = schedule.orders[self.pp_rank]
            return Follow(order, schedule.name, num_slices=schedule.num_slices)
        name = "forward-only" if forward_only else _simulated_name(self.schedule)
        if self.widths is not None:
            return unequal_widths.make_policy(name, self.widths, self.pp_rank, num_microbatches)
        cap = self._cap_for(num_microbatches)
        chosen = replace(self._chosen, name=name, cap=cap, frozen_stages=frozen_stages)
        unequal = None if isinstance(self._counts, int) else self._counts
        return chosen.policies(num_microbatches, unequal)[self.pp_rank]


_MOST_POLICIES = 64
"""Maximum number of cached policies.

Without this limit, memory usage would grow if every step had different numbers of slices.
"""


def _load_schedule(path: str, placement: Placement, *, splits: bool, num_slices: int) -> Schedule:
    """Loads the schedule file ``path``, and checks that it was made for this pipeline.

    ``placement``, ``splits`` (whether there are W actions) and ``num_slices`` describe this
    pipeline.
    """
    schedule = load(Path(path))
    its = schedule.placement
    if its != placement:
        raise ConfigError(
            f"--schedule-file {path} is for {its.num_ranks} pipeline ranks with {its.num_chunks} "
            f"chunks each ({its.kind} placement), but this run has {placement.num_ranks} ranks "
            f"with {placement.num_chunks} chunks each ({placement.kind} placement); set "
            "--pipeline-model-parallel-size, --num-virtual-stages-per-pipeline-rank and "
            "--pipeline-placement to match"
        )
    if schedule.num_slices != num_slices:
        raise ConfigError(
            f"--schedule-file {path} has {_slices(schedule.num_slices)}, but this run has "
            f"{_slices(num_slices)}; set --sequence-slices {schedule.num_slices} to match"
        )
    if schedule.weight_pieces and not splits:
        raise ConfigError(
            f"--schedule-file {path} has weight gradients as separate actions, but this run "
            "computes them in the backward pass; set --split-backward True"
        )
    return schedule


def _slices(num_slices: int) -> str:
    return "whole microbatches" if num_slices == 1 else f"{num_slices} slices per microbatch"


def _simulated_name(schedule: str) -> str:
    """Returns the name of the schedule to use until times have been measured.

    For ``auto``, this is ``adaptive``. All other names are returned unchanged.
    """
    return "adaptive" if schedule == "auto" else schedule
