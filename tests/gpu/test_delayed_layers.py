"""Tests that Transformer Engine's layers delay weight gradients until the W actions run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ROWS, WIDTH, MICROBATCHES = 32, 64, 3


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fuses", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_gradients_are_those_of_the_whole_backward(
    kind: str, bias: bool, fuses: bool, fp8: bool
) -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    from megatron.adaptive.engine.deferred_layers import attach_stores

    available, why = te.fp8.FP8GlobalStateManager.is_fp8_available() if fp8 else (True, "")
    if not available:
        pytest.skip(why)
    results = []
    for splits in (False, True):
        torch.manual_seed(3)
        layer = getattr(te, kind)(
            WIDTH, 2 * WIDTH, bias=bias, fuse_wgrad_accumulation=fuses, params_dtype=torch.bfloat16
        )
        if fuses:
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        (store,) = attach_stores([layer])
        store.active = splits
        inputs = []
        for number in range(MICROBATCHES):
            activation = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
            inputs.append(activation.requires_grad_())
            with store.collect(number), te.fp8_autocast(enabled=fp8):
                layer(activation).float().square().sum().backward()
        late = layer.weight.main_grad.any() if fuses else layer.weight.grad is not None
        assert bool(late) != splits
        for number in range(MICROBATCHES):
            store.run(number, 0, 1)
        gradients = {name: weight.grad for name, weight in layer.named_parameters()}
        if fuses:
            gradients["weight"] = layer.weight.main_grad
        results.append({**gradients, **{str(n): leaf.grad for n, leaf in enumerate(inputs)}})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-6, atol=0.0, msg=name)
