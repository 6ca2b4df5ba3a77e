"""Runs the trainer with steps that sleep, so that they are long but use little processor time.

Each step sleeps ``SOAK_STEP_S`` seconds, which does not change its results. With ``--reload
ITERATION,... TRAINER_FLAGS... --load DIR``, the program only loads checkpoints, one after another,
as training does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron.adaptive import accelerator as device

device.install()  # This call must precede the import of megatron-core.
device.quiet_libraries()

from harness.gpt_ranks import GptRank  # noqa: E402
from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.gpt.train_step import Step  # noqa: E402


def slow_down(seconds: float) -> None:
    """Makes each step of this process begin with a sleep of ``seconds``."""
    train = Step.train

    def slow(self: Step, *arguments: Any) -> Any:
        time.sleep(seconds)
        return train(self, *arguments)

    Step.train = slow  # type: ignore[method-assign]


def reload(iterations: Sequence[int], arguments: Sequence[str]) -> None:
    """Loads the checkpoints of ``iterations`` into the same model, one after another.

    ``arguments`` contains the flags of the trainer. Exits with a message if the progress in a
    checkpoint does not match its iteration.
    """
    rank = GptRank(arguments)
    batch = rank.config.batch.global_batch_size
    for iteration in iterations:
        progress = rank.load(ckpt_step=iteration)
        assert progress is not None
        done = progress.iteration, progress.consumed_train_samples, progress.skipped_iterations
        if done != (iteration, iteration * batch, 0):
            sys.exit(f"the checkpoint of iteration {iteration} contains {done}")
    rank.close()


if __name__ == "__main__":
    if sys.argv[1] == "--reload":
        reload([int(word) for word in sys.argv[2].split(",") if word], sys.argv[3:])
        sys.exit()
    slow_down(float(os.environ.get("SOAK_STEP_S", "0")))
    sys.exit(run())
