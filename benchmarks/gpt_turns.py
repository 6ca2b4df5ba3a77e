"""Measures what traces, checkpoints, copies in memory and the watch add to steps of a small GPT.

One job takes turns with and without, so that whatever else the machine does hits both alike. Both
the time on the clock and the processor time of all ranks are taken: who waits for whom changes the
former by some percent from step to step, the latter hardly, so that a fraction of a percent shows
in it; and where training uses every processor, the second is the cause of the first. Run as a
script, it is one rank.

``traced``: a traced step ends when its spans are in the file. ``saving``: windows of ten steps
begin with a checkpoint that is written behind training, and end when it is complete, so that
nothing of it is left to the next. ``copying``: two ranks, each on a node of its own as far as
copies go, each with a keeper in a process of its own as the node's agent has it, send each other
all that they copy, at every step or at the first of ten; processor time is that of ranks and
keepers. ``watched``: windows of ten steps with the watch for hangs, its process and threads, or
without; processor time is that of ranks and of the process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ranks
from benchmarks.ranks import GPT, GptRank, rank_main
from benchmarks.report import ratios

RANKS = {"traced": 4, "saving": 2, "copying": 2, "watched": 2}
WINDOW = 10
_LIMIT_S = 1200.0
_SECRET = "of the benchmark"


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Takes steps in turns with and without the feature.

    Args:
        kind: ``traced``, ``saving``, ``copying`` or ``watched``.
        rounds: of two turns with and two without.

    Returns:
        ``KIND_s`` and ``plain_s``, seconds per step of each round, ``KIND_cpu_s`` and
        ``plain_cpu_s``, the same of processor time over all ranks; for copies twice, under ``each``
        for those of every step and ``tenth``. Besides of traces ``spans`` per step and ``step_s``;
        of checkpoints ``size_bytes``, ``step_s`` and ``waited_s``, how long training waited for
        each; of copies ``notice``, what is copied.

    Raises:
        RuntimeError: a rank failed, or took too long.
    """
    return ranks.measure(__file__, RANKS[kind], rounds, kind, limit_s=_LIMIT_S)


def costs(result: dict[str, Any], kind: str, unit: str = "s") -> list[float]:
    """By what share steps with it are longer, round by round; ``unit`` is ``s`` or ``cpu_s``."""
    return [ratio - 1 for ratio in ratios(result[f"{kind}_{unit}"], result[f"plain_{unit}"])]


class _Rank(GptRank):
    """One rank.

    Args:
        kind: see :func:`measure`.
        width: of the model.
        more: further flags of the trainer.
    """

    def __init__(self, kind: str, width: int, *more: str) -> None:
        size = ["--hidden-size", str(width), "--pipeline-model-parallel-size", str(RANKS[kind])]
        super().__init__([*GPT, *size, *more])

    def timed(
        self,
        work: Callable[[], object],
        processor_s: Callable[[], float] = time.process_time,
        steps: int = WINDOW,
    ) -> tuple[float, float]:
        """Returns seconds of each of some steps of all ranks, and processor seconds of this one."""
        import torch.distributed as dist

        group = self._job.control_group
        dist.barrier(group=group)
        start, processor = time.perf_counter(), processor_s()
        work()
        processor = processor_s() - processor
        dist.barrier(group=group)
        return (time.perf_counter() - start) / steps, processor / steps


class TracedRank(_Rank):
    """One rank whose steps are traced or not.

    Args:
        folder: for the traces.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("traced", 256, "--diagnose-interval", "0", "--trace-dir", str(folder))
        self._traces = folder

    def measure(self, rounds: int) -> dict[str, Any]:
        self._train(False)
        return self.turns(
            rounds, lambda kind: self.timed(lambda: self._train(kind), steps=1), "traced"
        )

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        from megatron.adaptive.trace.read import read_run

        trace = read_run(self._traces)
        spans = sum(sum(b.marker.counts) for t in trace.ranks.values() for b in t.index.blocks)
        step_s = statistics.median(result["plain_s"])
        return {"spans": spans / max(1, len(trace.iterations)), "step_s": step_s}

    def _train(self, is_traced: bool) -> None:
        self._iteration += 1
        tracing = self._run.tracing
        tracing.begin_iteration(self._iteration, self._microbatches, is_traced=is_traced)
        self.train()
        recorder: Any = tracing.recorder
        # What the writer has not written would be the next step's.
        while not recorder._queue.empty():
            time.sleep(0.0002)


class SavingRank(_Rank):
    """One rank whose windows begin with a checkpoint or not.

    Args:
        folder: for its checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        words = "--keep-checkpoints 2 --async-save --save-interval 10 --save".split()
        super().__init__("saving", 128, *words, str(folder))
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        run = self._run
        self._checkpoints = Checkpoints(run)
        self._folder = folder
        self._waited_s: list[float] = []

    def measure(self, rounds: int) -> dict[str, Any]:
        return {**self.turns(rounds, self._window, "saving"), "waited_s": self._waited_s[1:]}

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        step_s = statistics.median(result["plain_s"])
        return {"size_bytes": self.size_bytes(self._folder), "step_s": step_s}

    def _window(self, is_saving: bool) -> tuple[float, float]:
        """Ten steps; returns seconds for each, on the clock and of this rank's processor."""
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

        return self.timed(work)


class CopyingRank(_Rank):
    """One rank with its keeper in a process of its own."""

    def __init__(self, _: Path) -> None:
        super().__init__("copying", 128)
        from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
        from megatron.adaptive.checkpoint.trainer_checkpoints import RunState

        self.notice = ""
        spawn = multiprocessing.get_context("spawn")
        self._keeper, theirs = spawn.Pipe()
        spawn.Process(target=keep, args=(theirs,)).start()
        theirs.close()
        address, port = self._keeper.recv()
        ports = self._job.gather(port)
        own = self._job.rank
        other = (own + 1) % RANKS["copying"]
        self._keeper.send({"name": f"node{other}", "address": "127.0.0.1", "port": ports[other]})
        self._keeper.recv()
        settings = SnapshotSettings(
            address=address,
            run="benchmark",
            node=f"node{own}",
            domain=f"node{own}",
            buddy=f"node{other}",
            every=1,
            limit_bytes=None,
        )
        state = RunState(self._run, lambda: self.progress(self._iteration + 1))
        self._copies = Snapshots(state, self._job, settings, self._note, self._say)

    def _note(self, text: str) -> None:
        self.notice = text

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr)

    def measure(self, rounds: int) -> dict[str, Any]:
        return {
            name: self.turns(
                rounds, lambda kind, each=each: self._window(kind, each=each), "copying"
            )
            for name, each in (("each", True), ("tenth", False))
        }

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"notice": self.notice}

    def close(self) -> None:
        self._copies.close()
        self._keeper.close()
        super().close()

    def _window(self, is_copying: bool, *, each: bool) -> tuple[float, float]:
        """Ten steps; returns seconds for each, on the clock and of processors."""
        copies = self._copies

        def work() -> None:
            for number in range(WINDOW):
                if is_copying and (each or not number):
                    copies.take(self._iteration + 1)
                self._iteration += 1
                self.train(copies.before_update)
                if is_copying and (each or number == WINDOW - 1):
                    copies.settle(self._iteration)

        taken = self.timed(work, self._processor_s)
        if self.notice.startswith("off"):
            raise RuntimeError(f"copies of the state are {self.notice}")
        return taken

    def _processor_s(self) -> float:
        self._keeper.send(None)
        return time.process_time() + float(self._keeper.recv())


class WatchedRank(_Rank):
    """One rank with the watch for hangs or without."""

    def __init__(self, folder: Path) -> None:
        super().__init__("watched", 256)
        self._folder = folder
        self._guard: Any = None

    def measure(self, rounds: int) -> dict[str, Any]:
        return self.turns(rounds, self._window, "watched")

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": statistics.median(result["plain_s"])}

    def _window(self, is_watched: bool) -> tuple[float, float]:
        """Some steps; returns seconds for each, on the clock and of processors."""
        from megatron.adaptive.engine.hang_guard import HangGuard

        run = self._run
        if is_watched:
            self._guard = HangGuard(
                self._job, after_s=None, on_hang="report", page_folder=self._folder
            )
            own = run.wiring.executor.evidence
            self._guard.snapshot = lambda: {**run.tracing.now(), **own()}

        def work() -> None:
            for _ in range(WINDOW):
                self._iteration += 1
                run.tracing.begin_iteration(self._iteration, self._microbatches, is_traced=False)
                self.train()
                run.tracing.end_iteration()

        taken = self.timed(work, self._processor_s)
        if is_watched:
            self._guard.close()
            self._guard = None
        return taken

    def _processor_s(self) -> float:
        watch = None if self._guard is None else self._guard._process
        times = None if watch is None else psutil.Process(watch.pid).cpu_times()
        return time.process_time() + (0.0 if times is None else times.user + times.system)


def keep(link: Connection) -> None:
    """Is a keeper for a buddy, if one is named; answers with its processor time."""
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
    made = {"traced": TracedRank, "saving": SavingRank, "copying": CopyingRank}
    made["watched"] = WatchedRank
    rank_main(lambda folder, kind: made[kind](folder))
