"""The state on its way to another placement: where it lies, and what stays of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive import accelerator

accelerator.install()

import torch  # noqa: E402

from megatron.adaptive.checkpoint.folder import CheckpointFolder  # noqa: E402
from megatron.adaptive.checkpoint.training import Progress  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.errors import CheckpointError  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, start_job  # noqa: E402
from megatron.adaptive.gpt.setup import Run, build_run  # noqa: E402
from megatron.adaptive.rebalance.change_placement import can_move, change_placement  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 9 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --save-interval 5 --no-save-optim --finetune"
)
PROGRESS = Progress(
    iteration=4, consumed_train_samples=4, consumed_valid_samples=0, skipped_iterations=0
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    config = parse([*FLAGS.split(), "--save", str(tmp_path / "save")], world_size=1)
    built = build_run(start_job(config, Environment(), accelerator.detect(0, backend="gloo")))
    yield built
    end_job()


def test_the_state_lies_where_checkpoints_are_not_looked_for(run: Run, tmp_path: Path) -> None:
    save = tmp_path / "save"
    (save / ".moving").mkdir(parents=True)
    (save / ".moving" / "left by a killed job").touch()
    with torch.no_grad():
        for parameter in run.chunks[0].parameters():
            parameter.fill_(0.25)
    run.optimizer.reload_model_params()

    def release() -> None:
        assert (save / ".moving" / "iter_0000004").is_dir()
        assert not (save / ".moving" / "left by a killed job").exists()
        assert CheckpointFolder(save).latest() is None

    built = change_placement([run], "loop", PROGRESS, release)
    assert built.job.config.schedule.pipeline_placement == "loop"
    assert built.job.config.checkpoint == run.job.config.checkpoint
    # All of it, although the run's own checkpoints lack the optimizer and its loads begin anew.
    assert all(bool((weight == 0.25).all()) for weight in built.chunks[0].parameters())
    assert built.scheduler.num_steps == run.scheduler.num_steps
    assert list(save.iterdir()) == []


def test_what_cannot_be_written_leaves_the_run_as_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "save").write_text("a file")
    with pytest.raises(CheckpointError, match="no folder for the stages on their way"):
        change_placement([run], "loop", PROGRESS, lambda: pytest.fail("released"))
    assert run.chunks[0].training


def test_machines_need_a_common_folder(run: Run) -> None:
    here = run.job.places[0]
    several = dataclasses.replace(run.job, places=[here, {**here, "machine": "another"}])
    checkpoint = dataclasses.replace(run.job.config.checkpoint, save=None, save_interval=None)
    config = dataclasses.replace(run.job.config, checkpoint=checkpoint)
    assert can_move(several)
    assert not can_move(dataclasses.replace(several, config=config))
    assert can_move(dataclasses.replace(run.job, config=config))
