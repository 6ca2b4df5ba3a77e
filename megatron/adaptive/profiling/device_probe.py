"""Briefly measures the device of a rank: its matmuls, memory, copies and clock rate."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.profiling.action_timing import now
from megatron.adaptive.profiling.probe_findings import (
    CLOCK,
    FROM_DEVICE,
    MATRIX_PRODUCT,
    MEMORY,
    TO_DEVICE,
    Figure,
)
from megatron.adaptive.profiling.probe_layout import Ranks

_CPU_WIDTH = 384
_GPU_WIDTH = 4096
_CPU_BYTES = 16 << 20
_GPU_BYTES = 128 << 20
_COPIED_BYTES = 32 << 20
_LEAST_REPEATS = 3
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FOLDER = Path("/sys/devices/system/cpu")


def measure_device(accelerator: Accelerator, ranks: Ranks, seconds: float) -> list[Figure]:
    """Measures the device of this process for about ``seconds`` per quantity.

    Args:
        accelerator: Device of this process.
        ranks: Tuple that contains only the global rank of this process. It is stored in the
            results.
        seconds: Minimum duration of each measurement in seconds.

    Returns:
        Measurements of the device. Some are missing if a GPU has too little free memory.
    """
    device = accelerator.device
    gpu = known_gpu(accelerator.name) if device.type == "cuda" else None
    shared = accelerator.is_shared
    sheet = {} if gpu is None or shared else {"flops": gpu.flops.get("bf16", 0.0)}
    width = _GPU_WIDTH if device.type == "cuda" else _CPU_WIDTH
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peers = accelerator.name
    figures = []

    def add(measure: str, amount: float, call: Callable[[], Any], sheet: float = 0.0) -> None:
        value = amount / _mean_s(call, device, seconds)
        figures.append(Figure(measure=measure, ranks=ranks, peers=peers, value=value, sheet=sheet))

    try:
        left = torch.full((width, width), 1 / width, dtype=dtype, device=device)
        product = torch.empty_like(left)
        add(
            MATRIX_PRODUCT,
            2.0 * width**3,
            lambda: torch.mm(left, left, out=product),
            sheet.get("flops", 0.0),
        )
        clock_hz, most_hz = _clock_hz(device)
        size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        speed = 0.0 if gpu is None or shared else gpu.memory_bytes_per_s
        # Count the copied bytes twice, because each byte is read and written.
        add(MEMORY, 2.0 * size, lambda: target.copy_(source), speed)
        if device.type == "cuda":
            # torch caches pinned memory for later tensors, so allocate only a small tensor.
            host = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
            part = target[:_COPIED_BYTES]
            add(TO_DEVICE, float(len(host)), lambda: part.copy_(host, non_blocking=True))
            add(FROM_DEVICE, float(len(host)), lambda: host.copy_(part, non_blocking=True))
    except torch.cuda.OutOfMemoryError:
        return figures  # During training, a GPU may have too little free memory for the probe.
    if clock_hz:
        figures.append(
            Figure(measure=CLOCK, ranks=ranks, peers=peers, value=clock_hz, sheet=most_hz)
        )
    return figures


def _mean_s(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Calls ``call`` repeatedly for about ``seconds``, and returns the mean time in seconds.

    The median would hide the effect of CPU quotas and of other programs. Both may interrupt a
    process for some milliseconds, which is often longer than a call takes.
    """
    call()
    count = 0
    begin_s = end_s = now(device)
    while count < _LEAST_REPEATS or end_s - begin_s < seconds:
        call()
        count += 1
        end_s = now(device)
    return max((end_s - begin_s) / count, 1e-9)


def _clock_hz(device: torch.device) -> tuple[float, float]:
    """Returns the current and the maximum clock rate of ``device`` in Hz, or 0 if unknown."""
    if device.type == "cuda":
        try:
            return torch.cuda.clock_rate(device) * 1e6, 0.0
        except Exception:
            # torch reads the clock rate through NVML. The NVML package is optional and has its own
            # error types.
            return 0.0, 0.0
    try:
        cpu = min(os.sched_getaffinity(0))
        folder = _CPU_FOLDER / f"cpu{cpu}" / "cpufreq"
        present, most = (
            int((folder / name).read_text()) * 1e3
            for name in ("scaling_cur_freq", "cpuinfo_max_freq")
        )
    except (OSError, ValueError):
        return _listed_clock_hz(), 0.0
    return present, most


def _listed_clock_hz() -> float:
    """Returns the mean frequency in ``/proc/cpuinfo`` in Hz, or 0 if the file has no frequency."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
        listed = [float(line.rpartition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return 0.0
    return statistics.fmean(listed) * 1e6 if listed else 0.0
