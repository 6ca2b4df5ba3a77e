"""Tests when an update of the parameters is refused or skipped."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Pipeline
from megatron.adaptive.modules.update import Update, _squared_norm

from .models import Tower


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_trained_parameters_in_float16_are_refused() -> None:
    batch = {"x": torch.ones(4, 16, dtype=torch.float16)}
    with Pipeline(Tower().half(), batch, micro_batch_size=2) as pipeline:
        expected = "layers.0.weight is a trained parameter in float16, which an optimizer's update"
        with pytest.raises(ConfigError, match=re.escape(expected)) as raised:
            pipeline.set_optimizer(adamw)
        assert "\n" not in str(raised.value)
        assert pipeline.set_optimizer(None) is None
        assert not pipeline.step(batch)[1]


def test_frozen_parameters_may_be_in_float16() -> None:
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    parameters = {"frozen": frozen, "trained": torch.nn.Parameter(torch.ones(2))}
    update = Update(mesh=cast(Any, None), parameters=parameters, shared={}, groups={})
    optimizer = update.set_optimizer(adamw, None, 1.0, 1)
    assert optimizer is not None
    assert update.optimizer is optimizer


@pytest.mark.parametrize(
    ("precision", "start"),
    [
        (None, "warning: step 2 did not update"),
        ("fp16", "warning: 2 of 3 steps were skipped because gradients were infinite or NaN in "),
    ],
)
def test_skipped_steps_are_reported_once(
    precision: Any, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks the warning at the first skipped step, and the summary at the end in fp16."""
    good = {"x": torch.ones(4, 16)}
    bad = {"x": torch.full((4, 16), math.nan)}
    with Pipeline(Tower(), good, micro_batch_size=2, mixed_precision=precision) as pipeline:
        pipeline.set_optimizer(adamw)
        assert [pipeline.step(batch)[1] for batch in (good, bad, bad)] == [False, True, True]
        weights = [parameter.isfinite().all() for parameter in pipeline.parameters()]
    assert all(weights)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert line.startswith(start)


@pytest.mark.parametrize(("scale", "is_told"), [(2.0**60, True), (2.0**10, False)])
def test_a_loop_in_fp16_reports_that_the_model_is_unchanged(
    scale: float, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"x": torch.ones(4, 16)}
    with Pipeline(Tower(), batch, micro_batch_size=2, mixed_precision="fp16") as pipeline:
        pipeline.set_optimizer(adamw, initial_loss_scale=scale)
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        for _ in pipeline.loop(4):
            pipeline.step(batch)
        after = [parameter.detach() for parameter in pipeline.parameters()]
    assert all(map(torch.equal, before, after)) == is_told
    lines = capsys.readouterr().out.splitlines()
    warning = (
        "warning: 4 of 4 steps were skipped because gradients were infinite or NaN in float16, so "
        "the model is unchanged; use bf16, or a lower initial loss scale (initial_loss_scale of "
        "Pipeline.set_optimizer)"
    )
    assert lines[lines.index("training ends: all iterations are done") + 1 :] == [warning] * is_told


class _Copies(TorchDispatchMode):
    """Counts the elements that operations convert to another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # no types in torch
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.elements += result.numel()
        return result


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32] * 3,
        [torch.bfloat16] * 3,
        [torch.float16] * 3,
        [torch.bfloat16, torch.float32, torch.float64],
        [torch.float32, torch.float16, torch.bfloat16],
    ],
)
def test_the_norm_needs_no_copy_of_the_gradients(dtypes: list[torch.dtype]) -> None:
    """Checks that the norm has the precision of float32 without copies in float32."""
    torch.manual_seed(1)
    gradients = [
        (300 * torch.randn(size, 7)).to(dtype)
        for size, dtype in zip((3, 400, 90), dtypes, strict=True)
    ]
    gradients.append(torch.empty(0, dtype=dtypes[0]))
    with _Copies() as copies:
        square = _squared_norm(gradients, torch.device("cpu"))
    assert copies.elements <= len(gradients)
    assert square.dtype == torch.float64
    converted = torch._foreach_norm(
        [each.float() if each.dtype.itemsize < 4 else each for each in gradients]
    )
    expected = torch.stack([norm.double() for norm in converted]).square().sum()
    if dtypes[0] == torch.float32 == dtypes[1]:
        assert square == expected
    assert square.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad: float) -> None:
    gradients = [torch.ones(4, dtype=torch.bfloat16), torch.tensor([bad], dtype=torch.float16)]
    assert not _squared_norm(gradients, torch.device("cpu")).isfinite()
