"""Casts recorded tensors to the dtypes that they would have on the device of the stages.

A model may be recorded on a CPU even if its stages run on GPUs. Autocast treats some operations
differently on CPUs and GPUs. For example, ``layer_norm``, ``softmax`` and ``pow`` of bfloat16
tensors return float32 on a GPU, and bfloat16 on a CPU. The sizes of messages between stages are
computed from the recorded dtypes, so the recorded dtypes must be those of the GPU::

    call on the CPU                  ──> result ──cast──> result for the model and the tape
    same call on fakes of the GPU    ──> dtypes ────┘

A fake (torch's ``FakeTensor``) has a shape, a dtype and a device, but no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.node import map_aggregate

from megatron.adaptive.accelerator import current_device
from megatron.adaptive.modules.host_memory import copied


@contextlib.contextmanager
def autocast_for_recording(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Turns on autocast for ``device`` and for the device that runs the stages.

    The model's code may still turn autocast off for either device.

    Args:
        device: Device on which the model is recorded.
        dtype: Dtype of matmuls; ``None`` leaves autocast unchanged.
    """
    if dtype is None:
        yield
        return
    with _autocast_set_to(current_device().type, dtype), torch.autocast(device.type, dtype=dtype):
        yield


@contextlib.contextmanager
def _autocast_set_to(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Turns autocast on or off for a type of device, even if the machine has no such device.

    Args:
        device_type: Type of device, such as ``cuda``.
        dtype: Dtype of matmuls; ``None`` turns autocast off.
    """
    was_enabled = torch.is_autocast_enabled(device_type)
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, was_enabled)
        torch.set_autocast_dtype(device_type, before)


class RecordedAutocast:
    """Determines the autocast setting of recorded calls, and the dtypes of their results.

    Args:
        device: Device on which the model is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._target = current_device()
        self._types = tuple(dict.fromkeys((device.type, self._target.type)))
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def dtype(self, ambient: torch.dtype | None) -> torch.dtype | None:
        """Returns the current autocast dtype, or ``None`` if autocast is off.

        The model may be recorded on one device while its stages run on another. If the model's code
        has changed autocast for only one of the two devices, the changed dtype is returned.

        Args:
            ambient: Autocast dtype of the surrounding context; ``None`` if autocast is off there.
        """
        for device_type in self._types:
            is_enabled = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if is_enabled else None
            if dtype != ambient:
                return dtype
        return ambient

    def adapt(
        self,
        run: Any,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        result: Any,
        ambient: torch.dtype | None,
    ) -> Any:
        """Casts the result of a call to the dtypes that it would have on the stages' device.

        Args:
            run: Function that was called.
            arguments: Positional and keyword arguments of the call.
            result: Result of the call.
            ambient: Autocast dtype of the surrounding context; ``None`` if autocast is off there.
        """
        dtype = self.dtype(ambient)
        if len(self._types) == 1 or (dtype is None and ambient is None):
            return result
        tensors = _tensors_in(result)
        # If the call returns one of its arguments, do not cast it, because it already has the right
        # dtype.
        argument_ids = {id(tensor) for tensor in _tensors_in(arguments)}
        made = {id(tensor) for tensor in tensors if tensor.is_floating_point()} - argument_ids
        dtypes = self._dtypes(run, arguments, dtype) if made else []
        if len(dtypes) != len(tensors):
            return result
        new_dtypes = {
            id(tensor): expected
            for tensor, expected in zip(tensors, dtypes, strict=True)
            if id(tensor) in made and expected.is_floating_point and tensor.dtype != expected
        }
        if not new_dtypes:
            return result

        def cast(part: Any) -> Any:
            return part.to(new_dtypes[id(part)]) if id(part) in new_dtypes else part

        return map_aggregate(result, cast)

    def _dtypes(
        self,
        run: Any,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        dtype: torch.dtype | None,
    ) -> list[torch.dtype]:
        """Returns the dtypes of the tensors that a call returns on the device of the stages.

        Returns an empty list if the call does not accept fakes, for example because it reads the
        values of tensors or calls another library.

        Args:
            run: Function to call.
            arguments: Positional and keyword arguments of the call.
            dtype: Autocast dtype; ``None`` if autocast is off.
        """
        with (
            unset_fake_temporarily(),
            self._mode,
            torch.no_grad(),
            _autocast_set_to(self._target.type, dtype),
        ):
            try:
                fakes: Any = map_aggregate(arguments, self._fake)
                return [tensor.dtype for tensor in _tensors_in(run(*fakes[0], **fakes[1]))]
            except Exception:
                # A call on fake tensors may raise any error. In this case, the result keeps its
                # recorded dtype, and the stage checks this dtype when it sends the tensor in a
                # message.
                return []

    def _fake(self, part: Any) -> Any:
        """Returns a fake on the device of the stages if ``part`` is a tensor, otherwise ``part``.

        Lists and arrays are copied, because the call may change them.
        """
        if not isinstance(part, torch.Tensor):
            return copied(part)
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=self._target)


def _tensors_in(structure: Any) -> list[torch.Tensor]:
    """Returns the tensors in ``structure`` in order. ``structure`` may be a nested container."""
    tensors: list[torch.Tensor] = []

    def collect(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        return part

    map_aggregate(structure, collect)
    return tensors
