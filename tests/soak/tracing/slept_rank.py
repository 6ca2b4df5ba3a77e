"""Runs a rank that sleeps instead of computing, but exchanges real messages and writes traces.

The durations are drawn by ``synthetic_trace.draw_step``, as for synthetic runs. Faults change the
durations of sleeps, the reading of data, or the arrival of messages.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from harness.emulated_work import EmulatedStages, RankWork, seconds_of  # noqa: E402
from harness.sleeping_ranks import Channels, Sleeper, sharpen_timers  # noqa: E402
from megatron.adaptive.schedule.catalog import make_candidate  # noqa: E402
from megatron.adaptive.schedule.microbatch_assignment import deal  # noqa: E402
from megatron.adaptive.schedule.rank_state import RankState  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402
from megatron.adaptive.schedule.workload import Workload, order_by_cost  # noqa: E402
from megatron.adaptive.trace.recorder import Recorder  # noqa: E402
from megatron.adaptive.trace.trace_format import KINDS, TraceHeader  # noqa: E402
from tests.support.synthetic_trace import Fault, SyntheticRun, draw_step  # noqa: E402

LAYERS = 4


class Stages(EmulatedStages):
    """Simulates the chunks of a rank by sleeping.

    The first stage also reads its data in each forward pass.

    Args:
        work: Durations of the actions of this rank in the step.
        placement: Placement of the stages.
        rank: Position of this rank in the pipeline.
        sleeper: Sleeper of this rank.
        split: Whether weight gradients are computed in separate actions.
        read_s: Duration in seconds of reading data, for each microbatch.
        recorder: Recorder to which reads of data are added.

    Attributes:
        worked_s: Start and end time of each forward and backward pass, in seconds.
    """

    def __init__(
        self,
        work: RankWork,
        placement: Placement,
        rank: int,
        sleeper: Sleeper,
        *,
        split: bool,
        read_s: list[float],
        recorder: Recorder,
    ) -> None:
        super().__init__(work, placement, rank, split=split)
        self._sleeper = sleeper
        self._read_s = read_s
        self._recorder = recorder
        self.worked_s: list[tuple[float, float]] = []

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Reads data on the first stage, and sleeps for the duration of a forward pass."""
        start_ns = time.monotonic_ns()
        if self._stages[chunk] == 0:
            self._sleeper.until(start_ns / 1e9 + self._read_s[microbatch])
            end_ns = time.monotonic_ns()
            row = (KINDS.index("data"), -1, microbatch, 0, start_ns, end_ns, 0, 0, 0, -1, -1, 0)
            self._recorder.extend([row])
        output = super().forward(chunk, microbatch, received)
        self.worked_s.append((start_ns / 1e9, time.monotonic()))
        return output

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Sleeps for the duration of a backward pass."""
        start_s = time.monotonic()
        result = super().backward(chunk, microbatch, gradient)
        self.worked_s.append((start_s, time.monotonic()))
        return result


class Rank:
    """Runs one rank of a job whose ranks sleep instead of computing.

    Args:
        rank: Global rank. Ranks with the same pipeline position on different replicas are
            consecutive.
        run: Description of the run.
        folder: Folder for the traces.
    """

    def __init__(self, rank: int, run: SyntheticRun, folder: Path) -> None:
        self._run = run
        self._rank = rank
        ranks, replicas, count = run.num_ranks, run.replicas, run.num_microbatches
        self._world = dist.new_group(list(range(run.world_size)), backend="gloo")
        self.position, self.replica = divmod(rank, replicas)
        self._candidate = made = make_candidate(
            run.schedule, ranks, run.num_chunks, count, weight_pieces=run.weight_pieces
        )
        self._placement = made.placement
        stages = made.placement.num_stages
        header = TraceHeader(
            run=folder.name,
            rank=rank,
            world_size=run.world_size,
            pp_rank=self.position,
            num_ranks=ranks,
            num_chunks=made.placement.num_chunks,
            num_microbatches=count,
            placement=made.placement.kind,
            schedule=run.schedule,
            dp_rank=self.replica,
            layers=(LAYERS,) * stages,
            work=(float(LAYERS),) * stages,
        )
        self._recorder = Recorder(folder, header)
        self._channels = Channels(
            self._placement,
            self.position,
            replica=self.replica,
            replicas=replicas,
            recorder=self._recorder,
        )
        self._sleeper = Sleeper()

    def close(self) -> None:
        """Closes all channels and files of this rank. All ranks must call this method."""
        self._recorder.close()
        self._channels.close()
        dist.barrier(group=self._world)

    def iterate(self, iteration: int) -> list[tuple[float, float]]:
        """Runs iteration ``iteration``.

        Returns the start and end times of the actions, in seconds.
        """
        run, made = self._run, self._candidate
        drawn, data_s = draw_dealt(run, self._placement, iteration, self.replica)
        count = len(data_s)
        policies = made.policies(count)
        self._channels.delay(
            {
                fault.rank: fault.seconds
                for fault in run.faults
                if fault.kind == "slow-link" and fault.to == self._rank and fault.holds(iteration)
            }
        )
        work = RankWork(self._placement, self.position, seconds_of(drawn), self._sleeper)
        stages = Stages(
            work,
            self._placement,
            self.position,
            self._sleeper,
            read_s=data_s.tolist(),
            recorder=self._recorder,
            split=self._candidate.weight_pieces > 0,
        )
        state = RankState(
            placement=self._placement,
            rank=self.position,
            num_microbatches=count,
            cap=made.cap,
            weight_pieces=made.weight_pieces,
        )
        dist.barrier(group=self._world)
        self._recorder.begin_iteration(iteration, count)
        begin_ns = time.monotonic_ns()
        self._channels.executor.run(stages, policies[self.position], state)
        self._channels.executor.finish_step()
        done_ns = time.monotonic_ns()
        dist.barrier(group=self._world)
        for kind, start_ns in (("reduce", done_ns), ("step", begin_ns)):
            times = (start_ns, time.monotonic_ns())
            self._recorder.extend([(KINDS.index(kind), -1, -1, 0, *times, 0, 0, 0, -1, -1, 0)])
        self._recorder.end_iteration()
        work.check_complete()
        return stages.worked_s


def draw_dealt(
    run: SyntheticRun, placement: Placement, iteration: int, replica: int
) -> tuple[Workload, Any]:
    """Draws the durations of all actions in the step ``iteration`` of ``replica``.

    ``placement`` is the placement of the stages.

    If ``run.is_dealt``, microbatches are distributed over the replicas by cost.
    """
    seeds = [
        random.Random(f"{run.seed}/{iteration}/{r}").randrange(2**31) for r in range(run.replicas)
    ]
    if not run.is_dealt:
        return draw_step(run, placement, iteration, replica, seeds[replica])
    sound = replace(run, faults=())
    drawn = [draw_step(sound, placement, iteration, r, seed)[0] for r, seed in enumerate(seeds)]
    work = np.concatenate([workload.durations_ps for workload in drawn], axis=2)
    factors = np.ones((run.replicas, placement.num_stages))
    for fault in run.faults:
        position, of = divmod(fault.rank, run.replicas)
        for chunk in range(placement.num_chunks):
            factors[of, placement.stage_of(position, chunk)] *= fault.factor
    # A replica is only as fast as its slowest rank.
    costs = (work.sum(axis=0)[None] * factors[:, :, None]).max(axis=1)
    numbers = deal(costs.tolist())[replica]
    order = order_by_cost(costs[replica, list(numbers)].tolist(), run.num_ranks)
    dealt = work[:, :, [numbers[index] for index in order]] * factors[replica][:, None]
    delays = drawn[replica].delays_ps[:, :, np.arange(len(numbers)) % run.num_microbatches]
    dealt_work = replace(
        drawn[replica], durations_ps=np.rint(dealt).astype(np.int64), delays_ps=delays
    )
    return dealt_work, np.full(len(numbers), run.data_s)


def run_rank(rank: int, plan: dict[str, Any]) -> list[Any]:
    """Runs rank ``rank`` of ``plan``, and returns the action times of all ranks by iteration."""
    sharpen_timers()
    faults = tuple(Fault(**fault) for fault in plan["run"]["faults"])
    run = SyntheticRun(**{**plan["run"], "faults": faults})
    member = Rank(rank, run, Path(plan["folder"]))
    spans = [member.iterate(iteration) for iteration in range(1, run.iterations + 1)]
    gathered: list[Any] = [None] * run.world_size
    dist.all_gather_object(gathered, spans)
    member.close()
    return gathered
