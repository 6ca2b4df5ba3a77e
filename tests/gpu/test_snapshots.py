"""Tests that training state on a GPU can be copied to host memory and restored."""

from __future__ import annotations

from megatron.adaptive import accelerator

accelerator.install()  # This call must precede the following imports, which load megatron-core.

from tests.checkpoint.keepers import keepers  # noqa: E402
from tests.checkpoint.test_snapshots import (  # noqa: E402
    test_training_goes_on_bit_for_bit_from_copies as test_training_goes_on_from_copies,
)
from tests.fixtures import make, worker  # noqa: E402

from .device import gpu_or_rehearsal  # noqa: E402

__all__ = ["keepers", "make", "test_training_goes_on_from_copies", "worker"]

pytestmark = [*gpu_or_rehearsal]
