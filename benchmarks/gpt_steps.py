"""Step time of our engine on a real small GPT, against megatron-core's and torch's own schedules.

Two processes train the same model. Within one job the competitors take turns on the same chunks,
step by step, so that whatever else the machine does hits all of them alike; a row is the median
over rounds of the ratio to the rival in the same round. At the end of a job every competitor runs
the same microbatches on the same weights, and losses and gradients must agree. Part of
``benchmarks/schedules.py``; run by itself, this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    " --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 100000"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0"
    " --pipeline-model-parallel-size 2"
).split()
MICROBATCHES = 8
WARMUPS = 2
MOST_DIFFERENCE = {"loss": 1e-5, "gradient": 1e-5}
Function = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Job:
    """Two ranks whose chunks several competitors run in turns.

    Attributes:
        flags: which chunks to build; beyond ``MODEL``.
        competitors: the first is what losses and gradients are compared with. ``megatron`` is
            megatron-core's own schedule, ``torch ...`` one of ``torch.distributed.pipelining``,
            any other one of ours.
    """

    flags: str
    competitors: tuple[str, ...]


TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
JOBS = {
    "1 chunk": Job("--pipeline-schedule megatron", ("1f1b", "adaptive", "megatron", "torch 1f1b")),
    "2 chunks": Job(
        f"--pipeline-schedule megatron {TWO_CHUNKS}",
        ("interleaved", "adaptive", "megatron", "torch interleaved"),
    ),
    "V": Job(
        f"--pipeline-schedule zb-v {TWO_CHUNKS}",
        ("zb-v", "adaptive", "torch zb-v", "torch zb-v, our W"),
    ),
}
# job, our schedule, its rival, most it may take relative to the rival; None where that is no goal
DUELS: tuple[tuple[str, str, str, float | None], ...] = (
    ("1 chunk", "1f1b", "megatron", 1.02),
    ("1 chunk", "adaptive", "megatron", 1.02),
    ("2 chunks", "interleaved", "megatron", 1.02),
    ("2 chunks", "adaptive", "megatron", 1.02),
    ("1 chunk", "1f1b", "torch 1f1b", None),
    ("2 chunks", "interleaved", "torch interleaved", None),
    ("V", "zb-v", "torch zb-v", None),
    ("V", "zb-v", "torch zb-v, our W", None),
    ("V", "adaptive", "torch zb-v", None),
    ("V", "adaptive", "torch zb-v, our W", None),
)


def takes_part(job: str, name: str, index: int) -> bool:
    """Whether a competitor runs in a round: in every second one if no goal looks at it."""
    return index % 2 == 0 or any(
        duel[0] == job and name in duel[1:3] and duel[3] is not None for duel in DUELS
    )


class Rank:
    """One rank: the model, and one function per competitor that runs a step up to its gradients.

    Args:
        job: one of ``JOBS``.
    """

    def __init__(self, job: str) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        config = parse([*MODEL, *JOBS[job].flags.split()], world_size=environment.world_size)
        self._accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.engine.deferred_layers import attach_stores
        from megatron.adaptive.gpt.forward import DropoutKeys, GptForward
        from megatron.adaptive.gpt.initialize import start_job
        from megatron.adaptive.gpt.setup import build_run, make_loader

        torch.set_num_threads(1)
        self._name = job
        self._job = start_job(config, environment, self._accelerator)
        self._run = build_run(self._job)
        self._stores = attach_stores(self._run.chunks) if config.splits_backward else None
        self._forward = GptForward(self._accelerator, DropoutKeys(1, enabled=False))
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0)
        self._wirings: list[Any] = [self._run.wiring] if self._run.wiring is not None else []
        self._functions = {name: self._function(name) for name in JOBS[job].competitors}

    def measure(self, rounds: int) -> dict[str, list[float | None]]:
        """Take turns.

        Returns:
            The step times in seconds of each competitor, round by round; ``None`` where it sat out.
        """
        times: dict[str, list[float | None]] = {name: [] for name in self._functions}
        for index in range(-WARMUPS, rounds):
            order = [name for name in times if index < 0 or takes_part(self._name, name, index)]
            # Rotate who goes first: the one after a slow step must not always be the same.
            start = index // 2 % len(order) if order else 0
            elapsed_s = {name: self._step(name) for name in order[start:] + order[:start]}
            for name in times if index >= 0 else ():
                times[name].append(elapsed_s.get(name))
        return times

    def compare(self) -> dict[str, dict[str, float]]:
        """Run all competitors on the same microbatches and weights. Collective.

        Returns:
            Per competitor the largest relative difference of a microbatch's loss, and the norm of
            the difference of all gradients relative to theirs; both to the first competitor.
        """
        import torch
        import torch.distributed as dist

        group = self._job.control_group
        microbatches = self._read()
        found: dict[str, dict[str, float]] = {}
        expected: list[Any] = []
        for name, function in self._functions.items():
            self._prepare(name)
            reported = function(microbatches)
            losses = torch.zeros(MICROBATCHES, dtype=torch.float64)
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

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return self._job.is_first

    def close(self) -> None:
        """End the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.gpt.initialize import end_job

        for wiring in self._wirings:
            wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def _function(self, name: str) -> Function:
        if name.startswith("torch "):
            from benchmarks.gpt_torch import TorchRunner

            schedule, _, by_stores = name.removeprefix("torch ").partition(", ")
            stores = self._stores if by_stores else None
            return TorchRunner(self._run, schedule, MICROBATCHES, stores or ())
        if name == "megatron":
            return self._fed(self._run.forward_backward)
        return self._fed(self._ours(name))

    def _fed(self, forward_backward: Callable[..., list[Any]]) -> Function:
        """Call a function with megatron-core's signature with microbatches alone."""
        from megatron.adaptive.gpt.forward import ChunkFeed

        chunks = self._run.chunks
        single = len(chunks) == 1

        def run(microbatches: Any) -> list[Any]:
            feeds = [ChunkFeed(microbatches, count=MICROBATCHES, step=0) for _ in chunks]
            return forward_backward(
                forward_step_func=self._forward,
                data_iterator=feeds[0] if single else feeds,
                model=chunks[0] if single else chunks,
                num_microbatches=MICROBATCHES,
                seq_length=256,
                micro_batch_size=1,
            )

        return run

    def _ours(self, name: str) -> Callable[..., list[Any]]:
        from megatron.core import parallel_state

        from megatron.adaptive.engine.build import build_executor
        from megatron.adaptive.engine.forward_backward import ForwardBackward
        from megatron.adaptive.engine.orders import Orders
        from megatron.adaptive.gpt.setup import payload_shape
        from megatron.adaptive.schedule.registry import is_rule

        run, config = self._run, self._job.config
        wiring = build_executor(
            placement=run.placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=payload_shape(config),
            payload_dtype=run.core.pipeline_dtype,
            timeout_s=120.0,
            recorder=None,
        )
        self._wirings.append(wiring)
        # As the trainer chooses it: a fixed order does each weight gradient in one go.
        pieces = config.schedule.weight_pieces if is_rule(name) else 1
        return ForwardBackward(
            executor=wiring.executor,
            orders=Orders(
                schedule=name,
                placement=run.placement,
                pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
                weight_pieces=pieces if self._stores else 0,
            ),
            stores=self._stores,
        )

    def _read(self) -> list[Any] | None:
        """Read a step's microbatches, before any clock starts."""
        return None if self._loader is None else list(self._loader.step(MICROBATCHES))

    def _prepare(self, name: str) -> None:
        self._run.core.deallocate_pipeline_outputs = name != "megatron"
        for chunk in self._run.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self._run.optimizer.zero_grad()

    def _step(self, name: str) -> float:
        import torch.distributed as dist

        microbatches = self._read()
        self._prepare(name)
        dist.barrier(group=self._job.control_group)
        start = time.perf_counter()
        self._functions[name](microbatches)
        self._run.optimizer.step()
        dist.barrier(group=self._job.control_group)
        return time.perf_counter() - start


def measure(job: str, rounds: int) -> dict[str, Any]:
    """Run two ranks.

    Args:
        job: one of ``JOBS``.
        rounds: how often the competitors that a goal looks at take a step.

    Returns:
        Under ``times`` what :meth:`Rank.measure` returned, under ``differences`` what
        :meth:`Rank.compare` did.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"),
                *("--nproc-per-node", "2", __file__, "--job", job),
                *("--rounds", str(rounds), "--output", str(output)),
            ],
            check=True,
            timeout=900,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
        )
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def make_rows(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn what :func:`measure` returned, by job, into the rows of the table."""
    table = []
    for job, name, rival, goal in DUELS:
        times = results[job]["times"]
        rounds = [pair for pair in zip(times[name], times[rival], strict=True) if None not in pair]
        ours, theirs = zip(*rounds, strict=True)
        ratios = sorted(a / b for a, b in rounds)
        ratio = statistics.median(ratios)
        table.append(
            {
                "job": job,
                "schedule": name,
                "rival": rival,
                "step_ms": statistics.median(ours) * 1e3,
                "rival_step_ms": statistics.median(theirs) * 1e3,
                "ratio": ratio,
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                "goal": goal,
                "met": None if goal is None else ratio <= goal,
            }
        )
    return table


def disagreements(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Name the competitors whose losses or gradients are not those of the first of their job."""
    found = []
    for job, result in results.items():
        for name, difference in result["differences"].items():
            for what, most in MOST_DIFFERENCE.items():
                # Not-a-number is none of the allowed ones either.
                if not difference[what] <= most:
                    found.append(
                        f"{job}: the {what} of {name} differs from that of"
                        f" {JOBS[job].competitors[0]} by {difference[what]:.1e}, allowed is {most}"
                    )
    return found


def markdown(rows: Sequence[dict[str, Any]], results: Mapping[str, dict[str, Any]]) -> str:
    """Rows as a table, and below it whether all competitors computed the same."""
    lines = [
        "### A small GPT on two ranks: step time over that of others on the same chunks",
        "",
        "| stages | schedule | step ms | rival | its ms | ratio (quartiles) | goal | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        goal = "" if row["goal"] is None else f"<= {row['goal']}"
        met = {None: "", True: "met", False: "MISSED"}[row["met"]]
        lines.append(
            f"| {row['job']} | {row['schedule']} | {row['step_ms']:.1f} "
            f"| {row['rival']} | {row['rival_step_ms']:.1f} "
            f"| {row['ratio']:.3f} ({low:.3f}-{high:.3f}) | {goal} | {met} |"
        )
    worst = {
        what: max(
            difference[what]
            for result in results.values()
            for difference in result["differences"].values()
        )
        for what in MOST_DIFFERENCE
    }
    lines += [
        "",
        "Largest relative differences on equal weights: "
        + ", ".join(f"{what} {value:.1e}" for what, value in worst.items())
        + ".",
    ]
    lines += [f"WRONG: {line}" for line in disagreements(results)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=tuple(JOBS), required=True, help="what to build and run")
    parser.add_argument("--rounds", type=int, required=True, help="turns to take")
    parser.add_argument("--output", type=Path, required=True, help="where the results go")
    options = parser.parse_args()
    rank = Rank(options.job)
    result = {"times": rank.measure(options.rounds), "differences": rank.compare()}
    if rank.is_first:
        options.output.write_text(json.dumps(result), encoding="utf-8")
    rank.close()


if __name__ == "__main__":
    main()
