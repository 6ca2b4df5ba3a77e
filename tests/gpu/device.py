"""Says where tests run: on a GPU, and jobs that need none in a rehearsal on a CPU as well.

The ordinary suite trains jobs like these on the CPU anyway, and skips them. With
``GPU_CHECK_REHEARSAL``, which ``scripts/gpu_check.sh --rehearse`` sets, they run there all the
same: their code is then known to be right before a GPU is at hand.
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
