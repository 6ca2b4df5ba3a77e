"""Makes a failure on one rank of a save or load a failure on all ranks.

After each step that only some ranks run, all ranks exchange their errors over gloo and raise the
same one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

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

# Errors that a full disk, a damaged file or a missing permission causes. Any other error is a bug,
# and keeps its traceback.
_EXPECTED = (
    AdaptiveError,
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
)


# Error types that win if ranks fail with several types, the strongest first.
_FIRST: tuple[type[Exception], ...] = (RuntimeError, DamagedCheckpointError)


class RankGroup:
    """Runs the steps of a collective operation; if one rank fails, all fail with the same error.

    All methods are collective.
    Every method raises PeerLostError if a rank is gone.

    Attributes:
        rank: Rank of this process.
        group: Process group of all ranks, on gloo. Nothing else may use it at the same time.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self.group = group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        is_set = torch.tensor([int(flag)])
        if self.size > 1:
            with naming_lost_peers():
                dist.all_reduce(is_set, dist.ReduceOp.MAX, group=self.group)
        return bool(is_set)

    def gather(self, value: _Result) -> list[_Result]:
        """Returns every rank's value, by rank."""
        with naming_lost_peers():
            return gather(value, self.group)

    def first(self, action: Callable[[], object]) -> None:
        """Runs ``action`` on rank 0 and raises its error on all ranks."""
        self.together(lambda: action() if self.rank == 0 else None)

    def on_first(self, action: Callable[[], _Result]) -> _Result:
        """Runs ``action`` on rank 0 and returns its result, or raises its error, on all ranks."""
        result = self.together(lambda: action() if self.rank == 0 else None, name_ranks=False)
        with naming_lost_peers():
            return from_first(result, self.group)  # type: ignore[return-value]

    def together(self, action: Callable[[], _Result], *, name_ranks: bool = True) -> _Result:
        """Runs ``action`` on each rank; if it fails on any rank, raises the error on all.

        Raises:
            CheckpointError: If it failed on any rank; the text names the ranks if this helps.
            DamagedCheckpointError: If it failed on any rank because of damage.
            ConfigError: If each rank that failed did so with this error.
            RuntimeError: If it failed on another rank because of a bug, which that rank raises.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            failure = error
        # Usually nothing failed, and one number is cheaper to exchange than objects.
        if not self.any(failure is not None):
            return result
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
            raise failure  # the merged error would only repeat it
        raise merged from failure


def _kind(error: Exception) -> type[Exception]:
    """Returns the error type that all ranks raise for this error on one of them."""
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
    """Returns one line with each distinct text once, and its ranks if there are several ranks."""
    if dist.get_world_size() == 1 or not name_ranks:
        return "; ".join(dict.fromkeys(failures.values()))
    parts = []
    for text in dict.fromkeys(failures[rank] for rank in sorted(failures)):
        ranks = [str(rank) for rank in sorted(failures) if failures[rank] == text]
        parts.append(f"rank {', '.join(ranks)}: {text}")
    return "; ".join(parts)
