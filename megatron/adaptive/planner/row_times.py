"""Computes times and memory of pipelines whose microbatches are rows of packed documents.

The time of a stage's action on a slice has a fixed part, a part per token, and a part per pair of
tokens that attend to each other. To separate these parts, the trainer measures slices of two
lengths (``schedule/choose_slice_tokens.py``). The planner also computes times for slices of the
plan's length and for slices of the longest document's length. Then the planner simulates steps like
the trainer.

The memory of a rank follows from the limit on activations (cap). The unit of the limit is the
average row of a step. If the limit is lower than the longest row of the step, it is raised to the
longest row (``memory_caps``). The maximum number of tokens that a rank holds is therefore::

    max over the steps of max(cap, longest row / mean row) x mean row

A rank can always hold the longest document of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.config.sequence_slices import Cut
from megatron.adaptive.planner.layer_costs import known_documents
from megatron.adaptive.planner.order_timing import ScheduleTimes
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.choose_slice_tokens import (
    CostParts,
    Parts,
    Setting,
    SlicedStep,
    fitting_candidates,
)
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Link

_GAIN = 0.005
"""Minimum fraction of the step time that a different activation limit must save to be chosen."""
_ALWAYS = 1 << 40
"""Number of actions to pass to simulations. It is so large that every simulation is compiled.
Compiling saves time because a search simulates many plans."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCosts:
    """Rows of the planner's sample steps, and times of actions on slices of these rows.

    Attributes:
        cuts: For each step, the microbatches of the replica with the most work. They are listed in
            the order in which they run.
        parts: Fixed part, part per token and part per token pair of each action's time, keyed by
            kind of action and stage.
        tokens: Number of tokens per slice in the plan.
        longest: Maximum number of slices of a row.
    """

    cuts: tuple[list[Cut], ...]
    parts: Parts
    tokens: int
    longest: int

    @property
    def num_items(self) -> float:
        """Mean number of tokens per step, in units of the plan's slice length."""
        return (
            sum(cut.ends[-1] for step in self.cuts for cut in step) / self.tokens / len(self.cuts)
        )

    @property
    def slices_per_row(self) -> float:
        """Mean number of tokens per row, in units of the plan's slice length."""
        return self.num_items * len(self.cuts) / sum(map(len, self.cuts))


def row_costs(
    plan: Plan, inputs: PlanInputs, times_of: Callable[[int], tuple[Any, Any]]
) -> RowCosts:
    """Returns the rows of a plan with packed documents, and the costs of their slices.

    Args:
        plan: Plan with ``slice_tokens``.
        inputs: Model, cluster, profile and documents.
        times_of: Function that takes the number of tokens of a slice and returns two arrays ``[3,
            stages]``. The first contains the times of F, B and W in seconds for a slice with the
            mean number of token pairs. The second contains the times per pair.

    Raises:
        ConfigError: A step has too few documents for the replicas.
    """
    documents = known_documents(inputs)
    tokens = plan.rows.tokens
    longest = max(tokens, documents.longest)

    def without_pairs(length: int) -> tuple[Any, Any]:
        seconds, pair_s = times_of(length)
        return seconds - pair_s * documents.mean_pairs(length), pair_s

    base, pair_s = without_pairs(tokens)
    token_s = base / tokens
    if longest > tokens:
        rest = without_pairs(longest)[0] - base
        token_s = np.clip(rest / (longest - tokens), 0.0, token_s)
    fixed_s = base - token_s * tokens
    parts = {
        (kind, stage): CostParts(*(float(part[row, stage]) for part in (fixed_s, token_s, pair_s)))
        for row, kind in enumerate(ActionKind)
        for stage in range(base.shape[1])
    }
    return RowCosts(
        cuts=documents.cuts(plan.rows),
        parts=parts,
        tokens=tokens,
        longest=documents.most_slices(tokens),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPipeline:
    """A pipeline that trains on packed documents, with the times of its actions and messages.

    Attributes:
        plan: Plan with ``slice_tokens``.
        costs: Rows of the planner's sample steps, and costs of actions.
        latency_s: Latency in seconds of the messages that a stage sends after F and after B, ``[2,
            stages]``.
        occupancy_s: Time in seconds during which the message of a slice keeps its link busy, ``[2,
            stages]``.
        weight_pieces: Number of W actions per weight gradient.
    """

    plan: Plan
    costs: RowCosts
    latency_s: Any
    occupancy_s: Any
    weight_pieces: int

    @property
    def placement(self) -> Placement:
        """Assignment of stages to ranks."""
        return catalog.placement_for(self.plan.schedule, self.plan.pp, self.plan.chunks)

    def setting(self, room_tokens: float = math.inf) -> Setting:
        """Returns the pipeline's settings in the form that simulations need.

        Args:
            room_tokens: Number of tokens whose activations fit into the memory of every rank.
        """
        placement = self.placement
        links = {}
        for kind, step in ((0, 1), (1, -1)):
            for stage in range(placement.num_stages):
                if 0 <= stage + step < placement.num_stages:
                    pair = placement.locate(stage)[0], placement.locate(stage + step)[0]
                    links[pair] = Link(
                        latency_s=float(self.latency_s[kind, stage]),
                        occupancy_s=float(self.occupancy_s[kind, stage]),
                    )
        return Setting(
            placements=[placement],
            weight_pieces=self.weight_pieces,
            link=Link(),
            links=links,
            link_tokens=self.costs.tokens,
            room=lambda tokens, placement: room_tokens,
        )

    def steps(self) -> list[SlicedStep]:
        """Returns the sample steps to simulate, with the costs of their slices."""
        setting, placement = self.setting(), self.placement
        return [
            SlicedStep.of(cuts, self.costs.parts, placement, setting) for cuts in self.costs.cuts
        ]

    def candidate(self, cap: float | None) -> catalog.Candidate:
        """Returns the plan's scheduling rule with the activation limit ``cap``.

        If ``cap`` is ``None``, the rule's default limit is used.
        """
        return catalog.Candidate(
            name=self.plan.schedule,
            placement=self.placement,
            weight_pieces=self.weight_pieces,
            cap=cap,
        )

    def simulated(self) -> list[SimResult]:
        """Simulates all sample steps with the plan's activation limit, and returns the results."""
        candidate = self.candidate(self.plan.cap)
        return [step.simulate(candidate, _ALWAYS) for step in self.steps()]

    def times(self) -> ScheduleTimes:
        """Returns the end times and busy times of the ranks, averaged over all sample steps."""
        results = self.simulated()
        ends = [[float(end[-1]) / PS_PER_S for end in result.ends_ps] for result in results]
        return ScheduleTimes(
            end_s=np.mean(ends, axis=0),
            busy_s=np.mean([result.busy_s for result in results], axis=0),
        )

    def best_cap(self, room_tokens: float) -> float | None:
        """Returns the activation limit with the shortest steps among those that fit into memory.

        Args:
            room_tokens: Number of tokens whose activations fit into the memory of every rank. If
                this number is too small for any limit, the result is the default.

        Returns:
            Limit in microbatches, or ``None`` for the default limit.
        """
        steps = self.steps()
        offered = fitting_candidates(
            steps, self.placement, self.setting(room_tokens), self.costs.tokens
        )
        best, least_s = None, math.inf
        for cap in dict.fromkeys(_shown_cap(candidate.cap) for candidate in offered):
            candidate = self.candidate(cap)
            step_s = sum(step.seconds(candidate, _ALWAYS) for step in steps)
            if step_s < least_s * (1 - _GAIN):
                best, least_s = cap, step_s
        return best


def _shown_cap(cap: float | None) -> float | None:
    """Rounds the activation limit ``cap`` down to two decimals, but not below 1.

    ``None`` is returned unchanged.
    """
    return None if cap is None else max(1.0, math.floor(cap * 100) / 100)


def held_slices(plan: Plan, costs: RowCosts) -> float:
    """Returns the maximum number of slices whose activations a rank holds under ``plan``.

    A slice that is shorter than the plan's slice length counts as a fraction.
    """
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    held = float(costs.longest)
    for step in costs.cuts:
        held = max(held, _held_tokens(step, placement, plan.cap) / costs.tokens)
    return held


def _held_tokens(step: Sequence[Cut], placement: Placement, cap: float | None) -> float:
    """Returns the maximum number of tokens whose activations a rank holds in ``step``."""
    rows = [cut.ends[-1] for cut in step]
    mean = sum(rows) / len(rows)
    mean_slices = sum(len(cut.ends) for cut in step) / len(rows)
    limit = default_cap(placement, len(rows), mean_slices) if cap is None else cap
    return min(max(limit * mean, float(max(rows))), float(sum(rows)))
