"""A small GPT of several ranks that takes turns: what two measurements of its steps share."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.cluster.jobs import environment  # noqa: E402
from tests.multiprocess.launch import kill_tree  # noqa: E402

__all__ = ["ORDERS", "GptRank", "measure", "rank_main", "run_ranks", "train"]

ORDERS = ((True, False, False, True), (False, True, True, False))
"""Kinds of the turns of a round: what drifts evenly hits both alike."""


def run_ranks(
    words: Sequence[str],
    ranks: int,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
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
        command += ["-m", "megatron.adaptive", "launch", "--standalone"]
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
    """Trains as :func:`run_ranks`; returns the lines of the progress, which is in a folder."""
    run_ranks([*words, "--progress-dir", str(folder)], ranks, limit_s, variables)
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def measure(script: str, ranks: int, rounds: int, limit_s: float) -> dict[str, Any]:
    """Has ranks take turns; returns what the first one wrote, see :func:`rank_main`.

    Args:
        script: which calls :func:`rank_main`.
        ranks: how many.
        rounds: that they measure.
        limit_s: everything is killed after it.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run_ranks([str(Path(script).resolve()), str(rounds), str(output)], ranks, limit_s)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def rank_main(make: Callable[[Path], GptRank]) -> None:
    """Is one rank: measures as the command line says, and writes the result on the first rank.

    Args:
        make: makes the rank from a folder for what it writes.
    """
    rounds, output = int(sys.argv[1]), Path(sys.argv[2])
    rank = make(output.parent / "written")
    result = rank.measure(rounds)
    rank.close()
    if rank.is_first:
        output.write_text(json.dumps({**result, **rank.facts(result)}), encoding="utf-8")


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
        config = parse(arguments, world_size=environment.world_size)
        accelerator = device.detect(environment.local_rank)
        device.install()
        device.quiet_libraries()

        import torch

        from megatron.adaptive.gpt.initialize import start_job
        from megatron.adaptive.gpt.setup import build_run, make_loader
        from megatron.adaptive.gpt.step import Step

        torch.set_num_threads(1)
        self._job = start_job(config, environment, accelerator)
        self._run = build_run(self._job)
        self._step = Step(self._run)
        tracing = self._run.tracing
        read = None if tracing.recorder is None else tracing.data_read
        self._loader: Any = make_loader(self._run, self._run.samples.train, 0, on_read=read)
        self._microbatches = config.num_microbatches
        self._iteration = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return bool(self._job.is_first)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Take turns; returns what was measured, of all ranks together."""
        raise NotImplementedError

    def facts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return what the first rank has to add to a result when all are closed."""
        return {}

    def close(self) -> None:
        """End the job; collective."""
        import torch.distributed as dist

        from megatron.adaptive.gpt.initialize import end_job

        self._loader = None if self._loader is None else self._loader.close()
        self._run.tracing.close()
        if self._run.wiring is not None:
            self._run.wiring.close()
        dist.barrier(group=self._job.control_group)
        end_job()

    def train(self, before_update: Callable[[], None] = lambda: None) -> None:
        """Take a step.

        Args:
            before_update: called when the state is about to change.
        """
        microbatches = None if self._loader is None else self._loader.step(self._microbatches)
        self._step.train(microbatches, self._microbatches, self._iteration, before_update)

    def turns(
        self, rounds: int, turn: Callable[[bool], tuple[float, float]], names: tuple[str, str]
    ) -> dict[str, Any]:
        """Take turns of two kinds.

        Args:
            rounds: of two turns of each kind.
            turn: takes one of the first kind if true; returns its seconds on the clock and of this
                rank's processor.
            names: of the kinds.

        Returns:
            Of each kind ``NAME_s`` and ``NAME_cpu_s``, means of each round; the latter of all ranks
            together.
        """
        walls: dict[bool, list[float]] = {True: [], False: []}
        processors: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
            for kind in ORDERS[number % 2]:
                for at, seconds in enumerate(turn(kind)):
                    sums[kind][at] += seconds / 2
            for kind, (wall, processor) in sums.items():
                walls[kind].append(wall)
                processors[kind].append(processor)
        told: dict[str, Any] = {}
        for kind, name in zip((True, False), names, strict=True):
            told[f"{name}_s"] = walls[kind]
            told[f"{name}_cpu_s"] = self._of_all_ranks(processors[kind])
        return told

    def _of_all_ranks(self, seconds: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        total = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self._job.control_group)
        return [float(value) for value in total]
