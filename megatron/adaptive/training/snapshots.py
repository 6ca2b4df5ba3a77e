"""The state of megatron-core's model and optimizer, for copies of it in memory.

Copies and their keeping are ``megatron.adaptive.checkpoint.snapshots``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron.adaptive.checkpoint import state as state
from megatron.adaptive.checkpoint.exchange import common_bytes
from megatron.adaptive.checkpoint.snapshot_plan import Part
from megatron.adaptive.checkpoint.snapshots import CopySettings, NoCopies, Piece, StateCopies
from megatron.adaptive.checkpoint.training import Checkpoints, Progress
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.gpt.step import gather_parameters
from megatron.adaptive.training.logging import TrainingLog

__all__ = ["RunState", "make_copies"]

# What layers of Transformer Engine keep for 8-bit types, which this trainer does not have.
_SCRATCH = "_extra_state"


def make_copies(run: Run, log: TrainingLog, progress: Callable[[], Progress]) -> NoCopies:
    """Return what copies the run's state, if the node's agent keeps copies.

    Args:
        run: the built run; another one needs another object.
        log: where it is told.
        progress: says how far the run has come.
    """
    told = run.job.environment.copies
    if told is None:
        return NoCopies()
    return StateCopies(
        RunState(run, progress),
        run.job,
        CopySettings.read(told),
        lambda text: log.report(copies=text),
        log.message,
    )


class RunState:
    """One run's state; see ``CopiedState``.

    Args:
        run: the built run.
        progress: says how far it has come.
    """

    def __init__(self, run: Run, progress: Callable[[], Progress]) -> None:
        self._run = run
        self._progress = progress
        self._checkpoints = _whole(run)
        self._common: dict[str, Any] = {}
        self._stays: bool | None = None

    def pieces(self) -> Mapping[Part, Piece] | None:
        """See ``CopiedState``."""
        gather_parameters(self._run)
        progress = self._progress()
        if self._stays:
            self._checkpoints.refresh(self._common, progress)
            return None
        sharded, self._common = self._checkpoints.pieces(progress)
        shards = _parts(sharded)
        if self._stays is None:
            whole = [shard.data for shard in shards.values() if shard.data.numel()]
            stays = state.lives_in_place(whole, self._run.chunks, self._run.optimizer)
            self._stays = all(self._run.job.gather(stays))  # else all take the state apart again
        return {
            part: Piece(
                tensor=shard.data,
                size=[1] * shard.prepend_axis_num + list(shard.local_shape),
                whole=list(shard.global_shape),
            )
            for part, shard in shards.items()
        }

    def extra(self) -> bytes:
        """See ``CopiedState``."""
        told = {"progress": dataclasses.asdict(self._progress())}
        return json.dumps(told).encode() + b"\n" + common_bytes(self._common)

    def head(self) -> Mapping[str, Any]:
        """See ``CopiedState``."""
        return {
            "common": COMMON_STATE_FNAME,
            "has_common": state.has_parameters(self._run.optimizer),
            "manifest": dataclasses.asdict(self._checkpoints.manifest(self._progress())),
            "format": dataclasses.asdict(CheckpointingConfig("torch_dist", 1)),
        }

    def is_changed(self) -> bool:
        """See ``CopiedState``: never."""
        return False


def _whole(run: Run) -> Checkpoints:
    """What takes the state apart, whatever the run's own checkpoints leave out."""
    config = run.job.config
    settings = dataclasses.replace(config.checkpoint, no_save_optim=False, no_save_rng=True)
    job = dataclasses.replace(run.job, config=dataclasses.replace(config, checkpoint=settings))
    return Checkpoints(job, run.chunks, run.optimizer, run.scheduler)


def _parts(sharded: dict[str, list[Any]]) -> dict[Part, Any]:
    """Return the shards by name and place."""
    found: dict[Part, Any] = {}
    for name, shards in sharded.items():
        for shard in shards:
            if isinstance(shard, ShardedObject):
                if shard.key.endswith(_SCRATCH):
                    continue
                raise TypeError(f"{name} is no tensor: copies of the state cannot hold it")
            found.setdefault((name, tuple(shard.global_offset)), shard)
    return found
