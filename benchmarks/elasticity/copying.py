"""What copies of the state in memory cost a step: a small GPT; by itself, one rank or a keeper.

Two ranks, each on a node of its own as far as copies go, each with a keeper in a process of its own
as the node's agent has it; each sends the other all that it copies. One job trains windows of ten
steps with copies, of every step or of the first, and without, in turns, so that whatever else the
machine does hits all alike. Processor time is that of ranks and keepers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity.saving import MICROBATCHES, MODEL, RANKS, WINDOW  # noqa: E402
from benchmarks.gpt_rank import GptRank, rank_main  # noqa: E402
from benchmarks.gpt_rank import measure as measure_ranks  # noqa: E402

SECRET = "of the benchmark"


def measure(rounds: int, limit_s: float = 400.0) -> dict[str, Any]:
    """Take turns.

    Args:
        rounds: of four windows for copies of every step, and four for one in ten.
        limit_s: everything is killed after it.

    Returns:
        By ``each`` and ``tenth``: seconds per step of each round with copies (``copying_s``) and
        without (``plain_s``), the same of processor time (``copying_cpu_s``, ``plain_cpu_s``). And
        ``notice``, what is copied.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    return measure_ranks(__file__, RANKS, rounds, limit_s)


class Rank(GptRank):
    """One rank of the job, with its keeper in a process of its own."""

    def __init__(self, _: Path) -> None:
        super().__init__([*MODEL])
        from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
        from megatron.adaptive.checkpoint.training import RunState

        self.notice = ""
        spawn = multiprocessing.get_context("spawn")
        self._keeper, theirs = spawn.Pipe()
        spawn.Process(target=keep, args=(theirs,)).start()
        theirs.close()
        address, port = self._keeper.recv()
        ports = self._job.gather(port)
        own = self._job.rank
        other = (own + 1) % RANKS
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
        state = RunState(self._run, self._progress)
        self._copies = Snapshots(state, self._job, settings, self._tell, self._say)

    def _tell(self, text: str) -> None:
        self.notice = text

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns seconds per step, processor seconds of all processes together."""
        for is_copying in (False, True):
            self._window(is_copying, each=True)
        return {
            name: self.turns(
                rounds,
                lambda is_copying, each=each: self._window(is_copying, each=each),
                ("copying", "plain"),
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
        import torch.distributed as dist

        group, copies = self._job.control_group, self._copies
        dist.barrier(group=group)
        start, processor = time.perf_counter(), self._processor_s()
        for number in range(WINDOW):
            if is_copying and (each or not number):
                copies.take(self._iteration + 1)
            self._iteration += 1
            self.train(copies.before_update)
            if is_copying and (each or number == WINDOW - 1):
                copies.settle(self._iteration)
        seconds = time.perf_counter() - start
        processor = self._processor_s() - processor
        if self.notice.startswith("off"):
            raise RuntimeError(f"copies of the state are {self.notice}")
        return seconds / WINDOW, processor / WINDOW

    def _progress(self) -> Any:
        from megatron.adaptive.checkpoint.training import Progress

        return Progress(
            iteration=self._iteration + 1,
            consumed_train_samples=self._iteration * MICROBATCHES,
            consumed_valid_samples=0,
            skipped_iterations=0,
        )

    def _processor_s(self) -> float:
        self._keeper.send(None)
        return time.process_time() + float(self._keeper.recv())


def keep(link: Connection) -> None:
    """Is a keeper for a buddy, if one is named; answers with its processor time."""
    from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper

    keeper = SnapshotKeeper("127.0.0.1")
    link.send((keeper.address, keeper.port))
    with contextlib.suppress(EOFError):
        while True:
            if buddy := link.recv():
                keeper.prepare("benchmark", SECRET, Buddy(**buddy))
            link.send(time.process_time())
    keeper.close()


if __name__ == "__main__":
    rank_main(Rank)
