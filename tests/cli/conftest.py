"""Makes the fixtures of tests that read data available here."""

from __future__ import annotations

from tests.fixtures import corpus

__all__ = ["corpus"]
