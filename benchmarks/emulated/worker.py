"""Runs the ranks of the emulated pipeline. All competitors alternate on these ranks.

All ranks agree on the time at which they begin a step. The makespan of a step is the time from then
until the last rank has finished.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.emulated.competitors import COMPETITORS, Competitor  # noqa: E402
from benchmarks.emulated.ours import OurRunner  # noqa: E402
from benchmarks.emulated.peers_megatron import MegatronRunner  # noqa: E402
from benchmarks.emulated.plugged import PluggedRunner  # noqa: E402
from benchmarks.emulated.scenarios import SCENARIOS, Draws, Times  # noqa: E402
from benchmarks.torch_schedules import EmulatedTorchRunner  # noqa: E402
from harness.emulated_work import RankWork, seconds_of  # noqa: E402
from harness.sleeping_ranks import Channels, Sleeper, sharpen_timers  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

_LEAD_S = 0.006
"""Seconds between choosing a start time and the start. This is enough to inform all ranks."""
Runner = MegatronRunner | EmulatedTorchRunner | PluggedRunner | OurRunner
"""Runner of a competitor on one rank. Only its method ``run`` is timed."""


class Rank:
    """Runs one rank of the emulated pipeline.

    Args:
        rank: Rank of this process.
        plan: Description of the run. ``cases`` are tuples of a scenario, a number of microbatches,
            and a number of steps of each competitor. ``competitors`` are the names of the
            competitors, which take turns. ``times`` are mean durations, ``seed`` is the seed of all
            random durations, and ``num_ranks`` is the number of ranks.
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
        """Runs all cases, and returns a record of each step.

        Returns:
            Records, which are the same on every rank. A record contains the competitor, the
            scenario, the repetition and the makespan (``makespan_s``) of a step. ``peak`` is the
            maximum number of activations that a rank stored, in microbatches of a whole rank.
        """
        records: list[dict[str, Any]] = []
        warm: set[int] = set()
        for scenario, count, repetitions in self._plan["cases"]:
            # Some runtimes open channels in their first step with a new number of microbatches, so
            # run one uncounted step first.
            first = 0 if count in warm else -1
            warm.add(count)
            for repetition in range(first, repetitions):
                records += self._round(scenario, count, repetition)
        return [record for record in records if record["repetition"] >= 0]

    def close(self) -> None:
        """Closes the objects that the runners share. All ranks must call this method."""
        for channels in self._channels.values():
            channels.close()
        for runner in self._runners.values():
            if isinstance(runner, PluggedRunner):
                runner.close()
        dist.barrier(group=self._control)

    def _make(self, competitor: Competitor) -> Runner:
        if competitor.engine == "megatron":
            return MegatronRunner(competitor, self._rank, self._num_ranks)
        if competitor.engine == "torch":
            return EmulatedTorchRunner(competitor, self._rank, self._num_ranks)
        if competitor.engine == "plug-in":
            return PluggedRunner(competitor, self._rank, self._num_ranks)
        placement = competitor.placement(self._num_ranks)
        if placement not in self._channels:
            self._channels[placement] = Channels(placement, self._rank)
        return OurRunner(competitor, self._channels[placement], self._rank, self._num_ranks)

    def _round(self, scenario: str, num_microbatches: int, repetition: int) -> list[dict[str, Any]]:
        """Runs a step of each competitor with the same durations, and returns a record per step.

        This is step ``repetition`` of the scenario ``scenario``, with ``num_microbatches``
        microbatches.
        """
        draws = Draws(
            scenario=SCENARIOS[scenario],
            num_ranks=self._num_ranks,
            num_microbatches=num_microbatches,
            times=self._times,
            seed=self._plan["seed"],
            repetition=repetition,
        )
        names = list(self._runners)
        # Rotate the order, so that no competitor follows the same slow competitor in every round.
        turn = repetition % len(names)
        return [
            {
                "competitor": name,
                "scenario": scenario,
                "repetition": repetition,
                **self._step(name, draws),
            }
            for name in names[turn:] + names[:turn]
        ]

    def _step(self, name: str, draws: Draws) -> dict[str, float]:
        """Runs a step of the competitor ``name``, and returns its makespan and peak memory.

        ``draws`` contains the durations of the step.
        """
        runner = self._runners[name]
        work = RankWork(
            runner.placement,
            runner.position,
            seconds_of(draws.workload(runner.placement)),
            self._sleeper,
            None if runner.delays_in_transport else draws.delay_s,
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
        return {"makespan_s": last_end - start, "peak": peak}

    def _latest(self, *values: float) -> list[float]:
        """Returns the maximum of each value over all ranks. All ranks must call this together."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        result: list[float] = tensor.tolist()
        return result


def run_rank(rank: int, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs rank ``rank`` as described by ``plan``, and returns its records (see :class:`Rank`)."""
    if not sharpen_timers() and rank == 0:
        print(
            "warning: no permission for real-time priority, so other programs may slow down "
            "the steps",
            file=sys.stderr,
        )
    member = Rank(rank, plan)
    gc.collect()
    gc.freeze()
    records = member.measure()
    member.close()
    return records
