"""Defines the hooks of the training loop, including the hook that profiles some iterations."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.config.run import RunConfig
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.trace.files import Outage
from megatron.adaptive.training.logging import TrainedStep


class Hook:
    """Handles one task of the training loop, such as checkpoints.

    All ranks must have the same hooks, and call them in the same order.
    """

    def before_step(self, iteration: int) -> None:
        """The training loop calls this method before each step.

        ``iteration`` is the number of completed iterations.
        """

    def after_step(self, step: TrainedStep) -> None:
        """The training loop calls this method after each step. ``step`` is the step's result."""

    def at_end(self) -> None:
        """The training loop calls this method once at the end, unless there was an error."""

    def close(self) -> None:
        """Frees the hook's resources, even after an error. Safe to call more than once."""


def make_profiler(cfg: TrainerConfig, rank: int, output_dir: Path | str | None) -> Hook:
    """Returns the hook that profiles this rank according to the flags.

    ``--profile-execution True`` and ``--profile --use-pytorch-profiler`` use PyTorch's profiler.
    The first flag writes to the subfolder ``--profile-name``. ``--profile`` alone marks the range
    to record for ``nsys profile --capture-range=cudaProfilerApi``. Without a GPU, nsys would record
    nothing, so PyTorch's profiler is used instead.

    Args:
        cfg: Settings of the run.
        rank: Global rank of this process.
        output_dir: Folder of TensorBoard, to which PyTorch's profiler writes.

    Raises:
        ConfigError: If PyTorch's profiler has no folder to write to. All ranks raise this error.
    """
    run = cfg.run
    if not (run.profile or run.profile_execution):
        return Hook()
    for_nsys = not (run.use_pytorch_profiler or run.profile_execution) and (
        torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
    )
    # Check on all ranks. Otherwise, only some ranks would stop, and the others would wait for them.
    if output_dir is None and not for_nsys:
        flag = "--profile-execution True" if run.profile_execution else "--profile"
        raise ConfigError(f"{flag} requires --tensorboard-dir, the folder to which it writes")
    if rank not in run.profile_ranks:
        return Hook()
    if output_dir is None or for_nsys:
        return ProfiledWindow(run, _NsysRange())
    folder = Path(output_dir)
    if run.profile_execution:
        folder /= run.profile_name
    profile = torch.profiler.profile(
        # Pass a schedule, even a constant one, so that the profiler marks each step in the trace.
        schedule=lambda _: torch.profiler.ProfilerAction.RECORD,
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            str(folder), worker_name=f"rank_{rank:05d}"
        ),
        record_shapes=True,
    )
    return ProfiledWindow(run, profile)


class ProfiledWindow(Hook):
    """Profiles the iterations from ``--profile-step-start`` to ``--profile-step-end``."""

    def __init__(self, run: RunConfig, recording: Any) -> None:
        self._iterations = range(run.profile_step_start, run.profile_step_end)
        self._recording = recording  # Profiler, or None once it has stopped.
        self._is_running = False

    def before_step(self, iteration: int) -> None:
        if self._recording is None:
            return
        if iteration not in self._iterations:
            if self._is_running:
                self.close()
        elif self._is_running:
            self._recording.step()
        else:
            self._recording.start()
            self._is_running = True

    def close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None and self._is_running:
            self._is_running = False
            try:
                recording.stop()
            # These are the errors that torch raises if it cannot write the profile.
            except (OSError, RuntimeError) as error:
                Outage("the profile", "profiles").begins(error)


class _NsysRange:
    """Starts and stops CUDA's profiler, and marks each operation with its name using NVTX."""

    def __init__(self) -> None:
        self._names = ExitStack()

    def start(self) -> None:
        torch.cuda.cudart().cudaProfilerStart()
        self._names.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def step(self) -> None:
        pass

    def stop(self) -> None:
        self._names.close()
        torch.cuda.cudart().cudaProfilerStop()
