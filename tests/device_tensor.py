"""Defines a tensor that appears to be on a GPU, so that gloo can be tested without a GPU.

The tensor uses host memory, so all operators work, but gloo handles it like a real GPU tensor. The
real code of gloo runs, and rejects the tensor if it would reject a GPU tensor. If gloo would copy
data through the host, this class uses the host memory directly, because torch without CUDA cannot
copy. If gloo would pass a device address to a socket, this class raises an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

# These are the names of collectives for which ProcessGroupGloo.cpp copies GPU tensors through the
# host. See megatron.adaptive.device_collectives.
_COPIED = frozenset(
    (
        *("allreduce_", "broadcast_", "reduce_", "gather_", "scatter_", "alltoall_"),
        *("alltoall_base_", "allgather_", "_allgather_base_", "reduce_scatter_"),
        *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    )
)
_BY_ADDRESS = frozenset(
    (
        *("send", "recv_", "recv_any_source_", "allgather_coalesced_"),
        "allgather_into_tensor_coalesced_",
    )
)
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class DeviceTensor(torch.Tensor):
    """Tensor in host memory that claims to be on ``cuda:0``.

    Args:
        host: Tensor on the host. Both tensors share memory.

    Attributes:
        host: Tensor that owns the memory.
    """

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            dtype=host.dtype,
            strides=host.stride(),
            device="cuda:0",
            requires_grad=host.requires_grad,
        )
        made.host = host.detach()
        return made  # type: ignore[no-any-return]

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        """Copies the values of ``source``. It replaces torch's method, which requires CUDA.

        Raises:
            RuntimeError: Autograd would reject the copy, because this tensor is a leaf that
                requires a gradient.
        """
        if torch.is_grad_enabled() and self.requires_grad and self.is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        self.host.copy_(_host(source).detach())
        return self

    def __getitem__(self, index: Any) -> DeviceTensor:  # torch's own method requires CUDA.
        return DeviceTensor(self.host[index])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs operators on host memory, and handles collectives as gloo does for GPU tensors."""
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name not in _COPIED:
            if name in _BY_ADDRESS:
                raise RuntimeError(f"gloo would pass a device address to a socket in {name}")
            return func.redispatch(_CUDA, *args, **kwargs)
        answer = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if func.namespace == "c10d":
            return answer
        if func._schema.is_mutable:
            return args[0]
        goes = kwargs.get("device")
        return answer if goes is not None and goes.type == "cpu" else tree_map(_wrap, answer)


def _wrap(value: Any) -> Any:
    return DeviceTensor(value) if type(value) is torch.Tensor else value


def _host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_device else value


def on_device(host: torch.Tensor) -> torch.Tensor:
    """Returns a copy of ``host`` on the GPU, or a simulated GPU tensor if there is no GPU.

    The result is a leaf of the autograd graph, and requires a gradient if ``host`` does.
    """
    if torch.cuda.is_available():
        return host.detach().cuda().requires_grad_(host.requires_grad)
    return DeviceTensor(host)


def values(tensor: torch.Tensor) -> list[Any]:
    """Returns the values of ``tensor``, which must be a result of :func:`on_device`."""
    return tensor.detach().to("cpu").tolist()  # type: ignore[no-any-return]
