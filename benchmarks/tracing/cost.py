"""What tracing costs a real small GPT on four processes; by itself, one rank of it.

One job trains steps that are traced or not, in turns, so that whatever else the machine does hits
both alike. A traced step ends when its spans are in the file. Both the time on the clock and the
processor time of all ranks are taken: who waits for whom changes the former by some percent from
step to step, the latter hardly, so that a fraction of a percent shows in it.
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

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.multiprocess.launch import kill_tree  # noqa: E402

RANKS = 4
ORDERS = ((True, False, False, True), (False, True, True, False))
"""Whether each step of a round is traced: what drifts evenly hits both kinds alike."""

WARMUPS = 4
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    " --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 100000"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0"
    f" --pipeline-model-parallel-size {RANKS} --diagnose-interval 0"
).split()
MICROBATCHES = 8


def measure(rounds: int, limit_s: float = 1200.0) -> dict[str, Any]:
    """Take turns.

    Args:
        rounds: of two traced and two other steps each.
        limit_s: everything is killed after it.

    Returns:
        ``traced_s`` and ``plain_s``, seconds per step of each round; ``traced_cpu_s`` and
        ``plain_cpu_s``, the same of processor time over all ranks; and ``spans`` per step.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"),
                *("--nproc-per-node", str(RANKS), str(Path(__file__).resolve())),
                *("--rounds", str(rounds), "--output", str(output)),
                *("--traces", str(Path(folder) / "traces")),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the traced GPT took more than {limit_s:g} s") from None
        finally:
            kill_tree(job)
        if status:
            raise RuntimeError(f"the traced GPT ended with status {status}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def ratios(result: dict[str, Any], unit: str = "s") -> list[float]:
    """Traced by plain, round by round; ``unit`` is ``s`` or ``cpu_s``."""
    pairs = zip(result[f"traced_{unit}"], result[f"plain_{unit}"], strict=True)
    return [traced / plain for traced, plain in pairs]


class Rank:
    """One rank of the job.

    Args:
        traces: folder for them.
    """

    def __init__(self, traces: Path) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        arguments = [*MODEL, "--trace-dir", str(traces)]
        config = parse(arguments, world_size=environment.world_size)
        accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.training.initialize import start_job
        from megatron.adaptive.training.setup import build_run, make_loader
        from megatron.adaptive.training.step import Step

        torch.set_num_threads(1)
        self._job = start_job(config, environment, accelerator)
        self._run = build_run(self._job)
        self._step = Step(self._run)
        read = self._run.tracing.data_read
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0, on_read=read)
        self._iteration = 0

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns seconds per step, of all ranks together."""
        for number in range(WARMUPS):
            self._train(is_traced=number % 2 == 0)
        walls: dict[bool, list[float]] = {True: [], False: []}
        processors: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
            for is_traced in ORDERS[number % 2]:
                for at, seconds in enumerate(self._timed(is_traced=is_traced)):
                    sums[is_traced][at] += seconds / 2
            for is_traced, (wall, processor) in sums.items():
                walls[is_traced].append(wall)
                processors[is_traced].append(processor)
        cpu = {is_traced: self._of_all_ranks(values) for is_traced, values in processors.items()}
        return {
            "traced_s": walls[True],
            "plain_s": walls[False],
            "traced_cpu_s": cpu[True],
            "plain_cpu_s": cpu[False],
        }

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return bool(self._job.is_first)

    def close(self) -> None:
        """End the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.training.initialize import end_job

        self._loader = None if self._loader is None else self._loader.close()
        self._run.tracing.close()
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def _timed(self, *, is_traced: bool) -> tuple[float, float]:
        """One step; returns its seconds of all ranks and the processor seconds of this one."""
        import torch.distributed as dist

        group = self._job.control_group
        recorder: Any = self._run.tracing.recorder
        dist.barrier(group=group)
        start, processor = time.perf_counter(), time.process_time()
        self._train(is_traced=is_traced)
        # What the writer has not written would be the next step's.
        while not recorder._queue.empty():
            time.sleep(0.0002)
        processor = time.process_time() - processor
        dist.barrier(group=group)
        return time.perf_counter() - start, processor

    def _of_all_ranks(self, seconds: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        total = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self._job.control_group)
        return [float(value) for value in total]

    def _train(self, *, is_traced: bool) -> None:
        self._iteration += 1
        tracing = self._run.tracing
        tracing.begin_iteration(self._iteration, MICROBATCHES, is_traced=is_traced)
        microbatches = None if self._loader is None else self._loader.step(MICROBATCHES)
        self._step.train(microbatches, MICROBATCHES, self._iteration)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, required=True, help="of four steps each")
    parser.add_argument("--output", type=Path, required=True, help="where the result goes")
    parser.add_argument("--traces", type=Path, required=True, help="folder for traces")
    options = parser.parse_args()
    rank = Rank(options.traces)
    result = rank.measure(options.rounds)
    rank.close()
    if rank.is_first:
        from megatron.adaptive.trace.read import read_run

        trace = read_run(options.traces)
        spans = sum(sum(b.marker.counts) for t in trace.ranks.values() for b in t.index.blocks)
        result["spans"] = spans / max(1, len(trace.iterations))
        result["step_s"] = statistics.median(result["plain_s"])
        options.output.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
