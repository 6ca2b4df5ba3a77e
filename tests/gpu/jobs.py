"""Defines jobs that run on a GPU: training jobs whose losses are compared, and trainer runs.

Starting a process on a GPU takes ten seconds. Therefore, all jobs of
``tests/multiprocess/worker.py`` with the same world size run in the same processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launch import SMALL_GPT, CaseRuns

from .device import HAS_GPU

STEPS = 3
UNFUSED = "--no-bias-gelu-fusion --no-bias-dropout-fusion"
"""Flags that disable fused kernels, which torch would compile for tens of seconds on a GPU."""
BASE = (
    f"{SMALL_GPT} {UNFUSED} --num-layers 8 --train-iters {STEPS}"
    " --attention-dropout 0 --hidden-dropout 0"
    # Without this flag, each stage would draw its initial weights with a separate generator on the
    # GPU.
    " --use-cpu-initialization"
)
TRAINER = (
    f"{SMALL_GPT} --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule adaptive"
    " --mock-data --log-interval 1 --use-cpu-initialization --transport shm --num-workers 2"
)
ALONE = "--pipeline-schedule megatron"
FP32 = 1e-4
"""Maximum relative difference between fp32 jobs. On a GPU, the order of sums varies."""
HALF = 2e-2
"""Maximum relative difference between jobs with 16-bit numbers."""


@dataclass(frozen=True, kw_only=True)
class GpuJob:
    """Training job whose losses are compared with those of another job.

    Attributes:
        flags: Flags of the trainer in addition to ``BASE``.
        ranks: Number of processes.
        like: Name of the reference job, which must have the same losses. Empty for a reference job.
        rel: Maximum relative difference of losses from those of the reference job.
        moves: Number of layers per stage after each move of layers, keyed by iteration.
    """

    flags: str
    ranks: int = 1
    like: str = ""
    rel: float = FP32
    moves: dict[str, list[int]] | None = None

    def case(self, name: str) -> dict[str, Any]:
        """Returns this job as a case with the name ``name``, in the format of ``worker.py``."""
        flags = f"{BASE} --pipeline-model-parallel-size {self.ranks} {self.flags}".split()
        case = {"name": name, "flags": flags, "steps": STEPS, "evaluate_after": STEPS}
        return {**case, "after": None, "moves": self.moves or {}}


class GpuJobs:
    """Runs the jobs of a table, and compares their results.

    Args:
        table: Jobs, keyed by name.
        new_folder: Function that creates a folder with a given name.
        limit_s: Timeout in seconds for all jobs of one world size on a GPU. On a CPU, the timeout
            is three times as long.
    """

    def __init__(self, table: dict[str, GpuJob], new_folder: Any, limit_s: float) -> None:
        self._table = table
        self._runs = CaseRuns(self._cases_of, new_folder, limit_s if HAS_GPU else 3 * limit_s)

    def _cases_of(self, ranks: int) -> Sequence[dict[str, Any]]:
        return [job.case(name) for name, job in self._table.items() if job.ranks == ranks]

    def losses(self, name: str) -> list[float]:
        """Returns the losses of the job ``name``. The first call runs all jobs of this size."""
        seen = self._runs(self._table[name].ranks, name)
        losses_of_rank: list[list[float]] = [losses for losses in seen["losses"] if losses]
        assert all(losses == losses_of_rank[0] for losses in losses_of_rank), losses_of_rank
        return losses_of_rank[0]

    def check(self, name: str) -> None:
        """Checks that the job ``name`` has the same results as its reference job.

        Raises:
            AssertionError: Losses, gradient norms, the norm of parameters or the validation loss
                differ too much, or the loss has not decreased.
        """
        job = self._table[name]
        losses, expected = self.losses(name), self.losses(job.like)
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected, rel=job.rel)
        seen, other = self._runs(job.ranks, name), self._runs(self._table[job.like].ranks, job.like)
        assert seen["grad_norms"][0] == pytest.approx(other["grad_norms"][0], rel=10 * job.rel)
        assert seen["params_norm"][0] == pytest.approx(other["params_norm"][0], rel=job.rel)
        evaluated = max(seen["evaluated"], key=len)
        assert evaluated == pytest.approx(max(other["evaluated"], key=len), rel=job.rel)
        assert losses[-1] < losses[0]


def compared(table: dict[str, GpuJob]) -> list[str]:
    """Returns the names of the jobs in ``table`` that have a reference job."""
    return [name for name, job in table.items() if job.like]


def trainer_flags(more: str, *, is_fused: bool = False) -> list[str]:
    """Returns flags for ``pretrain_gpt.py`` on two ranks, with the flags ``more`` added.

    On a GPU, fused kernels are compiled if ``is_fused`` is true.
    """
    return [*TRAINER.split(), *("" if is_fused else UNFUSED).split(), *more.split()]


def losses_in(log: Path) -> dict[int, float]:
    """Returns the losses in the trainer's log file ``log``, keyed by iteration."""
    pairs = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", log.read_text(errors="replace"))
    return {int(iteration): float(loss) for iteration, loss in pairs}
