"""Runs property tests without hypothesis' time limit, for a busy machine is not a bug."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("megatron-adaptive", deadline=None)
settings.load_profile("megatron-adaptive")
