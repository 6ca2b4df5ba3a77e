"""Formats numbers for messages and reports."""

from __future__ import annotations


def number_text(value: float, digits: int = 3) -> str:
    """Returns ``value`` as text. Large values are written without an exponent.

    Numbers of 1000 or more are rounded to integers and have separators, such as ``2,490``.

    Args:
        value: Number to format.
        digits: Number of significant digits of numbers below 1000.
    """
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(text)) >= 1000 else text
