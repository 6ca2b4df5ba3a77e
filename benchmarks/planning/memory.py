"""Memory of a rank: the planner's against the peak of runs of the trainer on this machine's CPUs.

24 short runs of a small GPT: every way of recompute, two lengths of sequences, and four ways to
spread the model. A run of hardly any model gives the constant of a process. Other programs do not
disturb these figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import ROOT, Result, Row
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.profiling.memory import HOST_SHARE

LAYERS, HIDDEN, HEADS, VOCABULARY, BATCH = 4, 256, 4, 2048, 4
DEADLINE_S = 400.0
_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
NODE = NodeType(name="node", gpu="cpu", gpus=2, memory_bytes=1e12, intra=LinkSpeed(bytes_per_s=2e9))


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """One run of the trainer for two steps."""

    recompute: str = "none"
    sequence: int = 1024
    tp: int = 1
    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: int = LAYERS
    sharded: bool = False

    def __str__(self) -> str:
        split = f"tp {self.tp} dp {self.dp} pp {self.pp}x{self.chunks} {self.schedule}"
        return f"{self.recompute} s {self.sequence} {split}{' sharded' * self.sharded}"

    def model_flags(self) -> list[str]:
        """Of the model."""
        return (
            f"--num-layers {self.layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS}"
            f" --seq-length {self.sequence} --max-position-embeddings {self.sequence}"
            " --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer"
            f" --vocab-size {VOCABULARY - 1}"
        ).split()

    def flags(self) -> list[str]:
        """Of the trainer."""
        words = (
            f"--lr 1e-4 --mock-data --eval-iters 0 --global-batch-size {BATCH * self.dp}"
            f" --micro-batch-size 1 --train-iters 2 --tensor-model-parallel-size {self.tp}"
            f" --pipeline-model-parallel-size {self.pp} --pipeline-schedule {self.schedule}"
            f" {_RECOMPUTE[self.recompute]}"
        ).split()
        if self.chunks > 1:
            words += ["--model-chunks", str(self.chunks)]
        words += ["--use-distributed-optimizer"] * self.sharded
        return [*self.model_flags(), *words]

    def plan(self, context_bytes: float = 0.0) -> tuple[Plan, PlanInputs]:
        """The same as the planner has it."""
        model = arguments_model(self.model_flags(), "small gpt", fused=False)
        cluster = Cluster(groups=(NodePool(type=NODE, count=1),))
        stages = self.pp * self.chunks
        counts = [self.layers // stages] * stages
        held = model.stage_layers(counts)
        plan = Plan(
            tp=self.tp,
            dp=self.dp,
            pp=self.pp,
            chunks=self.chunks,
            micro_batch=1,
            global_batch=BATCH * self.dp,
            schedule=self.schedule,
            recompute=self.recompute,
            distributed_optimizer=self.sharded,
            partition=tuple(len(one) for one in held),
            places=place_ranks(cluster, (0,), tp=self.tp, dp=self.dp, pp=self.pp, micro_batch=1),
        )
        # Memory alone counts here: any duration will do.
        one = LayerTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
        layers = {(kind, "cpu", self.tp, 1): one for kind in model.kinds}
        return plan, PlanInputs(
            model,
            cluster,
            Profile(
                layers=layers,
                context_bytes={"cpu": context_bytes},
                allocator_share={"cpu": HOST_SHARE},
            ),
        )


def measured_bytes(run: MemoryRun) -> list[int]:
    """Returns the peak of every rank, as the kernel has it until just before they end."""
    command = [sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"]
    command += ["--nproc-per-node", str(run.tp * run.dp * run.pp), str(ROOT / "pretrain_gpt.py")]
    with tempfile.TemporaryDirectory() as traces:
        child = subprocess.Popen(
            [*command, *run.flags(), "--trace-dir", traces],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        peaks: dict[int, int] = {}
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(child.pid, peaks, done), daemon=True)
        watch.start()
        try:
            _, errors = child.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.communicate(timeout=60)
            raise
        finally:
            done.set()
            watch.join(timeout=5)
    if child.returncode:
        raise RuntimeError(f"{run}: the trainer ended with {child.returncode}: {errors[-2000:]}")
    return [peaks[rank] for rank in sorted(peaks)]


def _watch(first: int, peaks: dict[int, int], done: threading.Event) -> None:
    """Keeps the largest peak of each rank, ten times a second."""
    ranks: dict[int, int | None] = {}
    while not done.wait(0.1):
        try:
            for one in psutil.Process(first).children(recursive=True):
                if ranks.get(one.pid) is None:
                    ranks[one.pid] = int(one.environ().get("RANK", "-1"))
                rank = ranks[one.pid]
                if rank is None or rank < 0:
                    continue
                status = Path(f"/proc/{one.pid}/status").read_text()
                for line in status.splitlines():
                    if line.startswith("VmHWM:"):
                        peaks[rank] = max(peaks.get(rank, 0), int(line.split()[1]) * 1024)
        except (psutil.Error, OSError, ValueError):
            continue  # one of them ended meanwhile


_SPREADS: tuple[tuple[dict[str, object], ...], ...] = (
    ({}, {"tp": 2}, {"pp": 2}, {"pp": 2, "schedule": "zb-h1"}),
    (
        {"dp": 2, "sharded": True},
        {"tp": 2},
        {"pp": 2, "schedule": "interleaved", "chunks": 2},
        {"pp": 2, "schedule": "adaptive", "chunks": 2},
    ),
)


def runs() -> list[MemoryRun]:
    """Returns the 24 runs."""
    return [
        MemoryRun(recompute=recompute, sequence=sequence, **spread)  # type: ignore[arg-type]
        for sequence, spreads in zip((2048, 1024), _SPREADS, strict=True)
        for recompute in _RECOMPUTE
        for spread in spreads
    ]


def measure(quick: bool) -> Result:
    """Runs all, or every third; returns the ratios of planned to measured peaks."""
    tiny = MemoryRun(sequence=64, layers=1)
    context = measured_bytes(tiny)[0] - predict(*tiny.plan()).peak_bytes
    ratios, facts = [], []
    chosen: Sequence[MemoryRun] = runs()[::5] if quick else runs()
    for run in chosen:
        peak = max(measured_bytes(run))
        planned = predict(*run.plan(context)).peak_bytes
        ratios.append(planned / peak)
        facts.append({"run": str(run), "measured_bytes": peak, "planned_bytes": planned})
        print(
            f"{run}: {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB, {ratios[-1]:.2f}",
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
