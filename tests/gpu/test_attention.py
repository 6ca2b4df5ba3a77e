"""Tests that torch's attention kernels apply the requested dropout rate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.adaptive.config.attention import allows_cudnn

from .device import HAS_GPU, gpu_or_rehearsal

pytestmark = gpu_or_rehearsal

DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)


@pytest.mark.parametrize("rate", [0.1, 0.15])
def test_dropout_keeps_the_mean_and_drops_the_requested_share(rate: float) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(
        allows_cudnn(dropout=rate, has_mask=False, is_varied=False, is_threaded=False)
    )
    try:
        torch.manual_seed(0)
        # All probabilities of a row are equal, and each value belongs to a single key.
        length = 64
        query = torch.zeros(16, 16, length, length, device=DEVICE, dtype=DTYPE)
        value = torch.eye(length, device=DEVICE, dtype=DTYPE).expand_as(query).contiguous()
        output = F.scaled_dot_product_attention(query, query, value, dropout_p=rate)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    dropped = (output == 0).double().mean().item()
    assert dropped == pytest.approx(rate, abs=0.005)
    assert output.double().mean().item() * length == pytest.approx(1.0, abs=0.005)
