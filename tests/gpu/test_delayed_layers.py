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
EXPERT_ROWS = ([32, 16, 48], [16, 64, 16])


def transformer_engine(*, fp8: bool) -> Any:
    """Returns Transformer Engine. Skips the test if it is missing, or if ``fp8`` is unavailable."""
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    available, why = te.fp8.FP8GlobalStateManager.is_fp8_available() if fp8 else (True, "")
    if not available:
        pytest.skip(why)
    return te


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fuses", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_gradients_are_those_of_the_whole_backward(
    kind: str, bias: bool, fuses: bool, fp8: bool
) -> None:
    te = transformer_engine(fp8=fp8)
    from megatron.adaptive.engine.deferred_layers import attach_stores

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


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("main_grad", ["none", "unfused", "fused"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_gradients_of_grouped_experts_are_those_of_the_whole_backward(
    bias: bool, main_grad: str, fp8: bool
) -> None:
    te = transformer_engine(fp8=fp8)
    from megatron.adaptive.engine.deferred_layers import attach_stores

    results = []
    for splits in (False, True):
        torch.manual_seed(3)
        layer = te.GroupedLinear(
            len(EXPERT_ROWS[0]),
            WIDTH,
            2 * WIDTH,
            bias=bias,
            fuse_wgrad_accumulation=main_grad == "fused",
            params_dtype=torch.bfloat16,
        )
        for parameter in layer.parameters() if main_grad != "none" else ():
            add_to_main_grad(parameter)
        (store,) = attach_stores([layer])
        store.active = splits
        inputs = []
        for number, rows in enumerate(EXPERT_ROWS):
            activation = torch.randn(sum(rows), WIDTH, device="cuda", dtype=torch.bfloat16)
            inputs.append(activation.requires_grad_())
            with store.collect(number), te.fp8_autocast(enabled=fp8):
                layer(activation, rows).float().square().sum().backward()
            store.run(number, 0, 1)
        gradients = {
            name: getattr(weight, "grad" if main_grad == "none" else "main_grad")
            for name, weight in layer.named_parameters()
        }
        results.append({**gradients, **{str(n): leaf.grad for n, leaf in enumerate(inputs)}})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-6, atol=0.0, msg=name)


def add_to_main_grad(parameter: Any) -> None:
    """Adds gradients of ``parameter`` to ``main_grad``, as megatron-core's wrapper does."""
    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.grad_added_to_main_grad = False

    def add(_: Any) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
