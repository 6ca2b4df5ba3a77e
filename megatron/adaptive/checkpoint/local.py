"""The trainer's checkpoints on the nodes' own disks, see ``checkpoint.local_disk``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from megatron.adaptive.checkpoint.folder import CheckpointFolder, Manifest
from megatron.adaptive.checkpoint.local_disk import LocalDisk, LocalSettings
from megatron.adaptive.checkpoint.upload import Parcel
from megatron.adaptive.gpt.initialize import TrainingJob

__all__ = ["LocalDisk", "finish_former", "make_local_disk", "parcel_of"]


def make_local_disk(job: TrainingJob) -> LocalDisk | None:
    """Return this node's part of the job's checkpoints, if they go there. Collective."""
    settings = job.config.checkpoint
    if settings.save_local is None:
        return None
    wanted = LocalSettings(
        base=Path(settings.save_local),
        option=f"--save-local {settings.save_local}",
        patience="--distributed-timeout-minutes",
        keep=settings.keep_checkpoints,
        timeout_s=60.0 * job.config.parallel.distributed_timeout_minutes,
        progress_dir=job.config.progress_dir,
    )
    return LocalDisk(job, _Shared(str(settings.save), settings.keep_checkpoints), wanted)


def finish_former(local: LocalDisk, job: TrainingJob) -> None:
    """Finish the copy of a newer checkpoint that ranks before these had written. Collective.

    Only where the run goes on from the newest of its own; see :meth:`LocalDisk.finish_former`.
    """
    settings = job.config.checkpoint
    if settings.load is None or settings.ckpt_step is not None:
        return
    load, save = Path(settings.load), Path(str(settings.save))

    def latest() -> int | None:
        return CheckpointFolder(load).latest() or 0 if load.resolve() == save.resolve() else None

    local.finish_former(latest)


def parcel_of(manifest: Manifest) -> Parcel:
    """Return what is known of a checkpoint on its way."""
    told = dataclasses.asdict(manifest)
    return Parcel(
        step=int(manifest.progress["iteration"]),
        save_id=manifest.save_id,
        files=told.pop("files"),
        told=told,
    )


class _Shared:
    """The folder of checkpoints in shared storage.

    Args:
        path: of it.
        keep: complete ones that stay, ``None`` for all.
    """

    def __init__(self, path: str, keep: int | None) -> None:
        self.folder = CheckpointFolder(path)
        self._keep = keep

    def commit(self, parcel: Parcel, check: Callable[[], None]) -> None:
        """See :class:`~megatron.adaptive.checkpoint.upload.Shared`."""
        self.folder.commit(parcel.step, Manifest(**parcel.told), check)
        if self._keep is not None:
            self.folder.keep(self._keep)
