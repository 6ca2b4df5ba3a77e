"""Tests that all configurations have the same work, for different numbers of images."""

from __future__ import annotations

import numpy as np
import pytest

from studies.unequal_content import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    FORWARD_S,
    FROZEN,
    MICROBATCHES,
    ONE,
    OURS,
    SEED,
    WAYS,
    images_of,
    layer_seconds,
    partition_of,
    simulated,
    stage_seconds,
)


def test_every_way_has_the_same_work_and_fixed_orders_their_best_partition() -> None:
    images = images_of(3, 200)
    assert (min(images), max(images)) == (0, 8)
    layers = layer_seconds(images_of(SEED, 4096))
    assert layers.sum(axis=0).mean() == pytest.approx(FORWARD_S)
    for name, way in WAYS.items():
        partition = partition_of(way)
        assert sum(partition) == ENCODER_LAYERS + DECODER_LAYERS, name
        stages = stage_seconds(partition, images)
        assert stages.shape == (way.placement.num_stages, 200)
        assert np.allclose(stages.sum(axis=0), layer_seconds(images).sum(axis=0))
    steps = [images_of(SEED + number, MICROBATCHES) for number in range(6)]
    fixed = ONE["1f1b"]
    equal = (ENCODER_LAYERS // 2, ENCODER_LAYERS // 2, DECODER_LAYERS // 2, DECODER_LAYERS // 2)
    best, other = (
        sum(simulated(fixed, partition, images) for images in steps)
        for partition in (partition_of(fixed), equal)
    )
    assert best < other
    rule = ONE[OURS]
    assert sum(simulated(rule, partition_of(rule), images) for images in steps) < best
    static_s, filled_s = (
        sum(simulated(way, partition_of(way), images) for images in steps)
        for way in FROZEN.values()
    )
    assert filled_s < static_s < best
