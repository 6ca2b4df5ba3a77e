"""Emulates a pipeline with experts, whose replicas exchange tokens in each pass.

Implements the ``experts`` part of ``studies/schedules.py``. Eight ranks form two stages of four
replicas. Each forward or backward pass alternates between sleeping and exchanging tokens with the
other replicas. The exchanges are real messages over gloo. Their duration is drawn at random, and
starts when the last replica begins. The same pipeline is simulated with each group of replicas as
one rank, and again as a pipeline of eight ranks. In one scenario an expert rank is slower, for
example because it has more tokens. Its exchanges are slower too, both in processes and in
simulation.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness.processes import fork_ranks
from harness.report import Row, measured, ratios
from harness.sleeping_ranks import DTYPE, WIDTH, Channels, IdleStages, sharpen_timers
from megatron.adaptive import extension
from megatron.adaptive.engine.agreement import Agreement, connect
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import Candidate, make_candidate, make_policies
from megatron.adaptive.schedule.choose_by_simulation import evaluate
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, StageProfile, StageTimes, draw
from megatron.adaptive.transport.interface import CompletionQueue, Completions, Label
from tests.engine import groups
from tests.engine.loopback import Loopback, arrival

REPLICAS, STAGES, MICROBATCHES, CUTS = 4, 2, 32, 4
SCHEDULES = ("interleaved", "combined-1f1b", "adaptive")
SHARE, WEIGHTS, SLOW, SIGMA = 0.4, 0.6, 1.3, 0.3
GOALS = {"quiet": 0.99, f"jitter {SIGMA}": 1.08, f"an expert rank {SLOW} times slower": 1.05}
"""Minimum speed of the rule ``adaptive`` relative to ``combined-1f1b``, keyed by scenario."""
LEAST_HIDDEN, LEAST_GAIN, MOST_AGREEMENT_US = 0.9, 1.24, 20.0
_LIMIT_S = 900.0
_LEAD_S = 0.01


def measure(*, quick: bool, chunk_ms: float) -> list[Row]:
    """Measures and simulates all scenarios, and returns a table row for each result."""
    failures = groups.failures(500 if quick else 10_000)
    for failure in failures[:5]:
        print(failure)
    wrong = Row(what="random groups that deadlock or disagree", value=len(failures), goal=0)
    plan = {"chunk_s": chunk_ms / 1e3, "repetitions": 2 if quick else 5}
    found = fork_ranks("studies.experts", STAGES * REPLICAS, _LIMIT_S, plan)
    cost = fork_ranks("studies.experts", 2, _LIMIT_S, None)
    what = "agreement within a node, processor time per action"
    rows = [wrong, measured(what, cost, unit="us", goal=MOST_AGREEMENT_US)]
    rows += _rows("processes", found["seconds"], found["hidden"])
    for stages, count in ((STAGES, MICROBATCHES), (8, 64)):
        rows += _rows(f"simulated, {stages} stages", *_simulated(stages, count))
    return rows


def _rows(where: str, seconds: dict[str, dict[str, list[float]]], hidden: list[float]) -> list[Row]:
    def gain(scenario: str, over: str) -> list[float]:
        return ratios(seconds[scenario][over], seconds[scenario]["adaptive"])

    first = measured(
        f"{where}: share of the exchanges hidden", hidden, goal=LEAST_HIDDEN, least=True
    )
    plain = measured(
        f"{where}: adaptive over interleaved without overlap",
        gain("quiet", "interleaved"),
        goal=LEAST_GAIN,
        least=True,
    )
    others = [
        measured(
            f"{where}: adaptive over the combined order, {name}",
            gain(name, "combined-1f1b"),
            goal=goal,
            least=True,
        )
        for name, goal in GOALS.items()
    ]
    return [first, plain, *others]


def _times(stages: int, chunk_s: float) -> StageTimes:
    return StageTimes.equal(
        2 * stages,
        forward_s=chunk_s,
        backward_s=chunk_s,
        weight_s=WEIGHTS * chunk_s,
        exchange_s=SHARE * chunk_s,
        exchanges=CUTS,
    )


def _simulated(
    stages: int, microbatches: int
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    seconds: dict[str, dict[str, list[float]]] = {}
    hidden: list[float] = []
    for name in GOALS:
        seconds[name] = {}
        profile = StageProfile(
            times=_times(stages, 1.0),
            action_sigma=SIGMA if "jitter" in name else 0.0,
            rank_factors=(*[1.0] * (stages - 1), SLOW) if "slower" in name else None,
        )
        for schedule in SCHEDULES:
            candidate = make_candidate(schedule, stages, 2, microbatches)
            outcome = evaluate(candidate, microbatches, profile, range(4))
            seconds[name][schedule] = list(outcome.makespans_s)
            if (name, schedule) == ("quiet", "adaptive"):
                hidden.append(outcome.example.hidden_fraction)
    return seconds, hidden


def sleep_until(moment_s: float) -> None:
    """Sleeps until ``moment_s`` without a busy loop, because processes must share CPUs."""
    time.sleep(max(0.0, moment_s - time.monotonic()))


class SlowExchange:
    """All-to-all that ends ``takes_s`` seconds after all ranks have begun.

    Attributes:
        takes_s: Duration of the next exchange, in seconds.
        waited_s: Total time that this rank has waited for exchanges, in seconds.
        whole_s: Total duration of all exchanges, in seconds.
    """

    def __init__(self) -> None:
        self.takes_s = self.waited_s = self.whole_s = 0.0
        self._free_s = 0.0
        self._plain = dist.all_to_all_single

    def __call__(
        self,
        output: Any,
        given: Any,
        out: Any = None,
        parts: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # All ranks run on one machine and share its clock, so each rank sends the time at which it
        # begins.
        given.fill_(time.monotonic())
        work = self._plain(output, given, out, parts, group, True)
        pending = _Pending(self, work, output, self.takes_s)
        if async_op:
            return pending
        pending.wait()
        return None

    def end(self, begun_s: float, all_began_s: float, takes_s: float) -> None:
        """Waits until the end of an exchange, ``takes_s`` seconds after ``all_began_s``.

        An exchange begins only after the previous exchange has ended. This rank has waited since
        the time ``begun_s``. All times are in seconds.
        """
        self._free_s = max(self._free_s, all_began_s) + takes_s
        sleep_until(self._free_s)
        self.waited_s += time.monotonic() - begun_s
        self.whole_s += takes_s


class _Pending(NamedTuple):
    """Exchange that has begun, but that may not have ended yet."""

    of: SlowExchange
    work: Any
    output: torch.Tensor
    takes_s: float

    def wait(self) -> None:
        """Waits until the exchange has ended, including its delay."""
        begun_s = time.monotonic()
        self.work.wait()
        self.of.end(begun_s, float(self.output.max()), self.takes_s)


class ExpertStages(IdleStages):
    """Chunks that sleep instead of computing, and that exchange tokens with the other replicas."""

    def __init__(self, rank: Rank, candidate: Candidate, seed: int, scenario: str) -> None:
        self._rank = rank
        placement = candidate.placement
        self._stages = [
            placement.stage_of(rank.position, chunk) for chunk in range(placement.num_chunks)
        ]
        times, sigma = _times(STAGES, rank.chunk_s), SIGMA if "jitter" in scenario else 0.0
        workload = draw(placement, MICROBATCHES, times, seed=seed, action_sigma=sigma)
        self._seconds = workload.durations_ps / PS_PER_S
        self._exchanges = workload.exchanges_ps / PS_PER_S
        self._split = candidate.weight_pieces > 0
        is_slow = "slower" in scenario and rank.rank == STAGES * REPLICAS - 1
        self._pace = SLOW if is_slow else 1.0

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        """Runs the forward pass (F) of ``microbatch``, which sleeps and exchanges tokens."""
        return self._run(0, chunk, microbatch)

    def backward(self, chunk: int, microbatch: int, gradient: Any) -> torch.Tensor | None:
        """Runs the backward pass for inputs (B), and also W unless W is a separate action."""
        return self._run(1, chunk, microbatch)

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Sleeps for one of ``pieces`` equal parts of the backward pass for weights (W)."""
        self._sleep(self._seconds[2, self._stages[chunk], microbatch] / pieces)

    def _run(self, kind: int, chunk: int, microbatch: int) -> torch.Tensor:
        at = kind, self._stages[chunk], microbatch
        compute_s = self._seconds[at] - self._exchanges[at]
        if kind == 1 and not self._split:
            compute_s += self._seconds[(2, *at[1:])]
        for _ in range(CUTS):
            self._sleep(compute_s / CUTS)
            self._rank.exchange.takes_s = self._pace * self._exchanges[at] / CUTS
            rows = torch.empty(REPLICAS, 1, dtype=torch.float64)
            dist.all_to_all_single(torch.empty_like(rows), rows, group=self._rank.replicas)
        return torch.zeros(WIDTH, dtype=DTYPE)

    def _sleep(self, seconds: float) -> None:
        sleep_until(time.monotonic() + seconds * self._pace)


class Rank:
    """One rank of the emulated pipeline."""

    def __init__(self, rank: int, chunk_s: float) -> None:
        self.rank, self.chunk_s = rank, chunk_s
        self.position, self.replica = divmod(rank, REPLICAS)
        made = [_neighbours(first, REPLICAS) for first in range(0, STAGES * REPLICAS, REPLICAS)]
        self.replicas = made[self.position]
        self.exchange = SlowExchange()
        self.candidates = {
            name: make_candidate(name, STAGES, 2, MICROBATCHES) for name in SCHEDULES
        }
        self._channels: dict[Placement, Channels] = {}
        for candidate in self.candidates.values():
            if candidate.placement not in self._channels:
                self._channels[candidate.placement] = Channels(
                    candidate.placement,
                    self.position,
                    replica=self.replica,
                    replicas=REPLICAS,
                    agree=lambda completions: _agreement(rank, REPLICAS, completions),
                )

    def step(self, name: str, scenario: str, seed: int) -> tuple[float, float]:
        """Runs a step.

        Returns the duration in seconds, and the fraction of exchange time hidden by other actions.
        """
        candidate = self.candidates[name]
        stages = ExpertStages(self, candidate, seed, scenario)
        policy = candidate.policies(MICROBATCHES)[self.position]
        state = RankState(
            placement=candidate.placement,
            rank=self.position,
            num_microbatches=MICROBATCHES,
            cap=candidate.cap,
            weight_pieces=candidate.weight_pieces,
            beside=name != "interleaved",
        )
        executor = self._channels[candidate.placement].executor
        self.exchange.waited_s = self.exchange.whole_s = 0.0
        start = torch.tensor(time.monotonic() + _LEAD_S)
        start = start.double()
        dist.all_reduce(start, dist.ReduceOp.MAX)
        sleep_until(float(start))
        executor.run(stages, policy, state)
        end = torch.tensor(time.monotonic()).double()
        executor.finish_step()
        dist.all_reduce(end, dist.ReduceOp.MAX)
        hidden = 1 - self.exchange.waited_s / self.exchange.whole_s
        return float(end - start), hidden

    def close(self) -> None:
        """Closes the channels. All ranks must call this together."""
        for channels in self._channels.values():
            channels.close()


def _neighbours(first: int, count: int) -> Any:
    return dist.new_group(list(range(first, first + count)), backend="gloo")


def _agreement(rank: int, size: int, completions: Completions) -> Agreement:
    firsts = range(0, dist.get_world_size(), size)
    made = {first: _neighbours(first, size) for first in firsts}
    first = rank // size * size
    module, members = extension.require("this benchmark"), range(first, first + size)
    return connect(made[first], members, rank, completions, 60.0, str, module)


def run_rank(rank: int, plan: dict[str, Any] | None) -> Any:
    """Runs a rank of the emulation, or measures the cost of agreement if ``plan`` is ``None``."""
    sharpen_timers()
    if plan is None:
        return _agreement_us(rank)
    own = Rank(rank, plan["chunk_s"])
    dist.all_to_all_single = own.exchange
    seconds: dict[str, dict[str, list[float]]] = {}
    hidden: list[float] = []
    own.step("adaptive", "quiet", 0)
    for scenario in GOALS:
        seconds[scenario] = {name: [] for name in SCHEDULES}
        for seed in range(plan["repetitions"]):
            # The interleaved schedule, which does not overlap actions with exchanges, is compared
            # only in the scenario without slow ranks.
            for name in SCHEDULES if scenario == "quiet" else SCHEDULES[1:]:
                taken, share = own.step(name, scenario, seed)
                seconds[scenario][name].append(taken)
                if (scenario, name) == ("quiet", "adaptive"):
                    hidden.append(share)
    own.close()
    return {"seconds": seconds, "hidden": hidden}


def _agreement_us(rank: int) -> list[float]:
    """Returns the CPU time in microseconds that agreement between ranks adds to each action."""
    placement = Placement(num_ranks=2, num_chunks=2)
    policy = make_policies("adaptive", placement, MICROBATCHES, cap=8.0, weight_pieces=4)[1]

    def step(number: int, transport: Loopback, executor: Executor) -> float:
        kinds = [ActionKind.F, ActionKind.B]
        for microbatch in range(MICROBATCHES):
            for kind, chunk in ((kind, chunk) for kind in kinds for chunk in range(2)):
                if kind is ActionKind.F or chunk == 0:
                    label = Label(number, Action(kind, chunk, microbatch))
                    transport.completions.put(arrival(label, 0, torch.zeros(1)))
        state = RankState(
            placement=placement, rank=1, num_microbatches=MICROBATCHES, cap=8.0, weight_pieces=4
        )
        dist.barrier()
        begun_s = time.process_time()
        executor.run(IdleStages(), policy, state)
        taken_s = time.process_time() - begun_s
        executor.finish_step()
        return 1e6 * taken_s / state.num_actions

    costs = []
    for agrees in (False, True):
        transport = Loopback(-1, {-1: CompletionQueue()})
        agreement = _agreement(rank, 2, transport.completions) if agrees else Agreement()
        executor = Executor(
            placement=placement, pp_rank=1, transport=transport, agreement=agreement, timeout_s=60.0
        )
        costs.append([step(number, transport, executor) for number in range(20)][5:])
        agreement.close()
    alone = statistics.median(costs[0])
    own = [cost - alone for cost in costs[1]]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    return [max(pair) for pair in zip(*gathered, strict=True)]
