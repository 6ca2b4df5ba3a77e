"""Tests that a job's secrets reach its nodes, and that other users cannot read the secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.cli.submit import batch_script, settings_text
from megatron.adaptive.cluster.conf import make_conf
from megatron.adaptive.errors import ConfigError
from tests.soak import planted_secrets


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_user_finds_no_secret_of_jobs_over_ssh_on_pods_and_of_slurm() -> None:
    result = planted_secrets.measure(1)
    assert result["seen"] == 2
    assert result["found"] == []
    assert result["arrived"] == result["jobs"], result
    assert result["files"] > 20
    assert result["commands"] > 10


def test_a_secret_among_the_options_of_slurm_is_refused_unseen(tmp_path: Path) -> None:
    variables = {"NNODES": "1", "NPROC_PER_NODE": "1", "DEVICE": "cpu", "HF_TOKEN": "hf_abc"}
    conf = make_conf(variables, tmp_path)
    assert "hf_abc" not in batch_script(conf, tmp_path / "s.json") + settings_text(conf)
    flags = "--export=ALL,HF_TOKEN=hf_abc"
    with pytest.raises(ConfigError, match=r"HF_TOKEN=\*\*\*") as caught:
        batch_script(make_conf({**variables, "SLURM_FLAGS": flags}, tmp_path), tmp_path / "s.json")
    assert "hf_abc" not in str(caught.value)
