"""Runs the trainer with simulations that exceed their time limit."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.rebalance import auto_schedule, judgement, repartition  # noqa: E402
from megatron.adaptive.schedule import choose_by_simulation as schedule_auto  # noqa: E402


def simulate_for_long(*_: Any) -> None:
    """Replaces a simulation. It sleeps, as if the processors were busy with other work."""
    time.sleep(600)


if __name__ == "__main__":
    vars(schedule_auto)["evaluate"] = simulate_for_long
    # Replace the whole search, because a search that expects no gain skips the simulation.
    vars(judgement)["propose"] = simulate_for_long
    for module in (auto_schedule, repartition):
        vars(module)["LIMIT_S"] = 0.5
    sys.exit(run())
