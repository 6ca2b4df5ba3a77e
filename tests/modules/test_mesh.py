"""Tests how processes join a job, once or several times in the same processes."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import device_collectives
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.modules import mesh

from ..multiprocess.launch import torchrun

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("joining.py")
RANKS, TIMES, LIMIT_S = 2, 8, 60.0


@pytest.mark.parametrize("store", ["True", "False"])
def test_a_job_can_begin_anew_after_its_end(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that ranks do not use addresses of a previous job in the launcher's store."""
    monkeypatch.setenv("AGENT_STORE", store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("OTHER_PORT", str(taken.getsockname()[1]))
    torchrun(SCRIPT, [str(TIMES)], world_size=RANKS, log=tmp_path / "output.txt", limit_s=LIMIT_S)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_gpu_that_a_rank_has_alone_is_known_in_process_groups_of_the_user(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a rank does not assume that all ranks share the only GPU that it sees.

    This also holds if the user has initialized torch.distributed. The backend is the user's.
    """
    gpu = Accelerator(device=torch.device("cuda", 0), backend="gloo", name="GPU", shares=8)
    calls: list[bool] = []
    monkeypatch.setattr(mesh, "detect", lambda local_rank: gpu)
    monkeypatch.setattr(device_collectives, "install", lambda: calls.append(True))
    monkeypatch.setattr(dist, "get_backend_config", lambda: f"cpu:gloo,cuda:{backend}")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            job = mesh.join_job(20.0)
            assert (job.accelerator.shares, job.accelerator.backend) == (1, backend)
            job.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert bool(calls) is (backend == "gloo")
