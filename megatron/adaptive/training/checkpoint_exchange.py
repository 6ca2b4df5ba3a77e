"""What all ranks that write or read a checkpoint do together: agree, fail alike, write their parts.

What fails on one rank fails on all: after each part that only some ranks do, all ranks exchange
what went wrong, over gloo, and raise the same :class:`CheckpointError`.
"""

from __future__ import annotations

import copy as copy_module
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron.adaptive.errors import AdaptiveError, CheckpointError

__all__ = ["Exchange", "InProcessSaver", "by_name", "common_bytes"]

# What a full disk, a damaged file or a missing permission looks like. torch raises the last one as
# a BaseException. Anything else is a mistake of ours and keeps its traceback.
_EXPECTED: tuple[type[BaseException], ...] = (
    AdaptiveError,
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
    CheckpointException,
)
_Result = TypeVar("_Result")


class Exchange:
    """Lets all ranks of a group do parts of one work and fail alike.

    Args:
        rank: of this process.
        group: all ranks, on gloo, used by nothing else meanwhile.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self._rank = rank
        self.group = group

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
        own = None if failure is None else (_is_expected(failure), _describe(failure, self._rank))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own, group=self.group)
        if failure is not None and not _is_expected(failure):
            raise failure
        failed = [entry for entry in gathered if entry is not None]
        if failed:
            texts = {rank: text for _, texts in failed for rank, text in texts.items()}
            kind = CheckpointError if all(expected for expected, _ in failed) else RuntimeError
            raise kind(_merged(texts, name_ranks=name_ranks)) from failure
        return result


def common_bytes(common: dict[str, Any]) -> memoryview:
    """Return the file of what all ranks have in common; torch itself hides why writing fails."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getbuffer()


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


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, _EXPECTED) and not isinstance(error, torch.OutOfMemoryError)


def _merged(failures: dict[int, str], *, name_ranks: bool) -> str:
    """Return one line for what failed, each text once, with its ranks unless there is only one."""
    if dist.get_world_size() == 1 or not name_ranks:
        return "; ".join(dict.fromkeys(failures.values()))
    parts = []
    for text in dict.fromkeys(failures[rank] for rank in sorted(failures)):
        ranks = [str(rank) for rank in sorted(failures) if failures[rank] == text]
        parts.append(f"rank {', '.join(ranks)}: {text}")
    return "; ".join(parts)


def by_name(sharded_state_dict: dict[str, Any]) -> dict[str, list[Any]]:
    """Return megatron-core's shards by their names in a checkpoint, other replicas' too."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
    return dict(flat)


class InProcessSaver(SaveShardedStrategy):  # type: ignore[misc]
    """Writes megatron-core's ``torch_dist`` with torch's own file writer, without other processes.

    Args:
        group: all ranks, on gloo: what is exchanged are plans and results.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects that differ between ranks are written among the tensors."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Write this rank's part; collective, raises the same failure on all ranks."""
        self.write(self.parts(sharded_state_dict, copy=False), checkpoint_dir)

    @staticmethod
    def parts(sharded_state_dict: dict[str, Any], *, copy: bool) -> dict[str, Any]:
        """Return what this rank writes.

        Args:
            sharded_state_dict: its state.
            copy: whether tensors are copied into the host's memory, so that training may go on.
        """
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        if copy:
            for shards in flat.values():
                for shard in shards:
                    shard.data = _copied(shard.data)
        return dict(mcore_to_pyt_state_dict(flat, False))

    def write(self, parts: dict[str, Any], checkpoint_dir: Path) -> None:
        """Write what :meth:`parts` returned; collective over the group."""
        torch_checkpoint.save(
            parts,
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )


def _copied(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.detach().to("cpu", copy=True)
    return copy_module.deepcopy(data)
