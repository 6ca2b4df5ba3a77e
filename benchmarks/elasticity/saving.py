"""What a checkpoint behind training costs every ten steps: a small GPT; by itself, one rank of it.

One job trains windows of ten steps that begin with a checkpoint or do not, in turns, so that
whatever else the machine does hits both alike. A window ends when its checkpoint is complete, so
that nothing of it is left to the next. Both the time on the clock and the processor time of all
ranks are taken: where training uses every processor, the second is the cause of the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gpt_rank import GptRank, rank_main  # noqa: E402
from benchmarks.gpt_rank import measure as measure_ranks  # noqa: E402

RANKS = 2
WINDOW = 10
MICROBATCHES = 8
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256"
    " --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
    f" --micro-batch-size 1 --global-batch-size {MICROBATCHES} --lr 1e-4 --train-iters 100000"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0"
    f" --pipeline-model-parallel-size {RANKS}"
).split()
SAVING = "--keep-checkpoints 2 --async-save --save-interval 10".split()


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
    return measure_ranks(__file__, RANKS, rounds, limit_s)


def costs(result: dict[str, Any], unit: str = "s") -> list[float]:
    """By how much steps beside checkpoints are longer, round by round; ``s`` or ``cpu_s``."""
    pairs = zip(result[f"saving_{unit}"], result[f"plain_{unit}"], strict=True)
    return [saving / plain - 1 for saving, plain in pairs]


class Rank(GptRank):
    """One rank of the job.

    Args:
        folder: for its checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__([*MODEL, *SAVING, "--save", str(folder)])
        from megatron.adaptive.checkpoint.training import Checkpoints

        run = self._run
        self._checkpoints = Checkpoints(
            self._job, self._job.config, run.chunks, run.optimizer, run.scheduler
        )
        self._folder = folder
        self._waited_s: list[float] = []

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns seconds per step, processor seconds of all ranks together."""
        for is_saving in (False, True):
            self._window(is_saving)
        self._waited_s.clear()
        told = self.turns(rounds, self._window, ("saving", "plain"))
        return {**told, "waited_s": self._waited_s}

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        latest = max(self._folder.glob("iter_*"))
        size = sum(file.stat().st_size for file in latest.iterdir())
        return {"size_bytes": size, "step_s": statistics.median(result["plain_s"])}

    def _window(self, is_saving: bool) -> tuple[float, float]:
        """Ten steps; returns seconds for each, on the clock and of this rank's processor."""
        import torch.distributed as dist

        group = self._job.control_group
        dist.barrier(group=group)
        start, processor = time.perf_counter(), time.process_time()
        if is_saving:
            self._save()
        for _ in range(WINDOW):
            self._iteration += 1
            self.train()
        self._checkpoints.saver.finish()
        processor = time.process_time() - processor
        dist.barrier(group=group)
        return (time.perf_counter() - start) / WINDOW, processor / WINDOW

    def _save(self) -> None:
        from megatron.adaptive.checkpoint.training import Progress
        from megatron.adaptive.gpt.step import gather_parameters

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


if __name__ == "__main__":
    rank_main(Rank)
