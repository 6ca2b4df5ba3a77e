"""Writes checkpoints: by all ranks together, whole or not at all, or to the nodes' disks first."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron.adaptive.checkpoint.exchange import Exchange
from megatron.adaptive.checkpoint.folder import CheckpointFolder, Manifest
from megatron.adaptive.checkpoint.local import LocalDisk, parcel_of
from megatron.adaptive.checkpoint.saver import InProcessSaver, Shards
from megatron.adaptive.engine.progress import is_over, require_current
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.initialize import TrainingJob

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes one run's checkpoints.

    Args:
        job: this process within the job.
        saver: writes this rank's part.
        local: the node's own disk, ``None`` for none.
    """

    def __init__(self, job: TrainingJob, saver: InProcessSaver, local: LocalDisk | None) -> None:
        self._job = job
        self._settings = job.config.checkpoint
        self._saver = saver
        self._local = local

    def put(
        self,
        folder: CheckpointFolder,
        manifest: Manifest,
        common: memoryview,
        shards: Shards,
        ranks: Exchange,
    ) -> Path | None:
        """Write a checkpoint to the nodes' own disks, or into its folder where that cannot be.

        Args:
            folder: of the checkpoints.
            manifest: what it holds.
            common: what all ranks have in common.
            shards: this rank's.
            ranks: all of them, on a group that is used by nothing else meanwhile.

        Returns:
            Where it is in the folder, ``None`` while it is on the nodes' own disks alone.

        Raises:
            CheckpointError: it could not be written on some rank; nothing of it is left.
        """
        if self._local is None:
            return self._write(folder, manifest, common, shards, ranks)
        return self._local.put(
            parcel_of(manifest),
            lambda path: self._saver.write(shards, path, ranks),
            lambda path: self._write_once(path, common),
            ranks,
            lambda: self._write(folder, manifest, common, shards, ranks),
        )

    def _write_once(self, folder: Path, common: memoryview) -> None:
        """Write what a checkpoint has once; on rank 0, after the shards."""
        _write_common(folder, common)
        self._write_form(folder)

    def _write_form(self, folder: Path) -> None:
        self._saver.write_metadata(folder)
        config = CheckpointingConfig(self._saver.backend, self._saver.version)
        save_config(config, str(folder))

    def _write(
        self,
        folder: CheckpointFolder,
        manifest: Manifest,
        common: memoryview,
        shards: Shards,
        ranks: Exchange,
    ) -> Path:
        iteration = manifest.progress["iteration"]
        partial = folder.partial_path(iteration)

        def begin() -> None:
            require_current(self._job.config.progress_dir)
            folder.begin(iteration)
            _write_common(partial, common)

        def complete() -> None:
            self._write_form(partial)
            folder.commit(
                iteration, manifest, lambda: require_current(self._job.config.progress_dir)
            )
            if self._settings.keep_checkpoints is not None:
                folder.keep(self._settings.keep_checkpoints)

        try:
            ranks.first(begin)
            self._saver.write(shards, partial, ranks)
            ranks.first(complete)
            return folder.complete_path(iteration)
        except BaseException as error:
            # Of a job that went on without us, what is there now is not ours.
            if self._job.is_first and not is_over(self._job.config.progress_dir):
                folder.abandon(iteration)
            if isinstance(error, CheckpointError):  # on all ranks: they wait for the clearing up
                dist.barrier(group=ranks.group)
                raise CheckpointError(
                    f"the checkpoint of iteration {iteration} was not written to "
                    f"{folder.path}: {error}; those before it are as they were. Free space there "
                    "or name another folder with --save"
                ) from error
            raise


def _write_common(folder: Path, common: memoryview) -> None:
    # megatron-core's `save` does the same, but a failure of rank 0 in its own part would leave the
    # others waiting in a collective.
    (folder / COMMON_STATE_FNAME).write_bytes(common)
