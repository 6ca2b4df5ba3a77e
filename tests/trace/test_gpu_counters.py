"""Tests that GPU counters are read from NVML, and that unavailable counters are omitted.

The tests need no GPU, because a fake module provides the functions and constants of NVML.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron.adaptive.trace import gpu_counters
from megatron.adaptive.trace.gpu_counters import (
    GPU_CLOCK,
    GPU_ERRORS,
    GPU_HOT,
    GPU_OTHERS,
    GPU_POWER_LIMITED,
    GPU_WATTS,
    GpuCounters,
)
from megatron.adaptive.trace.machine_counters import MachineCounters


class Nvml(ModuleType):
    """Replaces the module ``pynvml`` of the package nvidia-ml-py."""

    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.limited_ns = [100, 50]
        self.running = [os.getpid(), 7, 8]
        self.failure = ""

    def nvmlInit(self) -> None:  # noqa: N802 - a name of NVML
        if self.failure:
            raise RuntimeError(self.failure)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - a name of NVML
        return uuid

    def nvmlDeviceGetViolationStatus(self, device: str, policy: int) -> SimpleNamespace:  # noqa: N802 - a name of NVML
        return SimpleNamespace(violationTime=self.limited_ns[policy])

    def nvmlDeviceGetTotalEccErrors(self, device: str, kind: int, counter: int) -> int:  # noqa: N802 - a name of NVML
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetClockInfo(self, device: str, kind: int) -> int:  # noqa: N802 - a name of NVML
        return 1200

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:  # noqa: N802 - a name of NVML
        return 650_300

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> list[SimpleNamespace]:  # noqa: N802 - a name of NVML
        return [SimpleNamespace(pid=pid) for pid in self.running]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpu_counters, "_EVERY_S", 0.0)
    return module


def test_sums_are_differences_and_gauges_are_not(nvml: Nvml) -> None:
    counters = GpuCounters("GPU-1", ranks=2)
    counters.begin()
    nvml.limited_ns = [400, 50]
    counts = counters.end()
    assert (counts[GPU_POWER_LIMITED], counts[GPU_HOT]) == (300, 0)
    assert (counts[GPU_CLOCK], counts[GPU_WATTS]) == (1200, 650)
    # Three processes use the GPU. Two of these are ranks of this job, so only one other process is
    # counted.
    assert counts[GPU_OTHERS] == 1
    assert GPU_ERRORS not in counts


def test_what_a_gpu_or_a_version_of_nvml_lacks_is_named(nvml: Nvml) -> None:
    missing = GpuCounters("GPU-1").missing
    assert GPU_ERRORS in missing  # The fake GPU does not support this counter.
    assert "gpu_celsius" in missing  # The fake version of NVML has no function for this counter.
    assert GPU_CLOCK not in missing


def test_without_a_driver_or_the_package_the_reason_is_named(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.failure = "Driver Not Loaded"
    counters = MachineCounters("GPU-1")
    assert (
        "all counters of the GPU (NVML cannot be initialized: Driver Not Loaded)"
        in counters.missing
    )
    counters.close()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuCounters("GPU-1").why_not == "the package nvidia-ml-py is missing"
    assert GpuCounters("GPU-1").end() == {}
    assert GpuCounters("").why_not == ""
