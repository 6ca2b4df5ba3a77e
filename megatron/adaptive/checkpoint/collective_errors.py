"""Raises an error on all ranks if a save or a load fails on one rank.

Otherwise, the other ranks would wait forever for the failed rank. After each action that may fail,
all ranks exchange their errors over gloo, and then raise the same error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron.adaptive.engine.process_context import from_first, gather, naming_lost_peers
from megatron.adaptive.errors import (
    AdaptiveError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
)

_Result = TypeVar("_Result")

# A full disk, a damaged file or missing permissions can cause these types of errors. Errors of
# other types indicate a bug, so the failed rank raises the original error, with its traceback.
_EXPECTED = (
    AdaptiveError,
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
)


# If ranks fail with errors of different types, all ranks raise the first type in this tuple that
# occurred on any rank.
_FIRST: tuple[type[Exception], ...] = (RuntimeError, DamagedCheckpointError)


class RankGroup:
    """Runs actions on all ranks. If an action fails on one rank, all ranks raise the same error.

    All ranks must call each method together. Each method raises PeerLostError if another rank has
    exited.

    Attributes:
        rank: Rank of this process.
        group: Gloo process group of all ranks. No other communication may use it at the same time.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self.group = group

    @property
    def is_first(self) -> bool:
        """Returns whether this process is rank 0."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return dist.get_world_size(self.group)

    def any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on at least one rank."""
        is_set = torch.tensor([int(flag)])
        if self.size > 1:
            with naming_lost_peers():
                dist.all_reduce(is_set, dist.ReduceOp.MAX, group=self.group)
        return bool(is_set)

    def gather(self, value: _Result) -> list[_Result]:
        """Returns a list with the ``value`` of each rank, ordered by rank."""
        with naming_lost_peers():
            return gather(value, self.group)

    def first(self, action: Callable[[], object]) -> None:
        """Runs ``action`` on rank 0 only. If the action fails, all ranks raise its error."""
        self.together(lambda: action() if self.rank == 0 else None)

    def on_first(self, action: Callable[[], _Result]) -> _Result:
        """Runs ``action`` on rank 0 only, and returns its result on all ranks.

        If the action fails, all ranks raise its error.
        """
        # The result is None on ranks other than 0, until from_first() broadcasts rank 0's result.
        result: Any = self.together(lambda: action() if self.rank == 0 else None, name_ranks=False)
        with naming_lost_peers():
            of_first: _Result = from_first(result, self.group)
        return of_first

    def together(self, action: Callable[[], _Result], *, name_ranks: bool = True) -> _Result:
        """Runs ``action`` on each rank, and returns its result.

        If the action fails on any rank, all ranks raise an error.

        Args:
            action: Function to run on this rank.
            name_ranks: Whether the error message names the ranks that failed.

        Raises:
            CheckpointError: If ``action`` failed on any rank, for example because the disk is full
                or permissions are missing.
            DamagedCheckpointError: If ``action`` detected damaged data on any rank.
            ConfigError: If ``action`` raised ConfigError on all ranks on which it failed.
            RuntimeError: If ``action`` failed on another rank because of a bug. That rank raises
                the original error.
        """
        failure: Exception | None = None
        result: _Result | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        # Usually no rank fails, so first exchange a single number, which is faster than gathering
        # error objects.
        if not self.any(failure is not None):
            return cast(_Result, result)
        report = None if failure is None else (_kind(failure), _one_line(failure))
        reports = enumerate(self.gather(report))
        failed = {rank: other for rank, other in reports if other is not None}
        if failure is not None and _kind(failure) is RuntimeError:
            raise failure
        texts = {rank: text for rank, (_, text) in failed.items()}
        kinds = {kind for kind, _ in failed.values()}
        if len(kinds) > 1:
            first = next((kind for kind in _FIRST if kind in kinds), CheckpointError)
            kinds = {first}
        merged = kinds.pop()(_merged(texts, name_ranks=name_ranks))
        if failure is not None and type(failure) is type(merged) and str(failure) == str(merged):
            raise failure  # The merged error has the same text, so keep the original.
        raise merged from failure


def _kind(error: Exception) -> type[Exception]:
    """Returns the type of error that all ranks raise if a rank raises ``error``."""
    if not isinstance(error, _EXPECTED) or isinstance(error, torch.OutOfMemoryError):
        return RuntimeError
    special = (DamagedCheckpointError, ConfigError)
    return next((kind for kind in special if isinstance(error, kind)), CheckpointError)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = " ".join(str(error).split())
    return text if isinstance(error, AdaptiveError) else f"{type(error).__name__}: {text[:300]}"


def _merged(failures: dict[int, str], *, name_ranks: bool) -> str:
    """Returns one line of text with all error messages. Identical messages are listed only once.

    Args:
        failures: Error message of each failed rank, keyed by rank.
        name_ranks: Whether to prefix each message with the ranks on which it occurred.
    """
    if dist.get_world_size() == 1 or not name_ranks:
        return "; ".join(dict.fromkeys(failures.values()))
    parts = []
    for text in dict.fromkeys(failures[rank] for rank in sorted(failures)):
        ranks = [str(rank) for rank in sorted(failures) if failures[rank] == text]
        parts.append(f"rank {', '.join(ranks)}: {text}")
    return "; ".join(parts)
