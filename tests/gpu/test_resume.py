"""Tests that a run of two ranks with checkpoints and traces can be resumed, on a GPU if possible.

The first run writes checkpoints in the background and traces its steps. Separate processes read its
data, and tensors are sent through shared memory. A second run resumes from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.trace.read import read_run
from tests.multiprocess.launch import ROOT, torchrun

from .device import needs_extension
from .jobs import losses_in, trainer_flags

pytestmark = [needs_extension, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(250)]

LIMIT_S = 100.0
ITERATIONS, SAVED = 6, 3


@pytest.mark.long
def test_a_traced_run_saves_beside_its_steps_and_goes_on(tmp_path: Path) -> None:
    """Checks that a run with data workers can trace, save in the background, and be resumed.

    This is the only test in this folder whose jobs use fused kernels. Its time limit is long enough
    for torch to compile them.
    """
    whole, resumed = tmp_path / "whole.txt", tmp_path / "resumed.txt"
    common = f"--train-iters {ITERATIONS}"
    saving = f"{common} --save saved --save-interval {SAVED} --async-save --trace-dir traces"
    script = ROOT / "pretrain_gpt.py"
    torchrun(script, trainer_flags(saving, is_fused=True), world_size=2, log=whole, limit_s=LIMIT_S)
    expected = losses_in(whole)
    assert sorted(expected) == [*range(1, ITERATIONS + 1)]
    run = read_run(tmp_path / "traces")
    assert run.complete_iterations() == (*range(1, ITERATIONS + 1),)
    for trace in run.ranks.values():
        table = trace.table([2])
        for kind in ("F", "B", "optimizer", "step"):
            assert table.where(kind).any(), kind
    loading = f"{common} --load saved --ckpt-step {SAVED}"
    torchrun(
        script, trainer_flags(loading, is_fused=True), world_size=2, log=resumed, limit_s=LIMIT_S
    )
    later = {number: loss for number, loss in expected.items() if number > SAVED}
    assert losses_in(resumed) == pytest.approx(later, rel=1e-4)
