"""The trainer, whose simulations of schedules take longer than ranks wait for them."""

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
    """Stands for a simulation on processors that are busy."""
    time.sleep(600)


if __name__ == "__main__":
    vars(schedule_auto)["evaluate"] = simulate_for_long
    # Whole searches: a search whose bounds promise no gain simulates nothing.
    vars(judgement)["propose"] = simulate_for_long
    for module in (auto_schedule, repartition):
        vars(module)["LIMIT_S"] = 0.5
    sys.exit(run())
