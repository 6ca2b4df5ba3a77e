"""Tests that simulations pack and slice the documents of a step in the same way as the trainer."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.loader import LengthMicrobatches
from megatron.adaptive.rebalance.microbatch_dealing import rows_with_tokens
from megatron.adaptive.schedule.document_rows import batching_of

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 "
    "--global-batch-size 24 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 "
    "--max-position-embeddings 1024 --seq-length 1024 --pipeline-model-parallel-size 2 "
    "--variable-seq-lengths --pipeline-schedule auto"
)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dealing", ["off", "lengths"])
def test_microbatches_are_those_of_the_trainer(replicas: int, dealing: str) -> None:
    def config_of(tokens: str) -> TrainerConfig:
        flags = f"{FLAGS} --balance-replicas {dealing} --slice-tokens {tokens}"
        return parse(flags.split(), world_size=2 * replicas)

    drawn = np.random.default_rng(7).lognormal(4.0, 1.5, 24)
    lengths = np.clip(drawn, 1, 1024).astype(int).tolist()
    for tokens in (64, 256):
        config = config_of(str(tokens))
        batching = batching_of(config)
        rule = config.slice_rule
        assert rule is not None
        steps = [LengthMicrobatches(lengths, batching, rank, None) for rank in range(replicas)]
        cuts = rows_with_tokens(config_of("auto"), tokens, lengths)
        rows = [
            [rule.cut(positions, documents) for positions, *documents in step.contents]
            for step in steps
        ]
        if dealing == "off":
            assert cuts in rows
        elif replicas == 1:
            assert sorted(cuts, key=str) == sorted(rows[0], key=str)
        else:
            assert all(any(cut in share for share in rows) for cut in cuts)
