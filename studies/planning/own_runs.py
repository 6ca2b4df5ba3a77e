"""Compares the cost model with runs of small GPTs on the CPUs of this machine.

The study runs 12 plans for a dense model and 3 plans for a model with experts.

All runs have two processes, on a machine with at least two cores, because the planner does not
model ranks that share a core. For the dense model, a profile is fitted to traces of additional
runs, which alternate with the runs of the plans. Other programs disturb the measurements. Therefore
only iterations with little other load are used, and all runs are repeated in three rounds. For the
model with experts, ``profile`` measures the profile, and the plans are predicted from this profile
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from harness.report import Result, Row
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.calibrate import TracedRun, accuracy, calibrate
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import PlanInputs, Profile
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.trace_format import KINDS
from tests.multiprocess.launch import ROOT, environment

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, BATCH = 6, 256, 4, 256, 1024, 8
MODEL_FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS}"
    f" --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}"
    " --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --mock-data"
    f" --vocab-size {VOCABULARY - 1} --tokenizer-type NullTokenizer --eval-iters 0"
    f" --global-batch-size {BATCH} --log-interval 100 --trace-interval 1"
).split()
EXPERT_FLAGS = [
    *MODEL_FLAGS,
    *"--num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512".split(),
    *"--disable-bias-linear --position-embedding-type rope".split(),
]
QUIET = 0.06
"""Maximum CPU use of other programs, as a fraction of the machine, in an evaluated iteration."""
ITERATIONS, FEWEST, ROUNDS, DEADLINE_S = 10, 4, 3, 400.0
KEPT = "kept.json"
NODE = NodeType(name="node", gpu="cpu", gpus=4, memory_bytes=4e9, intra=LinkSpeed(bytes_per_s=2e9))
"""Node type that describes this machine. Plans use at most two of its GPUs."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Configuration of a small GPT. The model has experts if ``expert_ranks`` is positive."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] = (LAYERS,)
    expert_ranks: int = 0
    recompute: str = "none"
    sharded: bool = False

    @property
    def processes(self) -> int:
        """Number of processes of the job."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        layers = "-".join(map(str, self.layers))
        return (
            f"tp {self.tp} dp {self.dp} pp {self.pp} b {self.micro_batch} {self.schedule} {layers}"
            + f" ep {self.expert_ranks}" * (self.expert_ranks > 0)
        )

    def flags(self) -> list[str]:
        """Returns all flags of the trainer, including the flags that describe the model."""
        return [*(EXPERT_FLAGS if self.expert_ranks else MODEL_FLAGS), *self.parallel_flags()]

    def parallel_flags(self) -> list[str]:
        """Returns all flags of the trainer except the flags that describe the model."""
        flags = ["--tensor-model-parallel-size", str(self.tp)]
        flags += ["--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--micro-batch-size", str(self.micro_batch), "--pipeline-schedule", self.schedule]
        if self.chunks > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)]
        if self.expert_ranks > 1:
            flags += ["--expert-model-parallel-size", str(self.expert_ranks)]
        if self.pp > 1:
            flags += ["--partition", "-".join(map(str, self.layers))]
        return flags

    def plan(self, model: Model, batch: int = BATCH) -> tuple[Plan, Cluster]:
        """Returns the plan of this configuration, and this machine as a cluster."""
        cluster = Cluster(groups=(NodePool(type=NODE, count=1),))
        sizes = {"tp": self.tp, "dp": self.dp, "pp": self.pp, "micro_batch": self.micro_batch}
        plan = Plan(
            **sizes,
            chunks=self.chunks,
            global_batch=batch,
            schedule=self.schedule,
            expert_ranks=self.expert_ranks or 1,
            recompute=self.recompute,
            distributed_optimizer=self.sharded,
            partition=tuple(len(one) for one in model.stage_layers(self.layers)),
            places=place_ranks(cluster, (0,), **sizes),
        )
        return plan, cluster


TEACHERS = (
    Shape(pp=2, layers=(4, 2)),
    Shape(pp=2, layers=(2, 4), schedule="zb-h1"),
    Shape(pp=2, layers=(3, 3), micro_batch=2),
    Shape(tp=2),
    Shape(dp=2),
)
PLANS = (
    Shape(pp=2, layers=(3, 3)),
    Shape(pp=2, layers=(2, 4)),
    Shape(pp=2, layers=(5, 1)),
    Shape(pp=2, layers=(1, 5)),
    Shape(pp=2, layers=(3, 3), schedule="gpipe"),
    Shape(pp=2, layers=(4, 2), schedule="gpipe"),
    Shape(pp=2, layers=(3, 3), schedule="zb-h1"),
    Shape(pp=2, layers=(4, 2), schedule="zb-h1"),
    Shape(pp=2, layers=(2, 1, 1, 2), schedule="interleaved", chunks=2),
    Shape(pp=2, layers=(4, 2), micro_batch=2),
    Shape(dp=2, micro_batch=2),
    Shape(tp=2, micro_batch=2),
)
EXPERT_PLANS = (
    Shape(pp=2, layers=(2, 2), expert_ranks=1),
    Shape(pp=2, layers=(3, 1), expert_ranks=1, schedule="zb-h1"),
    Shape(pp=2, layers=(1, 3), expert_ranks=1, schedule="gpipe"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a traced run, and its iterations that other programs did not disturb."""

    trace: RunTrace
    iterations: tuple[int, ...]
    step_s: float
    spread: float


class BusyError(RuntimeError):
    """Raised if other programs have disturbed too many iterations of the runs."""


def run(shape: Shape, folder: Path, iterations: int) -> Outcome:
    """Trains until there are enough iterations that other programs did not disturb.

    Training is repeated at most ``ROUNDS`` times. The results are stored in ``folder``, from which
    :func:`reload` can read them.

    Raises:
        BusyError: Other programs used too much CPU time in all rounds.
        RuntimeError: The trainer exited with an error.
    """
    seen = []
    for number in range(ROUNDS):
        place = folder / f"{number}"
        words = ["--train-iters", str(iterations), "--trace-dir", str(place)]
        watch = train(shape, words, Watch(os.getpid()))
        trace = read_run(place)
        complete = trace.complete_iterations()[2:]
        figures = run_figures(trace, complete)
        whole = figures.kind_ns[:, :, KINDS.index("step")].max(axis=1).tolist()
        begin = figures.start_ns.min(axis=1).tolist()
        others = [
            watch.others(start, start + long) for start, long in zip(begin, whole, strict=True)
        ]
        quiet = [i for i, part in enumerate(others) if part < QUIET]
        seen.append((len(quiet), number))
        if len(quiet) >= FEWEST:
            kept = {
                "shape": str(shape),
                "run": place.name,
                "iterations": complete,
                "steps_s": [one / 1e9 for one in whole],
                "others": others,
            }
            (folder / KEPT).write_text(json.dumps(kept) + "\n", encoding="utf-8")
            return reload(shape, folder)
    raise BusyError(f"{shape}: other programs disturbed the runs; undisturbed iterations: {seen}")


def reload(shape: Shape, folder: Path) -> Outcome:
    """Returns the results that :func:`run` has stored in ``folder``.

    Raises:
        RuntimeError: The stored run has a different configuration than ``shape``.
    """
    kept = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    if kept["shape"] != str(shape):
        raise RuntimeError(f"{folder} has results of {kept['shape']}, not {shape}; measure again")
    quiet = [i for i, part in enumerate(kept["others"]) if part < QUIET]
    steps = [kept["steps_s"][i] for i in quiet]
    return Outcome(
        trace=read_run(folder / kept["run"]),
        iterations=tuple(kept["iterations"][i] for i in quiet),
        step_s=statistics.median(steps),
        spread=(max(steps) - min(steps)) / statistics.median(steps),
    )


def train(shape: Shape, words: Sequence[str], watch: AnyWatch) -> AnyWatch:
    """Runs the trainer with the additional arguments ``words``, while ``watch`` takes samples.

    Raises:
        RuntimeError: The trainer exited with an error.
    """
    command = ["-m", "megatron.adaptive", "job", "launch", "--standalone"]
    command += ["--nproc-per-node", str(shape.processes), str(ROOT / "pretrain_gpt.py")]
    return _watched([*command, *shape.flags(), *words], f"{shape}: the trainer", watch)


def profiled(folder: Path) -> Profile:
    """Measures the profile of the model with experts with two processes, and returns the profile.

    The profile is stored in ``folder``. If ``folder`` already contains a profile, it is only read.

    Raises:
        BusyError: Other programs used too much CPU time in all rounds.
        RuntimeError: The command that measures the profile exited with an error.
    """
    path = folder / "profile.json"
    for _ in range(0 if path.is_file() else ROUNDS):
        trial = folder / "trial.json"
        folder.mkdir(parents=True, exist_ok=True)
        command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
        command += ["-m", "megatron.adaptive", "profile", "--model", " ".join(EXPERT_FLAGS)]
        command += ["--output", str(trial), *"--tp 1 --micro-batch-sizes 1".split()]
        command += ["--node-type", NODE.name]
        watch = _watched(command, "profile", Watch(os.getpid()))
        # After a process has exited, its CPU time counts as that of other programs. So ignore the
        # samples after the one with the largest CPU time of this process and its descendants.
        end = max(watch.samples, key=lambda sample: sample[-1])
        if watch.others(watch.samples[0][0], end[0]) < QUIET:
            trial.rename(path)
            break
    else:
        if not path.is_file():
            raise BusyError("profile: other programs disturbed the run")
    return profile_file.make_profile(profile_file.load(path))


def _watched(command: Sequence[str], what: str, watch: AnyWatch) -> AnyWatch:
    """Runs Python with the arguments ``command`` while ``watch`` takes samples."""
    child = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    with watch:
        try:
            _, errors = child.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.communicate(timeout=60)
            raise
    if child.returncode:
        raise RuntimeError(f"{what} exited with status {child.returncode}: {errors[-2000:]}")
    return watch


def predicted_s(shape: Shape, model: Model, profile: Profile) -> float:
    """Returns the predicted step time of ``shape`` in seconds."""
    plan, cluster = shape.plan(model)
    return predict(plan, PlanInputs(model, cluster, profile)).seconds


class Watch:
    """Samples the CPU use of the machine, and of the process ``first`` and its descendants.

    Samples are taken at the start and at the end of the ``with`` block, and every 250 ms within it.
    """

    every_s = 0.25

    def __init__(self, first: int) -> None:
        self._first, self._done = psutil.Process(first), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[tuple[int, float, float]] = []

    def __enter__(self) -> Watch:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)
        self._sample()

    def _run(self) -> None:
        while not self._done.wait(self.every_s):
            self._sample()

    def _sample(self) -> None:
        """Records the CPU seconds of all programs, and of the process and its descendants."""
        whole, family = psutil.cpu_times(), 0.0
        busy = whole.user + whole.nice + whole.system + whole.irq + whole.softirq + whole.steal
        for one in (self._first, *self._first.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                family += times.user + times.system
        self.samples.append((time.monotonic_ns(), busy, family))

    def others(self, start_ns: int, end_ns: int) -> float:
        """Returns the CPU use of other programs between two times, as a fraction of the machine."""
        at = np.array([sample[0] for sample in self.samples])
        low = max(int(np.searchsorted(at, start_ns)) - 1, 0)
        high = min(int(np.searchsorted(at, end_ns)), len(at) - 1)
        first, last = self.samples[low], self.samples[high]
        seconds = (last[0] - first[0]) / 1e9
        if seconds <= 0:
            return 1.0
        taken = (last[1] - first[1]) - (last[2] - first[2])
        return max(0.0, taken / seconds / (os.cpu_count() or 1))


AnyWatch = TypeVar("AnyWatch", bound=Watch)


def measure(
    folder: Path, quick: bool = False, *, again: bool = True, experts: bool = False
) -> Result:
    """Runs all configurations, and returns rows with goals and a record for each plan.

    Args:
        folder: Folder in which the runs are stored, with about 6 MB.
        quick: Whether to run only every third plan, in a single round.
        again: Whether to run plans that are not stored. If false, all runs are read from
            ``folder``.
        experts: Whether to use the model with experts and its plans.
    """
    plans = EXPERT_PLANS if experts else PLANS
    plans = plans[::3] if quick else plans
    model = arguments_model(
        EXPERT_FLAGS if experts else MODEL_FLAGS, "small gpt", attention="unfused"
    )
    seen: dict[Shape, list[tuple[float, float]]] = {shape: [] for shape in plans}
    rounds = (1 if quick else 3) if again else len(list(folder.glob("round-*")))
    for number in range(1, rounds + 1):
        done: dict[Shape, Outcome] = {}
        here = folder / f"round-{number}"
        for shape in plans if experts else in_turn(TEACHERS, plans):
            place = here / str(shape).replace(" ", "_")
            try:
                if (place / KEPT).is_file():
                    done[shape] = reload(shape, place)
                elif again:
                    done[shape] = run(shape, place, ITERATIONS)
            except BusyError as error:
                print(f"round {number} is incomplete: {error}", flush=True)
        teachers = {shape: done[shape] for shape in TEACHERS if shape in done}
        if not (done if experts else teachers):
            continue
        try:
            profile = profiled(here) if experts else taught(teachers, model)
        except BusyError as error:
            print(f"round {number} is incomplete: {error}", flush=True)
            continue
        for shape in [shape for shape in plans if shape in done]:
            predicted = predicted_s(shape, model, profile)
            seen[shape].append((done[shape].step_s, predicted))
            print(
                f"round {number}, {shape}: measured {done[shape].step_s:.3f} s"
                f" (+-{done[shape].spread / 2:.0%}), predicted {predicted:.3f} s,"
                f" {predicted / done[shape].step_s - 1:+.1%}",
                flush=True,
            )
    records = [_record(shape, pairs) for shape, pairs in seen.items() if pairs]
    if not records:
        raise BusyError("other programs disturbed all runs; start again when the machine is idle")
    lost = sum(rounds - len(pairs) for pairs in seen.values())
    note = (
        f"{lost} of {rounds * len(seen)} runs left out, because other programs disturbed them"
        if lost
        else ""
    )
    name = f"own CPU runs, {len(records)} plans" + " with experts" * experts
    rows = [replace(row, note=note) for row in summary(records, name, 0.1 if experts else 0.05)]
    return Result(rows=rows, facts={"experts" if experts else "own": records})


def taught(done: Mapping[Shape, Outcome], model: Model) -> Profile:
    """Returns a profile that is fitted to the traces in ``done``, the runs of ``TEACHERS``."""
    runs = [
        TracedRun(
            trace=outcome.trace,
            micro_batch=shape.micro_batch,
            iterations=outcome.iterations,
            hosts={rank.header.host: NODE for rank in outcome.trace.ranks.values()},
        )
        for shape, outcome in done.items()
    ]
    profile = profile_file.make_profile(calibrate(model, runs))
    # Processes on one host copy messages through the same memory, so links share its bandwidth.
    shared = {
        name: {key: replace(link, shared=True) for key, link in getattr(profile, name).items()}
        for name in ("intra_links", "all_reduce")
    }
    return replace(profile, **shared)


def in_turn(teachers: Sequence[Shape], plans: Sequence[Shape]) -> list[Shape]:
    """Returns ``plans``, among which ``teachers`` are distributed evenly.

    The speed of the machine varies over minutes, so the runs of plans and of teachers must
    alternate.
    """
    order: list[Shape] = []
    for i, teacher in enumerate(teachers):
        begin, end = (len(plans) * k // len(teachers) for k in (i, i + 1))
        order += [teacher, *plans[begin:end]]
    return order


def _record(shape: Shape, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Returns the medians over all rounds of the configuration ``shape``.

    ``pairs`` contains the measured and the predicted step time in seconds for each round. The error
    is computed per round, because the speed of the machine varies.
    """
    return {
        "plan": str(shape),
        "measured_s": statistics.median(measured for measured, _ in pairs),
        "predicted_s": statistics.median(predicted for _, predicted in pairs),
        "error": statistics.median(predicted / measured - 1 for measured, predicted in pairs),
    }


def summary(records: Sequence[dict[str, Any]], name: str, goal: float) -> list[Row]:
    """Returns rows with the accuracy of predictions. ``goal`` applies to the median error."""
    measured = [record["measured_s"] for record in records]
    predicted = [record["predicted_s"] for record in records]
    found = accuracy(predicted, measured)
    error = statistics.median(abs(record["error"]) for record in records)
    slower = f"{name}: the plan predicted fastest is slower than the fastest by"
    return [
        Row(what=f"{name}: median error", value=error, goal=goal),
        Row(what=slower, value=found["regret"], goal=0.03),
        Row(what=f"{name}: rank correlation", value=found["rank_correlation"]),
    ]
