"""What copies of the state in memory cost a step: a small GPT; by itself, one rank or a keeper.

Two ranks, each on a node of its own as far as copies go, each with a keeper in a process of its own
as the node's agent has it; each sends the other all that it copies. One job trains windows of ten
steps with copies, of every step or of the first, and without, in turns, so that whatever else the
machine does hits all alike. Processor time is that of ranks and keepers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity.saving import MICROBATCHES, MODEL, RANKS, WINDOW  # noqa: E402
from benchmarks.gpt_rank import GptRank, run_ranks  # noqa: E402

SECRET = "of the benchmark"


def measure(rounds: int, limit_s: float = 400.0) -> dict[str, Any]:
    """Take turns.

    Args:
        rounds: of four windows for copies of every step, and four for one in ten.
        limit_s: everything is killed after it.

    Returns:
        By ``each`` and ``tenth``: seconds per step of each round with copies (``copying_s``) and
        without (``plain_s``), the same of processor time (``copying_cpu_s``, ``plain_cpu_s``). And
        ``told``, what is copied.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    return run_ranks(__file__, RANKS, rounds, "--folder", limit_s)


class Rank(GptRank):
    """One rank of the job, with its keeper."""

    def __init__(self) -> None:
        super().__init__([*MODEL])
        from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
        from megatron.adaptive.checkpoint.training import RunState

        self.told = ""
        self._keeper = _KeeperProcess()
        ports = self._job.gather(self._keeper.told["port"])
        own = self._job.rank
        other = (own + 1) % RANKS
        buddy = {"name": f"node{other}", "address": "127.0.0.1", "port": ports[other]}
        self._keeper.ask({"run": "benchmark", "secret": SECRET, "buddy": buddy})
        settings = SnapshotSettings(
            address=self._keeper.told["address"],
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
        self.told = text

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
        if self.told.startswith("off"):
            raise RuntimeError(f"copies of the state are {self.told}")
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
        return time.process_time() + float(self._keeper.ask({})["processor_s"])


class _KeeperProcess:
    """A keeper in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = self._answer()

    def ask(self, told: dict[str, Any]) -> dict[str, Any]:
        """Tell it of new ranks, or nothing; returns what it says of itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def keep() -> None:
    """Be a keeper until the standard input ends."""
    from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper

    keeper = SnapshotKeeper("127.0.0.1")
    print(json.dumps({"address": keeper.address, "port": keeper.port}), flush=True)
    for line in sys.stdin:
        if told := json.loads(line):
            keeper.prepare(told["run"], told["secret"], Buddy(**told["buddy"]))
        print(json.dumps({"processor_s": time.process_time()}), flush=True)
    keeper.close()


def main() -> None:
    """Be one rank, or a keeper."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keeper", action="store_true", help="be a keeper")
    parser.add_argument("--rounds", type=int, help="of eight windows each")
    parser.add_argument("--output", type=Path, help="where the result goes")
    parser.add_argument("--folder", type=Path, help="is not used")
    options = parser.parse_args()
    if options.keeper:
        keep()
        return
    rank = Rank()
    result = rank.measure(options.rounds)
    rank.close()
    if rank.is_first:
        options.output.write_text(json.dumps({**result, "told": rank.told}), encoding="utf-8")


if __name__ == "__main__":
    main()
