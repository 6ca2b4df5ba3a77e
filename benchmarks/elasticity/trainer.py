"""The trainer with steps that take a while, as if the model were large, at no cost of processors.

Seconds that each step waits are in ``SOAK_STEP_S``; what is computed stays the same.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from megatron.adaptive.cli.pretrain_gpt import run


def slow_down(seconds: float) -> None:
    """Let each step of this process begin with a wait."""
    from megatron.adaptive import accelerator as device

    device.install()  # before megatron-core is imported
    device.quiet_libraries()
    from megatron.adaptive.gpt.step import Step

    train = Step.train

    def slow(self: Step, *arguments: Any) -> Any:
        time.sleep(seconds)
        return train(self, *arguments)

    Step.train = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(os.environ.get("SOAK_STEP_S", "0")))
    sys.exit(run())
