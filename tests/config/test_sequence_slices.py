"""Sequences are cut into slices of the same cost, or of the same length."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS, slice_ends
from megatron.adaptive.errors import ConfigError


def cost(end: int, length: int, share: float) -> float:
    """Returns the cost of the first tokens of a sequence, relative to the whole."""
    part = end / length
    return (1 - share) * part + share * part**2


@given(
    slices=st.integers(1, 16),
    multiple=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(16, 4000),
    share=st.floats(0, 1),
)
def test_slices_cover_the_sequence(slices: int, multiple: int, blocks: int, share: float) -> None:
    length = blocks * multiple
    if slices > 1 and blocks // slices * multiple < LEAST_TOKENS:
        with pytest.raises(ConfigError, match=f"--sequence-slices {slices} ") as caught:
            slice_ends(length, slices, multiple, share)
        # A cut with as many slices as the message says is possible.
        most = int(str(caught.value).split("give ")[1].split()[0])
        assert most < slices
        slices = most
    ends = slice_ends(length, slices, multiple, share)
    assert ends[-1] == length
    lengths = [end - start for start, end in pairwise((0, *ends))]
    assert len(ends) == 1 or min(lengths) >= LEAST_TOKENS
    assert all(end % multiple == 0 for end in ends)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_slices_cost_the_same(share: float) -> None:
    ends = slice_ends(64_000, 8, 1, share)
    costs = [cost(b, 64_000, share) - cost(a, 64_000, share) for a, b in pairwise((0, *ends))]
    assert costs == pytest.approx([1 / 8] * 8, rel=1e-3)


def test_the_share_of_attention_follows_the_model() -> None:
    flags = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 "
        "--max-position-embeddings 8192 --seq-length 8192 --sequence-slices 4"
    )

    def lengths(more: str) -> list[int]:
        config = parse(f"{flags} {more}".split(), world_size=1)
        return [end - start for start, end in pairwise((0, *config.slice_ends))]

    # 12 h^2 multiplications per token for the matrices, h s for both products with half the pairs.
    share = parse(flags.split(), world_size=1).attention_share
    assert share == pytest.approx(8192 / (12 * 256 + 8192))
    by_cost = lengths("")
    assert sorted(by_cost, reverse=True) == by_cost
    assert by_cost[0] > 1.5 * by_cost[-1]
    assert lengths("--slice-cut equal-length") == [2048] * 4
    assert lengths("--window-size 127,0") == [2048] * 4
