"""Step time of our engine against megatron-core's own schedules on a real small GPT.

Two processes train the same model. Within one job the competitors take turns, step by step, so that
whatever else the machine does hits all of them alike; a row is the median over rounds of the ratio
to megatron-core's own schedule in the same round. Part of ``benchmarks/schedules.py``; run by
itself, this file is one rank.
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
WARMUPS = 3
# chunks, our schedule, most it may take relative to megatron-core's own at the same chunks
GOALS = (
    (1, "1f1b", 1.02),
    (1, "adaptive", 1.02),
    (2, "interleaved", 1.02),
    (2, "adaptive", 1.02),
)


class Rank:
    """One rank: the model, and one forward-backward function per competitor.

    Args:
        chunks: chunks per rank.
    """

    def __init__(self, chunks: int) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        flags = [*MODEL, "--pipeline-schedule", "megatron"]
        if chunks > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
        config = parse(flags, world_size=environment.world_size)
        accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch
        from megatron.core import parallel_state

        from megatron.adaptive.training.dropout import DropoutKeys
        from megatron.adaptive.training.forward import GptForward
        from megatron.adaptive.training.initialize import start_job
        from megatron.adaptive.training.setup import build_run, make_loader

        torch.set_num_threads(1)
        self._num_chunks = chunks
        self._job = start_job(config, environment, accelerator)
        self._run = build_run(self._job)
        self._pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self._forward = GptForward(accelerator, DropoutKeys(1, enabled=False))
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0)
        self._wirings: list[Any] = []
        self._functions: dict[str, Any] = {"megatron": self._run.forward_backward}
        for name in (name for count, name, _ in GOALS if count == chunks):
            self._functions[name] = self._ours(name, accelerator)

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Take turns; returns the step times in seconds of each competitor, round by round."""
        times: dict[str, list[float]] = {name: [] for name in self._functions}
        for index in range(rounds + WARMUPS):
            # Rotate who goes first: the one after a slow step must not always be the same.
            order = list(self._functions)
            order = order[index % len(order) :] + order[: index % len(order)]
            for name in order:
                elapsed_s = self._step(name, index)
                if index >= WARMUPS:
                    times[name].append(elapsed_s)
        return times

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return self._job.is_first

    def close(self) -> None:
        """End the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.training.initialize import end_job

        for wiring in self._wirings:
            wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def _ours(self, name: str, accelerator: Any) -> Any:
        import torch

        from megatron.adaptive.pipeline.build import build_executor
        from megatron.adaptive.pipeline.forward_backward import ForwardBackward

        placement = self._run.placement
        wiring = build_executor(
            placement=placement,
            accelerator=accelerator,
            places=self._job.places,
            payload_shape=(256, 1, 256),
            payload_dtype=torch.float32,
            timeout_s=120.0,
            recorder=None,
        )
        self._wirings.append(wiring)
        return ForwardBackward(
            executor=wiring.executor, placement=placement, pp_rank=self._pp_rank, schedule=name
        )

    def _step(self, name: str, index: int) -> float:
        import torch.distributed as dist

        from megatron.adaptive.training.forward import ChunkFeed

        run, several = self._run, self._num_chunks > 1
        run.core.deallocate_pipeline_outputs = name != "megatron"
        microbatches = self._loader.step(MICROBATCHES)
        for chunk in run.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        run.optimizer.zero_grad()
        feeds = [
            ChunkFeed(microbatches, count=MICROBATCHES, step=index) for _ in range(self._num_chunks)
        ]
        dist.barrier(group=self._job.control_group)
        start = time.perf_counter()
        self._functions[name](
            forward_step_func=self._forward,
            data_iterator=feeds if several else feeds[0],
            model=run.chunks if several else run.chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=256,
            micro_batch_size=1,
        )
        run.optimizer.step()
        dist.barrier(group=self._job.control_group)
        return time.perf_counter() - start


def measure(chunks: int, rounds: int) -> dict[str, list[float]]:
    """Run two ranks; returns the step times in seconds of each competitor, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"),
                *("--nproc-per-node", "2", __file__, "--chunks", str(chunks)),
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
        times: dict[str, list[float]] = json.loads(output.read_text(encoding="utf-8"))
        return times


def make_rows(times: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Turn times, by chunks per rank, into the rows of the table."""
    table = []
    for chunks, name, goal in GOALS:
        ours, theirs = times[chunks][name], times[chunks]["megatron"]
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        ratio = statistics.median(ratios)
        table.append(
            {
                "chunks": chunks,
                "schedule": name,
                "step_ms": statistics.median(ours) * 1e3,
                "megatron_step_ms": statistics.median(theirs) * 1e3,
                "ratio": ratio,
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                "goal": goal,
                "met": ratio <= goal,
            }
        )
    return table


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "### A small GPT on two ranks: step time over megatron-core's own",
        "",
        "| chunks | schedule | step ms | megatron ms | ratio (quartiles) | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        lines.append(
            f"| {row['chunks']} | {row['schedule']} | {row['step_ms']:.1f} "
            f"| {row['megatron_step_ms']:.1f} | {row['ratio']:.3f} ({low:.3f}-{high:.3f}) "
            f"| <= {row['goal']} | {'met' if row['met'] else 'MISSED'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, required=True, help="chunks per rank")
    parser.add_argument("--rounds", type=int, required=True, help="steps of each competitor")
    parser.add_argument("--output", type=Path, required=True, help="where the times go")
    options = parser.parse_args()
    rank = Rank(options.chunks)
    times = rank.measure(options.rounds)
    if rank.is_first:
        options.output.write_text(json.dumps(times), encoding="utf-8")
    rank.close()


if __name__ == "__main__":
    main()
