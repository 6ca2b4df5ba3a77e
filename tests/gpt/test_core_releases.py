"""Tests functions whose parameters or results differ between releases of megatron-core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..training.test_releases import INSTALLED, path_of

BALANCING = """
import warnings
from megatron.adaptive import accelerator

accelerator.install()

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.adaptive.gpt import core_releases

def record(layers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe_utils.save_to_aux_losses_tracker("z_loss", torch.tensor(0.5), layers, layers)

warnings.simplefilter("error")
record(2)
record(2)
assert core_releases.balancing_losses()["z_loss"].tolist() == [0.0, 1.0]
core_releases.reset_balancing_losses()
assert core_releases.balancing_losses()["z_loss"].tolist() == [0.0, 0.0]
# The next model may have more layers.
core_releases.forget_balancing_losses()
assert dict(core_releases.balancing_losses()) == {}
record(4)
assert core_releases.balancing_losses()["z_loss"].tolist() == [0.0, 0.0, 0.0, 0.5]
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("release", [INSTALLED, "0.19.2"])
def test_balancing_losses_are_those_of_the_current_model(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BALANCING],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PYTHONPATH": path_of(release), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
