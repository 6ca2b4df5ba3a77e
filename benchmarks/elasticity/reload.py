"""Loads checkpoints one after the other as training does; prints how many.

reload.py ITERATION,... TRAINER_FLAGS... --load DIR
"""

from __future__ import annotations

import sys
from dataclasses import replace

from megatron.adaptive import accelerator as device
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment


def main(argv: list[str]) -> None:
    """Load them into one model."""
    environment = Environment.read({})
    config = parse(argv[1:], world_size=1, last_wins=True)
    accelerator = device.detect(0)
    device.install()
    device.quiet_libraries()

    from megatron.adaptive.checkpoint.training import Checkpoints
    from megatron.adaptive.gpt.initialize import end_job, start_job
    from megatron.adaptive.gpt.setup import build_run

    job = start_job(config, environment, accelerator)
    run = build_run(job)
    loaded = 0
    for iteration in [int(word) for word in argv[0].split(",") if word]:
        settings = replace(config.checkpoint, ckpt_step=iteration)
        one = replace(config, checkpoint=settings)
        progress = Checkpoints(job, one, run.chunks, run.optimizer, run.scheduler).load()
        assert progress is not None
        batch = config.batch.global_batch_size
        done = progress.iteration, progress.consumed_train_samples, progress.skipped_iterations
        if done != (iteration, iteration * batch, 0):
            print(f"the checkpoint of iteration {iteration} says {done}", file=sys.stderr)
            sys.exit(1)
        loaded += 1
    if run.wiring is not None:
        run.wiring.close()
    end_job()
    print(loaded)


if __name__ == "__main__":
    main(sys.argv[1:])
