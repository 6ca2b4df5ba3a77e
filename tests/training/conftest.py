"""Provides the documents that runs of the trainer read."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
