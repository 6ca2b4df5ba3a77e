"""Steps of a small GPT with and without a feature: traces, checkpoints, copies, the hang watch.

Within one job steps with and without the feature take turns, so that whatever else the machine does
slows both alike. Both elapsed time and processor time of all ranks are measured. Elapsed time
varies by some percent from step to step, because ranks wait for each other. Processor time hardly
does, so it shows a fraction of a percent; and if training uses every processor, more of it means
longer steps. As a program this file is one rank.

* ``traced``: a traced step ends when its spans are in the file.
* ``layers``, ``collectives``, ``evidence``: all steps are traced, and some of them with the times
  of layers, with the times of collectives, or with the counters of the machine.
* ``saving``: a window of ten steps begins with a checkpoint that is written behind training, and
  ends when the checkpoint is complete, so that none of its work is left to the next window.
* ``copying``: two ranks, each on a node of its own as far as copies are concerned, send each other
  copies of their state, at every step or at the first of ten. Each has a keeper in a process of its
  own, as the agent of a node does; its processor time is counted too.
* ``watched``: windows of ten steps with the watch for hangs, whose process is counted too.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from harness import gpt_ranks
from harness.gpt_ranks import GPT, TrainingRank, rank_main
from harness.report import ratios

RANKS = {
    "traced": 4,
    "layers": 2,
    "collectives": 4,
    "evidence": 2,
    "saving": 2,
    "copying": 2,
    "watched": 2,
}
WINDOW = 10
"""Number of steps of a window."""
SHORT_WINDOW = 3
"""Number of steps of a window with details of traces."""
_LIMIT_S = 1200.0
_SECRET = "of the benchmark"


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Takes steps in turns with and without the feature.

    Args:
        kind: Kind of steps, a key of :data:`RANKS`.
        rounds: Number of rounds of two turns with the feature and two without.

    Returns:
        ``KIND_s`` and ``plain_s``: seconds per step in each round; ``KIND_cpu_s`` and
        ``plain_cpu_s``: processor seconds per step over all ranks. For copies there are two sets of
        these, ``each`` and ``tenth``. Further, for traces ``spans`` per step and ``step_s``; for
        details of traces ``marker_bytes``, bytes per rank and step with the detail; for
        checkpoints ``size_bytes``, ``step_s`` and ``waited_s``, the seconds that training waited
        for each; for copies ``notice``, a text that says what is copied.

    Raises:
        RuntimeError: A rank failed, or the time limit passed.
    """
    return gpt_ranks.measure(__file__, RANKS[kind], rounds, kind, limit_s=_LIMIT_S)


def costs(result: dict[str, Any], kind: str, unit: str = "s") -> list[float]:
    """Returns how much longer steps with the feature are, as a share of the others, by round.

    Args:
        result: Result of :func:`measure`.
        kind: Kind that was measured.
        unit: ``s`` for elapsed time, ``cpu_s`` for processor time.
    """
    return [ratio - 1 for ratio in ratios(result[f"{kind}_{unit}"], result[f"plain_{unit}"])]


class _Rank(TrainingRank):
    """One rank.

    Args:
        kind: Kind of steps; see :func:`measure`.
        width: Hidden size of the model.
        flags: Further flags of the trainer.
        tensor_size: Number of tensor-parallel ranks.
    """

    def __init__(self, kind: str, width: int, *flags: str, tensor_size: int = 1) -> None:
        pipeline_size = RANKS[kind] // tensor_size
        size = ["--hidden-size", str(width), "--pipeline-model-parallel-size", str(pipeline_size)]
        size += ["--tensor-model-parallel-size", str(tensor_size)]
        super().__init__([*GPT, *size, *flags])

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": statistics.median(result["plain_s"])}


class TracedRank(_Rank):
    """One rank that traces some of its steps.

    Args:
        folder: Folder for the traces.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("traced", 256, "--diagnose-interval", "0", "--trace-dir", str(folder))
        self._traces = folder

    def measure(self, rounds: int) -> dict[str, Any]:
        self._train(False)
        return self.turns(rounds, lambda is_on: self.timed(lambda: self._train(is_on)), "traced")

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        trace = read_run(self._traces)
        spans = sum(sum(b.marker.counts) for t in trace.ranks.values() for b in t.index.blocks)
        return {"spans": spans / max(1, len(trace.iterations)), **super().facts(result)}

    def _train(self, is_traced: bool) -> None:
        self._iteration += 1
        tracing = self._run.tracing
        tracing.begin_iteration(self._iteration, self._microbatches, is_traced=is_traced)
        self.train()
        recorder: Any = tracing.recorder
        # Otherwise the writer's remaining work would slow down the next step.
        while not recorder._queue.empty():
            time.sleep(0.0002)


class DetailedRank(_Rank):
    """One rank that traces all steps, and some of them with more detail.

    Args:
        folder: Folder for the traces.
        kind: Kind of detail: ``layers``, ``collectives`` or ``evidence``.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        flags = "--diagnose-interval 0 --trace-detail collectives --trace-dir".split()
        tensor_size = 2 if kind == "collectives" else 1
        super().__init__(kind, 256, *flags, str(folder), tensor_size=tensor_size)
        self._traces = folder
        self._kind = kind
        tracing = self._run.tracing
        self._layers = tracing.layers
        self._collectives = tracing.collectives
        self._counters = tracing._counters

    def measure(self, rounds: int) -> dict[str, Any]:
        self._window(False)
        return self.turns(rounds, self._window, self._kind)

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        keys = {
            "layers": ("layers", "layer_passes"),
            "collectives": ("collectives",),
            "evidence": ("machine",),
        }
        lines = [
            json.loads(line)
            for trace in read_run(self._traces).ranks.values()
            for line in trace.index.path.read_text().splitlines()
            if line.startswith('{"begin_iteration"')
        ]
        sizes = [
            sum(
                len(json.dumps(marker.get(key, ""), separators=(",", ":")))
                for key in keys[self._kind]
            )
            for marker in lines
        ]
        return {"marker_bytes": max(sizes), **super().facts(result)}

    def _window(self, is_detailed: bool) -> tuple[float, float]:
        """Takes some steps; returns elapsed and processor seconds per step."""
        tracing = self._run.tracing
        tracing.layers = tracing.collectives = None
        # Without the counters of the machine a trace is as it was before there were any.
        tracing._counters = None
        if is_detailed and self._kind == "layers":
            tracing.layers = self._layers
        if is_detailed and self._kind == "collectives":
            tracing.collectives = self._collectives
        if is_detailed and self._kind == "evidence":
            tracing._counters = self._counters

        def work() -> None:
            for _ in range(SHORT_WINDOW):
                self._iteration += 1
                tracing.begin_iteration(self._iteration, self._microbatches, is_traced=True)
                self.train()

        return self.timed(work, steps=SHORT_WINDOW)


class SavingRank(_Rank):
    """One rank that saves a checkpoint at the beginning of some windows.

    Args:
        folder: Folder for the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        flags = "--keep-checkpoints 2 --async-save --save-interval 10 --save".split()
        super().__init__("saving", 128, *flags, str(folder))
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        self._checkpoints = Checkpoints(self._run)
        self._folder = folder
        self._waited_s: list[float] = []

    def measure(self, rounds: int) -> dict[str, Any]:
        return {**self.turns(rounds, self._window, "saving"), "waited_s": self._waited_s[1:]}

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        latest = max(self._folder.glob("iter_*"))
        size_bytes = sum(file.stat().st_size for file in latest.iterdir())
        return {"size_bytes": size_bytes, **super().facts(result)}

    def _window(self, is_saving: bool) -> tuple[float, float]:
        """Takes ten steps; returns elapsed and processor seconds per step."""
        from megatron.adaptive.gpt.train_step import gather_parameters

        def work() -> None:
            if is_saving:
                start = time.perf_counter()
                gather_parameters(self._run)
                self._checkpoints.save(self.progress(self._iteration), behind=True)
                self._waited_s.append(time.perf_counter() - start)
            for _ in range(WINDOW):
                self._iteration += 1
                self.train()
            self._checkpoints.saver.finish()

        return self.timed(work, steps=WINDOW)


class CopyingRank(_Rank):
    """One rank that sends copies of its state, and its keeper in a process of its own."""

    def __init__(self, _: Path) -> None:
        super().__init__("copying", 128)
        from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
        from megatron.adaptive.checkpoint.trainer_checkpoints import RunState

        self.notice = ""
        spawn = multiprocessing.get_context("spawn")
        self._keeper, keeper_end = spawn.Pipe()
        spawn.Process(target=keep, args=(keeper_end,)).start()
        keeper_end.close()
        address, port = self._keeper.recv()
        ports = self._job.gather(port)
        other = (self.rank + 1) % RANKS["copying"]
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

    def measure(self, rounds: int) -> dict[str, Any]:
        return {
            name: self.turns(rounds, partial(self._window, each=each), "copying")
            for name, each in (("each", True), ("tenth", False))
        }

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"notice": self.notice}

    def close(self) -> None:
        self._copies.close()
        self._keeper.close()
        super().close()

    def _window(self, is_copying: bool, *, each: bool) -> tuple[float, float]:
        """Takes ten steps; returns elapsed and processor seconds per step."""
        copies = self._copies

        def work() -> None:
            for number in range(WINDOW):
                if is_copying and (each or not number):
                    copies.take(self._iteration + 1)
                self._iteration += 1
                self.train(copies.before_update)
                if is_copying and (each or number == WINDOW - 1):
                    copies.settle(self._iteration)

        seconds = self.timed(work, self._processor_s, WINDOW)
        if self.notice.startswith("off"):
            raise RuntimeError(f"copies of the state are {self.notice}")
        return seconds

    def _processor_s(self) -> float:
        self._keeper.send(None)
        return time.process_time() + float(self._keeper.recv())


class WatchedRank(_Rank):
    """One rank that runs the watch for hangs during some windows."""

    def __init__(self, folder: Path) -> None:
        super().__init__("watched", 256)
        self._folder = folder
        self._guard: Any = None

    def measure(self, rounds: int) -> dict[str, Any]:
        return self.turns(rounds, self._window, "watched")

    def _window(self, is_watched: bool) -> tuple[float, float]:
        """Takes ten steps; returns elapsed and processor seconds per step."""
        from megatron.adaptive.engine.hang_guard import HangGuard

        run = self._run
        if is_watched:
            self._guard = HangGuard(
                self._job, after_s=None, on_hang="report", page_folder=self._folder
            )
            assert run.wiring is not None
            evidence = run.wiring.executor.evidence
            self._guard.snapshot = lambda: {**run.tracing.now(), **evidence()}

        def work() -> None:
            for _ in range(WINDOW):
                self._iteration += 1
                run.tracing.begin_iteration(self._iteration, self._microbatches, is_traced=False)
                self.train()
                run.tracing.end_iteration()

        seconds = self.timed(work, self._processor_s, WINDOW)
        if is_watched:
            self._guard.close()
            self._guard = None
        return seconds

    def _processor_s(self) -> float:
        watch = None if self._guard is None else self._guard._process
        times = None if watch is None else psutil.Process(watch.pid).cpu_times()
        return time.process_time() + (0.0 if times is None else times.user + times.system)


def keep(link: Connection) -> None:
    """Runs a keeper of copies until the link closes.

    Each message names the keeper's buddy, or is ``None``; the answer is its processor time.
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


if __name__ == "__main__":
    classes = {
        "traced": TracedRank,
        "saving": SavingRank,
        "copying": CopyingRank,
        "watched": WatchedRank,
    }
    rank_main(
        lambda folder, kind: (
            classes[kind](folder) if kind in classes else DetailedRank(folder, kind)
        )
    )
