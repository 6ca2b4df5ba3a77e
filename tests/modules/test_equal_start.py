"""Tests the checksums by which processes compare their parameters and buffers."""

from __future__ import annotations

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.modules.equal_start import _checksum  # noqa: E402

TENSORS = {
    "scalar": torch.tensor(3),
    "odd": torch.randn(5),
    "half": torch.randn(5).half(),
    "transposed": torch.randn(7, 3).t(),
    "unaligned": torch.randn(9)[1:],
    "bool": torch.arange(5) > 2,
    "complex": torch.randn(4, dtype=torch.complex64).conj(),
    "large": torch.randn(3000, 101).bfloat16(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_checksum_depends_on_each_value(tensor: torch.Tensor) -> None:
    checksum = _checksum(tensor)
    assert checksum == _checksum(tensor.clone())
    for index in (0, -1):
        changed = tensor.resolve_conj().contiguous().clone()
        flat = changed.view(-1)
        flat[index] = ~flat[index] if flat.dtype == torch.bool else flat[index] + 1
        assert _checksum(changed) != checksum


@pytest.mark.parametrize("count", [8, 300_000])
def test_a_checksum_depends_on_the_order(count: int) -> None:
    numbers = torch.arange(count)
    assert _checksum(numbers) != _checksum(numbers.flip(0))
    assert _checksum(numbers) == _checksum(numbers.flip(0).flip(0))


def test_a_tensor_without_elements_has_a_checksum() -> None:
    assert _checksum(torch.empty(0)) == _checksum(torch.empty(0, 3))
