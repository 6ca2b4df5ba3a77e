"""Ranks that train as ``pretrain_gpt.py`` does and write down what they saw, under ``torchrun``.

Usage: ``move_worker.py RESULTS FLAG...``. Each rank writes ``RESULTS.<rank>``, a JSON object::

    {"iterations": [[iteration, consumed samples, learning rate, loss scale, {name: loss}], ...],
     "left_behind": [number of parameters of the former run that were still alive, per move]}

Losses are empty on ranks that do not hold the last stage.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.gpt.setup import Run  # noqa: E402
from megatron.adaptive.rebalance import move_stages as moving  # noqa: E402
from megatron.adaptive.training.logging import IterationReport, TrainingLog  # noqa: E402
from megatron.adaptive.training.pretrain import pretrain  # noqa: E402


def watch_moves(left_behind: list[int]) -> None:
    """Count what is left of a run's weights and optimizer when the next one is built."""
    references: list[weakref.ref[torch.Tensor]] = []
    take_down, build_run = moving.take_down, moving.build_run

    def noting(run: Run) -> None:
        held = [p for chunk in run.chunks for p in chunk.parameters()]
        held += [p for group in run.optimizer.param_groups for p in group["params"]]
        references.extend(weakref.ref(parameter) for parameter in held)
        take_down(run)

    def counting(job: Any, kept: Any) -> Run:
        left_behind.append(sum(reference() is not None for reference in references))
        return build_run(job, kept)

    moving.take_down, moving.build_run = noting, counting  # type: ignore[attr-defined]


def watch_iterations(seen: list[list[Any]]) -> None:
    """Keep what every rank tells its log."""
    write = TrainingLog.iteration

    def noting(log: TrainingLog, report: IterationReport) -> None:
        losses = dict(report.losses)
        seen.append(
            [
                report.iteration,
                report.consumed_samples,
                report.learning_rate,
                report.loss_scale,
                losses,
            ]
        )
        write(log, report)

    TrainingLog.iteration = noting  # type: ignore[method-assign]


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    environment = Environment.read()
    config = parse(sys.argv[2:], world_size=environment.world_size)
    iterations: list[list[Any]] = []
    left_behind: list[int] = []
    watch_iterations(iterations)
    watch_moves(left_behind)
    pretrain(config, environment)
    found = {"iterations": iterations, "left_behind": left_behind}
    Path(f"{sys.argv[1]}.{environment.rank}").write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
