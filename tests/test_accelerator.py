"""The device of a process, and one canary for each substitution that stands in for CUDA.

A canary does the thing in megatron-core that needs its substitution. It must work with all of them
and fail with all but its own; so a new release of torch or megatron-core says what it changed.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.accelerator import Accelerator, CpuClock, CudaClock, detect
from megatron.adaptive.errors import SetupError

ROOT = Path(__file__).resolve().parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA needs no substitute")

# Runs in processes of its own, forked where torch is loaded and nothing else: megatron-core must be
# imported after the substitutions, or before them, and only once for it takes seconds.
EXPERIMENTS = """
import importlib, json, os, sys, tempfile, traceback, warnings
warnings.simplefilter("ignore")
import torch
from megatron.adaptive import accelerator

def current_device():
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    return str(ChainedOptimizer([]).get_loss_scale().device)

def synchronize():
    import torch.distributed as dist
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    channel = P2PCommunicator(dist.group.WORLD, config)
    try:
        return channel._communicate_shapes(None, None, False, False) is not None
    finally:
        dist.destroy_process_group()

def streams():
    from megatron.core.pipeline_parallel import utils
    utils._COMP_STREAM = utils._COMM_STREAM = None
    utils.set_streams()
    with torch.cuda.stream(utils.get_comm_stream()):
        utils.get_comm_stream().wait_stream(utils.get_comp_stream())
    utils.get_comm_stream().record_event().synchronize()
    return True

def factories():
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler
    return str(ConstantGradScaler(8.0).scale.device)

def tensor_moves():
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 10, 2)
    state = scaler.state_dict()
    state["scale"] = torch.tensor([4.0])
    scaler.load_state_dict(state)
    return [float(scaler.scale), str(torch.nn.Linear(1, 1).cuda().weight.device)]

def tensor_type():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    half, full = (torch.nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.bfloat16, torch.float))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([half, full], lr=0.1), OptimizerConfig(bf16=True), None, lambda *_: None
    )
    kinds = optimizer.float16_groups, optimizer.fp32_from_fp32_groups
    return [[len(group) for group in kind] for kind in kinds]

def random_state():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 5)
    drawn = []
    for _ in range(2):
        with tracker.fork("mine"):
            drawn.append(float(torch.rand(())))
    drawn.append(float(torch.rand(())))
    expected = []
    for seed, count in ((5, 2), (1, 1)):
        generator = torch.Generator().manual_seed(seed)
        expected += [float(torch.rand((), generator=generator)) for _ in range(count)]
    return drawn == expected

def compiler():
    def fused(): pass
    fused.__module__ = "megatron.core.fusions.fused_softmax"
    torch.compile(fused)
    torch.compile(dynamic=True)(fused)
    if "torch._dynamo" in sys.modules:
        raise RuntimeError("the compiler is loaded")

def grouped_products():
    from megatron.core.transformer.moe import grouped_gemm_util
    grouped = importlib.reload(grouped_gemm_util)
    grouped.assert_grouped_gemm_is_available()
    matrices = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    return grouped.ops.gmm(torch.ones(3, 2), matrices, torch.tensor([1, 2])).tolist()

def between_two(function):
    import torch.distributed as dist
    name = tempfile.mktemp()
    child = os.fork()
    try:
        store = dist.FileStore(name, 2)
        dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
        return function(dist.group.WORLD)
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        dist.destroy_process_group()

def exchanged_parts():
    from megatron.core.tensor_parallel.mappings import all_to_all
    def exchange(group):
        # 1 and 2 rows of the first rank, 2 and 1 of the second.
        sizes = torch.tensor([1, 2] if group.rank() == 0 else [2, 1])
        given = torch.full((3,), float(group.rank()))
        return all_to_all(group, given, sizes, sizes).tolist()
    return between_two(exchange)

def unequal_parts():
    from megatron.core.tensor_parallel import mappings
    def there_and_back(group):
        own = torch.full((group.rank() + 1, 1), float(group.rank() + 1), requires_grad=True)
        whole = mappings.gather_from_sequence_parallel_region(
            own, group=group, output_split_sizes=[1, 2]
        )
        whole.sum().backward()
        return whole.flatten().tolist() + own.grad.flatten().tolist()
    return between_two(there_and_back)

# The compiler comes first: optimizers load it too.
CANARIES = [
    compiler, current_device, synchronize, streams, factories, tensor_moves, tensor_type,
    random_state, grouped_products, exchanged_parts, unequal_parts,
]

class Loaded: pass
loaded = Loaded()
loaded.__dict__ = sys.modules
OWNERS = [
    torch, torch.cuda, torch.cuda.random, torch.distributed, torch.Tensor, torch.nn.Module, loaded
]
undo = {}

def remember(name):
    substitute = getattr(accelerator, name)

    def run():
        before = [dict(vars(owner)) for owner in OWNERS]
        substitute()
        undo[name] = [
            (owner, attribute, old.get(attribute), value)
            for owner, old in zip(OWNERS, before)
            for attribute, value in dict(vars(owner)).items()
            if old.get(attribute) is not value
        ]

    setattr(accelerator, name, run)

def answer_of(function):
    try:
        return {"value": function()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

def shared():
    # Names of substitutes that are the same object as something else in torch.
    changes = [change for some in undo.values() for change in some if change[0] is not loaded]
    held = [
        (owner, attribute, value)
        for owner in OWNERS[:-1]
        for attribute, value in vars(owner).items()
        if callable(value)
    ]
    originals = {(owner, attribute): old for owner, attribute, old, new in changes}
    return [
        f"{owner.__name__}.{attribute} is {other.__name__}.{name}"
        for owner, attribute, old, new in changes
        for other, name, value in held
        if value is new and originals.get((other, name), value) is not old
    ]

def late():
    import megatron.core.tensor_parallel
    print(json.dumps(["late", answer_of(accelerator.install)]), flush=True)

def canaries():
    names = [name for name in vars(accelerator) if name.startswith("_substitute_")]
    for name in names:
        remember(name)
    first = accelerator.install(), torch.zeros, torch.cuda.current_device
    import megatron.core.tensor_parallel
    import megatron.core.models.gpt
    again = accelerator.install(), torch.zeros, torch.cuda.current_device
    answers = {"twice": [first[0], first == again], "names": sorted(names)}
    answers["shared"] = shared()
    answers["compiler"] = [name in sys.modules for name in ("torch._dynamo", "torch._inductor")]
    answers["given"] = [
        str(torch.zeros(1, device="cuda:1").device),
        str(torch.ones(1, device=torch.device("cuda", 0)).device),
        str(torch.empty(1, device="meta").device),
        torch.zeros(1).type(),
        str(torch.zeros(1).type(torch.float64).dtype),
        str(accelerator.current_device()),
    ]
    for canary in CANARIES:
        answers[canary.__name__ + " with"] = answer_of(canary)
        changes = undo["_substitute_" + canary.__name__]
        for owner, attribute, old, new in changes:
            if old is None:  # inherited
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, old)
        answers[canary.__name__ + " without"] = answer_of(canary)
        for owner, attribute, old, new in changes:
            setattr(owner, attribute, new)
    for item in answers.items():
        print(json.dumps(item), flush=True)

for function in (late, canaries):
    if os.fork() == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(max(os.wait()[1] for _ in range(2)) >> 8)
"""
# A torch that was built for CUDA complains otherwise than one that was not.
NO_CUDA = (
    "Found no NVIDIA driver"
    if torch.backends.cuda.is_built()
    else "Torch not compiled with CUDA enabled"
)
# What each canary answers, and a part of what it complains of.
CANARIES: dict[str, tuple[Any, str]] = {
    "current_device": ("cpu", NO_CUDA),
    "synchronize": (True, NO_CUDA),
    "streams": (True, NO_CUDA),
    "factories": ("cpu", NO_CUDA),
    "tensor_moves": ([4.0, "cpu"], "must be cuda device"),
    "tensor_type": ([[1], [1]], "Received torch.BFloat16Tensor"),
    "random_state": (True, NO_CUDA),
    "compiler": (None, "the compiler is loaded"),
    "grouped_products": ([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]], "Grouped GEMM is not available"),
    "exchanged_parts": ([0.0, 1.0, 1.0], "incompatible function arguments"),
    "unequal_parts": ([1.0, 2.0, 2.0, 2.0], "invalid tensor size"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What the experiments answered; of a canary ``{"value": ...}`` or ``{"error": text}``."""
    done = subprocess.run(
        [sys.executable, "-c", EXPERIMENTS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@without_gpu
@pytest.mark.parametrize("name", CANARIES)
def test_canary_dies_without_its_substitution_alone(name: str, answers: dict[str, Any]) -> None:
    assert answers[f"{name} with"] == {"value": CANARIES[name][0]}
    answer = answers[f"{name} without"]
    assert CANARIES[name][1] in answer.get("error", "it lives"), answer


@without_gpu
def test_install_after_megatron_core_is_refused(answers: dict[str, Any]) -> None:
    error = answers["late"]["error"]
    assert error.startswith("SetupError: megatron.core was imported before")
    assert "call install() first" in error
    assert len(error.splitlines()) == 1


@without_gpu
def test_only_cuda_is_substituted_and_once(answers: dict[str, Any]) -> None:
    assert answers["names"] == sorted(f"_substitute_{name}" for name in CANARIES)
    assert answers["twice"] == [True, True]
    assert answers["compiler"] == [False, False]  # is not loaded with megatron-core
    # What does not name CUDA goes through untouched.
    assert answers["given"] == (
        ["cpu", "cpu", "meta", "torch.cuda.FloatTensor", "torch.float64", "cpu"]
    )


@without_gpu
def test_no_substitute_is_an_object_that_torch_has_already(answers: dict[str, Any]) -> None:
    """``torch.cuda.manual_seed`` was ``torch.manual_seed`` itself: torch's compiler tells functions
    apart by identity, so torch 2.11 refused to load it ("Duplicate torch object")."""
    assert answers["shared"] == []


@needs_gpu
@pytest.mark.gpu
def test_with_cuda_nothing_is_substituted() -> None:
    assert not accelerator.install()
    assert torch.zeros(1, device="cuda").is_cuda


@without_gpu
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_detect_without_cuda(backend: str | None) -> None:
    found = detect(3, backend=backend)
    assert found == Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU")
    assert not found.is_cuda
    assert isinstance(found.clock(), CpuClock)
    tensor = torch.ones(2)
    assert found.to_device(tensor) is tensor
    found.synchronize()


@without_gpu
def test_nccl_without_cuda_is_refused() -> None:
    with pytest.raises(SetupError, match="--distributed-backend nccl: .* use gloo"):
        detect(0, backend="nccl")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, as far as ``detect`` can see; holds the devices made current."""
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
    found = detect(local_rank)
    assert two_gpus == [found.device] == [torch.device("cuda", index)]
    assert found.backend == backend
    assert found.is_cuda
    assert detect(local_rank, backend="gloo").backend == "gloo"


@without_gpu
def test_threads_make_the_processs_gpu_current(two_gpus: list[torch.device]) -> None:
    """A new thread's current device is GPU 0, whichever the process computes on."""
    gpu = torch.device("cuda", 1)
    threads = [
        threading.Thread(target=call, args=given)
        for call, *given in (
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
    # Not from the heap, which may hold as much that is free.
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(1) * len(block))
    after = cpu.memory_in_use_bytes()
    assert after - before > 32 << 20
    # The two are counted by different means, and other threads give memory back in between.
    assert cpu.peak_memory_bytes() - before > 32 << 20
    block.close()


def test_cpu_clock_is_the_monotonic_one() -> None:
    clock = CpuClock()
    before = time.monotonic_ns()
    mark = clock.mark()
    clock.wait(mark)
    assert before <= clock.resolve_ns(mark) <= time.monotonic_ns()


class MadeUpDevice:
    """A device whose clock drifts from the host's; it passes a mark some time after it was put."""

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
        # The first mark of a step finds the device idle, later ones queue up.
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
