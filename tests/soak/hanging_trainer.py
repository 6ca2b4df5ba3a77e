"""Runs the trainer with one rank that hangs as the variable ``HANG`` describes in JSON.

``HANG`` is ``{"kind": ..., "rank": ..., "iteration": ..., "folder": ...}``. Steps take ``step_s``
seconds longer.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator as device

device.install()  # This call must precede the import of megatron-core.
device.quiet_libraries()

import torch.distributed as dist  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.data.loader import MicrobatchLoader  # noqa: E402
from megatron.adaptive.engine import executor_setup  # noqa: E402
from megatron.adaptive.engine.executor import Executor  # noqa: E402
from megatron.adaptive.gpt.train_step import Step  # noqa: E402
from megatron.adaptive.training.loop import Trainer  # noqa: E402

LOCK = threading.Lock()


class Fault:
    """Makes this rank hang if ``settings`` selects it.

    Args:
        settings: Settings of the hang, from the environment variable ``HANG``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.kind = settings["kind"]
        self.is_here = int(os.environ["RANK"]) == settings["rank"]
        self.is_due = self.is_past = False
        self.pauses = Pauses(settings) if settings["kind"] == "quiet" else None

    def begins(self, iteration: int) -> None:
        """Sleeps for ``step_s`` seconds. Then hangs if the settings require a hang between steps.

        Called at the start of step ``iteration``.
        """
        time.sleep(self.settings.get("step_s", 0.0))
        self.is_due = iteration == self.settings["iteration"]
        self.is_past = iteration >= self.settings["iteration"]
        if self.kind == "collective" and self.is_due:
            if self.is_here:
                wander()
            dist.barrier()

    def put(self) -> None:
        """Replaces functions of the trainer, so that the hang begins at the chosen point."""
        if self.settings["machines"] > 1:
            split_machines(self.settings["machines"])
        train, perform, fetch = Step.train, Executor._perform, MicrobatchLoader._fetch

        def stepping(step: Step, microbatches: Any, count: int, iteration: int, *more: Any) -> Any:
            self.begins(iteration)
            return train(step, microbatches, count, iteration, *more)

        def performing(executor: Executor, *more: Any) -> None:
            if self.pauses is not None:
                self.pauses.performs(len(executor._launched))
            if self.is_due and self.is_here:
                if self.kind == "network":
                    executor._transport.send = lambda *_: None  # type: ignore
                elif len(executor._launched) == self.settings["action"]:
                    self.hang()
            perform(executor, *more)

        def fetching(loader: MicrobatchLoader, block: int) -> Any:
            if self.kind == "reader" and self.is_due and self.is_here:
                read_for_ever(self.settings["folder"])
            return fetch(loader, block)

        if self.pauses is not None:
            pauses, whole = self.pauses, Trainer._train_step

            def pausing(trainer: Trainer) -> Any:
                pauses.begins(trainer._live.progress.iteration + 1)
                return whole(trainer)

            Trainer._train_step = pausing  # type: ignore[method-assign]
        Step.train = stepping  # type: ignore[method-assign]
        Executor._perform = performing  # type: ignore[method-assign]
        MicrobatchLoader._fetch = fetching  # type: ignore[method-assign]
        if self.kind in ("disk", "disk behind") and self.is_here:

            def sync(file: int) -> None:
                if self.is_due or (self.is_past and self.kind == "disk behind"):
                    read_for_ever(self.settings["folder"])

            os.fsync = sync

    def hang(self) -> None:
        """Makes this rank hang within a step, in the way that the hang's ``kind`` describes."""
        if self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "lock":
            threading.Thread(target=keep, daemon=True).start()
            time.sleep(0.1)
            with LOCK:
                pass
        elif self.kind == "interpreter lock":
            mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)


class Pauses:
    """Pauses a job, but so briefly that all ranks show activity again before the timeout.

    All ranks draw the same pauses. In most pauses, one rank is busy and all other ranks wait for
    that rank.

    Args:
        settings: Settings from the environment variable ``HANG``. The setting ``rank`` is the seed
            of the pauses.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.draw = random.Random(settings["rank"])
        self.limit_s, self.folder = settings["after_s"], Path(settings["folder"])
        self.may_rest = settings["program"] == "pipeline"
        self.rank = int(os.environ["RANK"])
        self.slow: tuple[int, int, float] = (-1, -1, 0.0)

    def begins(self, iteration: int) -> None:
        """Pauses for a random time before step ``iteration``.

        The pause before the first step is as long as a compilation of kernels.
        """
        time.sleep(min(4.0, self.draw.expovariate(0.6)))
        kinds = ["none", "slow action", "rest", "computes", "writes"]
        (kind,) = self.draw.choices(kinds, (80, 12, 2, 3, 3))
        who, action = self.draw.randrange(dist.get_world_size()), self.draw.randrange(6)
        long_s = self.draw.uniform(1.2, 3.0) * self.limit_s
        short_s = self.draw.uniform(0.2, 0.6) * self.limit_s
        self.slow = (who, action, short_s) if kind == "slow action" else (-1, -1, 0.0)
        if iteration == 1 or (kind == "computes" and who == self.rank):
            compute(long_s)
        elif kind == "writes" and who == self.rank:
            write(self.folder / f"written-{self.rank}", long_s)
        elif kind == "rest":
            time.sleep(long_s if self.may_rest else short_s)
        if kind in ("computes", "writes"):
            dist.barrier()

    def performs(self, number: int) -> None:
        """Pauses before the action with index ``number`` if this action was chosen to be slow."""
        who, action, pause_s = self.slow
        if (who, action) == (self.rank, number):
            time.sleep(pause_s)


def compute(long_s: float) -> None:
    """Alternates between computing and sleeping, for ``long_s`` seconds in total."""
    end_s = time.monotonic() + long_s
    while time.monotonic() < end_s:
        used_s = time.thread_time()
        while time.thread_time() < used_s + 0.025:
            pass
        time.sleep(0.15)


def write(path: Path, long_s: float) -> None:
    """Repeatedly writes the file ``path`` for ``long_s`` seconds."""
    end_s = time.monotonic() + long_s
    while time.monotonic() < end_s:
        path.write_bytes(bytes(1 << 19))
        time.sleep(0.5)


def split_machines(count: int) -> None:
    """Makes the ranks appear to run on ``count`` machines, in rank order."""
    here, rank, size = executor_setup.here, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def elsewhere(pp_rank: int) -> dict[str, Any]:
        location = here(pp_rank)
        return {**location, "machine": f"{location['machine']} {rank * count // size}"}

    executor_setup.here = elsewhere


def wander() -> None:
    """Sleeps instead of joining the collective for which the other ranks wait."""
    time.sleep(100_000)


def keep() -> None:
    """Acquires a lock and keeps it."""
    with LOCK:
        time.sleep(100_000)


def read_for_ever(folder: str) -> None:
    """Reads a pipe in ``folder`` that has no writer, like a disk that does not respond."""
    pipe = Path(folder) / f"pipe-{os.getpid()}"
    os.mkfifo(pipe)
    pipe.read_bytes()


def choose_order() -> None:
    """Passes another schedule file to the trainer on the rank that must hang."""
    index = sys.argv.index("--schedule-file") + 1 if "--schedule-file" in sys.argv else 0
    if index and int(os.environ["RANK"]) == json.loads(os.environ["HANG"])["rank"]:
        sys.argv[index] = sys.argv[index].replace("order.csv", "other.csv")


if __name__ == "__main__":
    choose_order()
    Fault(json.loads(os.environ["HANG"])).put()
    sys.exit(run())
