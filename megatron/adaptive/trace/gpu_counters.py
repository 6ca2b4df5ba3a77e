"""Counts events that slow down a rank's GPU: power limits, heat, errors and other processes.

The counters are read through NVML, which requires the package ``nvidia-ml-py`` and NVIDIA's driver.
If either is missing, nothing is counted.
"""

from __future__ import annotations

import os
import time
from typing import Any

GPU_POWER_LIMITED = "gpu_power_limited_ns"
"""Name of the counter for the time in ns during which a power limit lowered the GPU's clock."""

GPU_HOT = "gpu_hot_ns"
"""Name of the counter for the time in ns during which heat lowered the GPU's clock."""

GPU_ERRORS = "gpu_memory_errors"
"""Name of the counter for uncorrectable errors in the GPU's memory (ECC)."""

GPU_REPLAYS = "gpu_pcie_replays"
"""Name of the counter for PCIe packets that the GPU retransmitted."""

GPU_CLOCK = "gpu_clock_mhz"
"""Name of the counter for the current clock rate of the GPU's multiprocessors in MHz."""

GPU_FULL_CLOCK = "gpu_full_clock_mhz"
"""Name of the counter for the maximum clock rate of the GPU's multiprocessors in MHz."""

GPU_CELSIUS = "gpu_celsius"
"""Name of the counter for the GPU's temperature in degrees Celsius."""

GPU_WATTS = "gpu_watts"
"""Name of the counter for the GPU's power consumption in watts."""

GPU_OTHERS = "gpu_others"
"""Name of the counter for processes outside the job that compute on the GPU."""

GPU_COUNTERS = (
    GPU_POWER_LIMITED,
    GPU_HOT,
    GPU_ERRORS,
    GPU_REPLAYS,
    GPU_CLOCK,
    GPU_FULL_CLOCK,
    GPU_CELSIUS,
    GPU_WATTS,
    GPU_OTHERS,
)
"""Names of all counters of a GPU."""

_SUMS = GPU_COUNTERS[:4]
_EVERY_S = 1.0
"""Minimum time in seconds between two readings, because a reading takes about a millisecond."""
_MILLI = 1000


class GpuCounters:
    """Reads the counters of one GPU. All methods must be called from the same thread.

    Args:
        uuid: ID of the GPU, as in ``nvidia-smi -L``; empty if there is no GPU.
        ranks: Number of ranks of the job that share the GPU.

    Attributes:
        why_not: Reason why nothing can be counted; empty if counting works or if there is no GPU.
        missing: Names of the counters that this GPU or this version of NVML does not provide.
    """

    def __init__(self, uuid: str, ranks: int = 1) -> None:
        self.why_not = ""
        self.missing: tuple[str, ...] = ()
        self._ranks = ranks
        self._nvml: Any = None
        self._values: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        self._read_s = 0.0
        if not uuid:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except ImportError:
            self.why_not = "the package nvidia-ml-py is missing"
        # NVML raises an error if, for example, there is no driver or no permission.
        except Exception as error:
            self.why_not = f"NVML cannot be initialized: {error}"
        else:
            self._nvml = pynvml
            self._read()
            self.missing = tuple(name for name in GPU_COUNTERS if name not in self._values)

    def begin(self) -> None:
        """Makes the latest reading the starting point of the counts that :meth:`end` returns."""
        self._begun = dict(self._values)

    def end(self) -> dict[str, int]:
        """Returns the counts since :meth:`begin`, and the current values of all other counters.

        The other counters are the clock rates, the temperature, the power and the number of other
        processes. The GPU is read at most once a second. Between two readings, counts are 0 and the
        other values stay the same.
        """
        if self._nvml is None:
            return {}
        if time.monotonic() - self._read_s >= _EVERY_S:
            self._read()
        return {
            name: max(0, value - self._begun.get(name, value)) if name in _SUMS else value
            for name, value in self._values.items()
        }

    def _read(self) -> None:
        nvml, device = self._nvml, self._device
        readers = {
            GPU_POWER_LIMITED: lambda: self._held_back_ns(nvml.NVML_PERF_POLICY_POWER),
            GPU_HOT: lambda: self._held_back_ns(nvml.NVML_PERF_POLICY_THERMAL),
            GPU_ERRORS: lambda: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            GPU_REPLAYS: lambda: nvml.nvmlDeviceGetPcieReplayCounter(device),
            GPU_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            GPU_FULL_CLOCK: lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
            GPU_CELSIUS: lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            GPU_WATTS: lambda: nvml.nvmlDeviceGetPowerUsage(device) // _MILLI,
            GPU_OTHERS: self._others,
        }
        for name, read in readers.items():
            if name in self.missing:
                continue
            try:
                self._values[name] = int(read())
            except Exception:  # The GPU or this version of NVML does not provide the counter.
                self._values.pop(name, None)
        self._read_s = time.monotonic()

    def _held_back_ns(self, policy: int) -> int:
        return int(self._nvml.nvmlDeviceGetViolationStatus(self._device, policy).violationTime)

    def _others(self) -> int:
        """Returns the number of processes outside the job that use the GPU.

        Processes are counted without comparing their IDs with the process IDs of the ranks, because
        in a container, NVML may report IDs of another namespace.
        """
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        others = [process for process in running if int(process.pid) != os.getpid()]
        return max(0, min(len(others), len(running) - 1) - (self._ranks - 1))
