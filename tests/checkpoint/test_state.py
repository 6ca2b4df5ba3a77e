"""The state of a schedule, where megatron-core's own loading would go wrong."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.adaptive.checkpoint.state import load_scheduler

SETTINGS: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 100,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "constant",
    "use_checkpoint_opt_param_scheduler": False,
}


class Groups:
    """What a schedule sees of an optimizer: a usual group and one with its own learning rate."""

    def __init__(self) -> None:
        self.param_groups = [
            {"default_config": True, "max_lr": 1e-2, "min_lr": 1e-3, "wd_mult": 1.0},
            {"default_config": False, "max_lr": 5e-2, "min_lr": 1e-3, "wd_mult": 0.0},
        ]


def schedule(steps: int = 0, **settings: object) -> tuple[OptimizerParamScheduler, Groups]:
    groups = Groups()
    scheduler = OptimizerParamScheduler(groups, **{**SETTINGS, **settings})
    scheduler.step(steps)
    return scheduler, groups


def test_the_length_of_a_constant_weight_decay_does_not_matter() -> None:
    before, _ = schedule(40)
    after, new = schedule(wd_incr_steps=500)
    load_scheduler(after, new, before.state_dict())
    assert after.num_steps == 40


@pytest.mark.parametrize("winner", ["checkpoint", "run"])
def test_the_winner_sets_the_usual_groups_and_leaves_those_with_a_rate_of_their_own(
    winner: str,
) -> None:
    """megatron-core leaves the ends of the rate in the groups as the optimizer's state has them."""
    before, _ = schedule(40, wd_incr_style="linear", start_wd=0.0)
    after, new = schedule(
        max_lr=4e-2,
        use_checkpoint_opt_param_scheduler=winner == "checkpoint",
        override_opt_param_scheduler=winner == "run",
    )
    load_scheduler(after, new, before.state_dict())
    first, second = new.param_groups
    expected = 1e-2 if winner == "checkpoint" else 4e-2
    assert first["max_lr"] == expected
    assert first["lr"] == pytest.approx(1e-3 + 0.6 * (expected - 1e-3))
    assert second["max_lr"] == 5e-2
    assert first["weight_decay"] == pytest.approx(0.04 if winner == "checkpoint" else 0.1)
