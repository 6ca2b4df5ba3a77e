"""Measures what checksums add to saving, to loading, and to steps during an asynchronous save.

One process takes turns with and without, so that whatever else the machine and its disk do hits
both alike. Without means that bytes go from memory to file, and from file to tensor, as they are:
neither summed nor cut into blocks. Run as a script it is one rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import ranks
from benchmarks.gpt_turns import SavingRank, costs
from benchmarks.ranks import GPT, GptRank, rank_main
from benchmarks.report import Result, measured

GOALS = {"saving": 0.03, "loading": 0.05, "behind": 0.01}
LIMIT_S = 1200.0


def measure(rounds: int) -> Result:
    """Takes turns.

    Args:
        rounds: of two turns of each kind.
    """
    facts, rows = {}, []
    for kind, what in (("saving", "longer saving"), ("loading", "longer loading")):
        found = facts[kind] = ranks.measure(__file__, 1, rounds, kind, limit_s=LIMIT_S)
        size, plain_s = found["size_bytes"] / 1e6, min(found["plain_s"])
        note = f"{size:.0f} MB, {1e3 * plain_s:.0f} ms without"
        rows.append(
            measured(f"checksums: {what}", costs(found, "checked"), goal=GOALS[kind], note=note)
        )
    found = facts["behind"] = ranks.measure(__file__, 2, rounds, "behind", limit_s=LIMIT_S)
    note = f"{found['size_bytes'] / 1e6:.0f} MB every ten steps of {found['step_s']:.3f} s"
    what = "checksums: longer steps beside a save behind training"
    rows.append(measured(what, costs(found, "checked"), goal=GOALS["behind"], note=note))
    return Result(rows=rows, facts={"checksums": facts})


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Lets checkpoints be written and read without checksums, what one wrote by the other."""
    from megatron.adaptive.checkpoint import checksums, writer

    class Nothing:
        """Is a hash of nothing, as long as a real one."""

        def update(self, data: Any) -> None:
            """Take no notice."""

        def reset(self) -> None:
            """Begin again."""

        def hexdigest(self) -> str:
            """Return the digits of nothing."""
            return "0" * 16

    def write(file: Any, sums: checksums.Checksums, data: Any) -> int:
        left = memoryview(data).cast("B")
        sums.update(left)
        size = len(left)
        while left:
            left = left[file.write(left) :]
        return size

    def read(self: checksums.CheckedFile, at: int, into: memoryview) -> None:
        with open(self._paths[0], "rb", buffering=0) as file:
            while into:
                done = os.preadv(file.fileno(), [into], at)
                at, into = at + done, into[done:]

    with (
        mock.patch.object(checksums.xxhash, "xxh3_64", Nothing),
        mock.patch.object(checksums.xxhash, "xxh3_64_hexdigest", return_value="0" * 16),
        mock.patch.object(writer, "write_summed", write),
        mock.patch.object(checksums.CheckedFile, "read", read),
    ):
        yield


def _turn(is_checked: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if is_checked else unchecked()


class WholeRank(GptRank):
    """Saves and loads a larger model, in the foreground.

    Args:
        folder: for checkpoints.
        kind: ``saving`` or ``loading``.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        words = "--hidden-size 512 --keep-checkpoints 2 --save-interval 10 --save".split()
        super().__init__([*GPT, *words, str(folder)])
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        self.train()
        self._checkpoints = Checkpoints(self._run)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns."""
        for is_checked in (False, True):
            self._save(is_checked, 1 + is_checked)
        turn = self._saving if self._kind == "saving" else self._loading
        return self.turns(rounds, turn, "checked")

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the size of a checkpoint."""
        return {"size_bytes": self.size_bytes(self._folder)}

    def _saving(self, is_checked: bool) -> tuple[float, float]:
        self._iteration += 10
        return self._save(is_checked, self._iteration)

    def _save(self, is_checked: bool, iteration: int) -> tuple[float, float]:
        os.sync()
        with _turn(is_checked):
            start, processor = time.perf_counter(), time.process_time()
            self._checkpoints.save(self.progress(iteration))
            return time.perf_counter() - start, time.process_time() - processor

    def _loading(self, is_checked: bool) -> tuple[float, float]:
        for path in self._folder.glob("iter_*/*"):
            with path.open("rb") as file:  # a job that starts finds it on the disk, not in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with _turn(is_checked):
            start, processor = time.perf_counter(), time.process_time()
            self.load(1 + is_checked, load=str(self._folder))
            return time.perf_counter() - start, time.process_time() - processor


class BehindRank(SavingRank):
    """Saves at each window of steps behind them, with checksums or without."""

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns."""
        return self.turns(rounds, self._with, "checked")

    def _with(self, is_checked: bool) -> tuple[float, float]:
        with _turn(is_checked):
            return self._window(True)


if __name__ == "__main__":
    rank_main(
        lambda folder, kind: BehindRank(folder) if kind == "behind" else WholeRank(folder, kind)
    )
