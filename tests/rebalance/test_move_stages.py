"""What is left of a run whose state has no room to wait while its stages move."""

from __future__ import annotations

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.errors import DeviceMemoryError  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, start_job  # noqa: E402
from megatron.adaptive.gpt.setup import build_run  # noqa: E402
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
    try:
        with pytest.raises(DeviceMemoryError, match="rank 0 would wait .* no room for them"):
            move_stages.move_stages([run], lambda: pytest.fail("released"), kind="loop")
    finally:
        end_job()
