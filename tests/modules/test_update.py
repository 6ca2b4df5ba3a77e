"""Tests when an update of the parameters is refused or skipped."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import pytest
import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Pipeline
from megatron.adaptive.modules.update import Update

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
        pipeline.set_optimizer(None)
        assert not pipeline.step(batch)[1]


def test_frozen_parameters_may_be_in_float16() -> None:
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    parameters = {"frozen": frozen, "trained": torch.nn.Parameter(torch.ones(2))}
    update = Update(mesh=cast(Any, None), parameters=parameters, shared={}, groups={})
    update.set_optimizer(adamw, None, 1.0, 1)
    assert update.optimizer is not None


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_skipped_step_is_reported_once_except_in_fp16(
    precision: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"x": torch.ones(4, 16)}
    bad = {"x": torch.full((4, 16), math.nan)}
    with Pipeline(Tower(), good, micro_batch_size=2, mixed_precision=precision) as pipeline:
        pipeline.set_optimizer(adamw)
        assert [pipeline.step(batch)[1] for batch in (good, bad, bad)] == [False, True, True]
        weights = [parameter.isfinite().all() for parameter in pipeline.parameters()]
    assert all(weights)
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == (precision is None)
    assert all(line.startswith("warning: step 2 did not update") for line in lines)
