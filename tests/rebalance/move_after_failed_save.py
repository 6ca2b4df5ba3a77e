"""Runs the trainer. Layers move after step 2, when the checkpoint folder is not writable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints, Progress  # noqa: E402
from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.rebalance.judgement import Move  # noqa: E402
from megatron.adaptive.rebalance.repartition import Repartitioner  # noqa: E402

# The checkpoint cannot be written in step FAILS, but it can be written from step MENDED on.
FAILS, MENDED = 2, 3

MOVE = Move(partition=(1, 3), present_s=1.0, step_s=0.5, why="test", before_s=1.0, former=(2, 2))


def main(checkpoints: Path) -> int:
    """Runs the trainer with the flags of the command line, and returns the exit status."""
    aside = checkpoints.with_name("aside")
    save = Checkpoints.save
    steps = 0

    def save_or_fail(self: Checkpoints, progress: Progress, *, behind: bool = False) -> Path | None:
        if self._all.is_first and progress.iteration == FAILS:
            self.saver.wait()
            checkpoints.rename(aside)
            # Put a file in the place of the folder, so that the folder cannot be created again.
            checkpoints.touch()
        elif self._all.is_first and progress.iteration == MENDED:
            checkpoints.unlink()
            aside.rename(checkpoints)
        elif progress.iteration > MENDED:
            # Wait for the previous checkpoint to be written, so that it is reported in this step.
            self.saver.wait()
        return save(self, progress, behind=behind)

    def move_once(*_: Any, **__: Any) -> Move | None:
        nonlocal steps
        steps += 1
        return MOVE if steps == FAILS else None

    vars_of_saves: Any = Checkpoints
    vars_of_saves.save = save_or_fail
    vars_of_moves: Any = Repartitioner
    vars_of_moves.after_step = move_once
    return run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv.pop(1))))
