"""Selects the device of the tests: a GPU, or the CPU in a rehearsal.

Without a GPU, these tests are skipped, because other tests train similar jobs on the CPU. If
``GPU_CHECK_REHEARSAL`` is set (by ``scripts/gpu_check.sh --rehearse``), they run on the CPU. This
finds errors in the tests before a GPU is available.
"""

from __future__ import annotations

import os

import pytest
import torch

from megatron.adaptive import extension

HAS_GPU = torch.cuda.is_available()
REHEARSING = not HAS_GPU and "GPU_CHECK_REHEARSAL" in os.environ

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")]
gpu_or_rehearsal = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_GPU and not REHEARSING,
        reason="there is no CUDA device; scripts/gpu_check.sh --rehearse trains this on the CPU",
    ),
]
needs_extension = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))
