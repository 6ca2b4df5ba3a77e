"""Tests that flags for newly added settings of megatron-core set the values in its classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.megatron_core_flags import CoreConfig
from megatron.adaptive.config.unsupported_flags import NEWER

from ..training.test_releases import path_of

PROGRAM = Path(__file__).with_name("newer_settings.py")
INSTALLED = {name for spec in fields_of(CoreConfig) for name in spec.names}
# These flags must set a value in a class of megatron-core, at least with these releases.
ARRIVE = {
    "0.17.1": {"--mtp-use-repeated-layer", "--moe-router-force-biased", "--mla-down-proj-fusion"},
    "0.19.2": {
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "--flash-attention-version",
        "--grad-norm-skip-threshold",
        "--high-priority-a2a-comm-stream",
        "--mla-down-proj-fusion",
        "--moe-flex-dispatcher-num-sms",
        "--moe-router-force-biased",
        "--moe-router-quantile-balancing-ema",
        "--moe-shared-expert-glu-interleave-size",
        "--mtp-detach-heads",
        "--mtp-use-repeated-layer",
        "--use-grouped-gemm-for-shared-expert",
    },
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("release", ARRIVE)
def test_what_a_release_adds_reaches_its_classes_or_is_refused_by_name(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PYTHONPATH": path_of(release), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    # Each flag that a release adds must be in ``NEWER``. Otherwise, users could not set it.
    assert set(seen["flags"]) - INSTALLED <= set(NEWER)
    answers = seen["answers"]
    for flag, answer in answers.items():
        if "refused" in answer:
            name = flag.removeprefix("--")
            assert name in answer["refused"] or name.replace("-", "_") in answer["refused"]
            assert "\n" not in answer["refused"]
        else:
            assert answer["has"] == answer["given"], flag
    arrived = {flag for flag, answer in answers.items() if "has" in answer}
    assert arrived >= ARRIVE[release]
