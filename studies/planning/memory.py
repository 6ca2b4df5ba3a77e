"""Compares planned memory of ranks with the peak memory of trainer runs on this machine's CPUs.

The study has 24 short runs of a small GPT, with all kinds of recomputation, two sequence lengths,
and four ways to distribute the model. A run of a tiny model measures the constant memory of a
process. Other programs do not affect these measurements.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.report import Result, Row
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.profiling.free_memory import HOST_SHARE
from studies.planning.own_runs import Shape, Watch, train

LAYERS, HIDDEN, HEADS, VOCABULARY, BATCH = 4, 256, 4, 2048, 4
_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclass(frozen=True, kw_only=True)
class MemoryRun(Shape):
    """Run of the trainer with two steps, whose memory is predicted and measured."""

    sequence: int = 1024

    def __str__(self) -> str:
        sharded = " sharded" * self.sharded
        return f"{self.recompute} s {self.sequence} {super().__str__()}{sharded}"

    def model_flags(self) -> list[str]:
        """Returns the flags that describe the model."""
        return (
            f"--num-layers {sum(self.layers)} --hidden-size {HIDDEN} --num-attention-heads {HEADS}"
            f" --seq-length {self.sequence} --max-position-embeddings {self.sequence}"
            " --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer"
            f" --vocab-size {VOCABULARY - 1}"
        ).split()

    def flags(self) -> list[str]:
        """Returns all flags of the trainer, including the flags that describe the model."""
        words = (
            f"--lr 1e-4 --mock-data --eval-iters 0 --global-batch-size {BATCH * self.dp}"
            f" --train-iters 2 {_RECOMPUTE[self.recompute]}"
        ).split()
        words += ["--use-distributed-optimizer"] * self.sharded
        return [*self.model_flags(), *words, *self.parallel_flags()]

    def planned(self, context_bytes: float = 0.0) -> tuple[Plan, PlanInputs]:
        """Returns the plan that corresponds to this run, and the inputs of the planner."""
        model = arguments_model(self.model_flags(), "small gpt", attention="unfused")
        plan, cluster = self.plan(model, BATCH * self.dp)
        # Only memory is compared, so the durations do not matter.
        one = LayerTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
        profile = Profile(
            layers={(kind, "cpu", self.tp, 1): one for kind in model.kinds},
            context_bytes={"cpu": context_bytes},
            allocator_share={"cpu": HOST_SHARE},
        )
        return plan, PlanInputs(model, cluster, profile)


class PeakWatch(Watch):
    """Samples the maximum memory of each rank's process, as reported by the kernel.

    Attributes:
        peaks: Maximum memory of each rank in bytes, keyed by rank.
    """

    every_s = 0.1

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self.peaks: dict[int, int] = {}
        self._ranks: dict[int, int] = {}

    def _sample(self) -> None:
        for one in self._first.children(recursive=True):
            try:
                if one.pid not in self._ranks:
                    self._ranks[one.pid] = int(one.environ().get("RANK", "-1"))
                rank = self._ranks[one.pid]
                for line in Path(f"/proc/{one.pid}/status").read_text().splitlines():
                    if rank >= 0 and line.startswith("VmHWM:"):
                        peak = int(line.split()[1]) * 1024
                        self.peaks[rank] = max(self.peaks.get(rank, 0), peak)
            except (psutil.Error, OSError, ValueError):
                continue  # The process has exited, so skip it.


def measured_bytes(run: MemoryRun) -> int:
    """Runs the trainer, and returns the maximum memory of a rank in bytes."""
    with tempfile.TemporaryDirectory() as traces:
        return max(train(run, ["--trace-dir", traces], PeakWatch()).peaks.values())


_SPREADS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"tp": 2}, {"pp": 2}, {"pp": 2, "schedule": "zb-h1"}),
    (
        {"dp": 2, "sharded": True},
        {"tp": 2},
        {"pp": 2, "schedule": "interleaved", "chunks": 2},
        {"pp": 2, "schedule": "adaptive", "chunks": 2},
    ),
)


def runs() -> list[MemoryRun]:
    """Returns the 24 runs of the study."""
    return [
        MemoryRun(recompute=recompute, sequence=sequence, layers=_even(spread), **spread)
        for sequence, spreads in zip((2048, 1024), _SPREADS, strict=True)
        for recompute in _RECOMPUTE
        for spread in spreads
    ]


def _even(spread: dict[str, Any]) -> tuple[int, ...]:
    """Returns the number of layers of each stage if layers are divided evenly."""
    stages = spread.get("pp", 1) * spread.get("chunks", 1)
    return (LAYERS // stages,) * stages


def measure(quick: bool) -> Result:
    """Compares planned with measured memory of all runs, or of every fifth if ``quick`` is true."""
    tiny = MemoryRun(sequence=64, layers=(1,))
    context = measured_bytes(tiny) - predict(*tiny.planned()).peak_bytes
    ratios, facts = [], []
    chosen: Sequence[MemoryRun] = runs()[::5] if quick else runs()
    for run in chosen:
        peak = measured_bytes(run)
        planned = predict(*run.planned(context)).peak_bytes
        ratios.append(planned / peak)
        facts.append({"run": str(run), "measured_bytes": peak, "planned_bytes": planned})
        print(
            f"{run}: measured {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB, "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    name = f"memory of {len(ratios)} runs, planned over measured"
    return Result(
        rows=[
            Row(what=f"{name}: least", value=min(ratios), goal=0.9, least=True),
            Row(what=f"{name}: largest", value=max(ratios), goal=1.15),
        ],
        facts={"memory": facts},
    )
