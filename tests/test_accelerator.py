"""Tests how a process selects its device, and how memory and time are measured on devices."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator, device_collectives
from megatron.adaptive.accelerator import Accelerator, CpuClock, CudaClock, agree_on_sharing, detect
from megatron.adaptive.errors import SetupError

ROOT = Path(__file__).resolve().parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA needs no substitute")


@without_gpu
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_detect_without_cuda(backend: str | None) -> None:
    detected = detect(3, backend=backend)
    assert detected == Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU")
    assert not detected.is_cuda
    assert isinstance(detected.clock(), CpuClock)
    tensor = torch.ones(2)
    assert detected.to_device(tensor) is tensor
    detected.synchronize()


@without_gpu
def test_nccl_without_cuda_is_refused() -> None:
    # If torch was built with CUDA, only the driver is missing, so the error suggests nvidia-smi.
    # Otherwise, the user needs another build of torch.
    remedy = "nvidia-smi" if torch.backends.cuda.is_built() else "use gloo"
    with pytest.raises(SetupError, match=f"--distributed-backend nccl: .*{remedy}"):
        detect(0, backend="nccl")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Simulates two GPUs. Returns a list that records each device that becomes current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    return current


@pytest.mark.parametrize(
    ("local_rank", "ranks", "index", "backend"),
    [(0, "2", 0, "nccl"), (1, "2", 1, "nccl"), (3, "4", 1, "gloo"), (2, "3", 0, "gloo")],
)
def test_ranks_share_gpus_in_turn(
    local_rank: int,
    ranks: str,
    index: int,
    backend: str,
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    detected = detect(local_rank)
    assert two_gpus == [detected.device] == [torch.device("cuda", index)]
    assert detected.backend == backend
    assert detected.is_cuda
    assert detect(local_rank, backend="gloo").backend == "gloo"


@without_gpu
def test_threads_make_the_processs_gpu_current(two_gpus: list[torch.device]) -> None:
    """Checks that a new thread, whose current device is GPU 0, can switch to the rank's GPU."""
    gpu = torch.device("cuda", 1)
    threads = [
        threading.Thread(target=call, args=arguments)
        for call, *arguments in (
            (Accelerator(device=gpu, backend="nccl", name="GPU").make_current,),
            (accelerator.make_current, gpu),
            (accelerator.make_current, torch.device("cpu")),
        )
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert two_gpus == [gpu, gpu]


def test_memory_of_a_cpu_is_that_of_the_process() -> None:
    cpu = detect(0)
    before = cpu.memory_in_use_bytes()
    # Map new memory. An allocation from the heap could reuse freed memory, so that memory use would
    # not increase.
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(1) * len(block))
    after = cpu.memory_in_use_bytes()
    assert after - before > 32 << 20
    # Allow a margin, because the two values are measured in different ways, and other threads may
    # free memory between the measurements.
    assert cpu.peak_memory_bytes() - before > 32 << 20
    block.close()


@without_gpu
def test_the_peak_of_a_process_is_not_that_of_the_program_that_started_it() -> None:
    """Checks that a child's peak memory does not include its parent's, as ``ru_maxrss`` would."""
    program = (
        "from megatron.adaptive.accelerator import detect; print(detect(0).peak_memory_bytes())"
    )
    large = bytearray(b"x") * (1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 1 << 26 < int(done.stdout) < len(large)


def test_cpu_clock_is_the_monotonic_one() -> None:
    clock = CpuClock()
    before = time.monotonic_ns()
    mark = clock.mark()
    clock.wait(mark)
    assert before <= clock.resolve_ns(mark) <= time.monotonic_ns()


class MadeUpDevice:
    """Simulates a GPU with a drifting clock that executes events later than they are recorded."""

    def __init__(self, drift: float) -> None:
        self.host_ns = 10**12
        self._drift = drift
        self.delay_ns = 0

    def monotonic_ns(self) -> int:
        return self.host_ns

    def event(self, **_: bool) -> MadeUpEvent:
        return MadeUpEvent(self)

    def now_ns(self) -> float:
        return (self.host_ns + self.delay_ns) * (1 + self._drift)


class MadeUpEvent:
    def __init__(self, device: MadeUpDevice) -> None:
        self._device = device
        self.passed_ns = 0.0

    def record(self) -> None:
        self.passed_ns = self._device.now_ns()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: MadeUpEvent) -> float:
        return float(np.float32((other.passed_ns - self.passed_ns) / 1e6))


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_cuda_clock_keeps_with_the_host_for_hours(
    monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    device = MadeUpDevice(drift)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(accelerator.time, "monotonic_ns", device.monotonic_ns)
    clock = CudaClock()
    for step in range(3 * 3600 // 2):
        device.host_ns += 2 * 10**9
        # The device is idle at the first event of a step, so it executes this event immediately. It
        # executes each later event with a longer delay.
        for number in range(4):
            device.host_ns += 3_000_000
            device.delay_ns = 8_000 + number * 40_000_000
            mark = clock.mark()
            expected_ns = device.host_ns + device.delay_ns
            error_ns = abs(clock.resolve_ns(mark) - expected_ns)
            assert error_ns < 250_000, (step, number)


@needs_gpu
@pytest.mark.gpu
def test_cuda_clock_places_events_on_the_host_clock() -> None:
    clock = CudaClock()
    before = time.monotonic_ns()
    first = clock.mark()
    torch.ones(1 << 20, device="cuda").sum()
    second = clock.mark()
    torch.cuda.synchronize()
    after = time.monotonic_ns()
    slack_ns = 5_000_000
    assert before - slack_ns <= clock.resolve_ns(first) <= clock.resolve_ns(second)
    assert clock.resolve_ns(second) <= after + slack_ns


@needs_gpu
@pytest.mark.gpu
def test_cuda_clock_waits_until_the_device_has_passed_a_mark() -> None:
    clock = CudaClock()
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        square = square @ square / 4096
    mark = clock.mark()
    clock.wait(mark)
    assert clock.is_passed(mark)


def agreed(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, asked: str | None = None
) -> list[Accelerator | SetupError]:
    """Runs ``agree_on_sharing`` on one rank per UUID in ``gpus``, and returns all results."""
    current = threading.local()
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(uuid=current.identity),
    )
    monkeypatch.setattr(device_collectives, "install", lambda: None)
    store = dist.HashStore()

    def agree(rank: int) -> Accelerator | SetupError:
        current.identity = gpus[rank]
        here = Accelerator(
            device=torch.device("cuda", 0), backend="gloo", name="GPU", asked_backend=asked
        )
        try:
            return agree_on_sharing(here, store, rank=rank, world_size=len(gpus))
        except SetupError as error:
            return error

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(agree, range(len(gpus))))


def test_ranks_that_see_one_gpu_each_share_it_only_if_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = agreed(["a", "b", "c"], monkeypatch)
    assert [(answer.backend, answer.shares) for answer in apart] == [("nccl", 1)] * 3  # type: ignore[union-attr]
    # All ranks of a job must use the same backend, even a rank that does not share its GPU.
    mixed = agreed(["a", "b", "a"], monkeypatch)
    expected = [("gloo", 2), ("gloo", 1), ("gloo", 2)]
    assert [(answer.backend, answer.shares) for answer in mixed] == expected  # type: ignore[union-attr]


def test_jobs_of_tests_replace_gloos_collectives_if_ranks_share_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the program that trains the models of ``tests/gpu`` replaces gloo's collectives.

    Without the replacements, gloo would read the addresses of GPU tensors as host memory.
    """
    # This import comes first. With a simulated GPU, megatron-core would get no substitutes for
    # CUDA, which later tests of this process need.
    from tests.multiprocess.worker import Meshes

    request.getfixturevalue("two_gpus")
    calls: list[str] = []

    def stop(*arguments: object, **options: object) -> None:
        calls.append("process groups")
        raise InterruptedError

    same = types.SimpleNamespace(uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: same)
    monkeypatch.setattr(device_collectives, "install", lambda: calls.append("replacements"))
    monkeypatch.setattr(dist, "init_process_group", stop)
    store = dist.HashStore()
    dist.PrefixStore("mesh-1", store).set("gpu-of-rank/1", "a")
    environment: Any = types.SimpleNamespace(local_rank=0, rank=0, world_size=2)
    config: Any = None
    with pytest.raises(InterruptedError):
        Meshes(store, environment)._set_up(config)
    assert calls == ["replacements", "process groups"]


def test_nccl_on_a_shared_gpu_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = agreed(["a", "b", "a"], monkeypatch, "nccl")
    assert {str(answer) for answer in refused} == {
        "--distributed-backend nccl: ranks 0, 2 share a GPU, but NCCL does not support two "
        "ranks on one GPU; start 2 ranks, or remove the flag, or use gloo, which "
        "allows ranks to share a GPU"
    }
    assert all(answer.backend == "nccl" for answer in agreed(["a", "b"], monkeypatch, "nccl"))  # type: ignore[union-attr]


def test_imports_are_no_longer_frozen_at_exit() -> None:
    """Checks the state in which libraries such as triton look for objects that were not freed."""
    code = (
        "import atexit, gc\n"
        "from megatron.adaptive import accelerator\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "accelerator.freeze_imports()\n"
        "print(gc.get_freeze_count() > 1000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["True", "0"]
