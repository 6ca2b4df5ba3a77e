"""Checks the text of numbers in messages and reports."""

import math

import pytest

from megatron.adaptive.config.number_text import number_text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0"),
        (0.55749, 3, "0.557"),
        (12.34, 3, "12.3"),
        (999.4, 3, "999"),
        (999.6, 3, "1,000"),
        (999.6, 4, "999.6"),
        (2490.4, 3, "2,490"),
        (2543.7, 4, "2,544"),
        (-2490.4, 3, "-2,490"),
        (12_345_678.0, 4, "12,345,678"),
        (math.nan, 3, "nan"),
        (math.inf, 3, "inf"),
    ],
)
def test_large_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert number_text(value, digits) == text
