"""Shares the keepers of snapshots."""

from __future__ import annotations

from tests.checkpoint.keepers import keepers

__all__ = ["keepers"]
