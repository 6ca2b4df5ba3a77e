"""Tests which measured times of actions are used, and how their spread is computed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.adaptive.profiling.action_timing import WARM_UP, spread, time_microbatches

CPU = torch.device("cpu")


class Stages:
    """Imitates the stages of a rank, and records which methods are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor) -> torch.Tensor:
        self.calls.append(f"F{microbatch}")
        return received + microbatch

    def release(self, chunk: int, microbatch: int) -> None:
        self.calls.append(f"release{microbatch}")

    def backward(self, chunk: int, microbatch: int, gradient: torch.Tensor) -> None:
        self.calls.append(f"B{microbatch}")
        if gradient is None:
            raise RuntimeError("no gradient")

    def after_backward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(f"after{microbatch}")

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        self.calls.append(f"W{microbatch}")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("split", [False, True])
def test_microbatches_run_one_by_one_and_the_first_do_not_count(split: bool) -> None:
    stages, tensor = Stages(), torch.ones(1)
    rows, output = time_microbatches(
        stages, received=lambda: tensor, gradient=lambda: tensor, device=CPU, repeats=2, split=split
    )
    assert [len(row) for row in rows] == [2, 2, 2]
    assert all(value > 0 for row in rows[:2] for value in row)
    assert (sum(rows[2]) > 0) == split
    each = ["F{}", "release{}", "B{}", "after{}", *["W{}"] * split]
    assert stages.calls == [
        *(action.format(i) for i in range(WARM_UP + 2) for action in each),
        "finish",
    ]
    assert output is not None
    assert output == 1 + WARM_UP + 1


def test_stages_are_finished_whatever_happens() -> None:
    stages = Stages()
    with pytest.raises(RuntimeError, match="no gradient"):
        time_microbatches(
            stages,
            received=lambda: torch.ones(1),
            gradient=lambda: None,
            device=CPU,
            repeats=1,
            split=False,
        )
    assert stages.calls[-1] == "finish"


def test_spread_is_that_of_the_logarithm_and_knows_no_outlier() -> None:
    steady = [1.0] * 8
    assert spread([steady]) == 0
    draws = [math.exp(0.2 * z) for z in (-1.5, -0.9, -0.5, -0.16, 0.16, 0.5, 0.9, 1.5)]
    assert spread([draws, [2 * draw for draw in draws]]) == pytest.approx(0.2, rel=0.3)
    assert spread([[*draws[:-1], 1000.0]]) == pytest.approx(0.2, rel=0.5)
    assert spread([[1.0, 1.1]]) == 0
