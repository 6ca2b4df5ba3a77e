"""Generates the traces of synthetic runs of any size with known faults.

Each step is simulated (``schedule.simulate``) with new random durations, so spans, waits and
messages are consistent, as in a real job. Replicas synchronize when they reduce gradients. Each
host has a separate clock, and measures its offset from the clock of the first host. A fault changes
the work of a rank, the latency of a link, or the loading of data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_kernel import F
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Link, StageTimes, Workload, draw
from megatron.adaptive.trace.span_columns import KIND, Ints
from megatron.adaptive.trace.trace_format import (
    COLUMNS,
    ClockSamples,
    IterationStart,
    TraceHeader,
    block_text,
    header_line,
    samples_line,
    trace_file_name,
)
from tests.support.synthetic_step import step_rows

FaultKind = Literal["slow-rank", "slow-link", "spikes", "slow-data"]
FAULTS: tuple[FaultKind, ...] = ("slow-rank", "slow-link", "spikes", "slow-data")

COMPILE_FROM = 200_000
"""Number of actions above which the compiled simulator is used. It is faster, but starts slowly."""

BOOT_UNIX_NS = 1_700_000_000_000_000_000
START_NS = 5_000_000_000_000
SAMPLES_PER_BURST = 8
REDUCE_NS = 2_000_000

_PEER = COLUMNS.index("peer")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of a synthetic run.

    Attributes:
        kind: Kind of the fault. With ``slow-rank``, all actions of a rank take ``factor`` times as
            long. With ``slow-link``, messages from a rank to another rank take ``seconds`` longer.
            With ``spikes``, each action of a rank takes ``factor`` times as long with the given
            probability. With ``slow-data``, loading a microbatch on the first stage of the rank's
            pipeline takes ``seconds`` longer.
        rank: Global rank that has the fault.
        to: Global rank that receives on a slow link.
        factor: Factor by which durations are multiplied, at least 1.
        seconds: Non-negative time in seconds that is added to a duration.
        probability: Probability that an action is slow if the kind is ``spikes``.
        first: First iteration that has the fault.
        last: Last iteration that has the fault. If it is ``None``, the fault lasts until the end.

    Raises:
        TraceError: An attribute is out of range.
    """

    kind: FaultKind
    rank: int
    to: int = -1
    factor: float = 1.0
    seconds: float = 0.0
    probability: float = 0.02
    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        sound = self.factor >= 1 and self.seconds >= 0 and 0 <= self.probability <= 1
        if self.kind not in FAULTS or not sound:
            raise TraceError(
                f"{self} is invalid: kind must be one of {', '.join(FAULTS)}, factor at least 1, "
                "seconds non-negative and probability between 0 and 1"
            )

    def holds(self, iteration: int) -> bool:
        """Returns whether ``iteration`` has the fault."""
        return self.first <= iteration and (self.last is None or iteration <= self.last)


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """Settings of a synthetic run.

    Attributes:
        num_ranks: Number of pipeline ranks.
        replicas: Number of data-parallel replicas.
        num_chunks: Number of chunks per rank, unless the schedule determines this number.
        num_microbatches: Number of microbatches per step of each replica.
        iterations: Number of iterations, which are numbered from 1.
        schedule: Name of a schedule or run-time rule.
        weight_pieces: Number of pieces into which a run-time rule divides each weight gradient. If
            it is 0, backward passes are not divided.
        forward_s: Mean time of a forward pass through a rank, in seconds.
        backward_s: Mean time that a rank takes to compute the gradients of its inputs, in seconds.
        weight_s: Mean time that a rank takes to compute its weight gradients, in seconds.
        latency_s: Latency of a message, in seconds.
        occupancy_s: Time for which a message occupies its link, in seconds.
        data_s: Time to load a microbatch, in seconds.
        optimizer_s: Time of the optimizer's update, in seconds.
        action_sigma: Standard deviation of the logarithm of a random factor, which differs between
            actions.
        microbatch_sigma: Standard deviation of the logarithm of a random factor, which differs
            between microbatches.
        rank_sigma: Standard deviation of the logarithm of a random factor, which differs between
            ranks but not between iterations.
        iteration_sigma: Standard deviation of the logarithm of a random factor, which differs
            between ranks and between iterations.
        stray_probability: Probability that an action on any rank takes 1.5 to 4 times as long.
        stage_factors: Factors by which the planned work of each rank is multiplied. If empty, all
            stages have equal work.
        layers: Number of transformer layers of each stage, which is written to the headers.
        head: Additional work of the last stage, as a number of layers.
        planned_head: Additional work of the last stage according to the headers. ``None`` stands
            for ``head``.
        hosts: Number of machines. Each machine has a separate clock and an equal share of the
            ranks.
        clock_offset_s: Maximum difference between a clock and the clock of the first host, in
            seconds.
        clock_drift_ppm: Maximum drift of a clock, in parts per million.
        faults: Faults of the run.
        is_dealt: Whether microbatches are distributed over replicas by cost. Used only in real
            runs.
        num_slices: Number of equal-cost slices of each microbatch.
        seed: Seed of all random numbers.
    """

    num_ranks: int = 4
    replicas: int = 1
    num_chunks: int = 1
    num_microbatches: int = 8
    iterations: int = 10
    schedule: str = "adaptive"
    weight_pieces: int = 0
    forward_s: float = 0.010
    backward_s: float = 0.010
    weight_s: float = 0.010
    latency_s: float = 0.0001
    occupancy_s: float = 0.0
    data_s: float = 0.0002
    optimizer_s: float = 0.004
    action_sigma: float = 0.03
    microbatch_sigma: float = 0.0
    rank_sigma: float = 0.0
    iteration_sigma: float = 0.0
    stray_probability: float = 0.0
    stage_factors: tuple[float, ...] = ()
    layers: int = 4
    head: float = 0.0
    planned_head: float | None = None
    hosts: int = 1
    clock_offset_s: float = 0.0
    clock_drift_ppm: float = 0.0
    faults: tuple[Fault, ...] = ()
    is_dealt: bool = False
    num_slices: int = 1
    seed: int = 0

    @property
    def world_size(self) -> int:
        """Returns the number of global ranks.

        Replicas of the same pipeline rank have adjacent global ranks.
        """
        return self.num_ranks * self.replicas


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """Ground truth of a synthetic run, which tests compare with measurements.

    Attributes:
        bubble_fraction: Fraction of idle time, ``[iterations, ranks]``.
        step_s: Time in seconds from the first action to the last, ``[iterations, replicas]``.
        start_ns: Start of each step of the first replica in nanoseconds, on the first host's clock,
            ``[iterations]``.
        spans: Number of spans in all traces.
        clocks: Offset in nanoseconds at ``START_NS``, and drift, of the clock of each host.
    """

    bubble_fraction: Any
    step_s: Any
    start_ns: Any
    spans: int
    clocks: tuple[tuple[int, float], ...]


def write_synthetic(folder: str | os.PathLike[str], run: SyntheticRun) -> Truth:
    """Writes the trace files of ``run`` to ``folder``, and returns the ground truth.

    Raises:
        ScheduleError: The schedule does not support the pipeline.
        TraceError: The rank of a fault does not exist, or a file cannot be written.
    """
    writer = _Writer(Path(folder), run)
    try:
        return writer.write()
    except OSError as error:
        raise TraceError(f"cannot write traces into {folder}: {error.strerror or error}") from error


class _Writer:
    """Simulates the steps of a run, and writes its trace files."""

    def __init__(self, folder: Path, run: SyntheticRun) -> None:
        self._folder = folder
        self._run = run
        self._rng = np.random.default_rng(run.seed)
        self._candidate = make_candidate(
            run.schedule,
            run.num_ranks,
            run.num_chunks,
            run.num_microbatches,
            weight_pieces=run.weight_pieces,
            num_slices=run.num_slices,
        )
        self._policies = _policies(self._candidate, run.num_microbatches)
        actions = run.num_microbatches * run.num_slices * (2 + self._candidate.weight_pieces)
        actions *= run.world_size * self._candidate.placement.num_chunks * run.iterations
        self._compiled = actions > COMPILE_FROM
        for fault in run.faults:
            if not 0 <= fault.rank < run.world_size or fault.to >= run.world_size:
                raise TraceError(f"{fault} has a rank outside 0..{run.world_size - 1}")
        self._clocks = [(0, 0.0)] + [
            (
                round(self._rng.uniform(-1, 1) * run.clock_offset_s * 1e9),
                self._rng.uniform(-1, 1) * run.clock_drift_ppm * 1e-6,
            )
            for _ in range(1, run.hosts)
        ]
        self._spans = 0

    def write(self) -> Truth:
        run = self._run
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(run.world_size):
            path = self._folder / trace_file_name(rank)
            path.write_text(header_line(self._header(rank)), encoding="ascii")
        bubbles = np.zeros((run.iterations, run.world_size))
        steps = np.zeros((run.iterations, run.replicas))
        starts = np.zeros(run.iterations, dtype=np.int64)
        begin_ns = START_NS
        for number in range(run.iterations):
            results = [self._step(number + 1, replica) for replica in range(run.replicas)]
            starts[number] = begin_ns
            for replica, (result, _) in enumerate(results):
                bubbles[number, replica :: run.replicas] = result.bubble_fraction
                steps[number, replica] = result.makespan_s
            begin_ns = self._iteration(number + 1, begin_ns, results)
        return Truth(
            bubble_fraction=bubbles,
            step_s=steps,
            start_ns=starts,
            spans=self._spans,
            clocks=tuple(self._clocks),
        )

    def _host(self, rank: int) -> int:
        return rank * self._run.hosts // self._run.world_size

    def _local(self, host: int, times_ns: Any) -> Any:
        """Converts ``times_ns`` on the first host's clock to times on the clock of ``host``."""
        offset_ns, drift = self._clocks[host]
        if not host:
            return times_ns
        passed = np.asarray(times_ns, dtype=np.int64) - START_NS
        return times_ns + offset_ns + np.rint(passed * drift).astype(np.int64)

    def _header(self, rank: int) -> TraceHeader:
        run, host = self._run, self._host(rank)
        return TraceHeader(
            run="synthetic",
            rank=rank,
            world_size=run.world_size,
            pp_rank=rank // run.replicas,
            dp_rank=rank % run.replicas,
            num_ranks=run.num_ranks,
            num_chunks=self._candidate.placement.num_chunks,
            num_microbatches=run.num_microbatches,
            placement=self._candidate.placement.kind,
            schedule=run.schedule,
            host=f"host{host}",
            pid=1000 + rank,
            monotonic_ns=int(self._local(host, START_NS)),
            unix_ns=BOOT_UNIX_NS + START_NS,
            clock=f"clock of host{host}",
            layers=(run.layers,) * self._candidate.placement.num_stages,
            work=self._planned_work(),
            num_slices=run.num_slices,
        )

    def _planned_work(self) -> tuple[float, ...]:
        run, placement = self._run, self._candidate.placement
        factors = run.stage_factors or (1.0,) * run.num_ranks
        work = [
            run.layers * factors[placement.locate(stage)[0]]
            for stage in range(placement.num_stages)
        ]
        work[-1] += run.head if run.planned_head is None else run.planned_head
        return tuple(work)

    def _step(self, iteration: int, replica: int) -> tuple[SimResult, list[Ints]]:
        """Simulates step ``iteration`` of ``replica``, and returns the result and the trace rows.

        The peers in the rows are global ranks.
        """
        run, seed = self._run, int(self._rng.integers(2**31))
        work, data_s = draw_step(run, self._candidate.placement, iteration, replica, seed)
        work.durations_ps[F, 0, :: run.num_slices] += np.rint(data_s * PS_PER_S).astype(np.int64)
        result = simulate(
            self._candidate.placement,
            run.num_microbatches,
            self._policies,
            work,
            cap=self._candidate.cap,
            weight_pieces=self._candidate.weight_pieces,
            compiled=self._compiled,
        )
        data_ns = np.rint(data_s * 1e9).astype(np.int64)
        rows = step_rows(result, self._policies, data_ns=data_ns)
        for part in rows:
            has_peer = part[:, _PEER] >= 0
            part[has_peer, _PEER] = part[has_peer, _PEER] * run.replicas + replica
        return result, rows

    def _iteration(
        self, iteration: int, begin_ns: int, results: Sequence[tuple[SimResult, list[Ints]]]
    ) -> int:
        """Writes ``iteration`` for all ranks, and returns the start of the next iteration in ns.

        The iteration begins at ``begin_ns``. ``results`` contains each replica's simulation and
        rows.
        """
        run = self._run
        longest_s = max(result.makespan_s for result, _ in results)
        done_ns = begin_ns + round(longest_s * 1e9)
        reduced_ns = done_ns + REDUCE_NS
        updated_ns = reduced_ns + round(run.optimizer_s * 1e9)
        sampled = set()
        for rank in range(run.world_size):
            position, replica = divmod(rank, run.replicas)
            result, parts = results[replica]
            end_ns = begin_ns + int(result.ends_ps[position][-1]) // 1000
            around = [(KIND["reduce"], end_ns, reduced_ns)]
            around.append((KIND["optimizer"], reduced_ns, updated_ns))
            around.append((KIND["step"], begin_ns, updated_ns))
            more = np.array([(kind, -1, -1, 0, a, b, 0, 0, 0, -1, -1, 0) for kind, a, b in around])
            rows = parts[position].copy()
            rows[:, 4:6] += begin_ns
            rows = np.concatenate([rows, more])
            host = self._host(rank)
            rows[:, 4:6] = self._local(host, rows[:, 4:6])
            start_ns = int(self._local(host, begin_ns))
            text = block_text(
                IterationStart(iteration, run.num_microbatches, start_ns), rows.tolist()
            )
            if host and host not in sampled:
                sampled.add(host)
                text += samples_line(self._exchanges(host, begin_ns))
            self._spans += len(rows)
            with (self._folder / trace_file_name(rank)).open("a", encoding="ascii") as file:
                file.write(text)
        return updated_ns + 1_000_000

    def _exchanges(self, host: int, at_ns: int) -> ClockSamples:
        """Returns several samples of the clock of ``host``. Some of the samples are delayed.

        The first sample begins at the time ``at_ns``.
        """
        samples = []
        for number in range(SAMPLES_PER_BURST):
            there, back = 15_000 + self._rng.exponential((30_000, 30_000))
            if self._rng.random() < 0.2:
                there += self._rng.exponential(2_000_000)
            sent = at_ns + number * 1_200_000
            received, answered = sent + int(there), sent + int(there) + 8_000
            samples.append(
                (
                    int(self._local(host, sent)),
                    received,
                    answered,
                    int(self._local(host, answered + int(back))),
                )
            )
        return ClockSamples(0, tuple(samples))


def draw_step(
    run: SyntheticRun, placement: Placement, iteration: int, replica: int, seed: int
) -> tuple[Workload, Any]:
    """Draws random durations for a step of one replica, and applies the faults of the replica.

    Args:
        run: Description of the run.
        placement: Placement of the stages.
        iteration: Iteration number, counted from 1.
        replica: Index of the replica.
        seed: Seed of the random factors of actions.

    Returns:
        Durations for the simulator, and the time to load each microbatch in seconds. The caller
        must add this time to the forward passes of the first stage.
    """
    faults = [f for f in run.faults if f.rank % run.replicas == replica and f.holds(iteration)]
    rng = np.random.default_rng((run.seed, iteration, replica))
    speeds = np.random.default_rng((run.seed, 1, replica)).standard_normal(run.num_ranks)
    now = np.random.default_rng((run.seed, 2, replica, iteration)).standard_normal(run.num_ranks)
    differ = np.exp(run.rank_sigma * speeds + run.iteration_sigma * now)
    factors = (np.array(run.stage_factors or (1.0,) * run.num_ranks) * differ).tolist()
    links: dict[tuple[int, int], Link] = {}
    for fault in faults:
        position = fault.rank // run.replicas
        if fault.kind == "slow-rank":
            factors[position] *= fault.factor
        elif fault.kind == "slow-link":
            links[position, fault.to // run.replicas] = Link(
                latency_s=run.latency_s + fault.seconds, occupancy_s=run.occupancy_s
            )
    work = draw(
        placement,
        run.num_microbatches,
        StageTimes.equal(
            placement.num_stages,
            forward_s=run.forward_s / placement.num_chunks,
            backward_s=run.backward_s / placement.num_chunks,
            weight_s=run.weight_s / placement.num_chunks,
        ),
        seed=seed,
        action_sigma=run.action_sigma,
        microbatch_sigma=run.microbatch_sigma,
        latency_sigma=0.3,
        link=Link(latency_s=run.latency_s, occupancy_s=run.occupancy_s),
        links=links,
        rank_factors=factors,
        num_slices=run.num_slices,
    )
    durations = work.durations_ps.copy()
    durations[:, -1] = np.rint(durations[:, -1] * (1 + run.head / run.layers))
    if run.stray_probability:
        stray = rng.random(durations.shape) < run.stray_probability
        longer = np.where(stray, rng.uniform(1.5, 4.0, durations.shape), 1.0)
        durations[...] = np.rint(durations * longer)
    extra_s = 0.0
    for fault in faults:
        if fault.kind == "spikes":
            position = fault.rank // run.replicas
            stages = [placement.stage_of(position, c) for c in range(placement.num_chunks)]
            hit = rng.random(durations[:, stages].shape) < fault.probability
            longer = np.where(hit, fault.factor, 1.0)
            durations[:, stages] = (durations[:, stages] * longer).astype(np.int64)
        elif fault.kind == "slow-data":
            extra_s += fault.seconds
    data_s = (run.data_s + extra_s) * np.exp(0.2 * rng.standard_normal(run.num_microbatches))
    return replace(work, durations_ps=durations), data_s


@lru_cache(maxsize=16)
def _policies(candidate: Candidate, num_microbatches: int) -> tuple[Policy, ...]:
    return candidate.policies(num_microbatches)
