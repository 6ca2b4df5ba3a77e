"""Tests that a move of stages frees the old model, and checks whether host memory is sufficient."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.checkpoint.megatron_state import fill_state  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.engine.process_context import process_groups  # noqa: E402
from megatron.adaptive.errors import DeviceMemoryError  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, remake_mesh, start_job  # noqa: E402
from megatron.adaptive.gpt.setup import build_run  # noqa: E402
from megatron.adaptive.gpt.train_step import Step  # noqa: E402
from megatron.adaptive.rebalance import move_stages  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 9 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)


def test_without_room_in_the_host_the_run_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(FLAGS.split(), world_size=1)
    run = build_run(start_job(config, Environment(), accelerator.detect(0, backend="gloo")))
    monkeypatch.setattr(move_stages, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(move_stages, "free_memory_bytes", lambda device, ranks: 1000)
    try:
        with pytest.raises(DeviceMemoryError, match="of rank 0 do not fit into the host.s memory"):
            move_stages.move_stages([run], lambda: pytest.fail("released"), kind="loop")
    finally:
        end_job()


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_model_with_experts_that_was_taken_down_is_freed(dispatcher: str) -> None:
    flags = f"{FLAGS} --num-experts 2 --moe-token-dispatcher-type {dispatcher}"
    config = parse(flags.split(), world_size=1)
    run = build_run(start_job(config, Environment(), accelerator.detect(0, backend="gloo")))
    try:
        tokens = torch.arange(8)[None]
        batch = {"tokens": tokens, "labels": tokens, "position_ids": tokens}
        Step(run).train([batch | {"loss_mask": torch.ones(1, 8)}], 1, 1)
        model = weakref.ref(run.chunks[0].module)
        move_stages.take_down(run)
        del run
        gc.collect()
        assert model() is None
    finally:
        end_job()


def test_groups_beside_the_mesh_stay_when_it_is_made_anew() -> None:
    config = parse(FLAGS.split(), world_size=1)
    job = start_job(config, Environment(), accelerator.detect(0, backend="gloo"))
    try:
        group = dist.new_group(backend="gloo")
        remake_mesh(job)
        assert group in process_groups()
    finally:
        end_job()


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_number_of_updates_stays_on_the_device_where_adam_needs_it(is_fused: bool) -> None:
    """Checks where Adam finds its number of updates after a move.

    Fused Adam needs this number on the device of the parameter, and other kinds of Adam need it on
    the host. The device ``meta`` stands for the GPU.
    """
    parameters = [torch.nn.Parameter(torch.ones(2, device="meta")) for _ in range(2)]
    adam = torch.optim.AdamW(parameters)
    adam.param_groups[0]["fused"] = is_fused
    leaf = SimpleNamespace(optimizer=adam, init_state_fn=None)
    fill_state(leaf)
    group = {key: value for key, value in adam.param_groups[0].items() if key != "params"}
    state = move_stages._State(shares={}, steps=7.0, groups=[[group]], scalers=[None])
    move_stages._restore_settings(state, [leaf], 7.0)
    first, second = (adam.state[parameter]["step"] for parameter in parameters)
    assert first is not second  # Adam increments the step count of each parameter in place.
    assert first.device.type == second.device.type == ("meta" if is_fused else "cpu")
    if not is_fused:
        assert first == second == 7
