"""Runs many small jobs of several ranks, forked from one process that has imported torch.

Imports take seconds and a job one: a process of its own for each rank would make it minutes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
_MODULES = "modules.txt"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program on one or more ranks.

    Attributes:
        name: of the job; ``<name>.txt`` in the folder gets what its ranks print.
        ranks: number of processes.
        flags: of the trainer; without them ``script`` counts.
        script: arguments of ``script.train``.
    """

    name: str
    ranks: int = 1
    flags: str = ""
    script: dict[str, Any] = field(default_factory=dict)


def run_jobs(folder: Path, jobs: Sequence[Job]) -> dict[str, tuple[list[int], str]]:
    """Run jobs one after the other in a folder, which relative paths start from.

    Returns:
        By name of the job, the exit status of each rank and what they printed.

    Raises:
        AssertionError: the process that starts them failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = folder / "jobs.json"
    given.write_text(json.dumps([asdict(job) for job in jobs]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.ranks", str(given)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * len(jobs),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    statuses: dict[str, list[int]] = json.loads((folder / "statuses.json").read_text())
    texts = {name: (folder / f"{name}.txt").read_text(errors="replace") for name in statuses}
    return {name: (status, texts[name]) for name, status in statuses.items()}


def environment() -> dict[str, str]:
    """Return the environment of processes that are started here, without a launcher's variables."""
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in taken}
    path = f"{ROOT}:{own['PYTHONPATH']}" if own.get("PYTHONPATH") else str(ROOT)
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def main(path: Path) -> None:
    """Run the jobs of a file."""
    from . import script  # noqa: F401, I001  # first, for it prepares what is imported below
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

    from megatron.adaptive.cli import pretrain_gpt  # noqa: F401

    Path(_MODULES).touch()
    statuses = {}
    for told in json.loads(path.read_text()):
        statuses[told["name"]] = _run(Job(**told))
        _import_alike()
    Path("statuses.json").write_text(json.dumps(statuses))


def _import_alike() -> None:
    """Import what the last job's first rank had to, so that later ranks need not."""
    for name in Path(_MODULES).read_text().split():
        if name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank's own collections leave alone what it shares


def _run(job: Job) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [_fork(job, rank, port) for rank in range(job.ranks)]
    statuses: dict[int, int] = {}
    end_s = time.monotonic() + LIMIT_S
    while len(statuses) < len(ranks):
        for pid in ranks:
            if pid not in statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s or any(statuses.values()):
            time.sleep(0.5)  # others may still say why
            for pid in set(ranks) - set(statuses):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in ranks]


def _fork(job: Job, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(f"{job.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(output, number)
        places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        places |= {"WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MEGATRON_ADAPTIVE_NODE="node-a")
        status = _program(job)
        if rank == 0:
            Path(_MODULES).write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _program(job: Job) -> int:
    if job.flags:
        from megatron.adaptive.cli import pretrain_gpt

        return pretrain_gpt.run(job.flags.split())
    from . import script

    script.train(**job.script)
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
