"""Imports the fixtures for the documents that training runs read."""

from __future__ import annotations

from tests.fixtures import write_tokens

__all__ = ["write_tokens"]
