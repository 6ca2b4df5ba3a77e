"""Tests that jobs that use NCCL do not deadlock, however much the ranks are delayed.

The jobs are simulated with ``skew_model.py``.
"""

from __future__ import annotations

import pytest

from .skew_model import Receiving, Shape, standing_still

OTHERS = [
    Shape(pp=2, tp=2, ep=2, microbatches=3, follows_list=False),
    Shape(pp=3, tp=2, ep=1, microbatches=4),
    Shape(pp=4, tp=1, ep=2, microbatches=4),
]


def test_none_of_a_thousand_skews_stands_still() -> None:
    assert standing_still(Shape(pp=2, tp=2, ep=2, microbatches=3), 1000) == 0


@pytest.mark.parametrize("shape", OTHERS, ids=["rule", "three-stages", "four-stages"])
def test_no_other_shape_stands_still(shape: Shape) -> None:
    assert standing_still(shape, 100) == 0


def test_a_receive_in_the_computing_stream_stands_still() -> None:
    """Checks that ranks deadlock if they receive in the compute stream at different times."""
    alone = Shape(pp=2, tp=1, ep=1, receiving=Receiving.STREAM)
    assert standing_still(alone, 100) == 0
    pair = Shape(pp=2, tp=2, ep=1, receiving=Receiving.STREAM)
    assert standing_still(pair, 100) > 20


def test_messages_need_a_queue_of_the_hardware_apart_from_the_computing_stream() -> None:
    """Checks that messages deadlock if they share a hardware queue with waiting collectives."""
    assert standing_still(Shape(pp=3, tp=2, ep=2, one_queue=True), 100) > 0
