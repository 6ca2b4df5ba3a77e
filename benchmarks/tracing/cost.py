"""Measures the cost of tracing a small GPT on four processes; run as a script, it is one rank.

One job trains steps that are traced or not, in turns, so that whatever else the machine does hits
both alike. A traced step ends when its spans are in the file. Both the time on the clock and the
processor time of all ranks are taken: who waits for whom changes the former by some percent from
step to step, the latter hardly, so that a fraction of a percent shows in it.
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

RANKS = 4
WARMUPS = 4
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    " --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 100000"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0"
    f" --pipeline-model-parallel-size {RANKS} --diagnose-interval 0"
).split()


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
    return measure_ranks(__file__, RANKS, rounds, limit_s)


def ratios(result: dict[str, Any], unit: str = "s") -> list[float]:
    """Traced by plain, round by round; ``unit`` is ``s`` or ``cpu_s``."""
    pairs = zip(result[f"traced_{unit}"], result[f"plain_{unit}"], strict=True)
    return [traced / plain for traced, plain in pairs]


class Rank(GptRank):
    """One rank of the job.

    Args:
        traces: folder for them.
    """

    def __init__(self, traces: Path) -> None:
        super().__init__([*MODEL, "--trace-dir", str(traces)])
        self._traces = traces

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns seconds per step, of all ranks together."""
        for number in range(WARMUPS):
            self._train(is_traced=number % 2 == 0)
        return self.turns(rounds, self._timed, ("traced", "plain"))

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        trace = read_run(self._traces)
        spans = sum(sum(b.marker.counts) for t in trace.ranks.values() for b in t.index.blocks)
        step_s = statistics.median(result["plain_s"])
        return {"spans": spans / max(1, len(trace.iterations)), "step_s": step_s}

    def _timed(self, is_traced: bool) -> tuple[float, float]:
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

    def _train(self, *, is_traced: bool) -> None:
        self._iteration += 1
        tracing = self._run.tracing
        tracing.begin_iteration(self._iteration, self._microbatches, is_traced=is_traced)
        self.train()


if __name__ == "__main__":
    rank_main(Rank)
