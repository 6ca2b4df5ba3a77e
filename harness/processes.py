"""Runs programs and ranks with a time limit, and ensures that all of their processes end."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import ROOT


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment for programs of this checkout, including the given ``variables``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    # Without this variable, torch's C++ code prints warnings when an elastic job stops ranks.
    fixed["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    return {**os.environ, **fixed, **variables}


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kills ``process`` and all its descendants, even ranks in separate sessions."""
    # Import psutil only here, because the GPU check also runs on machines without psutil.
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.kill()
        process.wait(10)
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=10)


def run_ranks(
    command: Sequence[str], ranks: int, limit_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a script as a job of ranks on this machine.

    Args:
        command: Path of the script and its arguments.
        ranks: Number of ranks. A single rank is started without a launcher.
        limit_s: Seconds after which all processes are killed.
        variables: Additional environment variables.

    Raises:
        RuntimeError: A rank failed, or the ranks took longer than ``limit_s``.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "megatron.adaptive", "job", "launch", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
    job = subprocess.Popen(
        [*launcher, *command],
        env={**environment(), **(variables or {})},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = job.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the ranks of {command[0]} took more than {limit_s:g} s") from None
    finally:
        kill_tree(job)
    if status:
        raise RuntimeError(f"the ranks of {command[0]} exited with status {status}")


def train(
    command: Sequence[str],
    folder: Path,
    ranks: int,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs a training job, and returns the lines of its progress file as dictionaries.

    The arguments are those of :func:`run_ranks`, and ``folder`` is the folder to which the job
    writes the file.
    """
    run_ranks([*command, "--progress-dir", str(folder)], ranks, limit_s, variables)
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def run_module(
    module: str, *arguments: object, limit_s: float, prefix: Sequence[str] = (), **variables: str
) -> Any:
    """Runs the module ``module`` as a program, and returns the JSON value that the program prints.

    Args:
        module: Name of the module.
        arguments: Arguments of the program.
        limit_s: Seconds after which the program is killed.
        prefix: Command that starts the program, such as ``unshare`` with its options.
        variables: Additional environment variables.

    Raises:
        RuntimeError: The program failed, or took longer than ``limit_s``.
    """
    command = [*prefix, sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} took more than {limit_s:g} s") from None
    if done.returncode:
        raise RuntimeError(f"{module} exited with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def fork_ranks(module: str, ranks: int, limit_s: float, *arguments: Any) -> Any:
    """Forks ranks from a process that has imported ``module``, and connects the ranks over gloo.

    Args:
        module: Name of a module with a function ``run_rank``, which is called with the rank and
            ``arguments``.
        ranks: Number of ranks.
        limit_s: Seconds after which all processes are killed.
        arguments: Additional arguments of ``run_rank``.

    Returns:
        Result of ``run_rank`` on rank 0, which must be a JSON value.

    Raises:
        RuntimeError: A rank failed, or the ranks took longer than ``limit_s``.
    """
    # The forkserver process does not inherit sys.path.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_be_rank, args=(module, rank, ranks, folder, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end_s = time.monotonic() + limit_s
        try:
            # Stop as soon as one rank fails, because the other ranks would wait for it forever.
            while any(process.exitcode != 0 for process in processes):
                if any(process.exitcode for process in processes):
                    statuses = [process.exitcode for process in processes]
                    raise RuntimeError(f"the ranks of {module} exited with statuses {statuses}")
                if time.monotonic() > end_s:
                    raise RuntimeError(
                        f"the {ranks} ranks of {module} took more than {limit_s:g} s"
                    )
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def _be_rank(module: str, rank: int, ranks: int, folder: str, arguments: Sequence[Any]) -> None:
    run_rank = importlib.import_module(module).run_rank
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    result = run_rank(rank, *arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()
