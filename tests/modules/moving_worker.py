"""Runs one of two ranks, for tests of moving segments and of settings that differ between ranks.

Usage: ``moving_worker.py FOLDER PROGRAM``. The process group is created by this program, and not by
the pipeline.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import Tower

from megatron.adaptive import Pipeline
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.process_context import process_groups
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.checkpointer import PipelineFolder
from megatron.adaptive.rebalance import judgement
from megatron.adaptive.rebalance.judgement import Move

WIDTH, SAMPLES, STEPS = 16, 4, 6
WAIT_S = 20.0
SEARCH_WAIT_S = 12.0


def tied() -> Tower:
    """Returns a model whose first two layers share a weight."""
    torch.manual_seed(3)
    model = Tower(WIDTH, layers=4)
    model.layers[1].weight = model.layers[0].weight
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))}


def make(**options: Any) -> Pipeline:
    settings: dict[str, Any] = {"micro_batch_size": 2, "timeout_s": WAIT_S, **options}
    return Pipeline(tied(), batch_of(0), **settings)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def settings_that_differ_are_named(folder: Path) -> None:
    """Checks that an error names a setting that differs between ranks.

    The error must be raised before the timeout.
    """
    is_second = dist.get_rank() == 1
    groups = process_groups()

    def refused(expected: str, **options: Callable[[], Any]) -> None:
        settings = {name: value() for name, value in options.items()}
        with pytest.raises(ConfigError) as raised:
            make(**settings)
        text = str(raised.value)
        assert text.startswith(expected), text
        assert "\n" not in text
        assert process_groups() == groups

    traces = folder / "traces"
    on_first = None if is_second else str(traces)
    for repartition in ("off", "auto"):
        refused(
            "no trace_dir on rank 1, but a trace_dir on rank 0; ",
            trace_dir=lambda: on_first,
            repartition=lambda repartition=repartition: repartition,
        )
    refused(
        "trace_detail='layers' on rank 1, but trace_detail='actions' on rank 0; ",
        trace_dir=lambda: str(traces / str(dist.get_rank())),
        trace_detail=lambda: "layers" if is_second else "actions",
    )
    assert not traces.exists()
    refused(
        "pipeline_size=1 on rank 1, but pipeline_size=2 on rank 0; ",
        pipeline_size=lambda: 1 if is_second else 2,
    )
    refused(
        "batch_size=8 on rank 1, but batch_size=4 on rank 0; ",
        batch_size=lambda: 8 if is_second else 4,
    )
    refused(
        "micro_batch_size=None on rank 1, but micro_batch_size=2 on rank 0; ",
        micro_batch_size=lambda: None if is_second else 2,
    )
    refused(
        "transport='gloo' on rank 1, but transport='auto' on rank 0; ",
        transport=lambda: TransportConfig(transport="gloo") if is_second else None,
    )


def a_failed_save_does_not_end_a_run_whose_segments_move(folder: Path) -> None:
    """Checks that segments can still move after a failed save, and that later saves succeed."""
    checkpoints, aside = folder / "checkpoints", folder / "aside"
    whole = tied()
    reference = sgd(whole.parameters())
    groups = process_groups()
    with make(partition="2-2", repartition="auto") as pipeline:
        pipeline.set_optimizer(sgd)
        balancer = pipeline._repartitioner
        assert balancer is not None
        move = Move(
            partition=(1, 3), present_s=1.0, step_s=0.5, why="test", before_s=1.0, former=(2, 2)
        )
        balancer.after_step = lambda work, times: move if pipeline.steps == 3 else None  # type: ignore[method-assign]
        for step in pipeline.loop(STEPS, folder=checkpoints, save_interval=2, async_save=True):
            if dist.get_rank() == 0:
                if step == 1:
                    checkpoints.rename(aside)
                    # Replace the folder by a file, so that creating a checkpoint fails.
                    checkpoints.touch()
                elif step == 3:
                    checkpoints.unlink()
                    aside.rename(checkpoints)
            loss, _ = pipeline.step(batch_of(step))
            reference.zero_grad()
            expected = whole(**batch_of(step))
            expected.backward()
            reference.step()
            assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        assert pipeline.partition == (1, 3)
        assert pipeline.shared_weights == (("layers.0.weight", "layers.1.weight"),)
    assert sorted(PipelineFolder(checkpoints).steps()) == [4, 6]
    # The move of segments created a process group for the shared weight, which must be closed.
    assert process_groups() == groups


def a_slow_search_ends_before_other_ranks_stop_to_wait(folder: Path) -> None:
    """Checks that a slow search for a partition is stopped before the other ranks time out."""
    vars(judgement)["propose"] = lambda *_: time.sleep(600)
    with make(
        partition="2-2", repartition="auto", repartition_interval=4, timeout_s=SEARCH_WAIT_S
    ) as pipeline:
        pipeline.set_optimizer(sgd)
        for step in range(STEPS):
            pipeline.step(batch_of(step))
        assert pipeline.partition == (2, 2)


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    globals()[sys.argv[2]](folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
