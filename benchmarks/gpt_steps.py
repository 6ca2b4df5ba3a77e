"""Step time of our engine on a real small GPT, against megatron-core's and torch's own schedules.

Two processes train the same model. Within one job the competitors take turns on the same chunks,
step by step, so that whatever else the machine does hits all of them alike; a row is the median
over rounds of the ratio to the rival in the same round. At the end of a job every competitor runs
the same microbatches on the same weights, and losses and gradients must agree. Part of
``benchmarks/schedules.py``, and of ``benchmarks/transport.py``, where competitors are transports
between more ranks than processors: a rank that waits must not take the time of one that computes.
Run by itself, this file is one rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import ranks
from benchmarks.ranks import GPT, MICROBATCHES, GptRank, rank_main
from benchmarks.report import Row, measured

WARMUPS = 2
MOST_DIFFERENCE = {"loss": 1e-5, "gradient": 1e-5}
Function = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Job:
    """Some ranks whose chunks several competitors run in turns.

    Attributes:
        flags: which chunks to build; beyond ``GPT`` and the width.
        competitors: the first is what losses and gradients are compared with. ``megatron`` is
            megatron-core's own schedule, ``torch ...`` one of ``torch.distributed.pipelining``,
            ``plug-in ...`` one of ours by way of ``install()``, any other one of ours as the
            trainer runs it; a transport has our 1F1B on it.
        ranks: how many.
    """

    flags: str
    competitors: tuple[str, ...]
    ranks: int = 2


TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
JOBS = {
    "1 chunk": Job(
        "--pipeline-schedule megatron",
        ("1f1b", "adaptive", "megatron", "torch 1f1b", "plug-in 1f1b", "plug-in adaptive"),
    ),
    "2 chunks": Job(
        f"--pipeline-schedule megatron {TWO_CHUNKS}",
        ("interleaved", "adaptive", "megatron", "torch interleaved"),
    ),
    "V": Job(
        f"--pipeline-schedule zb-v {TWO_CHUNKS}",
        ("zb-v", "adaptive", "torch zb-v", "torch zb-v, our W"),
    ),
}
TRANSPORTS = ("shm", "gloo", "tcp")
OVER_TRANSPORTS = "transports"
ALL_JOBS = {**JOBS, OVER_TRANSPORTS: Job("--pipeline-schedule megatron", TRANSPORTS, ranks=4)}
# job, our schedule, its rival, most it may take relative to the rival; None where that is no goal
DUELS: tuple[tuple[str, str, str, float | None], ...] = (
    ("1 chunk", "1f1b", "megatron", 1.02),
    ("1 chunk", "adaptive", "megatron", 1.02),
    ("2 chunks", "interleaved", "megatron", 1.02),
    ("2 chunks", "adaptive", "megatron", 1.02),
    ("1 chunk", "plug-in 1f1b", "megatron", 1.00),
    ("1 chunk", "plug-in adaptive", "megatron", 1.00),
    ("1 chunk", "plug-in adaptive", "adaptive", 1.01),
    ("1 chunk", "1f1b", "torch 1f1b", None),
    ("2 chunks", "interleaved", "torch interleaved", None),
    ("V", "zb-v", "torch zb-v", None),
    ("V", "zb-v", "torch zb-v, our W", None),
    ("V", "adaptive", "torch zb-v", None),
    ("V", "adaptive", "torch zb-v, our W", None),
)


def takes_part(job: str, name: str, index: int) -> bool:
    """Whether a competitor runs in a round: in every second one if no goal looks at it."""
    if index % 2 == 0 or job == OVER_TRANSPORTS:
        return True
    return any(duel[0] == job and name in duel[1:3] and duel[3] is not None for duel in DUELS)


class Rank(GptRank):
    """One rank: the model, and one function per competitor that runs a step up to its gradients.

    Args:
        _: folder that it does not need.
        job: one of ``JOBS``.
        width: of the model.
    """

    JOBS: ClassVar[Mapping[str, Job]] = ALL_JOBS

    def __init__(self, _: Path, job: str, width: str = "256") -> None:
        of_job = self.JOBS[job]
        size = ["--hidden-size", width, "--pipeline-model-parallel-size", str(of_job.ranks)]
        super().__init__([*GPT, *size, *of_job.flags.split()])

        from megatron.adaptive.engine.deferred_layers import attach_stores
        from megatron.adaptive.gpt.forward import GptForward

        splits = self._job.config.splits_backward
        self._name = job
        self._stores = attach_stores(self._run.chunks) if splits else None
        self._forward = GptForward(self._accelerator)
        self._wirings: list[Any] = []  # what is closed at the end
        self._functions = {name: self._function(name) for name in of_job.competitors}

    def measure(self, rounds: int) -> dict[str, Any]:
        """Runs the competitors in turns.

        Returns:
            Under ``times`` the step times in seconds of each competitor, round by round, ``None``
            where it sat out; under ``differences`` what :meth:`compare` found.
        """
        times: dict[str, list[float | None]] = {name: [] for name in self._functions}
        for index in range(-WARMUPS, rounds):
            order = [name for name in times if index < 0 or takes_part(self._name, name, index)]
            # Rotate who goes first: the one after a slow step must not always be the same.
            start = index // 2 % len(order) if order else 0
            elapsed_s = {name: self._timed(name) for name in order[start:] + order[:start]}
            for name in times if index >= 0 else ():
                times[name].append(elapsed_s.get(name))
        return {"times": times, "differences": self.compare()}

    def compare(self) -> dict[str, dict[str, float]]:
        """Runs all competitors on the same microbatches and weights. Collective.

        Returns:
            Per competitor the largest relative difference of a microbatch's loss, and the norm of
            the difference of all gradients relative to theirs; both to the first competitor.
        """
        import torch
        import torch.distributed as dist

        group = self._job.control_group
        microbatches = self.read()
        found: dict[str, dict[str, float]] = {}
        expected: list[Any] = []
        for name, function in self._functions.items():
            self._prepare(name)
            reported = function(microbatches)
            losses = torch.zeros(self._microbatches, dtype=torch.float64)
            for index, values in enumerate(reported):
                (losses[index],) = (value.double().cpu() for value in values.values())
            # Only one rank has losses.
            dist.all_reduce(losses, group=group)
            gradients = [
                parameter.main_grad.double().cpu()  # type: ignore[attr-defined]
                for chunk in self._run.chunks
                for parameter in chunk.parameters()
            ]
            seen = [losses, *gradients]
            expected = expected or seen
            squares = torch.zeros(2, dtype=torch.float64)
            for mine, theirs in zip(gradients, expected[1:], strict=True):
                squares += torch.stack([(mine - theirs).square().sum(), theirs.square().sum()])
            dist.all_reduce(squares, group=group)
            found[name] = {
                "loss": float(((losses - expected[0]) / expected[0]).abs().max()),
                "gradient": float((squares[0] / squares[1]).sqrt()),
            }
        return found

    def close(self) -> None:
        for wiring in self._wirings:
            wiring.close()
        super().close()

    def read(self) -> list[Any] | None:
        """Reads all microbatches of a step before any clock starts."""
        microbatches = super().read()
        return None if microbatches is None else list(microbatches)

    def _function(self, name: str) -> Function:
        if name.startswith("torch "):
            from benchmarks.gpt_torch import TorchRunner

            schedule, _, by_stores = name.removeprefix("torch ").partition(", ")
            stores = self._stores if by_stores else None
            return TorchRunner(self._run, schedule, MICROBATCHES, stores or ())
        if name == "megatron":
            return self._fed(self._run.forward_backward)
        if self._name == OVER_TRANSPORTS:
            return self._fed(self._ours("1f1b", transport=name))
        if name.startswith("plug-in "):
            return self._fed(self._plugged_in(name.removeprefix("plug-in ")))
        return self._fed(self._ours(name))

    def _fed(self, forward_backward: Callable[..., list[Any]]) -> Function:
        """Returns a function that calls ``forward_backward`` with microbatches only."""
        from megatron.adaptive.gpt.forward import feed

        chunks, count, config = self._run.chunks, self._microbatches, self._job.config
        single = len(chunks) == 1

        def run(microbatches: Any) -> list[Any]:
            feeds = [feed(microbatches, count) for _ in chunks]
            return forward_backward(
                forward_step_func=self._forward,
                data_iterator=feeds[0] if single else feeds,
                model=chunks[0] if single else chunks,
                num_microbatches=count,
                seq_length=config.model.seq_length,
                micro_batch_size=config.batch.micro_batch_size,
            )

        return run

    def _ours(self, name: str, **transport: Any) -> Callable[..., list[Any]]:
        """Our executor with a schedule, over channels as ``TransportConfig`` has them."""
        from megatron.core import parallel_state

        from megatron.adaptive.config.parallel import TransportConfig
        from megatron.adaptive.engine.executor_setup import build_executor
        from megatron.adaptive.engine.policy_factory import Orders
        from megatron.adaptive.engine.stages import ForwardBackward
        from megatron.adaptive.gpt.setup import payload_shape

        run, config = self._run, self._job.config
        wiring = build_executor(
            placement=run.placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=payload_shape(config),
            payload_dtype=run.core.pipeline_dtype,
            timeout_s=120.0,
            transport=TransportConfig(**transport),
        )
        self._wirings.append(wiring)
        return ForwardBackward(
            executor=wiring.executor,
            orders=Orders(
                schedule=name,
                placement=run.placement,
                pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
                splits=bool(self._stores),
                pieces=config.schedule.weight_pieces,
            ),
            stores=self._stores,
        )

    def _plugged_in(self, name: str) -> Callable[..., list[Any]]:
        from megatron.adaptive.plugin.engines import Engines
        from megatron.adaptive.plugin.placement_patch import Placed
        from megatron.adaptive.plugin.settings import Settings

        settings = Settings(schedule=name)
        engines = Engines(Placed(lambda: "loop"))
        self._wirings.append(engines)
        return lambda **given: engines.engine_of(given["model"], settings, None).run(given)

    def _prepare(self, name: str) -> None:
        self._run.core.deallocate_pipeline_outputs = name != "megatron"
        for chunk in self._run.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self._run.optimizer.zero_grad()

    def _timed(self, name: str) -> float:
        import torch.distributed as dist

        microbatches = self.read()
        self._prepare(name)
        dist.barrier(group=self._job.control_group)
        start = time.perf_counter()
        self._functions[name](microbatches)
        self._run.optimizer.step()
        self._accelerator.synchronize()
        dist.barrier(group=self._job.control_group)
        return time.perf_counter() - start


def measure(job: str, rounds: int, limit_s: float = 900.0, width: int = 256) -> dict[str, Any]:
    """Runs the ranks of a job.

    Args:
        job: one of ``ALL_JOBS``.
        rounds: how often the competitors that a goal looks at take a step.
        limit_s: everything is killed after it.
        width: of the model.

    Returns:
        What :meth:`Rank.measure` did.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    words = job, str(width)
    return ranks.measure(__file__, ALL_JOBS[job].ranks, rounds, *words, limit_s=limit_s)


def make_rows(results: Mapping[str, dict[str, Any]]) -> list[Row]:
    """Converts the results of :func:`measure`, by job, to rows."""
    rows = []
    for job, name, rival, goal in DUELS:
        times = results[job]["times"]
        rounds = [pair for pair in zip(times[name], times[rival], strict=True) if None not in pair]
        ours_ms, theirs_ms = (1e3 * statistics.median(one) for one in zip(*rounds, strict=True))
        what = f"small GPT, {job}: step of {name} over {rival}"
        note = f"{ours_ms:.1f} ms against {theirs_ms:.1f}"
        rows.append(measured(what, [a / b for a, b in rounds], goal=goal, note=note))
    wrong = disagreements(results)
    for what, most in MOST_DIFFERENCE.items():
        values = [
            difference[what]
            for result in results.values()
            for difference in result["differences"].values()
        ]
        note = "; ".join(text for text in wrong if f"the {what} of" in text)
        rows.append(difference_row("small GPT", what, values, most, note))
    return rows


def difference_row(where: str, what: str, values: Iterable[float], most: float, note: str) -> Row:
    """Returns the row of the largest of relative differences."""
    # Not-a-number is no difference that is allowed, and max passes it by.
    worst = max(values, key=lambda value: (math.isnan(value), value))
    text = f"{where}: largest relative difference of the {what} on equal weights"
    return Row(what=text, value=worst, goal=most, note=note)


def disagreements(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Returns the competitors whose losses or gradients differ from the first of their job."""
    return [
        f"{job}: the {what} of {name} differs from that of {JOBS[job].competitors[0]} by "
        f"{difference[what]:.1e}, allowed is {most}"
        for job, result in results.items()
        for name, difference in result["differences"].items()
        for what, most in MOST_DIFFERENCE.items()
        # Not-a-number is none of the allowed ones either.
        if not difference[what] <= most
    ]


if __name__ == "__main__":
    rank_main(Rank)
