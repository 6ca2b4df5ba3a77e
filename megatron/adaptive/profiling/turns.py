"""Lets ranks measure in turns, while the others sleep.

A barrier between turns would wake all ranks each time. With 64 ranks on two processors this takes
longer than the measurements. Here the last rank of a turn wakes the ranks of the next turn, through
the key-value store of the job::

    turn 0      ranks 0, 1      each adds 1 to "0/done"; the one that makes it 2 sets "1/go"
    turn 1      ranks 2, 3      wait for "1/go", ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.profiling.probe_layout import Ranks


class Turns:
    """Takes the turns of one rank. All ranks must make it, and call :meth:`each` equally often.

    Args:
        job: Environment of this process.
        name: Name of this series of turns, unique in the job.
    """

    def __init__(self, job: Job, name: str) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, default)
        self._job = job
        self._series = 0

    def each(self, batches: Sequence[Sequence[Ranks]]) -> Iterator[Ranks]:
        """Iterates over this rank's subjects, when it is their turn.

        The turn of a subject ends when the caller asks for the next one, which it must always do.

        Args:
            batches: Subjects of each turn, with no rank in common; equal on all ranks.
        """
        self._series += 1
        for number, batch in enumerate(batches):
            for ranks in batch:
                if self._job.rank in ranks:
                    if number:
                        self._store.wait([self._key(number, "go")], self._job.timeout)
                    yield ranks
                    self._end(number, sum(map(len, batch)))

    def finish(self, batches: Sequence[Sequence[Ranks]]) -> None:
        """Deletes the keys of the last series; the caller knows that all its turns have ended."""
        if self._job.is_first:
            for number in range(len(batches)):
                self._store.delete_key(self._key(number, "done"))
                self._store.delete_key(self._key(number + 1, "go"))

    def note(self, text: str) -> None:
        """Makes :meth:`is_noted` true on all ranks, in later turns."""
        self._store.set(f"noted/{text}", "")

    def is_noted(self, text: str) -> bool:
        """Returns whether some rank has called :meth:`note` with this text in an earlier turn."""
        return bool(self._store.check([f"noted/{text}"]))

    def _end(self, number: int, count: int) -> None:
        if self._store.add(self._key(number, "done"), 1) == count:
            self._store.set(self._key(number + 1, "go"), "")

    def _key(self, number: int, event: str) -> str:
        return f"{self._series}/{number}/{event}"
