"""Tests parsing and formatting partitions, and dividing layers nearly evenly among stages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.config.schedule import format_partition, nearly_even_split, parse_partition

PARTITIONS = st.lists(st.integers(0, 10_000), min_size=1, max_size=64).map(tuple)


@given(PARTITIONS)
def test_what_is_written_is_read_back(partition: tuple[int, ...]) -> None:
    assert parse_partition(format_partition(partition)) == partition


@given(st.text(max_size=12))
def test_text_of_any_kind_is_read_or_refused(text: str) -> None:
    is_partition = re.fullmatch("[0-9]+(-[0-9]+)*", text) is not None
    if is_partition:
        assert len(parse_partition(text)) == text.count("-") + 1
    else:
        with pytest.raises(ValueError, match="is not a partition"):
            parse_partition(text)


@given(st.integers(0, 500), st.integers(1, 64))
def test_a_nearly_even_split_holds_all_layers(num_layers: int, num_stages: int) -> None:
    split = nearly_even_split(num_layers, num_stages)
    assert len(split) == num_stages
    assert sum(split) == num_layers
    assert max(split) - min(split) <= 1


def test_the_example_of_the_documentation() -> None:
    assert parse_partition("0-11-8-8-8-8-5-0") == (0, 11, 8, 8, 8, 8, 5, 0)
    assert nearly_even_split(9, 4) == (2, 2, 3, 2)


@pytest.mark.parametrize(
    "text", ["", "-", "1-", "-1", "1--2", "1,2", "a", " 1", "1-2 ", "²", "1_0"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="0-11-8-8"):
        parse_partition(text)
