"""Runs one process of a training job, and stops all processes if one of them fails."""

from __future__ import annotations

import errno
import logging as python_logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as device
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.flag_checks import warning_about_effects
from megatron.adaptive.config.input_files import printable, say
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.hang_guard import HangGuard
from megatron.adaptive.engine.process_context import lost_peer
from megatron.adaptive.engine.rendezvous import MeetingError, no_rendezvous
from megatron.adaptive.errors import (
    AdaptiveError,
    DataError,
    DeviceMemoryError,
    PeerLostError,
    ScheduleError,
    SetupError,
)
from megatron.adaptive.trace.files import keep_printing
from megatron.adaptive.trace.trace_format import SLICES
from megatron.adaptive.transport.liveness import Watcher

EXIT_EXPECTED_ERROR = 2
EXIT_BUG = 1
_TOO_MUCH = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]*)")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Time in seconds that a rank with a broken connection waits for the watcher to determine which rank
# failed.
_VERDICT_S = 2.0
# Time in seconds that other ranks have to print their messages and exit by themselves.
_GRACE_S = 2.0
_SILENCE = "--transport-silence-s"
# Maximum time in seconds for which the rank that serves the store waits for other ranks to read the
# error. It is two polling intervals of the watchers.
_PART_S = 4.0
_POLL_S = 0.05


def pretrain(config: TrainerConfig, environment: Environment) -> None:
    """Trains a model with the settings ``config``, as one process of a job.

    If an error occurs in a job with several processes, this function reports the error and exits
    the process instead of returning, because other threads may be waiting for peers that have
    exited.

    Raises:
        TransportError: If the job's processes cannot connect to each other.
        AdaptiveError: If an expected error occurs in a job with a single process.
    """
    accelerator = prepare_process(config, environment)
    from megatron.adaptive.gpt.initialize import end_job, start_job

    try:
        job = start_job(config, environment, accelerator)
    except (dist.DistError, MeetingError, ValueError) as error:
        raise no_rendezvous(environment, error) from error
    except (RuntimeError, OSError) as error:
        if lost_peer(error, environment.rank) is not None:
            _follow_reported_error(environment)
        raise
    former_hook, threading.excepthook = threading.excepthook, _thread_failed
    store = _job_store()
    schedule = config.schedule
    guard = HangGuard(
        job,
        after_s=schedule.hang_after_s,
        on_hang=schedule.on_hang,
        page_folder=schedule.trace_dir or config.logging.progress_dir or config.checkpoint.save,
    )
    lost: list[PeerLostError] = []
    watcher = Watcher(
        job.places,
        environment.rank,
        store,
        lost.append,
        _GRACE_S,
        silent_s=config.transport.transport_silence_s,
        is_launchers_store=environment.has_agent_store,
    )
    try:
        _train(job, watcher, lost, guard)
        dist.barrier(group=job.control_group)
        watcher.leave()
        end_job()
    except BaseException as error:
        expected = expected_error(error, environment.rank)
        if environment.world_size > 1:
            _fail(expected, store, watcher, environment)
        if expected is not error:
            raise expected from error
        raise
    finally:
        job.end_leases()
        guard.close()
        watcher.close()
        threading.excepthook = former_hook


def prepare_process(config: TrainerConfig, environment: Environment) -> device.Accelerator:
    """Chooses the device and configures libraries. Call this before importing megatron-core."""
    accelerator = device.detect(environment.local_rank, backend=config.parallel.distributed_backend)
    require_hardware_queues(config, environment, accelerator)
    device.install()
    device.quiet_libraries()
    device.keep_freed_memory()
    keep_printing()
    if config.logging.logging_level is not None:
        python_logging.getLogger("megatron.core").setLevel(config.logging.logging_level)
    if environment.omp_num_threads is None:
        # Use one thread per rank, as torchrun does, because the threads of several ranks would slow
        # each other down.
        torch.set_num_threads(1)
    return accelerator


def require_hardware_queues(
    config: TrainerConfig, environment: Environment, accelerator: device.Accelerator
) -> None:
    """Checks that expert-parallel communication can overlap with computation on the GPU.

    Raises:
        SetupError: If overlap is enabled, but CUDA uses a single hardware queue
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``).
    """
    overlaps = config.schedule.overlap_moe_expert_parallel_comm
    if accelerator.is_cuda and overlaps and environment.cuda_device_max_connections == 1:
        raise SetupError(
            "--overlap-moe-expert-parallel-comm requires more than one hardware queue, but "
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so communication cannot overlap with "
            "computation; unset the variable, or set it to 32"
        )


def device_lines(config: TrainerConfig, accelerator: device.Accelerator) -> list[str]:
    """Returns lines to print about the effects of this device on training."""
    lines = []
    if (
        accelerator.is_cuda
        and config.parallel.world_size > 1
        and config.checkpoint.load is None
        and not config.model.use_cpu_initialization
    ):
        lines.append(
            "initial weights are drawn on GPUs and differ between layouts of stages and tensor "
            "parallelism; use --use-cpu-initialization to draw the same weights in every layout"
        )
    if not accelerator.is_shared:
        return lines
    lines += [f"{accelerator.shares} ranks share a GPU, so busy times and bubbles reflect {SLICES}"]
    overlaps = {
        "--overlap-grad-reduce": config.parallel.overlap_grad_reduce,
        "--overlap-param-gather": config.parallel.overlap_param_gather,
        "--overlap-moe-expert-parallel-comm": config.schedule.overlap_moe_expert_parallel_comm,
    }
    if useless := [name for name, is_on in overlaps.items() if is_on]:
        lines.append(
            f"warning: {' '.join(useless)}: overlap has no benefit for ranks that share a GPU, "
            "because they communicate through the host; remove the flag, or use one GPU per rank"
        )
    return lines


def _load(run: Any, local: Any) -> tuple[Any, int]:
    """Loads the checkpoint of ``run``, and returns its progress and the iteration of its weights.

    The ``Checkpoints`` object is not kept, because it would prevent the trainer from freeing the
    model.
    """
    from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

    checkpoints = Checkpoints(run, local)
    return checkpoints.load(), checkpoints.weights_iteration


def _train(job: Any, watcher: Watcher, lost: list[PeerLostError], guard: HangGuard) -> None:
    from megatron.adaptive.engine import core_version

    # Check before the imports below, which would fail with a traceback if a name is missing in the
    # installed megatron-core.
    core_version.check(oldest=(0, 16, 1), remedy="the trainer needs megatron-core 0.16.1 to 0.20")
    from megatron.adaptive.checkpoint.trainer_checkpoints import check_model_folder, prepare_folder
    from megatron.adaptive.engine.stop import StopRequest
    from megatron.adaptive.gpt.setup import build_run, require_room
    from megatron.adaptive.rebalance.repartition import resume_partition
    from megatron.adaptive.training.hook import make_profiler
    from megatron.adaptive.training.logging import TrainingLog, startup_line
    from megatron.adaptive.training.loop import Trainer, TrainingRun

    device.freeze_imports()
    config = job.config
    with StopRequest(config.run.exit_duration_in_mins) as stop:
        if job.is_first:
            print(printable(startup_line(config), lines=True), flush=True)
            for line in (*device_lines(config, job.accelerator), warning_about_effects(config)):
                if line is not None:
                    print(printable(line), flush=True)
        check_model_folder(job, config)
        require_room(config, job.accelerator)
        local = prepare_folder(job, config)
        job = resume_partition(job)
        run = build_run(job)
        connect = _connector(watcher, lost)
        connect(run)
        begin_s = time.perf_counter()
        # Do not keep a reference to the Checkpoints object. It refers to the run, whose memory must
        # be freed when the trainer replaces the run.
        progress, weights_iteration = _load(run, local)
        log = TrainingLog(
            config,
            is_writer=job.is_writer,
            accelerator=job.accelerator,
            total_iterations=run.samples.iterations,
            start_iteration=0 if progress is None else progress.iteration,
            padded_vocab_size=run.padded_vocab_size,
        )
        if progress is not None:
            log.report(loaded_s=time.perf_counter() - begin_s)
        profiler = make_profiler(config, job.rank, config.logging.tensorboard_dir)
        try:
            report_position = partial(setattr, watcher, "position")
            live = TrainingRun(
                run, log, progress, report_position=report_position, connect=connect, local=local
            )
            live.weights_iteration = weights_iteration
            del run  # Drop this reference, so that the trainer can free the run.
            guard.snapshot = partial(_evidence, live)
            Trainer(live, profiler, stop).train()
        finally:
            log.close()
        live.run.tracing.close()
        if live.run.wiring is not None:
            live.run.wiring.close()


def _evidence(live: Any) -> dict[str, Any]:
    """Returns what this rank is doing in the run ``live``, as evidence for a hang report."""
    run = live.run
    inner = run.forward_backward.snapshot if run.wiring is None else run.wiring.executor.evidence
    return {**run.tracing.now(), **inner()}


def _connector(watcher: Watcher, lost: list[PeerLostError]) -> Callable[[Any], None]:
    """Returns a function that makes ``watcher`` notify the channels of a run about lost ranks.

    The function also notifies the channels about ranks that were lost earlier.
    """

    def connect(run: Any) -> None:
        if run is None or run.wiring is None or run.wiring.transport is None:
            watcher.on_lost = lost.append
            return
        put = run.wiring.transport.completions.put
        watcher.on_lost = put
        for error in lost:
            put(error)

    return connect


def expected_error(error: BaseException, rank: int) -> BaseException:
    """Converts ``error`` of rank ``rank`` to an expected error if its cause is external.

    External causes are full disks, too little memory, killed data loaders and lost peers. Any other
    error is returned unchanged.
    """
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        where = f" {error.filename}" if error.filename else ""
        return SetupError(
            f"rank {rank} cannot write{where}: {error.strerror}; free space, or choose another "
            "folder with --save"
        )
    if isinstance(error, RuntimeError) and (asked := _TOO_MUCH.search(str(error))):
        return DeviceMemoryError(
            f"rank {rank} ran out of memory when it requested {int(asked[1]) / (1 << 30):,.0f} "
            "GiB; make the model, its sequences or --micro-batch-size smaller"
        )
    # torch raises the error about a lost data worker in a signal handler, so the error may occur
    # anywhere in the rank's code.
    if isinstance(error, RuntimeError) and (worker := _WORKER.search(str(error))) is not None:
        return DataError(
            f"rank {rank}: the process that loads its data (pid {worker[1]}) was killed "
            f"({worker[2].strip()}), perhaps because memory ran out; lower --num-workers, or "
            "resume from the last checkpoint"
        )
    return lost_peer(error, rank) or error


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Prints the error ``failure`` of a thread, unless it is about a full disk.

    The main thread reports full disks.
    """
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in _FULL_DISK):
        threading.__excepthook__(failure)


def _fail(
    error: BaseException, store: dist.Store, watcher: Watcher, environment: Environment
) -> NoReturn:
    """Reports ``error`` once for the whole job, and then exits this process.

    The cause may be a lost rank, which ``watcher`` reports.
    """
    expected = isinstance(error, AdaptiveError)
    follows = False
    # If the error is about a silent peer, do not wait for the watcher, because it would only report
    # the same error.
    verdict_s = 0.0 if _SILENCE in str(error) else _VERDICT_S
    if isinstance(error, (PeerLostError, RuntimeError)) and watcher.verdict(verdict_s) is not None:
        # The connection broke because another rank exited, and the watcher has reported that rank.
        expected = follows = True
    elif expected:
        if _is_first(store):
            say(f"error: {error}", lines=isinstance(error, ScheduleError))
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    watcher.report(str(error) or type(error).__name__, is_shown=expected)
    if not follows:
        _part(store, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_EXPECTED_ERROR if expected else EXIT_BUG)


def _follow_reported_error(environment: Environment) -> None:
    """Exits this process if another rank has already reported an error.

    A rank that is slow to connect may fail to reach a rank that has already failed. This is only a
    consequence of the reported error, so it is not reported.
    """
    if not dist.is_initialized():
        return
    store = _job_store()
    try:
        if not store.check(["error"]):
            return
    except RuntimeError:
        return  # The store no longer exists.
    _part(store, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_EXPECTED_ERROR)


def _job_store() -> dist.Store:
    """Returns the job's store, shared by all ranks, with a prefix for the keys of this program."""
    return dist.PrefixStore("megatron-adaptive", dist.distributed_c10d._get_default_store())


def _part(store: dist.Store, environment: Environment) -> None:
    """Waits until all other ranks have read the reported error, if this rank serves ``store``.

    The other ranks increment a counter in the store once they have read the error. Without this
    wait, the store would disappear too early, and they would also report a lost connection.
    """
    if environment.has_agent_store:
        return
    until_s = time.monotonic() + _PART_S
    is_guest = int(environment.rank != 0)
    try:
        parted = store.add("parted", is_guest)
        while not is_guest and parted < environment.world_size - 1 and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            parted = store.add("parted", 0)
    except RuntimeError:
        return  # The rank that serves the store has exited.


def _is_first(store: dist.Store) -> bool:
    """Returns whether this rank is the first rank that reports an error in ``store``."""
    try:
        return store.add("error", 1) == 1
    except RuntimeError:
        # The store no longer exists. It is better to print the error twice than not at all.
        return True
