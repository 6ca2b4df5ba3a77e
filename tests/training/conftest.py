"""Imports the fixtures that create the documents for training runs."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
