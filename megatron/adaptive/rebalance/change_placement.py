"""Moves a job's stages to another placement between two steps, in the processes it runs in.

The training state goes through a checkpoint in a temporary folder, for that loads into any shape::

    write the folder ──> release, take down ──> build anew and load ──> remove the folder
                         channels, traces       groups, model, optimizer

Until something is taken down nothing has changed, so that a folder that cannot be written only
means to stay. Counters, logs and the data loader are the training loop's.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.checkpoint.training import Checkpoints, Progress
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.initialize import TrainingJob, remake_mesh
from megatron.adaptive.gpt.setup import Run, build_run
from megatron.adaptive.gpt.step import gather_parameters
from megatron.adaptive.schedule.placement import PlacementKind

__all__ = ["can_move", "change_placement", "take_down"]

_FOLDER = ".moving"  # in that of --save; what loads checkpoints does not look there


def can_move(job: TrainingJob) -> bool:
    """Returns whether all ranks reach one folder: on one machine always, else with ``--save``."""
    machines = {place["machine"] for place in job.places}
    return len(machines) == 1 or job.config.checkpoint.save is not None


def change_placement(
    box: list[Run], kind: PlacementKind, progress: Progress, release: Callable[[], None]
) -> Run:
    """Goes on under another placement, from the same state. Collective over all ranks.

    Args:
        box: holds the run, between two steps, and is empty once the run is taken down.
        kind: how stages lie from here on.
        progress: how far the run has come.
        release: drops every other reference to the run; called before anything is taken down, and
            not at all where the state could not be written.

    Returns:
        The run that takes its place.

    Raises:
        CheckpointError: the state could not be written, and nothing has changed; or, after
            ``release``, it could not be read back and is lost.
    """
    job = box[0].job
    folder = _write(box[0], progress)
    failed = True
    try:
        release()
        take_down(box.pop())
        run = _build(job, kind, folder)
        failed = False
    finally:
        if not failed:
            dist.barrier(group=job.control_group)  # all have read it
        if failed or job.is_first:
            shutil.rmtree(folder, ignore_errors=True)
    return run


def take_down(run: Run) -> None:
    """Closes the run's channels and traces; it cannot take another step. Collective."""
    run.tracing.close()
    if run.wiring is not None:
        run.wiring.close()
    run.job.accelerator.synchronize()


def _write(run: Run, progress: Progress) -> Path:
    """Writes the training state into a temporary folder; leaves none where it cannot."""
    job = run.job
    found: Any = None
    if job.is_first:
        try:
            found = _make_folder(job.config.checkpoint.save)
        except OSError as error:
            found = CheckpointError(f"no folder for the stages on their way: {error}")
    folder = job.from_first(found)
    if isinstance(folder, CheckpointError):
        raise folder
    try:
        gather_parameters(run)
        _checkpoints(run, folder).save(progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    written: Path = folder
    return written


def _build(job: TrainingJob, kind: PlacementKind, folder: Path) -> Run:
    """Builds the run anew under another placement and loads the state."""
    gc.collect()
    if job.accelerator.is_cuda:
        torch.cuda.empty_cache()
    schedule = dataclasses.replace(job.config.schedule, pipeline_placement=kind)
    config = dataclasses.replace(job.config, schedule=schedule)
    job = dataclasses.replace(job, config=config)
    remake_mesh(job)
    run = build_run(job)
    _checkpoints(run, folder).load()
    return run


def _make_folder(save: str | None) -> Path:
    if save is None:
        return Path(tempfile.mkdtemp(prefix="megatron-adaptive-moving-"))
    folder = Path(save).resolve() / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed on its way
    folder.mkdir(parents=True)
    return folder


def _checkpoints(run: Run, folder: Path) -> Checkpoints:
    """Makes what saves and loads everything in ``folder``, whatever the run's settings say."""
    config = run.job.config
    settings = dataclasses.replace(
        config.checkpoint,
        save=str(folder),
        load=str(folder),
        ckpt_step=None,
        no_save_optim=False,
        no_save_rng=False,
        no_load_optim=False,
        no_load_rng=False,
        finetune=False,
        exit_on_missing_checkpoint=True,
    )
    config = dataclasses.replace(config, checkpoint=settings)
    return Checkpoints(run.job, config, run.chunks, run.optimizer, run.scheduler)
