"""Tests collectives over gloo with GPU tensors, which are used if several ranks share a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator, device_collectives
from megatron.adaptive.device_collectives import TREATMENTS
from megatron.adaptive.errors import SetupError
from tests.device_tensor import DeviceTensor, on_device, values
from tests.multiprocess.launch import ROOT, torchrun

WORKER = ROOT / "tests" / "device_collectives_worker.py"


@pytest.mark.multiprocess
def test_every_collective_of_a_step_takes_tensors_of_a_gpu(tmp_path: Path) -> None:
    torchrun(WORKER, [], world_size=2, log=tmp_path / "log", limit_s=200.0)


@pytest.fixture
def _group() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.usefixtures("_group")
def test_gloo_itself_refuses_a_coalesced_reduction() -> None:
    """Checks that gloo itself rejects the simulated GPU tensor, like a real GPU tensor."""
    refuse = dist.ProcessGroup.allreduce_coalesced
    refuse = getattr(refuse, "__wrapped__", refuse)
    with pytest.raises(RuntimeError, match="unsupported device type cuda"):
        refuse(dist.group.WORLD, [DeviceTensor(torch.ones(2))])


@pytest.fixture
def _without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the replacements of collectives. Calls of the original methods fail the test."""

    def fail(*_: object) -> None:
        pytest.fail("a group with a single rank called gloo")

    for name in TREATMENTS:
        if "barrier" not in name and hasattr(dist.ProcessGroup, name):
            monkeypatch.setattr(dist.ProcessGroup, name, fail)
    device_collectives.install()


@pytest.mark.usefixtures("_group", "_without_gloo")
def test_a_group_with_a_single_rank_does_not_call_gloo() -> None:
    def tensors(*values_of: list[float]) -> list[torch.Tensor]:
        return [on_device(torch.tensor(row)) for row in values_of]

    (ones, twos, zeros) = tensors([1.0, 1.0], [2.0, 2.0], [0.0, 0.0])
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(ones, op=operation)
    work = dist.all_reduce(ones, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    # Call the group directly, because dist.broadcast asks CUDA for the capability of the GPU.
    dist.group.WORLD.broadcast([ones], dist.BroadcastOptions()).wait()
    dist.reduce(ones, dst=0)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(ones)
        dist.all_reduce(twos)
    manager.wait()
    assert (values(ones), values(twos)) == ([1.0, 1.0], [2.0, 2.0])
    dist.all_gather_into_tensor(zeros, twos)
    assert values(zeros) == [2.0, 2.0]
    dist.reduce_scatter_tensor(zeros, ones)
    assert values(zeros) == [1.0, 1.0]
    (gathered,) = tensors([[0.0, 0.0]])
    dist.all_gather([gathered], twos.reshape(1, 2))
    assert values(gathered) == [[2.0, 2.0]]
    dist.reduce_scatter(zeros, [twos])
    assert values(zeros) == [2.0, 2.0]
    others = tensors([0.0], [0.0])
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, value in zip(others, tensors([3.0], [4.0]), strict=True):
            dist.all_gather_into_tensor(output, value)
    manager.wait()
    assert [values(each) for each in others] == [[3.0], [4.0]]


def test_every_method_of_a_process_group_that_takes_tensors_has_a_treatment() -> None:
    """Checks that ``TREATMENTS`` lists all collectives that the installed torch provides."""
    methods = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("__")
        and re.search(r"gather|reduce|scatter|cast|alltoall|all_to_all|^send$|^recv|barrier", name)
    }
    assert methods <= set(TREATMENTS)


@pytest.mark.parametrize(("other_gpu", "installs"), [("b", False), ("a", True)])
def test_only_ranks_that_share_a_gpu_get_them(
    other_gpu: str, installs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a rank replaces collectives only after it knows that its GPU is shared.

    The rank sees one GPU, and learns from the other rank whether they use the same one.
    """
    calls: list[bool] = []
    monkeypatch.setattr(device_collectives, "install", lambda: calls.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    detected = accelerator.detect(0)
    assert detected.shares == 2
    assert not calls
    store = dist.HashStore()
    store.set("gpu-of-rank/1", other_gpu)
    agreed = accelerator.agree_on_sharing(detected, store, rank=0, world_size=2)
    assert agreed.shares == (2 if installs else 1)
    assert bool(calls) is installs


def _answer(monkeypatch: pytest.MonkeyPatch, why: str, **variables: str) -> None:
    """Simulates a torch with CUDA 13.0 that finds no usable GPU. ``why`` is the error of CUDA."""

    def fail() -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)."
NO_GPU = "No CUDA GPUs are available"


@pytest.mark.parametrize(
    ("why", "visible", "cause", "remedy"),
    [
        (NO_DRIVER, None, "no working NVIDIA driver", "nvidia-smi"),
        (OLD_DRIVER, None, "the NVIDIA driver is older than CUDA 13.0", "update the driver"),
        (NO_GPU, "", "CUDA_VISIBLE_DEVICES is empty", "unset it"),
        (NO_GPU, "7", "CUDA_VISIBLE_DEVICES=7 contains no GPU of this", "unset the variable"),
        (NO_GPU, None, NO_GPU, "nvidia-smi"),
    ],
)
def test_why_there_is_no_gpu_is_one_line_with_a_remedy(
    why: str, visible: str | None, cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer(monkeypatch, why, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    with pytest.raises(SetupError) as caught:
        accelerator.detect(0, backend="nccl")
    text = str(caught.value)
    assert text.startswith("--distributed-backend nccl: ")
    assert cause in text
    assert remedy in text
    assert "\n" not in text


def test_gpus_that_are_named_and_not_there_do_not_become_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _answer(monkeypatch, NO_GPU, CUDA_VISIBLE_DEVICES="7")
    with pytest.raises(SetupError, match="^CUDA_VISIBLE_DEVICES=7: "):
        accelerator.detect(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not accelerator.detect(0).is_cuda


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SetupError, match="built without CUDA; install a torch with CUDA"):
        accelerator.detect(0, backend="nccl")


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SetupError, match="nccl: 2 ranks on this node have 1 GPU, .* at most 1"):
        accelerator.detect(0, backend="nccl")
