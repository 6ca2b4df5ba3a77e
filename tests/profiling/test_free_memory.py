"""Tests how much memory a process may use in control groups, on shared GPUs and with other jobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config import control_groups
from megatron.adaptive.profiling import free_memory
from megatron.adaptive.profiling.free_memory import (
    available_host_bytes,
    free_memory_bytes,
    node_facts,
    total_host_bytes,
)

GIB = 1 << 30
CPU = Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU")
V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class Machine:
    """Simulates the files in which Linux reports memory. 80 of 100 GiB are available."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        kib = GIB // 1024
        (self.proc / "meminfo").write_text(
            f"MemTotal: {100 * kib} kB\nMemFree: 1 kB\nMemAvailable: {80 * kib} kB\n"
        )

    def joins(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(
        self, folder: str, files: tuple[str, str], limit: Any, used: int, **stat: int
    ) -> None:
        path = self.groups / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / files[0]).write_text(f"{limit}\n")
        (path / files[1]).write_text(f"{used}\n")
        (path / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(control_groups, "PROC", made.proc)
    monkeypatch.setattr(control_groups, "MOUNTED", made.groups)
    return made


def test_without_groups_ranks_share_what_the_machine_has_available(machine: Machine) -> None:
    assert available_host_bytes() == 80 * GIB
    assert free_memory_bytes(CPU, 4) == 20 * GIB
    assert total_host_bytes() == 100 * GIB


def test_a_container_gets_no_more_than_its_group_leaves(machine: Machine) -> None:
    # The group has a limit of 16 GiB, of which 10 GiB are in use. If ``auto`` or ``--repartition``
    # planned with the machine's 80 GiB, the kernel would kill ranks.
    machine.joins("0::/job")
    machine.group("job", V2, 16 * GIB, 10 * GIB)
    assert free_memory_bytes(CPU, 2) == 3 * GIB
    assert total_host_bytes() == 16 * GIB


@pytest.mark.parametrize(
    ("line", "prefix", "files", "unlimited", "cached"),
    [
        ("0::/slice/job", "", V2, "max", "inactive_file"),
        ("4:cpu,memory:/slice/job", "memory/", V1, 2**63 - 4096, "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_the_tightest_group_on_the_way_to_the_root_counts(
    machine: Machine, line: str, prefix: str, files: tuple[str, str], unlimited: Any, cached: str
) -> None:
    machine.joins("1:cpuset:/elsewhere", line)
    machine.group(f"{prefix}slice/job", files, unlimited, 10 * GIB)
    assert available_host_bytes() == 80 * GIB
    machine.group(f"{prefix}slice", files, 30 * GIB, 28 * GIB)
    assert available_host_bytes() == 2 * GIB
    # The page cache counts as available, because the kernel frees it when memory is needed.
    machine.group(f"{prefix}slice", files, 30 * GIB, 28 * GIB, **{cached: 5 * GIB})
    assert available_host_bytes() == 7 * GIB
    machine.group(f"{prefix}slice", files, 30 * GIB, 31 * GIB)
    assert available_host_bytes() == 0


def test_the_hosts_path_in_a_container_stands_for_the_containers_root(machine: Machine) -> None:
    machine.joins("4:memory:/docker/0123")
    machine.group("memory", V1, 8 * GIB, 6 * GIB)
    assert available_host_bytes() == 2 * GIB


@pytest.mark.parametrize("visible", [1, 8])
@pytest.mark.parametrize("shares", [1, 2])
def test_ranks_that_share_a_gpu_divide_what_others_leave_there(
    monkeypatch: pytest.MonkeyPatch, shares: int, visible: int
) -> None:
    """Checks that the ranks on a GPU divide its free memory, even if each rank sees only this GPU.

    With ``--gpus-per-task``, Slurm shows each rank only its own GPU. Eight ranks on a node with
    eight GPUs must not be mistaken for ranks that share one GPU.
    """
    cuda = SimpleNamespace(
        # The GPU has 80 GiB of memory, of which 30 GiB are free.
        mem_get_info=lambda device: (30 * GIB, 80 * GIB),
        memory_reserved=lambda device: 12 * GIB,
        memory_allocated=lambda device: 10 * GIB,
        device_count=lambda: visible,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    gpu = Accelerator(device=torch.device("cuda", 0), backend="gloo", name="GPU", shares=shares)
    assert free_memory_bytes(gpu, 8) == 30 * GIB // shares + 2 * GIB


@pytest.mark.parametrize(("backend", "channels"), [("nccl", 400_000_000), ("gloo", 0)])
def test_a_profile_counts_the_channels_that_a_job_opens(
    monkeypatch: pytest.MonkeyPatch, backend: str, channels: int
) -> None:
    """Checks that a profile reserves memory for the channels of NCCL."""
    properties = SimpleNamespace(total_memory=80 * GIB)
    cuda = SimpleNamespace(
        mem_get_info=lambda device: (79 * GIB, 80 * GIB),
        memory_reserved=lambda device: 0,
        get_device_properties=lambda device: properties,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    gpu = Accelerator(device=torch.device("cuda", 0), backend=backend, name="GPU")
    assert node_facts(gpu, 1)["context_bytes"] == GIB + channels


def test_nobody_else_asks_for_free_memory() -> None:
    # All other code must call the functions of this module, because they consider control groups
    # and shared GPUs.
    package = Path(free_memory.__file__).parents[1]
    asks = ("mem_get_info", "virtual_memory", "MemAvailable")
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    files = [path for path, text in texts.items() if any(call in text for call in asks)]
    assert files == [Path(free_memory.__file__)]
