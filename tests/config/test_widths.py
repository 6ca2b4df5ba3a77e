"""Stages of unequal sizes: what their flags mean, and what they refuse by name."""

from __future__ import annotations

import pytest

from .conftest import Complaint, Parse

SIZES = "--pipeline-model-parallel-size 2 --stage-data-parallel-sizes 2-1"


def test_sizes_and_microbatches(small: Parse) -> None:
    config = small(f"{SIZES} --global-batch-size 24", world_size=3)
    assert config.parallel.unequal_sizes == (2, 1)
    assert config.parallel.data_parallel_size == 2
    assert config.num_microbatches == 6
    assert [config.parallel.microbatches_of(stage, 6) for stage in (0, 1)] == [6, 12]


def test_the_batch_is_one_round_where_it_is_not_given(small: Parse) -> None:
    config = small(SIZES.replace("2-1", "2-3"), world_size=5)
    assert config.num_microbatches == 1
    assert config.batch.global_batch_size == 6 * config.batch.micro_batch_size


def test_equal_sizes_are_the_usual_mesh(small: Parse) -> None:
    config = small(SIZES.replace("2-1", "2-2"), world_size=4)
    assert config.parallel.unequal_sizes is None
    assert config.parallel.data_parallel_size == 2
    assert config.parallel.microbatches_of(0, 6) == 6


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("", 4, ("--stage-data-parallel-sizes 2-1", "needs 3 processes", "has 4")),
        (
            "--pipeline-model-parallel-size 3",
            3,
            ("--stage-data-parallel-sizes 2-1", "2 stages", "--pipeline-model-parallel-size is 3"),
        ),
        ("--stage-data-parallel-sizes 2-0", 2, ("'2-0'", "as in 2-1-1")),
        ("--stage-data-parallel-sizes 2,1", 3, ("'2,1'", "as in 2-1-1")),
        ("--tensor-model-parallel-size 2", 6, ("2-1", "--tensor-model-parallel-size 2")),
        ("--model-chunks 2", 3, ("2-1", "--model-chunks 2")),
        ("--use-distributed-optimizer", 3, ("2-1", "--use-distributed-optimizer")),
        ("--ddp-average-in-collective", 3, ("2-1", "--ddp-average-in-collective")),
        ("--repartition auto", 3, ("2-1", "--repartition auto")),
        ("--trace-dir traces", 3, ("2-1", "--trace-dir traces")),
        ("--record-schedule order", 3, ("2-1", "--record-schedule order")),
        ("--pipeline-schedule zb-h1", 3, ("2-1", "zb-h1", "1f1b, adaptive, gpipe")),
        ("--pipeline-schedule megatron", 3, ("2-1", "megatron", "1f1b, adaptive, gpipe")),
        ("--micro-batch-size 2 --global-batch-size 6", 3, ("--global-batch-size 6", "= 4")),
    ],
)
def test_what_does_not_fit_is_named(
    complaint: Complaint, flags: str, world_size: int, words: tuple[str, ...]
) -> None:
    text = complaint(f"{SIZES} {flags}", world_size=world_size)
    assert "\n" not in text
    for word in words:
        assert word in text
