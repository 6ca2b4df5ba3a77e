"""Step time of our engine against megatron-core's own schedules, in one run.

    python benchmarks/schedules.py [--quick] [--json FILE]

Two processes train the same small GPT. Within one job the competitors take turns, step by step, so
that whatever else the machine does hits all of them alike; a row is the median over rounds of the
ratio to megatron-core's own schedule in the same round. Exits with status 1 where a goal is missed.
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
# chunks, our schedule, most it may take relative to megatron-core's own at the same chunks
GOALS = (
    (1, "1f1b", 1.02),
    (1, "adaptive", 1.02),
    (2, "interleaved", 1.02),
    (2, "adaptive", 1.02),
)


def worker(chunks: int, rounds: int, output: Path) -> None:
    """One rank: take turns between megatron-core's own schedule and ours."""
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
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.adaptive.pipeline.build import build_executor
    from megatron.adaptive.pipeline.forward_backward import ForwardBackward
    from megatron.adaptive.training.forward import ChunkFeed, DropoutKeys, GptForward
    from megatron.adaptive.training.initialize import end_job, start_job
    from megatron.adaptive.training.setup import build_run, make_loader

    torch.set_num_threads(1)
    job = start_job(config, environment, accelerator)
    run = build_run(job)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    names = [name for count, name, _ in GOALS if count == chunks]
    functions: dict[str, Any] = {"megatron": run.forward_backward}
    wirings = []
    for name in names:
        wiring = build_executor(
            placement=run.placement,
            accelerator=accelerator,
            places=job.places,
            payload_shape=(256, 1, 256),
            payload_dtype=torch.float32,
            timeout_s=120.0,
            recorder=None,
        )
        wirings.append(wiring)
        functions[name] = ForwardBackward(
            executor=wiring.executor, placement=run.placement, pp_rank=pp_rank, schedule=name
        )
    forward = GptForward(accelerator, DropoutKeys(1, enabled=False))
    loader = make_loader(run, run.samples.train, 0)
    assert loader is not None
    times: dict[str, list[float]] = {name: [] for name in functions}

    def step(name: str, index: int) -> float:
        run.core.deallocate_pipeline_outputs = name != "megatron"
        microbatches = loader.step(8)
        for chunk in run.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        run.optimizer.zero_grad()
        feeds = [
            ChunkFeed(
                microbatches, count=8, stage=run.placement.stage_of(pp_rank, chunk), step=index
            )
            for chunk in range(chunks)
        ]
        dist.barrier(group=job.control_group)
        start = time.perf_counter()
        functions[name](
            forward_step_func=forward,
            data_iterator=feeds[0] if chunks == 1 else feeds,
            model=run.chunks[0] if chunks == 1 else run.chunks,
            num_microbatches=8,
            seq_length=256,
            micro_batch_size=1,
        )
        run.optimizer.step()
        dist.barrier(group=job.control_group)
        return time.perf_counter() - start

    for index in range(rounds + 3):
        # Rotate who goes first: the one after a slow step must not always be the same.
        order = list(functions)
        order = order[index % len(order) :] + order[: index % len(order)]
        for name in order:
            elapsed = step(name, index)
            if index >= 3:
                times[name].append(elapsed)
    if job.is_first:
        output.write_text(json.dumps(times), encoding="utf-8")
    for wiring in wirings:
        wiring.close()
    dist.barrier(group=job.control_group)
    end_job()


def measure(chunks: int, rounds: int) -> dict[str, list[float]]:
    """Run two ranks; returns the step times in seconds of each competitor, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"),
                *("--nproc-per-node", "2", __file__, "--worker", str(chunks)),
                *("--rounds", str(rounds), "--json", str(output)),
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


def rows(times: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Turn times into the rows of the table."""
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
                "quartiles": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
                "goal": goal,
                "met": ratio <= goal,
            }
        )
    return table


def main() -> int:
    """Measure, print the table; returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--rounds", type=int, help="steps of each competitor")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.rounds, options.json)
        return 0
    rounds = options.rounds or (20 if options.quick else 60)
    table = rows({chunks: measure(chunks, rounds) for chunks in (1, 2)})
    print("| chunks | schedule | step ms | megatron ms | ratio (quartiles) | goal | |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        low, high = row["quartiles"]
        print(
            f"| {row['chunks']} | {row['schedule']} | {row['step_ms']:.1f} "
            f"| {row['megatron_step_ms']:.1f} | {row['ratio']:.3f} ({low:.3f}-{high:.3f}) "
            f"| <= {row['goal']} | {'met' if row['met'] else 'MISSED'} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
