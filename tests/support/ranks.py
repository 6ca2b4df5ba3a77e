"""Ranks of soaks and studies: jobs of a script, forked ranks, and a rank that loads a GPT."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.multiprocess.launch import ROOT, environment, kill_tree


def run_ranks(
    words: Sequence[str], ranks: int, limit_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a script as a job of ranks of this machine; none of them outlives the call.

    Args:
        words: Path of the script and its arguments.
        ranks: Number of ranks; a single one needs no launcher.
        limit_s: Seconds after which everything is killed.
        variables: Further variables of the environment.

    Raises:
        RuntimeError: A rank failed, or the time limit passed.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "megatron.adaptive", "job", "launch", "--standalone"]
        command += ["--nproc-per-node", str(ranks)]
    job = subprocess.Popen(
        [*command, *words],
        env={**environment(), **(variables or {})},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = job.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{words[0]}: its ranks took more than {limit_s:g} s") from None
    finally:
        kill_tree(job)
    if status:
        raise RuntimeError(f"{words[0]}: its ranks ended with status {status}")


def train(
    words: Sequence[str],
    folder: Path,
    ranks: int,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Trains as :func:`run_ranks` does; returns the lines of the progress file in a folder."""
    run_ranks([*words, "--progress-dir", str(folder)], ranks, limit_s, variables)
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def run_module(module: str, *words: object, limit_s: float, **variables: str) -> Any:
    """Runs a module as a program, with further environment; returns the JSON that it prints.

    Raises:
        RuntimeError: The program failed, or the time limit passed.
    """
    command = [sys.executable, "-m", module, *map(str, words)]
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
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def fork_ranks(module: str, ranks: int, limit_s: float, *arguments: Any) -> Any:
    """Forks ranks that meet over gloo from a process that has imported a module.

    Args:
        module: Name of the module; its ``run_rank`` is called with the rank and the arguments.
        ranks: Number of ranks.
        limit_s: Seconds after which everything is killed.
        arguments: Further arguments of ``run_rank``.

    Returns:
        The result of ``run_rank`` on rank 0, as read from JSON.

    Raises:
        RuntimeError: A rank failed, or the time limit passed.
    """
    # The process that forks does not inherit sys.path.
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
            # A rank that fails leaves the others waiting.
            while any(process.exitcode != 0 for process in processes):
                if any(process.exitcode for process in processes):
                    statuses = [process.exitcode for process in processes]
                    raise RuntimeError(f"{module}: its ranks ended with {statuses}")
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{module}: its {ranks} ranks took more than {limit_s:g} s")
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


class LoadingRank:
    """A rank of a GPT that is built as the trainer builds it, and loads checkpoints.

    Args:
        arguments: Command line of the trainer.

    Attributes:
        config: Settings of the trainer.
        chunks: Model chunks of this rank.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        self.config = parse(arguments, world_size=environment.world_size, last_wins=True)
        accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.gpt.initialize import start_job
        from megatron.adaptive.gpt.setup import build_run

        torch.set_num_threads(1)
        self._job = start_job(self.config, environment, accelerator)
        self._run = build_run(self._job)
        self.chunks = self._run.chunks

    def load(self, iteration: int, **checkpoint: str) -> Any:
        """Loads the checkpoint of an iteration; returns its progress.

        Args:
            iteration: Number of the iteration.
            checkpoint: Settings of checkpoints that replace those of the command line.
        """
        from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

        settings = replace(self.config.checkpoint, ckpt_step=iteration, **checkpoint)
        return Checkpoints(self._run, config=replace(self.config, checkpoint=settings)).load()

    def close(self) -> None:
        """Ends the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.gpt.initialize import end_job

        self._run.tracing.close()
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()
