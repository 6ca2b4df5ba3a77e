"""Measures the cost of a feature, such as traces or checkpoints, in steps of a small GPT.

Steps with and without the feature alternate within one job, so that other load on the machine slows
down both equally. Both the elapsed time and the CPU time of all ranks are measured. Elapsed time
varies by several percent from step to step, because ranks wait for each other. CPU time hardly
varies, so it reveals differences of a fraction of a percent. If training uses all CPUs, more CPU
time means longer steps. Run as a script, this module acts as one rank.

* ``traced``: some steps are traced. A traced step ends when its spans are in the file.
* ``layers``, ``collectives``, ``evidence``: all steps are traced, and some of them with the times
  of layers, with the times of collectives, or with the counters of the machine.
* ``saving``: a run of ten steps begins with a checkpoint that is written in the background. The run
  ends when the checkpoint is complete, so that no work is left for the next run.
* ``copying each``, ``copying tenth``: two ranks, treated as ranks of different nodes, send each
  other copies of their state, in every step or in the first of ten. Each rank has a separate
  process that keeps the copies, as the agent of a node does. The processor time of this process is
  included.
* ``watched``: runs of ten steps with the hang detector. The processor time of the detector is
  included.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from harness import gpt_ranks
from harness.gpt_ranks import GPT, TrainingRank, rank_main
from harness.report import ratios

DETAILS = ("layers", "collectives", "evidence")
RANKS = {"traced": 4, "collectives": 4}
"""Number of ranks for some kinds of steps. All other kinds have 2 ranks."""
WINDOW = 10
"""Number of steps in each run. A run either uses the feature or does not use it."""
SHORT_WINDOW = 3
"""Number of steps in each run with details of traces."""
_LIMIT_S = 1200.0
_SECRET = "of the benchmark"


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Measures runs of several steps, which alternate with and without a feature.

    Args:
        kind: Kind of steps, which selects the feature. The module's docstring lists the kinds.
        rounds: Number of rounds. Each round has two runs with the feature and two runs without it.

    Returns:
        Seconds per step in each round (``on_s`` with the feature, ``plain_s`` without it), and CPU
        seconds per step, summed over all ranks (``on_cpu_s`` and ``plain_cpu_s``). ``step_s`` is
        the median duration of a step without the feature. Some kinds add entries: traces add
        ``spans``, the number of spans per step. Details of traces add ``marker_bytes``, the size of
        the detail per rank and step. Counters of the machine add ``read_share``, the time to read
        the counters relative to the duration of a step. Checkpoints add ``size_bytes``, and
        ``waited_s``, the seconds for which each checkpoint blocked training. Copies add ``notice``,
        a text that describes the copies.

    Raises:
        RuntimeError: A rank failed, or the timeout passed.
    """
    ranks = RANKS.get(kind, 2)
    result = gpt_ranks.measure(__file__, ranks, rounds, kind, limit_s=_LIMIT_S)
    return {**result, "step_s": statistics.median(result["plain_s"])}


def costs(result: dict[str, Any], unit: str) -> list[float]:
    """Returns the relative increase of the step time due to the feature in each round.

    Args:
        result: Result of :func:`measure`.
        unit: ``s`` for elapsed time, or ``cpu_s`` for CPU time.
    """
    return [ratio - 1 for ratio in ratios(result[f"on_{unit}"], result[f"plain_{unit}"])]


class FeatureRank(TrainingRank):
    """Runs one rank whose steps alternate with and without a feature.

    Args:
        kind: Kind of steps, which selects the feature.
        flags: Additional flags of the trainer.
        width: Hidden size of the model.

    Attributes:
        steps: Number of steps in each run.
    """

    steps = WINDOW

    def __init__(self, kind: str, *flags: str, width: int = 256) -> None:
        tensor_size = 2 if kind == "collectives" else 1
        shape = {
            "--hidden-size": width,
            "--tensor-model-parallel-size": tensor_size,
            "--pipeline-model-parallel-size": RANKS.get(kind, 2) // tensor_size,
        }
        sizes = [str(word) for pair in shape.items() for word in pair]
        super().__init__([*GPT, *sizes, *flags])
        self.kind = kind

    def measure(self, rounds: int) -> dict[str, Any]:
        return self.turns(rounds, self.turn, "on")

    def turn(self, is_on: bool) -> tuple[float, float]:
        """Measures ``steps`` training steps, with the tested feature enabled if ``is_on`` is true.

        Returns the elapsed seconds and the CPU seconds per step.
        """
        return self.timed(lambda: self.work(is_on), self.processor_s, self.steps)

    def work(self, is_on: bool) -> None:
        """Trains for ``steps`` steps, with the tested feature enabled if ``is_on`` is true."""
        raise NotImplementedError

    def processor_s(self) -> float:
        """Returns the CPU seconds of this rank and of the feature's process, if there is one."""
        return time.process_time()

    def traced_steps(self, is_traced: bool) -> None:
        """Trains for ``steps`` steps, and traces them if ``is_traced`` is true."""
        for _ in range(self.steps):
            self._iteration += 1
            tracing = self._run.tracing
            tracing.begin_iteration(self._iteration, self._microbatches, is_traced=is_traced)
            self.train()


class TracedRank(FeatureRank):
    """Runs one rank that traces some of its steps.

    Args:
        folder: Folder for the traces.
        kind: Kind of steps, which selects the feature.
    """

    steps = 1

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(kind, "--diagnose-interval", "0", "--trace-dir", str(folder))
        self._traces = folder

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        trace = read_run(self._traces)
        spans = sum(sum(b.marker.counts) for t in trace.ranks.values() for b in t.index.blocks)
        return {"spans": spans / max(1, len(trace.iterations))}

    def work(self, is_on: bool) -> None:
        self.traced_steps(is_on)
        recorder: Any = self._run.tracing.recorder
        # Wait for the writer, because its remaining work would slow down the next step.
        while not recorder._queue.empty():
            time.sleep(0.0002)


class DetailedRank(FeatureRank):
    """Runs one rank that traces all steps, and adds a certain detail to some of the traces.

    Args:
        folder: Folder for the traces.
        kind: Kind of detail: ``layers``, ``collectives`` or ``evidence``.
    """

    steps = SHORT_WINDOW

    def __init__(self, folder: Path, kind: str) -> None:
        flags = "--diagnose-interval 0 --trace-detail collectives --trace-dir".split()
        super().__init__(kind, *flags, str(folder))
        self._traces = folder
        tracing = self._run.tracing
        # The baseline of ``evidence`` is a trace without the counters of the machine.
        self._attribute = "_counters" if kind == "evidence" else kind
        self._detail = getattr(tracing, self._attribute)
        self._reads_s: list[float] = []
        if kind == "evidence":
            counters: Any = self._detail
            counters.begin, counters.end = self._timed(counters.begin), self._timed(counters.end)
        tracing.layers = tracing.collectives = tracing._counters = None

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        keys = {"layers": ("layers", "layer_passes"), "evidence": ("machine",)}
        markers = [
            json.loads(line)
            for trace in read_run(self._traces).ranks.values()
            for line in trace.index.path.read_text().splitlines()
            if line.startswith('{"begin_iteration"')
        ]
        sizes = [
            sum(
                len(json.dumps(marker.get(key, ""), separators=(",", ":")))
                for key in keys.get(self.kind, (self.kind,))
            )
            for marker in markers
        ]
        facts: dict[str, Any] = {"marker_bytes": max(sizes)}
        if self._reads_s:
            # The counters are read at the start and at the end of each step, so count each read
            # twice.
            read_s = 2 * statistics.mean(self._reads_s)
            facts["read_share"] = read_s / statistics.median(result["plain_s"])
        return facts

    def _timed(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that calls ``read`` and records how long the call takes."""

        def timed_read() -> Any:
            start = time.perf_counter()
            try:
                return read()
            finally:
                self._reads_s.append(time.perf_counter() - start)

        return timed_read

    def work(self, is_on: bool) -> None:
        setattr(self._run.tracing, self._attribute, self._detail if is_on else None)
        self.traced_steps(True)


class SavingRank(FeatureRank):
    """Runs one rank that saves a checkpoint at the beginning of some runs.

    Args:
        folder: Folder for the checkpoints.
        kind: Kind of steps, which selects the feature.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        flags = "--keep-checkpoints 2 --async-save --save-interval 10 --save".split()
        super().__init__(kind, *flags, str(folder), width=128)
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        self._checkpoints = Checkpoints(self._run)
        self._folder = folder
        self._waited_s: list[float] = []

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        latest = max(self._folder.glob("iter_*"))
        size_bytes = sum(file.stat().st_size for file in latest.iterdir())
        return {"size_bytes": size_bytes, "waited_s": self._waited_s[1:]}

    def work(self, is_on: bool) -> None:
        from megatron.adaptive.gpt.train_step import gather_parameters

        if is_on:
            start = time.perf_counter()
            gather_parameters(self._run)
            self._checkpoints.save(self.progress(self._iteration), behind=True)
            self._waited_s.append(time.perf_counter() - start)
        for _ in range(self.steps):
            self._iteration += 1
            self.train()
        self._checkpoints.saver.finish()


class CopyingRank(FeatureRank):
    """Runs one rank that sends copies of its state. A separate process stores received copies."""

    def __init__(self, _: Path, kind: str) -> None:
        super().__init__(kind, width=128)
        from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
        from megatron.adaptive.checkpoint.trainer_checkpoints import RunState

        self.notice = ""
        self._copies_each = kind == "copying each"
        spawn = multiprocessing.get_context("spawn")
        self._keeper, keeper_end = spawn.Pipe()
        spawn.Process(target=keep, args=(keeper_end,)).start()
        keeper_end.close()
        address, port = self._keeper.recv()
        ports = self._job.gather(port)
        other = 1 - self.rank
        self._keeper.send({"name": f"node{other}", "address": "127.0.0.1", "port": ports[other]})
        self._keeper.recv()
        settings = SnapshotSettings(
            address=address,
            run="benchmark",
            node=f"node{self.rank}",
            domain=f"node{self.rank}",
            buddy=f"node{other}",
            every=1,
            limit_bytes=None,
        )
        state = RunState(self._run, lambda: self.progress(self._iteration + 1))
        warn = partial(print, file=sys.stderr)
        self._copies = Snapshots(state, self._job, settings, self._note, warn)

    def _note(self, text: str) -> None:
        self.notice = text

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"notice": self.notice}

    def close(self) -> None:
        self._copies.close()
        self._keeper.close()
        super().close()

    def work(self, is_on: bool) -> None:
        copies = self._copies
        for number in range(self.steps):
            if is_on and (self._copies_each or not number):
                copies.take(self._iteration + 1)
            self._iteration += 1
            self.train(copies.before_update)
            if is_on and (self._copies_each or number == self.steps - 1):
                copies.settle(self._iteration)
        if self.notice.startswith("off"):
            raise RuntimeError(f"copies of the state are {self.notice}")

    def processor_s(self) -> float:
        self._keeper.send(None)
        return time.process_time() + float(self._keeper.recv())


class WatchedRank(FeatureRank):
    """Runs one rank that enables the hang detector for some of the runs."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(kind)
        self._folder = folder
        self._guard: Any = None

    def turn(self, is_on: bool) -> tuple[float, float]:
        """Runs some steps, with the hang detector if ``is_on`` is true, and measures them."""
        from megatron.adaptive.engine.hang_guard import HangGuard

        run = self._run
        if not is_on:
            return super().turn(is_on)
        self._guard = HangGuard(self._job, after_s=None, on_hang="report", page_folder=self._folder)
        assert run.wiring is not None
        evidence = run.wiring.executor.evidence
        self._guard.snapshot = lambda: {**run.tracing.now(), **evidence()}
        seconds = super().turn(is_on)
        self._guard.close()
        self._guard = None
        return seconds

    def work(self, is_on: bool) -> None:
        for _ in range(self.steps):
            self._iteration += 1
            tracing = self._run.tracing
            tracing.begin_iteration(self._iteration, self._microbatches, is_traced=False)
            self.train()
            tracing.end_iteration()

    def processor_s(self) -> float:
        watch = None if self._guard is None else self._guard._process
        times = None if watch is None else psutil.Process(watch.pid).cpu_times()
        return time.process_time() + (0.0 if times is None else times.user + times.system)


def keep(link: Connection) -> None:
    """Runs a process that stores copies, until the connection ``link`` is closed.

    Each message is either the peer whose copies are stored from now on, or ``None``. The reply is
    the CPU time of this process.
    """
    from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper

    keeper = SnapshotKeeper("127.0.0.1")
    link.send((keeper.address, keeper.port))
    with contextlib.suppress(EOFError):
        while True:
            if buddy := link.recv():
                keeper.prepare("benchmark", _SECRET, Buddy(**buddy))
            link.send(time.process_time())
    keeper.close()


CLASSES: dict[str, Callable[[Path, str], FeatureRank]] = {
    "traced": TracedRank,
    **dict.fromkeys(DETAILS, DetailedRank),
    "saving": SavingRank,
    "copying each": CopyingRank,
    "copying tenth": CopyingRank,
    "watched": WatchedRank,
}

if __name__ == "__main__":
    rank_main(lambda folder, kind: CLASSES[kind](folder, kind))
