"""Implements ``--slice-tokens auto``: measures slices of two lengths and chooses by simulation.

Steps 2 to 4 are measured with the first slice length, and step 1 is warm-up. The same number of
steps is measured with the next longer slice length. Then rank 0 simulates the documents of the
measured steps with each length (``schedule/choose_slice_tokens.py``), while all other ranks wait.
Losses and gradients depend neither on the slice length nor on the order of actions. If
``--slice-tokens`` is a number, only steps 2 to 4 are measured, and only this length is simulated.

The training loop rebuilds the run with the chosen length and placement.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.gpt.setup import Run, payload_shape
from megatron.adaptive.profiling.pipeline_times import Sample, most_of, profile_of
from megatron.adaptive.rebalance.auto_schedule import FIRST, LAST, measure_neighbours, memory_of
from megatron.adaptive.rebalance.microbatch_dealing import rows_with_tokens
from megatron.adaptive.rebalance.time_limit import (
    LIMIT_S,
    SIMULATED_OF_LIMIT,
    limit_of_search,
    result_within,
)
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.choose_slice_tokens import (
    Setting,
    Timed,
    TokensChoice,
    choose_tokens,
)
from megatron.adaptive.schedule.choose_slices import memory_factor
from megatron.adaptive.schedule.stage_placement import Placement


@dataclass(kw_only=True)
class LengthTrial:
    """Measurements of one rank with slices of one length.

    Attributes:
        tokens: Number of tokens per slice.
        sample: Memory and links of this rank. The times are in ``actions``.
        actions: Measured actions, keyed by kind and pipeline stage.
        row_tokens: Mean number of tokens of this rank's microbatches in the last measured step.
        lengths: Number of tokens of each document in each measured step, over all replicas.
    """

    tokens: int
    sample: Sample
    actions: dict[tuple[ActionKind, int], list[Timed]] = field(default_factory=dict)
    row_tokens: float = 0.0
    lengths: list[tuple[int, ...]] = field(default_factory=list)


class LengthTuner:
    """Measures the first steps, and chooses the slice length. Every rank has a tuner.

    Args:
        run: Run to measure.
        before: Measurements of all ranks with a different slice length. ``None`` if this tuner
            measures the first length, or if the user sets the length.
        say: Function that writes a line to the log. It is called on all ranks.
    """

    def __init__(
        self, run: Run, before: Sequence[LengthTrial] | None, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._before = before
        self._say = say
        self._steps = 0
        tokens = run.job.config.slice_tokens
        assert tokens is not None  # The trainer creates this object only with --slice-tokens.
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self._trial = LengthTrial(tokens=tokens, sample=Sample(pp_rank=pp_rank))
        self.trials: list[LengthTrial] = []

    def after_step(self, times: RankTimes, lengths: Sequence[int]) -> TokensChoice | None:
        """Adds the times of a training step, and decides after the last measured step.

        The call after the last measured step is collective.

        Args:
            times: Durations of this rank's actions in the step.
            lengths: Number of tokens of each document in the step, over all replicas.

        Returns:
            Decision after the last measured step, equal on all ranks, or ``None`` after other
            steps. Unless the user sets the slice length, the first decision is to measure another
            slice length. The attribute ``trials`` then contains the measurements of all ranks. Pass
            them to the tuner for the other length.
        """
        self._steps += 1
        if not FIRST <= self._steps <= LAST:
            return None
        self._add(times, lengths)
        if self._steps < LAST:
            return None
        run = self._run
        job, engine = run.job, run.forward_backward
        assert isinstance(engine, ForwardBackward)
        sample = self._trial.sample
        sample.free_bytes, sample.kept_bytes, sample.held_bytes = memory_of(job, engine, run.chunks)
        sample.links = measure_neighbours(
            job,
            engine.orders.placement,
            dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
            None if run.wiring is None else run.wiring.transport,
            payload_shape=payload_shape(job.config),
            payload_dtype=run.core.pipeline_dtype,
            timeout_s=job.config.schedule.pipeline_timeout_s,
        )
        self.trials = job.gather(self._trial)
        if self._before is None and job.config.tokens_to_choose:
            return job.on_first(self._next_length)
        limit = f"{self._limit_s:g} s"
        compared = "lengths" if job.config.tokens_to_choose else "schedules"
        self._say(f"auto simulates {compared} for at most {limit}; all ranks wait for rank 0")
        return job.on_first(self._choose_in_time)

    def _add(self, times: RankTimes, lengths: Sequence[int]) -> None:
        slices, placement = self._run.slices, self._run.placement
        assert slices is not None
        totals: dict[tuple[ActionKind, int, int], int] = defaultdict(int)
        # The weight gradient (W) of a microbatch may be divided into several actions, so add their
        # times.
        for action, nanoseconds in times.actions:
            totals[action.kind, action.chunk, action.microbatch] += nanoseconds
        trial = self._trial
        for (kind, chunk, item), nanoseconds in totals.items():
            stage = placement.stage_of(trial.sample.pp_rank, chunk)
            timed = Timed(*slices.work(item), nanoseconds / 1e9)
            trial.actions.setdefault((kind, stage), []).append(timed)
        trial.lengths.append(tuple(lengths))
        sizes = slices.sizes or (0.0,)
        trial.row_tokens = sum(sizes) / max(1, slices.num_microbatches)

    def _next_length(self) -> TokensChoice:
        lengths = self._run.job.config.tokens_to_choose
        present = self._trial.tokens
        index = lengths.index(present)
        after = lengths[index - 1 if index else 1]
        text = f"auto has measured slices of {present} tokens, and measures {after} next"
        return TokensChoice(tokens=after, candidate=None, text=text)

    def _choose_in_time(self) -> TokensChoice:
        present = self._trial.tokens
        limit = f"{self._limit_s:g} s"
        busy = f"auto keeps slices of {present} tokens: no step was simulated within {limit}"
        engine = self._run.forward_backward
        assert isinstance(engine, ForwardBackward)
        stay = TokensChoice(
            tokens=present,
            candidate=replace(engine.orders.candidate(1), cap=self._cap),
            text=f"{busy}, because the processors are busy",
        )
        try:
            return result_within(self._limit_s, self._choose, stay)
        except ScheduleError as error:
            return replace(stay, text=f"auto keeps slices of {present} tokens: {error}")

    @property
    def _limit_s(self) -> float:
        return limit_of_search(LIMIT_S, self._run.job.timeout)

    @property
    def _cap(self) -> float | None:
        return self._run.job.config.schedule.activation_cap

    def _choose(self) -> TokensChoice:
        config = self._run.job.config
        engine = self._run.forward_backward
        assert isinstance(engine, ForwardBackward)
        before = self._before or []
        trials = [*before, *self.trials]
        lanes: dict[tuple[ActionKind, int], list[Timed]] = defaultdict(list)
        for trial in trials:
            for lane, rows in trial.actions.items():
                lanes[lane] += rows
        present = engine.orders.placement
        profile = profile_of([trial.sample for trial in self.trials], present)
        latest = self._trial
        setting = Setting(
            placements=self._placements(present),
            weight_pieces=engine.orders.weight_pieces,
            link=profile.link,
            links=profile.links,
            link_tokens=latest.tokens,
            room=lambda tokens, placement: self._room(present, tokens, placement),
            cap=self._cap,
        )
        steps = [lengths for trial in (*before[:1], latest) for lengths in trial.lengths]
        others = [tokens for tokens in config.tokens_to_choose if tokens != latest.tokens]
        return choose_tokens(
            [latest.tokens, *others],
            lanes,
            lambda tokens: [rows_with_tokens(config, tokens, lengths) for lengths in steps],
            setting,
            time.monotonic() + SIMULATED_OF_LIMIT * self._limit_s,
        )

    def _placements(self, present: Placement) -> list[Placement]:
        if self._run.job.config.schedule.pipeline_placement is None and present.num_chunks == 2:
            return [present, replace(present, kind="loop" if present.kind == "v" else "v")]
        return [present]

    def _room(self, present: Placement, tokens: int, placement: Placement) -> float:
        """Returns the number of tokens whose activations fit into memory on all ranks.

        The memory is estimated for slices of ``tokens`` tokens and the stages in ``placement``.
        ``present`` is the current placement.
        """
        longest = self._run.job.config.model.seq_length
        counts = [-(-longest // length) for length in (tokens, self._trial.tokens)]
        most = most_of([trial.sample for trial in self.trials], present, placement)
        most /= memory_factor(*counts)
        row_tokens = max(trial.row_tokens for trial in self.trials)
        if placement == present and tokens <= self._trial.tokens:
            # The current layout has room for the longest row of documents. This layout has the same
            # placement and no larger slices, so it does not need more memory for this row.
            return max(most * row_tokens, float(longest + self._trial.tokens))
        return most * row_tokens
