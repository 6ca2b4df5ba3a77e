"""The processes of the emulated pipeline: one per rank, all competitors in turns.

Started by ``measure.run`` as a process of its own, which imports everything once and forks the
ranks. Every step begins on all ranks at one moment of the machine's clock; its makespan is the time
from there to the end of the rank that is done last.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.emulated.competitors import COMPETITORS, Competitor  # noqa: E402
from benchmarks.emulated.ours import Channels, OurRunner  # noqa: E402
from benchmarks.emulated.overhead import overhead  # noqa: E402
from benchmarks.emulated.peers_megatron import MegatronRunner  # noqa: E402
from benchmarks.emulated.peers_torch import TorchRunner  # noqa: E402
from benchmarks.emulated.scenarios import SCENARIOS, Draws, Times, draw  # noqa: E402
from benchmarks.emulated.work import RankWork, Sleeper, sharpen_timers  # noqa: E402
from megatron.adaptive.schedule.placement import Placement  # noqa: E402

# From the agreement on the start to the start itself: enough for all ranks to hear of it.
_LEAD_S = 0.006


Runner = MegatronRunner | TorchRunner | OurRunner
"""One competitor on one rank; ``prepare`` and ``finish`` of a step are not timed, ``run`` is."""


class Rank:
    """One rank of the emulated pipeline.

    Args:
        rank: which.
        plan: what to measure, see ``measure.run``.
    """

    def __init__(self, rank: int, plan: dict[str, Any]) -> None:
        self._rank = rank
        self._plan = plan
        self._num_ranks: int = plan["num_ranks"]
        self._times = Times(**plan["times"])
        self._sleeper = Sleeper()
        self._control = dist.new_group(list(range(self._num_ranks)), backend="gloo")
        self._channels: dict[Placement, Channels] = {}
        self._runners: dict[str, Runner] = {
            name: self._make(COMPETITORS[name]) for name in plan["competitors"]
        }

    def measure(self) -> list[dict[str, Any]]:
        """Run all cases; returns one record per step, on every rank."""
        records: list[dict[str, Any]] = []
        warm: set[int] = set()
        for case in self._plan["cases"]:
            count = case["num_microbatches"]
            # Some runtimes set up their channels in the first step of that many microbatches.
            first = 0 if count in warm else -self._plan["warmups"]
            warm.add(count)
            for repetition in range(first, case["repetitions"]):
                records += self._round(case["scenario"], count, repetition)
        return [record for record in records if record["repetition"] >= 0]

    def close(self) -> None:
        """Close what the runners share; collective."""
        for channels in self._channels.values():
            channels.close()
        dist.barrier(group=self._control)

    def _make(self, competitor: Competitor) -> Runner:
        if competitor.engine == "megatron":
            return MegatronRunner(competitor, self._rank, self._num_ranks)
        if competitor.engine == "torch":
            return TorchRunner(competitor, self._rank, self._num_ranks)
        placement = competitor.placement(self._num_ranks)
        if placement not in self._channels:
            self._channels[placement] = Channels(placement, self._rank)
        return OurRunner(competitor, self._channels[placement], self._rank, self._num_ranks)

    def _round(self, scenario: str, num_microbatches: int, repetition: int) -> list[dict[str, Any]]:
        """Let every competitor run one step with the same draws."""
        draws = draw(
            SCENARIOS[scenario],
            num_ranks=self._num_ranks,
            num_microbatches=num_microbatches,
            times=self._times,
            seed=self._plan["seed"],
            repetition=repetition,
        )
        names = list(self._runners)
        # Rotate who goes first: the one after a slow step must not always be the same.
        turn = repetition % len(names)
        return [
            {
                "competitor": name,
                "num_ranks": self._num_ranks,
                "num_microbatches": num_microbatches,
                "scenario": scenario,
                "repetition": repetition,
                **self._step(name, draws),
            }
            for name in names[turn:] + names[:turn]
        ]

    def _step(self, name: str, draws: Draws) -> dict[str, float]:
        """Run a step; returns what is recorded of it."""
        runner = self._runners[name]
        work = RankWork(
            runner.placement,
            self._rank,
            draws,
            self._sleeper,
            delayed_by_transport=runner.delays_in_transport,
        )
        runner.prepare(work, draws)
        gc.collect()
        gc.disable()
        start = self._latest(time.monotonic())[0] + _LEAD_S
        self._sleeper.until(start)
        runner.run()
        end = time.monotonic()
        gc.enable()
        runner.finish()
        work.check_complete()
        last_end, peak = self._latest(end, work.peak)
        spans: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(spans, work.spans, group=self._control)
        split = COMPETITORS[name].weight_pieces > 0
        added = overhead(runner.placement, draws, spans, split=split)
        return {"makespan_s": last_end - start, "peak": peak, **asdict(added)}

    def _latest(self, *values: float) -> list[float]:
        """Return the largest of all ranks' values, one by one; also a barrier."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        result: list[float] = tensor.tolist()
        return result


def _rank_main(rank: int, plan: dict[str, Any], store: str, output: str) -> None:
    if not sharpen_timers() and rank == 0:
        print("no real-time priority: other programs' work shows in the times", file=sys.stderr)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=plan["num_ranks"]
    )
    member = Rank(rank, plan)
    gc.collect()
    gc.freeze()
    records = member.measure()
    if rank == 0:
        Path(output).write_text(json.dumps(records), encoding="utf-8")
    member.close()
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks and wait; arguments are the files of the plan and of the records."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank_main, args=(rank, plan, f"{folder}/store", sys.argv[2]), daemon=True
            )
            for rank in range(plan["num_ranks"])
        ]
        for process in ranks:
            process.start()
        # One that fails leaves the others waiting: they are daemons and end with this process.
        while any(process.exitcode is None for process in ranks):
            if any(process.exitcode for process in ranks):
                return 1
            time.sleep(0.1)
        return 1 if any(process.exitcode for process in ranks) else 0


if __name__ == "__main__":
    sys.exit(main())
