"""Shares the fixtures of tests that read token files."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
