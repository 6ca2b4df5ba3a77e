"""Trains GPT as ``pretrain_gpt.py`` does, with ranks that are slow: they also sleep.

The first rank does, or as ``SLOWED`` says, JSON: every rank sleeps ``sleep_s`` in each forward and
backward, and those of ``ranks`` ``factor`` times as long from step ``first`` to before ``end``.
"""

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.engine.stages import MegatronStages  # noqa: E402

SLEEP_S = 0.03
STEPS = itertools.count(1)


def slowed(work: Callable[..., Any], sleep_s: Callable[[Any], float]) -> Callable[..., Any]:
    """The same work, later done."""

    @functools.wraps(work)
    def slow(stages: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(sleep_s(stages))
        return work(stages, *arguments, **options)

    return slow


def pause_of(rank: int, given: dict[str, Any] | None) -> Callable[[Any], float]:
    """Returns a function from an action of a step to its pause."""
    if given is None:
        return lambda stages: SLEEP_S if rank == 0 else 0.0

    def pause_s(stages: Any) -> float:
        step = stages.__dict__.setdefault("step", None) or next(STEPS)
        stages.step = step
        slow = rank in given["ranks"] and given["first"] <= step < given["end"]
        return float(given["sleep_s"] * (given["factor"] if slow else 1.0))

    return pause_s


if __name__ == "__main__":
    told = os.environ.get("SLOWED")
    pause = pause_of(int(os.environ["RANK"]), None if told is None else json.loads(told))
    for name in ("forward", "backward"):
        setattr(MegatronStages, name, slowed(getattr(MegatronStages, name), pause))
    sys.exit(run())
