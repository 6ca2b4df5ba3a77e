"""Imports the fixtures that write documents for training runs, so that these tests find them."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
