"""Makes the fixtures for data sets available to the tests in this folder."""

from __future__ import annotations

from tests.fixtures import corpus

__all__ = ["corpus"]
