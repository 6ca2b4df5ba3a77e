"""One process of a training run from its start to its end."""

from __future__ import annotations

import hashlib
import logging as python_logging
import os
import socket
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as device
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import AdaptiveError, PeerLostError
from megatron.adaptive.transport.liveness import Watcher

EXIT_EXPECTED_ERROR = 2
EXIT_BUG = 1


def pretrain(config: TrainerConfig, environment: Environment) -> None:
    """Train as ``config`` says.

    Does not return after an error in a job of several processes: the process reports it and exits,
    for its other threads may be blocked on peers that are gone.

    Raises:
        AdaptiveError: an expected error in a job of one process.
    """
    accelerator = device.detect(environment.local_rank, backend=config.parallel.distributed_backend)
    device.install()
    _quiet_libraries()
    # megatron-core may only be imported from here on.
    from megatron.adaptive.training.initialize import end_job, start_job

    python_logging.getLogger("megatron.core").setLevel(
        config.logging.logging_level or python_logging.ERROR
    )
    if environment.omp_num_threads is None and not accelerator.is_cuda:
        torch.set_num_threads(1)
    job = start_job(config, environment, accelerator)
    store = dist.PrefixStore("megatron-adaptive", dist.distributed_c10d._get_default_store())
    lost: list[PeerLostError] = []
    watcher = Watcher(_places(), environment.rank, store, lost.append)
    try:
        _train(job, watcher, lost)
        dist.barrier(group=job.control_group)
        watcher.leave()
        end_job()
    except BaseException as error:
        _fail(error, environment, store, watcher, lost)
        raise
    finally:
        watcher.close()


def _quiet_libraries() -> None:
    """Silence warnings about optional GPU packages and torch's internals: users cannot act on them.

    Must run before megatron-core is imported, which is when most of them are given.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", message=".*(Apex|cuda_graph_scope|deprecated).*")


def _train(job: Any, watcher: Watcher, lost: list[PeerLostError]) -> None:
    from megatron.adaptive.training.checkpoint import Checkpoints
    from megatron.adaptive.training.logging import TrainingLog, startup_line
    from megatron.adaptive.training.loop import Trainer
    from megatron.adaptive.training.profiler import make_profiler
    from megatron.adaptive.training.setup import build_run
    from megatron.adaptive.training.stop import StopRequest

    config = job.config
    with StopRequest(config.run.exit_duration_in_mins) as stop:
        if job.is_first:
            print(startup_line(config), flush=True)
        run = build_run(job)
        if run.wiring is not None and run.wiring.transport is not None:
            watcher.on_lost = run.wiring.transport.completions.put
            for error in lost:
                run.wiring.transport.completions.put(error)
        checkpoints = Checkpoints(job, run.chunks, run.optimizer, run.scheduler)
        progress = checkpoints.load()
        log = TrainingLog(
            config,
            is_writer=job.is_last,
            accelerator=job.accelerator,
            total_iterations=run.samples.iterations,
            start_iteration=0 if progress is None else progress.iteration,
            padded_vocab_size=run.padded_vocab_size,
        )
        profiler = make_profiler(config, job.rank, config.logging.tensorboard_dir)
        try:
            trainer = Trainer(run, checkpoints, log, profiler, stop, progress)
            reason = trainer.train()
            log.message(f"training ends: {reason}")
            if reason == Trainer.COMPLETE:
                trainer.evaluate_at_end()
        finally:
            profiler.close()
            log.close()
        if run.recorder is not None:
            run.recorder.close()
        if run.wiring is not None:
            run.wiring.close()


def _places() -> list[dict[str, Any]]:
    """Return host, pid and stage of every rank."""
    from megatron.core import parallel_state

    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
    }
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    return places


def _fail(
    error: BaseException,
    environment: Environment,
    store: dist.Store,
    watcher: Watcher,
    lost: list[PeerLostError],
) -> None:
    """Report ``error`` once for the job and end this process; returns only in a job of one."""
    if environment.world_size == 1:
        return
    expected = isinstance(error, AdaptiveError)
    if not expected and isinstance(error, RuntimeError) and _others_failed(store):
        # A collective broke because another rank ended; that rank has said why.
        expected = True
    elif expected:
        if _is_news(store, str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    watcher.report(f"{type(error).__name__}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_EXPECTED_ERROR if expected else EXIT_BUG)


def _is_news(store: dist.Store, text: str) -> bool:
    """Whether this rank is the first of the job to report ``text``."""
    key = hashlib.sha256(text.encode()).hexdigest()
    try:
        store.set("failed", "1")
        return store.add(f"error/{key}", 1) == 1
    except RuntimeError:
        return True  # the store went with its host: better said twice than not at all


def _others_failed(store: dist.Store) -> bool:
    try:
        return bool(store.check(["failed"]))
    except RuntimeError:
        return True
