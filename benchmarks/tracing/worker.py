"""Real runs with a fault: processes that exchange real messages, trace themselves, and sleep.

Started by ``emulated.run`` as a process of its own, which imports everything once and forks the
ranks of one run after the other. Work is slept as ``benchmarks.emulated`` draws it; faults go into
these sleeps, into the reading of data, or into the moment at which a message is handed over.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.emulated.ours import DelayedQueue, EmulatedStages  # noqa: E402
from benchmarks.emulated.scenarios import Draws, Scenario, Times, draw  # noqa: E402
from benchmarks.emulated.work import (  # noqa: E402
    DTYPE,
    WIDTH,
    RankWork,
    Sleeper,
    sharpen_timers,
)
from megatron.adaptive.engine.executor import Executor  # noqa: E402
from megatron.adaptive.schedule.memory import default_cap  # noqa: E402
from megatron.adaptive.schedule.placement import Placement  # noqa: E402
from megatron.adaptive.schedule.registry import make_policies  # noqa: E402
from megatron.adaptive.schedule.state import RankState  # noqa: E402
from megatron.adaptive.trace.event import KINDS, TraceHeader  # noqa: E402
from megatron.adaptive.trace.recorder import Recorder  # noqa: E402
from megatron.adaptive.transport.gloo import GlooTransport  # noqa: E402
from megatron.adaptive.transport.interface import Arrival, HeldArrival, Item  # noqa: E402

TIMEOUT_S = 60.0
LAYERS = 4


class LateQueue(DelayedQueue):
    """A queue whose late messages arrive late, instead of only being looked at late."""

    def put(self, item: Item | Exception) -> None:
        """See :class:`CompletionQueue`."""
        due_s = time.monotonic()
        if isinstance(item, Arrival):
            payload = item.take()
            due_s = payload[2].item() + self._delays_s.get(item.peer, 0.0)
            due_s = max(due_s, time.monotonic())
            item = HeldArrival(
                item.label, item.peer, item.nbytes, lambda: payload, int(due_s * 1e9)
            )
        with self._changed:
            self._count += 1
            heapq.heappush(self._held, (due_s, self._count, item))
            self._changed.notify()


class Stages(EmulatedStages):
    """Chunks of which the first reads its data within its forward.

    Args:
        read_s: how long a read takes, by microbatch.
        recorder: records them.
        others: see :class:`EmulatedStages`.

    Attributes:
        worked_s: when they were at work, from the call of a forward or a backward to its return:
            sleeps, and the little that is done around them.
    """

    def __init__(
        self,
        work: RankWork,
        placement: Placement,
        rank: int,
        *,
        read_s: list[float],
        recorder: Recorder,
        split: bool,
    ) -> None:
        super().__init__(work, placement, rank, split=split)
        self._read_s = read_s
        self._recorder = recorder
        self.worked_s: list[tuple[float, float]] = []

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Read and sleep F."""
        start_ns = time.monotonic_ns()
        if self._stages[chunk] == 0:
            self._work._sleeper.until(start_ns / 1e9 + self._read_s[microbatch])
            end_ns = time.monotonic_ns()
            row = (KINDS.index("data"), -1, microbatch, 0, start_ns, end_ns, 0, 0, 0, -1, -1, 0)
            self._recorder.extend([row])
        output = super().forward(chunk, microbatch, received)
        self.worked_s.append((start_ns / 1e9, time.monotonic()))
        return output

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Sleep B, and W with it."""
        start_s = time.monotonic()
        result = super().backward(chunk, microbatch, gradient)
        self.worked_s.append((start_s, time.monotonic()))
        return result


class Rank:
    """One rank of a run.

    Args:
        rank: global; a pipeline position's replicas are next to each other.
        run: what to do, a ``SyntheticRun`` and its ``folder``.
    """

    def __init__(self, rank: int, run: dict[str, Any]) -> None:
        self._run = run
        self._rank = rank
        ranks, replicas = run["num_ranks"], run["replicas"]
        self._world = dist.new_group(list(range(ranks * replicas)), backend="gloo")
        self.position, self.replica = divmod(rank, replicas)
        groups = [
            dist.new_group([p * replicas + replica for p in range(ranks)], backend="gloo")
            for replica in range(replicas)
        ]
        self._placement = Placement(num_ranks=ranks, num_chunks=1)
        count = run["num_microbatches"]
        self._cap = default_cap(self._placement, count)
        self._policy = make_policies(run["schedule"], self._placement, count, cap=self._cap)[
            self.position
        ]
        self._fault: dict[str, Any] = next(iter(run["faults"]), {"kind": "", "rank": -1, "to": -1})
        stages = self._placement.num_stages
        header = TraceHeader(
            run=Path(run["folder"]).name,
            rank=rank,
            world_size=ranks * replicas,
            pp_rank=self.position,
            num_ranks=ranks,
            num_chunks=1,
            num_microbatches=count,
            schedule=run["schedule"],
            dp_rank=self.replica,
            layers=(LAYERS,) * stages,
            work=(float(LAYERS),) * stages,
        )
        self._recorder = Recorder(run["folder"], header)
        self._transport = GlooTransport(
            groups[self.replica],
            peers=[
                p * replicas + self.replica for p in self._placement.neighbours_of(self.position)
            ],
            device=torch.device("cpu"),
            payload_shape=(WIDTH,),
            dtype=DTYPE,
            timeout_s=TIMEOUT_S,
        )
        self._late: dict[int, float] = {}
        self._transport.completions = LateQueue(self._late)
        self._executor = Executor(
            placement=self._placement,
            pp_rank=self.position,
            route=lambda position, microbatch: (position * replicas + self.replica, microbatch),
            transport=self._transport,
            recorder=self._recorder,
            timeout_s=TIMEOUT_S,
        )
        self._sleeper = Sleeper()

    def measure(self) -> list[list[tuple[float, float]]]:
        """Run all iterations; returns when each action ran, by iteration."""
        spans = []
        for iteration in range(1, self._run["iterations"] + 1):
            spans.append(self._iteration(iteration))
        return spans

    def close(self) -> None:
        """Close what this has opened; collective."""
        self._recorder.close()
        self._transport.close()
        dist.barrier(group=self._world)

    def _iteration(self, iteration: int) -> list[tuple[float, float]]:
        run, count = self._run, self._run["num_microbatches"]
        draws, read_s = self._draw(iteration)
        link = self._holds("slow-link", iteration) and self._rank == self._fault["to"]
        self._late.clear()
        if link:
            self._late[self._fault["rank"]] = self._fault["seconds"]
        work = RankWork(
            self._placement, self.position, draws, self._sleeper, delayed_by_transport=True
        )
        stages = Stages(
            work,
            self._placement,
            self.position,
            read_s=read_s,
            recorder=self._recorder,
            split=False,
        )
        state = RankState(
            placement=self._placement,
            rank=self.position,
            num_microbatches=count,
            cap=self._cap if run["schedule"] == "adaptive" else None,
            weight_pieces=0,
        )
        dist.barrier(group=self._world)
        self._recorder.begin_iteration(iteration, count)
        begin_ns = time.monotonic_ns()
        self._executor.run(stages, self._policy, state)
        self._executor.finish_step()
        done_ns = time.monotonic_ns()
        dist.barrier(group=self._world)
        for kind, start_ns in (("reduce", done_ns), ("step", begin_ns)):
            times = (start_ns, time.monotonic_ns())
            self._recorder.extend([(KINDS.index(kind), -1, -1, 0, *times, 0, 0, 0, -1, -1, 0)])
        self._recorder.end_iteration()
        work.check_complete()
        return stages.worked_s

    def _holds(self, kind: str, iteration: int) -> bool:
        return self._fault["kind"] == kind and iteration >= self._fault["first"]

    def _draw(self, iteration: int) -> tuple[Draws, list[float]]:
        """The step's work, and what each read of data takes."""
        run, fault = self._run, self._fault
        draws = draw(
            Scenario(name=f"replica {self.replica}", jitter_sigma=run["action_sigma"]),
            num_ranks=run["num_ranks"],
            num_microbatches=run["num_microbatches"],
            times=Times(**{kind: run[kind] for kind in ("forward_s", "backward_s", "weight_s")}),
            seed=run["seed"],
            repetition=iteration,
        )
        factors = [1.0] * run["num_ranks"]
        mine = fault["rank"] % run["replicas"] == self.replica
        if self._holds("slow-rank", iteration) and mine:
            factors[fault["rank"] // run["replicas"]] = fault["factor"]
        rng = random.Random(f"{run['seed']}/{iteration}/{self._rank}")
        if self._holds("spikes", iteration) and self._rank == fault["rank"]:
            draws = replace(draws, halves_s=self._spiked(draws, rng))
        read_s = run["forward_s"] * 0.02
        if self._holds("slow-data", iteration) and self._rank == fault["rank"]:
            read_s += fault["seconds"]
        reads = [read_s * rng.lognormvariate(0, 0.2) for _ in range(run["num_microbatches"])]
        return replace(draws, rank_factors=tuple(factors)), reads

    def _spiked(self, draws: Draws, rng: random.Random) -> Any:
        """Halves of which some of this rank's take longer, F by itself, B and W together."""
        halves = {kind: [list(row) for row in rows] for kind, rows in draws.halves_s.items()}
        kinds = list(halves)
        for microbatch in range(draws.num_microbatches):
            for part in (kinds[:1], kinds[1:]):
                if rng.random() < self._fault["probability"]:
                    for kind in part:
                        for half in (2 * self.position, 2 * self.position + 1):
                            halves[kind][half][microbatch] *= self._fault["factor"]
        return {kind: tuple(map(tuple, rows)) for kind, rows in halves.items()}


def _rank_main(rank: int, run: dict[str, Any], store: str) -> None:
    sharpen_timers()
    torch.set_num_threads(1)
    world = run["num_ranks"] * run["replicas"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    member = Rank(rank, run)
    spans = member.measure()
    truth = Path(run["folder"]) / f"truth_{rank}.json"
    truth.write_text(json.dumps(spans), encoding="ascii")
    member.close()
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks of each run in turn; the argument is the file of the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    context = multiprocessing.get_context("fork")
    for run in plan:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=_rank_main, args=(rank, run, f"{folder}/store"), daemon=True)
                for rank in range(run["num_ranks"] * run["replicas"])
            ]
            for process in ranks:
                process.start()
            # One that fails leaves the others waiting: they are daemons and end with this process.
            while any(process.exitcode is None for process in ranks):
                if any(process.exitcode for process in ranks):
                    return 1
                time.sleep(0.05)
            if any(process.exitcode for process in ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
