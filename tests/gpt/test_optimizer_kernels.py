"""Tests the functions that update many parameters of a GPU at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import utils  # noqa: E402
from megatron.core.optimizer import clip_grads, optimizer  # noqa: E402

from megatron.adaptive.gpt.optimizer_kernels import fuse_adam, use_foreach_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    clip_grads.l2_norm_impl is not utils.local_multi_tensor_l2_norm,
    reason="needs a machine without Transformer Engine and apex",
)


def test_torchs_adam_updates_a_gpus_parameters_in_one_kernel() -> None:
    def optimizer(is_gpu: bool) -> torch.optim.AdamW:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        made = torch.optim.AdamW([parameter], lr=0.1)
        if is_gpu:
            parameter = type("OnGpu", (), {"is_cuda": True, "is_floating_point": lambda _: True})()
            usual, made.param_groups[0]["params"] = made.param_groups[0]["params"], [parameter]
            fuse_adam(made)
            made.param_groups[0]["params"] = usual
        else:
            fuse_adam(made)
        return made

    fused, usual = optimizer(True), optimizer(False)
    assert fused.param_groups[0]["fused"] is True
    assert not fused.param_groups[0]["foreach"]
    assert not usual.param_groups[0]["fused"]
    for each in (fused, usual):
        (parameter,) = each.param_groups[0]["params"]
        for step in range(3):
            parameter.grad = torch.full_like(parameter, 0.5 + step)
            each.step()
    torch.testing.assert_close(*(each.param_groups[0]["params"][0] for each in (fused, usual)))


@pytest.fixture
def _many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the functions for lists of tensors, and restores megatron-core's at the end."""
    for module, name in (
        (clip_grads, "l2_norm_impl"),
        (clip_grads, "multi_tensor_scale_impl"),
        (optimizer, "multi_tensor_scale_impl"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    use_foreach_kernels()


@pytest.mark.usefixtures("_many_at_once")
def test_gradients_are_clipped_and_copied_as_by_loops() -> None:
    torch.manual_seed(0)
    lists = [torch.randn(3, 5), torch.randn(7), torch.randn(2, 2, 2)]
    flag = torch.zeros(1, dtype=torch.int)
    expected, _ = utils.local_multi_tensor_l2_norm(0, flag, [lists], False)
    norm, _ = clip_grads.l2_norm_impl(0, flag, [lists], False)
    assert norm.shape == expected.shape
    torch.testing.assert_close(norm, expected)
    for scale, dtype in ((1.0, torch.bfloat16), (1.0, torch.float32), (0.3, torch.float32)):
        targets = [torch.empty_like(each, dtype=dtype) for each in lists]
        optimizer.multi_tensor_scale_impl(0, flag, [lists, targets], scale)
        for source, target in zip(lists, targets, strict=True):
            assert torch.equal(target, (source * scale).to(dtype))
    clipped = [each.clone() for each in lists]
    clip_grads.multi_tensor_scale_impl(0, flag, [clipped, clipped], 0.3)
    for source, target in zip(lists, clipped, strict=True):
        assert torch.equal(target, source * 0.3)


@pytest.mark.usefixtures("_many_at_once")
def test_the_norm_of_gradients_is_computed_without_reading_values() -> None:
    class Counter(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    gradients = [torch.ones(2) for _ in range(8)]
    with Counter() as counter:
        norm, _ = clip_grads.l2_norm_impl(0, torch.zeros(1), [gradients], False)
    assert counter.reads == 0
    assert float(norm) == pytest.approx(4.0)
