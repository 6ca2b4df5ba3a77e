"""Ranks of benchmarks: jobs of this machine, forked processes, and a rank of a small GPT."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

GPT = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    " --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8"
    " --lr 1e-4 --train-iters 100000 --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer"
    " --eval-iters 0"
).split()
"""Flags of the small GPT but for its width and its pipeline."""
MICROBATCHES = 8
_ORDERS = ((True, False, False, True), (False, True, True, False))
"""Kinds of the turns of a round: what drifts evenly hits both alike."""


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of processes that a benchmark starts."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, **more}


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it started, ranks in sessions of their own too."""
    import psutil  # a machine without the packages is named first

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
    words: Sequence[str], ranks: int, limit_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a script as a job of ranks of this machine; none of them outlives it.

    Args:
        words: the script and its arguments.
        ranks: how many; one needs no launcher.
        limit_s: everything is killed after it.
        variables: further environment.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
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


def run_module(module: str, *words: object, limit_s: float, **variables: str) -> Any:
    """Runs a module as a program, with further environment; returns the JSON that it prints.

    Raises:
        RuntimeError: it failed, or the time limit passed.
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
    """Forks ranks that meet over gloo from a process that has imported what they need.

    Args:
        module: its ``run_rank`` is called with the rank and ``arguments``, once
            ``torch.distributed`` is set up.
        ranks: how many.
        limit_s: everything is killed after it.
        arguments: of ``run_rank``.

    Returns:
        What ``run_rank`` returned on rank 0, as read from JSON.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    # The process that forks does not get this one's path.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with tempfile.TemporaryDirectory() as folder:
        forked = [
            context.Process(
                target=_forked, args=(module, rank, ranks, folder, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in forked:
            process.start()
        end_s = time.monotonic() + limit_s
        try:
            # One that fails leaves the others waiting.
            while any(process.exitcode != 0 for process in forked):
                if any(process.exitcode for process in forked):
                    statuses = [process.exitcode for process in forked]
                    raise RuntimeError(f"{module}: its ranks ended with {statuses}")
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{module}: its {ranks} ranks took more than {limit_s:g} s")
                time.sleep(0.05)
        finally:
            for process in forked:
                process.kill()
                process.join()
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def _forked(module: str, rank: int, ranks: int, folder: str, arguments: Sequence[Any]) -> None:
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


def measure(script: str, ranks: int, rounds: int, *words: str, limit_s: float) -> dict[str, Any]:
    """Has ranks take turns; returns what the first one wrote, see :func:`rank_main`.

    Args:
        script: which calls :func:`rank_main`.
        ranks: how many.
        rounds: that they measure.
        words: further arguments of the rank.
        limit_s: everything is killed after it.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run_ranks([str(Path(script).resolve()), str(rounds), str(output), *words], ranks, limit_s)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def rank_main(make: Callable[..., GptRank]) -> None:
    """Is one rank: measures as the command line says, and writes the result on the first rank.

    Args:
        make: makes the rank from a folder for what it writes, and further arguments.
    """
    rounds, output, *words = sys.argv[1:]
    rank = make(Path(output).parent / "written", *words)
    result = rank.measure(int(rounds))
    rank.close()
    if rank.is_first:
        Path(output).write_text(json.dumps({**result, **rank.facts(result)}), encoding="utf-8")


class GptRank:
    """One rank of the job.

    Args:
        arguments: of the trainer.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        from megatron.adaptive import accelerator as device
        from megatron.adaptive.config.arguments import parse
        from megatron.adaptive.config.environment import Environment

        environment = Environment.read()
        config = parse(arguments, world_size=environment.world_size, last_wins=True)
        self._accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.gpt.initialize import start_job
        from megatron.adaptive.gpt.setup import build_run, make_loader
        from megatron.adaptive.gpt.train_step import Step

        torch.set_num_threads(1)
        self._job = start_job(config, environment, self._accelerator)
        self._run = build_run(self._job)
        self._step = Step(self._run)
        tracing = self._run.tracing
        read = None if tracing.recorder is None else tracing.data_read
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0, on_read=read)
        self._microbatches = config.num_microbatches
        self._iteration = 0

    @staticmethod
    def size_bytes(checkpoints: Path) -> int:
        """Returns the size of the newest checkpoint in a folder."""
        latest = max(checkpoints.glob("iter_*"))
        return sum(file.stat().st_size for file in latest.iterdir())

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return bool(self._job.is_first)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Takes steps in turns; returns the measurements of all ranks."""
        raise NotImplementedError

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns the facts that the first rank adds to a result after all have closed."""
        return {}

    def close(self) -> None:
        """Ends the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.gpt.initialize import end_job

        self._loader = None if self._loader is None else self._loader.close()
        self._run.tracing.close()
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def read(self) -> Any:
        """Reads a step's microbatches; ``None`` on a rank that needs none."""
        return None if self._loader is None else self._loader.step(self._microbatches)

    def progress(self, iteration: int) -> Any:
        """Returns a checkpoint's entry for a run that has done ``iteration`` steps."""
        from megatron.adaptive.checkpoint.trainer_checkpoints import Progress

        return Progress(
            iteration=iteration,
            consumed_train_samples=iteration * self._microbatches,
            consumed_valid_samples=0,
            skipped_iterations=0,
        )

    def train(self, before_update: Callable[[], None] = lambda: None) -> None:
        """Takes a step.

        Args:
            before_update: called when the state is about to change.
        """
        self._step.train(self.read(), self._microbatches, self._iteration, before_update)

    def turns(
        self, rounds: int, turn: Callable[[bool], tuple[float, float]], name: str
    ) -> dict[str, Any]:
        """Takes turns with and without a feature, after one uncounted turn of each.

        Args:
            rounds: of two turns of each kind.
            turn: takes one, with it if true; returns its seconds on the clock and of this rank's
                processor.
            name: of the kind with it.

        Returns:
            ``NAME_s`` and ``plain_s``, means of each round, and ``NAME_cpu_s`` and ``plain_cpu_s``,
            of all ranks together.
        """
        import torch
        import torch.distributed as dist

        for kind in (False, True):
            turn(kind)
        taken = torch.zeros(rounds, 2, 2, dtype=torch.float64)
        for number in range(rounds):
            for kind in _ORDERS[number % 2]:
                taken[number, int(kind)] += torch.tensor(turn(kind), dtype=torch.float64) / 2
        processors = taken[:, :, 1].clone()
        dist.all_reduce(processors, group=self._job.control_group)
        return {
            f"{name}_s": taken[:, 1, 0].tolist(),
            "plain_s": taken[:, 0, 0].tolist(),
            f"{name}_cpu_s": processors[:, 1].tolist(),
            "plain_cpu_s": processors[:, 0].tolist(),
        }
