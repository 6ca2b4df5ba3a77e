"""What all ranks that write or read a checkpoint do together: agree, and fail alike.

What fails on one rank fails on all: after each part that only some ranks do, all ranks exchange
what went wrong, over gloo, and raise the same :class:`CheckpointError`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.adaptive.errors import AdaptiveError, CheckpointError

__all__ = ["Exchange"]

_Result = TypeVar("_Result")


class Exchange:
    """Lets all ranks of a group do parts of one work and fail alike.

    Args:
        rank: of this process.
        group: all ranks, on gloo, used by nothing else meanwhile.

    Attributes:
        expected: what a full disk, a damaged file or a missing permission looks like; torch raises
            the last one as a BaseException. Anything else is a mistake of ours and keeps its
            traceback.
    """

    expected: ClassVar[tuple[type[BaseException], ...]] = (
        AdaptiveError,
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        CheckpointException,
    )

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self._rank = rank
        self.group = group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank."""
        found = torch.tensor([int(flag)])
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def sum(self, number: int) -> int:
        """Add up what all ranks give."""
        found = torch.tensor([number])
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(found, group=self.group)
        return int(found)

    def gather(self, mine: _Result) -> list[_Result]:
        """Return what every rank gave, by rank."""
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, mine, group=self.group)
        return told

    def first(self, action: Callable[[], object]) -> None:
        """Run ``action`` on rank 0 and raise its failure on all ranks."""
        self.together(lambda: action() if self._rank == 0 else None)

    def on_first(self, action: Callable[[], _Result], *, name_rank: bool = True) -> _Result:
        """Run ``action`` on rank 0 and return its result, or raise its failure, on all ranks."""
        result = self.together(lambda: action() if self._rank == 0 else None, name_ranks=name_rank)
        box: list[Any] = [result]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def together(self, action: Callable[[], _Result], *, name_ranks: bool = True) -> _Result:
        """Run ``action`` on each rank; raise on all ranks what failed on any.

        Raises:
            CheckpointError: it failed somewhere; the text names the ranks where that helps.
            RuntimeError: another rank met a mistake of ours, and raises it itself.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
        # As a rule nothing failed, and one number tells that for less than objects do.
        if not self.any(failure is not None):
            return result
        own = (
            None
            if failure is None
            else (self._is_expected(failure), _describe(failure, self._rank))
        )
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own, group=self.group)
        if failure is not None and not self._is_expected(failure):
            raise failure
        failed = [entry for entry in gathered if entry is not None]
        if failed:
            texts = {rank: text for _, texts in failed for rank, text in texts.items()}
            kind = CheckpointError if all(expected for expected, _ in failed) else RuntimeError
            raise kind(_merged(texts, name_ranks=name_ranks)) from failure
        return result

    def _is_expected(self, error: BaseException) -> bool:
        return isinstance(error, self.expected) and not isinstance(error, torch.OutOfMemoryError)


def _describe(error: BaseException, rank: int) -> dict[int, str]:
    """Return what went wrong, on one line, by the rank it happened on."""
    if isinstance(error, CheckpointException):
        return {failed: _one_line(wrapped[0]) for failed, wrapped in error.failures.items()}
    return {rank: _one_line(error)}


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = " ".join(str(error).split())
    return text if isinstance(error, AdaptiveError) else f"{type(error).__name__}: {text[:300]}"


def _merged(failures: dict[int, str], *, name_ranks: bool) -> str:
    """Return one line for what failed, each text once, with its ranks unless there is only one."""
    if dist.get_world_size() == 1 or not name_ranks:
        return "; ".join(dict.fromkeys(failures.values()))
    parts = []
    for text in dict.fromkeys(failures[rank] for rank in sorted(failures)):
        ranks = [str(rank) for rank in sorted(failures) if failures[rank] == text]
        parts.append(f"rank {', '.join(ranks)}: {text}")
    return "; ".join(parts)
