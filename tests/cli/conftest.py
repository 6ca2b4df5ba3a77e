"""Makes fixtures available to tests that read data."""

from __future__ import annotations

from tests.fixtures import corpus

__all__ = ["corpus"]
