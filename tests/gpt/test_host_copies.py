"""Tests that forward passes on a GPU copy no pageable host memory, because the host would wait.

The device ``meta`` stands for the GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.accelerator import Accelerator  # noqa: E402
from megatron.adaptive.config.sequence_slices import DocumentPart  # noqa: E402
from megatron.adaptive.gpt import attention  # noqa: E402
from megatron.adaptive.gpt.attention import LocalAttention  # noqa: E402
from megatron.adaptive.gpt.sequence_slices import SequenceSlices  # noqa: E402

META = torch.device("meta")
GPU = torch.device("cuda", 0)


class HostCopies(TorchFunctionMode):
    """Raises an error if a call copies host memory to the device and waits for the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_meta:
            is_upload = func is torch.Tensor.to and args[0].device.type == "cpu"
            waits = func is torch.tensor or (is_upload and not kwargs.get("non_blocking"))
            assert not waits, f"{func.__name__} copies host memory and waits"
        return result


@pytest.fixture
def packed_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Replaces torch's kernel for packed rows; returns the ends of documents in each call."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def kernel(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        _, _, ends, ends_of_keys, *_ = others
        seen.append((ends, ends_of_keys))
        return query

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    return seen


def layer() -> Any:
    """Returns the attributes of a layer that the tested methods use."""
    return SimpleNamespace(
        _repeated=lambda query, key, value: (key, value), _whole_scale=1.0, _window=None
    )


def test_attention_of_a_row_makes_its_ends_on_the_device(
    packed_rows: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    for device in (META, torch.device("cpu")):
        query, key = (torch.empty(length, 1, 2, 8, device=device) for length in (3, 7))
        with HostCopies():
            for _ in range(2):
                LocalAttention._by_rows(layer(), query, key, key)
    on_meta, again, values, _ = packed_rows
    assert all(ends.is_meta and ends.dtype == torch.int32 for ends in on_meta)
    assert all(first is second for first, second in zip(on_meta, again, strict=True))
    assert [ends.tolist() for ends in values] == [[0, 3], [0, 7]]


def test_attention_of_a_slice_copies_the_ends_of_its_documents_once() -> None:
    seen: list[Any] = []
    attention = SimpleNamespace(_packed=lambda query, key, value, documents: seen.append(documents))
    row = torch.empty(5, 1, 2, 8, device="meta")
    with HostCopies():
        for _ in range(2):
            LocalAttention._row(attention, row, row, row, [2, 3])  # type: ignore[arg-type]
    assert seen[0] is seen[1]
    assert seen[0].cu_seqlens_q.is_meta
    assert seen[0].lengths == (2, 3)


def test_positions_of_a_slice_with_several_documents_are_copied_without_a_wait() -> None:
    slices = SequenceSlices([8])
    slices._pieces = [
        DocumentPart(begin=0, start=2, end=4, close=4),
        DocumentPart(begin=4, start=4, end=8, close=8),
    ]
    with HostCopies():
        picked = slices._pick_positions(None, None, torch.empty(8, 1, 1, 4, device="meta"))
    assert picked.shape == (6, 1, 1, 4)
    on_cpu = SequenceSlices([8])
    on_cpu._pieces = slices._pieces
    assert on_cpu._pick_positions(None, None, torch.arange(8)).tolist() == [2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_host_memory_is_pinned_before_it_is_copied_to_a_gpu(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that non-contiguous memory, a part of each row of a batch, is pinned first."""
    calls: list[tuple[str, Any]] = []

    def empty_like(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(("pinned", options))
        return torch.empty(tensor.shape)

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(("to", (tensor.is_contiguous(), args, options)))
        return tensor

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu = Accelerator(device=GPU, backend="nccl", name="GPU")
    batch = torch.arange(12.0).view(2, 6)
    for tensor in (batch, batch[:, 1:3]):
        assert gpu.to_device(tensor).tolist() == tensor.tolist()
    copies = [("pinned", {"pin_memory": True}), ("to", (True, (GPU,), {"non_blocking": True}))]
    assert calls == [*copies[is_pinned:], *copies]
