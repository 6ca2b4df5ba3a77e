"""What a checkpoint behind training costs every ten steps: a small GPT; by itself, one rank of it.

One job trains windows of ten steps that begin with a checkpoint or do not, in turns, so that
whatever else the machine does hits both alike. A window ends when its checkpoint is complete, so
that nothing of it is left to the next. Both the time on the clock and the processor time of all
ranks are taken: where training uses every processor, the second is the cause of the first.
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

RANKS = 2
WINDOW = 10
ORDERS = ((True, False, False, True), (False, True, True, False))
"""Whether each window of a round has a checkpoint: what drifts evenly hits both kinds alike."""

MICROBATCHES = 8
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256"
    " --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
    f" --micro-batch-size 1 --global-batch-size {MICROBATCHES} --lr 1e-4 --train-iters 100000"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0"
    f" --pipeline-model-parallel-size {RANKS} --keep-checkpoints 2 --async-save --save-interval 10"
).split()


def measure(rounds: int, limit_s: float = 900.0) -> dict[str, Any]:
    """Take turns.

    Args:
        rounds: of two windows of each kind.
        limit_s: everything is killed after it.

    Returns:
        ``saving_s`` and ``plain_s``, seconds per step of each round; ``saving_cpu_s`` and
        ``plain_cpu_s``, the same of processor time over all ranks; ``waited_s``, how long training
        waited for each checkpoint; and its ``size_bytes``.

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
                *("--save", str(Path(folder) / "saved")),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the GPT that saves took more than {limit_s:g} s") from None
        finally:
            kill_tree(job)
        if status:
            raise RuntimeError(f"the GPT that saves ended with status {status}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def costs(result: dict[str, Any], unit: str = "s") -> list[float]:
    """By how much steps beside checkpoints are longer, round by round; ``s`` or ``cpu_s``."""
    pairs = zip(result[f"saving_{unit}"], result[f"plain_{unit}"], strict=True)
    return [saving / plain - 1 for saving, plain in pairs]


class Rank:
    """One rank of the job.

    Args:
        folder: for its checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        config = parse([*MODEL, "--save", str(folder)], world_size=environment.world_size)
        accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.training.checkpoint import Checkpoints
        from megatron.adaptive.training.initialize import start_job
        from megatron.adaptive.training.setup import build_run, make_loader
        from megatron.adaptive.training.step import Step

        torch.set_num_threads(1)
        self._job = start_job(config, environment, accelerator)
        self._run = run = build_run(self._job)
        self._step = Step(run)
        self._loader: Any = make_loader(run, run.samples.train, 0)
        self._checkpoints = Checkpoints(self._job, run.chunks, run.optimizer, run.scheduler)
        self._iteration = 0
        self._waited_s: list[float] = []

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns seconds per step, processor seconds of all ranks together."""
        for is_saving in (False, True):
            self._window(is_saving=is_saving)
        self._waited_s.clear()
        walls: dict[bool, list[float]] = {True: [], False: []}
        processors: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
            for is_saving in ORDERS[number % 2]:
                for at, seconds in enumerate(self._window(is_saving=is_saving)):
                    sums[is_saving][at] += seconds / 2 / WINDOW
            for is_saving, (wall, processor) in sums.items():
                walls[is_saving].append(wall)
                processors[is_saving].append(processor)
        cpu = {is_saving: self._of_all_ranks(values) for is_saving, values in processors.items()}
        return {
            "saving_s": walls[True],
            "plain_s": walls[False],
            "saving_cpu_s": cpu[True],
            "plain_cpu_s": cpu[False],
            "waited_s": self._waited_s,
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
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def _window(self, *, is_saving: bool) -> tuple[float, float]:
        """Ten steps; returns their seconds of all ranks and the processor seconds of this one."""
        import torch.distributed as dist

        group = self._job.control_group
        dist.barrier(group=group)
        start, processor = time.perf_counter(), time.process_time()
        if is_saving:
            self._save()
        for _ in range(WINDOW):
            self._iteration += 1
            microbatches = None if self._loader is None else self._loader.step(MICROBATCHES)
            self._step.train(microbatches, MICROBATCHES, self._iteration)
        self._checkpoints.finish()
        processor = time.process_time() - processor
        dist.barrier(group=group)
        return time.perf_counter() - start, processor

    def _save(self) -> None:
        from megatron.adaptive.training.checkpoint import Progress
        from megatron.adaptive.training.step import gather_parameters

        start = time.perf_counter()
        gather_parameters(self._run)
        self._checkpoints.save_behind(
            Progress(
                iteration=self._iteration,
                consumed_train_samples=self._iteration * MICROBATCHES,
                consumed_valid_samples=0,
                skipped_iterations=0,
            )
        )
        self._waited_s.append(time.perf_counter() - start)

    def _of_all_ranks(self, seconds: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        total = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self._job.control_group)
        return [float(value) for value in total]


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, required=True, help="of four windows each")
    parser.add_argument("--output", type=Path, required=True, help="where the result goes")
    parser.add_argument("--save", type=Path, required=True, help="folder for checkpoints")
    options = parser.parse_args()
    rank = Rank(options.save)
    result = rank.measure(options.rounds)
    rank.close()
    if rank.is_first:
        latest = max(options.save.glob("iter_*"))
        result["size_bytes"] = sum(file.stat().st_size for file in latest.iterdir())
        result["step_s"] = statistics.median(result["plain_s"])
        options.output.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
