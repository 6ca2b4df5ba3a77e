"""Samples what a node's processes use: GPUs by NVML where it is there, else processors and memory.

It appends a line of JSON to ``<node>.gpu`` every few seconds::

    {"unix_s": ..., "gpus": [{"index": 0, "used_percent": 97, "memory_used_bytes": ...,
     "memory_total_bytes": ..., "pids": [...]}], "processes": [{"pid": ..., "cpu_percent": ...,
     "memory_bytes": ...}]}

The last one of a node that ends in good order also has ``"ended": true``: samples that stop without
it tell of a node that vanished.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import IO, Any

import psutil

from megatron.adaptive.cluster.logs import ENDED

__all__ = ["Sampler", "count_gpus", "why_no_gpu_use"]

_PERIOD_S = 5.0


def _nvml() -> Any:
    """Return NVML's bindings, ready, or ``None`` where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: there is nothing to sample
        return None
    return pynvml


def why_no_gpu_use() -> str | None:
    """Return why the use of GPUs cannot be sampled here, ``None`` if it can."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is missing"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return None


def count_gpus(visible: str | None) -> int:
    """Return the number of GPUs that a process may use.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``, ``None`` if it is not set.
    """
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetCount())
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


class Sampler:
    """Samples a process and its descendants until it is closed.

    Args:
        pid: the process.
        path: the file that lines are appended to.
        period_s: time between two samples.
    """

    def __init__(self, pid: int, path: Path, period_s: float = _PERIOD_S) -> None:
        self._pid = pid
        self._path = path
        self._period_s = period_s
        self._known: dict[int, psutil.Process] = {}
        self._nvml = _nvml()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and end. Idempotent."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._path.open("a") as file:
            over = False
            while not over:
                self._write(file, {})
                over = self._done.wait(self._period_s)
            self._write(file, {ENDED: True})

    def _write(self, file: IO[str], more: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the signs of life
            file.write(json.dumps({**self.sample(), **more}) + "\n")
            file.flush()

    def sample(self) -> dict[str, Any]:
        """Return what one line of the file holds."""
        processes = self._processes()
        return {"unix_s": round(time.time(), 1), "gpus": self._gpus(), "processes": processes}

    def _processes(self) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._pid).children(recursive=True):
                process = self._known.setdefault(process.pid, process)
                with contextlib.suppress(psutil.Error):
                    found.append(
                        {
                            "pid": process.pid,
                            "cpu_percent": process.cpu_percent(),
                            "memory_bytes": process.memory_info().rss,
                        }
                    )
        return found

    def _gpus(self) -> list[dict[str, Any]]:
        nvml = self._nvml
        if nvml is None:
            return []
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
                found.append(
                    {
                        "index": index,
                        "used_percent": int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
                        "memory_used_bytes": int(memory.used),
                        "memory_total_bytes": int(memory.total),
                        "pids": [int(one.pid) for one in running],
                    }
                )
        return found
