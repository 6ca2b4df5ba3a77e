"""The state of schedule and optimizer, where megatron-core's own loading would go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.adaptive.checkpoint.state import (
    load_scheduler,
    with_own_storage,
    without_local_copies,
)

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


def piece(key: str, *, copy: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2), replica_id=(copy, 0, 0))


@pytest.mark.parametrize("copy_comes_first", [False, True])
def test_a_rank_saves_the_first_of_two_copies(copy_comes_first: bool) -> None:
    """Sharing out the writing among ranks, megatron-core would have one rank write both."""
    main, copy, other = piece("embedding"), piece("embedding", copy=1), piece("layer")
    chunks: list[dict[str, Any]] = [{"embedding": main, "layer": other}, {"output": copy}]
    if copy_comes_first:
        chunks.reverse()
    whole = {"model": {str(number): chunk for number, chunk in enumerate(chunks)}, "step": 3}
    kept = without_local_copies(whole)
    assert list(kept["model"].values()) == [{"embedding": main, "layer": other}]
    assert kept["step"] == 3


def test_a_copy_of_another_rank_s_tensor_stays() -> None:
    whole = {"model": {"output": piece("embedding", copy=1), "layer": piece("layer")}, "none": {}}
    assert without_local_copies(whole) is whole


def test_what_was_loaded_once_for_two_copies_is_taken_apart() -> None:
    """An optimizer that updates its state in place would otherwise update it twice."""
    tensor = torch.ones(2)
    loaded = with_own_storage({"state": {0: {"exp_avg": tensor}, 1: [tensor, "text"]}})
    loaded["state"][0]["exp_avg"].add_(1)
    assert torch.equal(loaded["state"][1][0], torch.ones(2))
    assert loaded["state"][1][1] == "text"


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


def test_each_parameter_of_torchs_adam_counts_its_own_steps() -> None:
    """One shared tensor would be counted up once for each parameter."""
    from megatron.adaptive.checkpoint.state import _load_shards

    class Leaf:
        def __init__(self) -> None:
            weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
            self.optimizer = torch.optim.AdamW(weights, lr=0.1)
            shared = torch.tensor(5.0)
            for weight in weights:
                self.optimizer.state[weight] = {"exp_avg": torch.zeros(2), "step": shared}

        def load_parameter_state_from_fully_reshardable(self, shards: object) -> None:
            assert all("step" not in state for state in self.optimizer.state.values())

    leaf = Leaf()
    _load_shards(leaf, {})
    steps = [state["step"] for state in leaf.optimizer.state.values()]
    assert [step.item() for step in steps] == [5.0] * 3
    assert len({step.data_ptr() for step in steps}) == 3
