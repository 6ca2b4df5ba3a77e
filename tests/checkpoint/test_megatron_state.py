"""Tests loading learning rate schedules and random states that megatron-core loads incorrectly."""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.checkpoint.megatron_state import load_rng, load_scheduler  # noqa: E402
from megatron.adaptive.checkpoint.saver import _room_for  # noqa: E402

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
    """Imitates an optimizer with two parameter groups, which have different learning rates."""

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
    """Checks the learning rates and weight decay of both parameter groups after loading."""
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_random_states_of_another_kind_of_device_are_left_out_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # A GPU's random state is a tensor of this size.
        "device": torch.zeros(16, dtype=torch.uint8),
        "tracker": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
    }
    load_rng(state)
    (line,) = caplog.messages
    assert "random states of a GPU, but this rank computes on a CPU" in line
    assert "--no-load-rng" in line


def test_memory_for_copies_is_locked_as_large_as_it_is_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that no more memory is pinned than aligned copies need, and that it is freed."""
    locked: dict[int, int] = {}

    def lock(address: int, size_bytes: int, flags: int) -> int:
        locked[address] = size_bytes
        return 0

    driver = types.SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    copies = _room_for([torch.ones(513), torch.ones(3)], torch.device("cuda", 0))
    assert [copy.shape for copy in copies] == [(513,), (3,)]
    assert list(locked.values()) == [2112 + 64]
    part = copies[1]
    del copies
    assert locked
    del part
    assert not locked
