"""Makes what fails on one rank of a save or load fail on all.

After each part that only some ranks do, all ranks exchange what went wrong, over gloo, and raise
the same error.
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

# How a full disk, a damaged file or a missing permission shows itself. Anything else is a mistake
# of ours and keeps its traceback.
_EXPECTED = (
    AdaptiveError,
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
)


# Where ranks fail for several reasons.
_FIRST: tuple[type[Exception], ...] = (RuntimeError, DamagedCheckpointError)


class RankGroup:
    """Lets all ranks of a group do parts of one work and fail alike. Every method is collective.

    Every method raises PeerLostError if a rank is gone.

    Attributes:
        rank: of this process.
        group: all ranks, on gloo, used by nothing else meanwhile.
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
        """Return whether it is set on any rank."""
        found = torch.tensor([int(flag)])
        if self.size > 1:
            with naming_lost_peers():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def gather(self, mine: _Result) -> list[_Result]:
        """Return what every rank gave, by rank."""
        with naming_lost_peers():
            return gather(mine, self.group)

    def first(self, action: Callable[[], object]) -> None:
        """Run ``action`` on rank 0 and raise its failure on all ranks."""
        self.together(lambda: action() if self.rank == 0 else None)

    def on_first(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action`` on rank 0 and return its result, or raise its failure, on all ranks."""
        result = self.together(lambda: action() if self.rank == 0 else None, name_ranks=False)
        with naming_lost_peers():
            return from_first(result, self.group)  # type: ignore[return-value]

    def together(self, action: Callable[[], _Result], *, name_ranks: bool = True) -> _Result:
        """Run ``action`` on each rank; raise on all ranks what failed on any.

        Raises:
            CheckpointError: it failed somewhere; the text names the ranks where that helps.
            DamagedCheckpointError: the same, where it was for damage on some rank.
            ConfigError: the same, where it failed with this error alone.
            RuntimeError: another rank met a mistake of ours, and raises it itself.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            failure = error
        # As a rule nothing failed, and one number says that for less than objects do.
        if not self.any(failure is not None):
            return result
        own = None if failure is None else (_kind(failure), _one_line(failure))
        failed = {rank: one for rank, one in enumerate(self.gather(own)) if one is not None}
        if failure is not None and _kind(failure) is RuntimeError:
            raise failure
        texts = {rank: text for rank, (_, text) in failed.items()}
        kinds = {kind for kind, _ in failed.values()}
        if len(kinds) > 1:
            first = next((one for one in _FIRST if one in kinds), CheckpointError)
            kinds = {first}
        merged = kinds.pop()(_merged(texts, name_ranks=name_ranks))
        if failure is not None and type(failure) is type(merged) and str(failure) == str(merged):
            raise failure  # a second error of the same words would only repeat the first
        raise merged from failure


def _kind(error: Exception) -> type[Exception]:
    """Return what all ranks raise for an error of one."""
    if not isinstance(error, _EXPECTED) or isinstance(error, torch.OutOfMemoryError):
        return RuntimeError
    known = (DamagedCheckpointError, ConfigError)
    return next((one for one in known if isinstance(error, one)), CheckpointError)


def _one_line(error: Exception) -> str:
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
