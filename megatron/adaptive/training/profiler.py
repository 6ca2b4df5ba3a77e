"""Profiles some iterations: a trace of PyTorch's profiler, or a range that nsys records.

Owns when a profile starts and stops and where it is written. Traces of the pipeline's own actions
are the ``trace`` package's.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from megatron.adaptive.config.run import RunConfig
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["Profiler", "make_profiler"]


class Profiler(Protocol):
    """Told about each iteration, so that it can profile some of them."""

    def step(self, iteration: int) -> None:
        """Say that ``iteration`` iterations of the whole training are done.

        To be called before each iteration; the profile covers those that start with
        ``profile_step_start <= iteration < profile_step_end``.
        """

    def close(self) -> None:
        """End a profile that still runs, and write it; may be called again."""


def make_profiler(cfg: TrainerConfig, rank: int, output_dir: Path | str | None) -> Profiler:
    """Return what the flags ask for on this rank.

    ``--profile-execution True`` and ``--profile --use-pytorch-profiler`` trace with PyTorch's
    profiler; the first writes into a folder ``--profile-name``. ``--profile`` alone marks a range
    for ``nsys profile --capture-range=cudaProfilerApi``; where no GPU can be observed nsys would
    record nothing, and PyTorch's profiler is used instead.

    Args:
        cfg: the run's settings.
        rank: global rank of this process.
        output_dir: TensorBoard's folder.

    Raises:
        ConfigError: a trace is asked for and there is no folder for it; on every rank alike.
    """
    run = cfg.run
    if not (run.profile or run.profile_execution):
        return _NoProfiler()
    for_nsys = _is_for_nsys(run)
    # Before ranks part ways, so that none of them goes on to wait for one that stopped here.
    if output_dir is None and not for_nsys:
        flag = "--profile-execution True" if run.profile_execution else "--profile"
        raise ConfigError(f"{flag} writes into TensorBoard's folder: add --tensorboard-dir")
    if rank not in run.profile_ranks:
        return _NoProfiler()
    if output_dir is None or for_nsys:
        return _Window(run, _NsysRange())
    folder = Path(output_dir)
    if run.profile_execution:
        folder /= run.profile_name
    return _Window(run, _TorchProfile(folder, rank))


def _is_for_nsys(run: RunConfig) -> bool:
    if run.use_pytorch_profiler or run.profile_execution:
        return False
    return torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()


class _Recording(Protocol):
    """Something that records from ``start`` to ``stop``."""

    def start(self) -> None: ...

    def next_iteration(self) -> None: ...

    def stop(self) -> None: ...


class _NoProfiler:
    def step(self, iteration: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Window:
    """Runs a recording once, from the first to the last iteration that is profiled."""

    def __init__(self, run: RunConfig, recording: _Recording) -> None:
        self._iterations = range(run.profile_step_start, run.profile_step_end)
        self._recording: _Recording | None = recording
        self._is_running = False

    def step(self, iteration: int) -> None:
        if self._recording is None:
            return
        if iteration not in self._iterations:
            if self._is_running:
                self.close()
        elif self._is_running:
            self._recording.next_iteration()
        else:
            self._recording.start()
            self._is_running = True

    def close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None and self._is_running:
            self._is_running = False
            recording.stop()


class _TorchProfile:
    """A trace file ``rank_<rank>.<time>.pt.trace.json`` with a mark for each iteration."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._profile = torch.profiler.profile(
            # A schedule, even a constant one, makes the profiler mark each step in the trace.
            schedule=lambda _: torch.profiler.ProfilerAction.RECORD,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                str(folder), worker_name=f"rank_{rank:05d}"
            ),
            record_shapes=True,
        )

    def start(self) -> None:
        self._profile.start()

    def next_iteration(self) -> None:
        self._profile.step()

    def stop(self) -> None:
        self._profile.stop()


class _NsysRange:
    """The range between CUDA's profiler start and stop, with a name for each operation."""

    def __init__(self) -> None:
        self._names = ExitStack()

    def start(self) -> None:
        torch.cuda.cudart().cudaProfilerStart()
        self._names.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def next_iteration(self) -> None:
        pass

    def stop(self) -> None:
        self._names.close()
        torch.cuda.cudart().cudaProfilerStop()
