"""Makes gloo's collectives accept GPU tensors.

Ranks that share a GPU communicate over gloo, because NCCL does not support two ranks on one device.
gloo's collectives handle GPU tensors in one of three ways. Some copy GPU tensors through host
memory, which works. Others reject GPU tensors. The rest treat the addresses of GPU tensors as host
addresses, and send wrong data. :data:`TREATMENTS` lists all collectives, and :func:`install`
replaces those that do not work. In a group with a single rank, collectives skip gloo.

The replaced functions are methods of ``torch.distributed.ProcessGroup``. All functions of
``torch.distributed`` call these methods, so the replacement works regardless of how megatron-core
imports those functions.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_Method = Callable[..., Any]


class _AllWorks:
    """Handle for several collectives that together replace one collective.

    Args:
        works: ``torch.distributed`` handles of the collectives.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *limit: datetime.timedelta) -> bool:
        """Waits until all collectives are complete, for at most ``limit`` per collective."""
        for work in self._works:
            work.wait(*limit)
        return True

    def is_completed(self) -> bool:
        """Returns whether all of the collectives are complete."""
        return all(work.is_completed() for work in self._works)


class _Receive:
    """Handle for receiving a message in host memory. :meth:`wait` copies the message to the GPU.

    Args:
        work: ``torch.distributed`` handle for receiving the message into ``host``.
        host: Tensors in host memory that receive the message.
        tensors: GPU tensors of the caller, to which the message is copied.
    """

    def __init__(self, work: Any, host: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        self._work = work
        self._host = host
        self._tensors = tensors

    def wait(self, *limit: datetime.timedelta) -> bool:
        """Waits for the message, and copies the message to the GPU in the current CUDA stream."""
        answer = bool(self._work.wait(*limit))
        # Megatron-core's receive buffers are leaves that require a gradient. Disable gradients,
        # because autograd would otherwise reject the copy.
        with torch.no_grad():
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.copy_(host)
        # Release the tensors, so that a second call does not copy the message again.
        self._host = []
        self._tensors = []
        return answer

    def is_completed(self) -> bool:
        """Returns whether :meth:`wait` has copied the message to the GPU."""
        return not self._tensors

    def _source_rank(self) -> int:
        """Returns the sender's rank in the group.

        torch calls this method after receiving a message that may come from any rank.
        """
        return int(self._work._source_rank())


def _reduce_one_by_one(
    group: Any, _: _Method, tensors: Sequence[torch.Tensor], options: Any = None
) -> _AllWorks:
    single = _with_settings(dist.AllreduceOptions(), options)
    return _AllWorks([group.allreduce([tensor], single) for tensor in tensors])


def _gather_one_by_one(
    group: Any,
    _: _Method,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *options: Any,
) -> _AllWorks:
    pairs = zip(outputs, inputs, strict=True)
    return _AllWorks([group._allgather_base(whole, part, *options) for whole, part in pairs])


def _gather_as_list(
    group: Any, _: _Method, output: torch.Tensor, part: torch.Tensor, options: Any
) -> Any:
    """Implements a gather into one tensor with a gather into a list of tensors."""
    is_root = options.rootRank == group.rank()
    parts = [list(output.view(group.size(), *part.shape))] if is_root else []
    return group.gather(parts, [part], options)


def _gather_lists_one_by_one(
    group: Any,
    _: _Method,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *options: Any,
) -> _AllWorks:
    # Each element of ``lists`` contains the output tensors of one input, ordered by rank.
    lists = zip(*outputs, strict=True)
    pairs = zip(lists, inputs, strict=True)
    return _AllWorks([group.allgather([list(parts)], [part], *options) for parts, part in pairs])


def _gather_unequal(group: Any, original: _Method, outputs: Any, inputs: Any, *options: Any) -> Any:
    """Gathers tensors of different sizes, using one broadcast per rank."""
    if not isinstance(inputs, Sequence) or len(inputs) != 1 or not _differ(outputs[0]):
        return original(group, outputs, inputs, *options)
    parts = outputs[0]
    parts[group.rank()].copy_(inputs[0])
    works = []
    for rank, part in enumerate(parts):
        if part.numel():
            broadcast = _with_settings(dist.BroadcastOptions(), *options)
            broadcast.rootRank = rank
            works.append(group.broadcast([part], broadcast))
    return _AllWorks(works)


def _scatter_unequal_sums(
    group: Any, original: _Method, outputs: Any, inputs: Any, *options: Any
) -> Any:
    """Reduces and scatters tensors of different sizes, using one reduce per rank.

    This replaces gloo's reduce-scatter, which rejects tensors of different sizes.
    """
    if not isinstance(inputs, Sequence) or len(inputs) != 1 or not _differ(inputs[0]):
        return original(group, outputs, inputs, *options)
    works = []
    for rank, part in enumerate(inputs[0]):
        is_own = rank == group.rank()
        total = outputs[0].copy_(part) if is_own else part.clone()
        if total.numel():
            reduce = _with_settings(dist.ReduceOptions(), *options)
            reduce.rootRank = rank
            works.append(group.reduce([total], reduce))
    return _AllWorks(works)


def _send_from_host(
    group: Any, original: _Method, tensors: Sequence[torch.Tensor], *where: int, **named: int
) -> Any:
    return original(group, [tensor.detach().to("cpu") for tensor in tensors], *where, **named)


def _receive_on_host(
    group: Any, original: _Method, tensors: Sequence[torch.Tensor], *where: int, **named: int
) -> _Receive:
    host = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    return _Receive(original(group, host, *where, **named), host, list(tensors))


def _keep(*_: Any) -> None:
    """Does nothing, because a sum or broadcast over a single rank leaves the tensor unchanged."""


def _copy_all(outputs: Any, inputs: Any, *_: Any) -> None:
    """Copies each tensor in ``inputs`` to the corresponding tensor in ``outputs``.

    The arguments are either two tensors with the same number of elements, or two lists. The
    elements of a list are tensors, or lists with one tensor per rank. The group has only one rank.
    """
    for output, source in zip(_tensors([outputs]), _tensors([inputs]), strict=True):
        output.copy_(source.reshape(output.shape))


_ALONE: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), _keep),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base"), _copy_all),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), _copy_all),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "reduce_scatter"), _copy_all),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _copy_all),
    "reduce_scatter_tensor_coalesced": _copy_all,
    "reduce_scatter_single_coalesced": _copy_all,
    **dict.fromkeys(("gather_single", "gather_into_tensor"), _copy_all),
}
"""Functions that run instead of gloo's methods in groups with a single rank, keyed by method.

megatron-core calls collectives even for groups with a single rank. NCCL does almost nothing for
such groups, but gloo copies GPU tensors to the host and back, and blocks the calling thread until
the GPU has finished all earlier work.
"""


def _with_settings(single: Any, options: Any = None) -> Any:
    """Copies the settings of ``options`` to ``single``, and returns ``single``.

    Args:
        single: Options of one of the collectives that replace the original collective.
        options: Options of the original collective, or ``None`` to copy nothing.
    """
    for name in ("reduceOp", "timeout", "asyncOp"):
        # Some collectives and older releases of torch do not have all of these attributes.
        if hasattr(options, name) and hasattr(single, name):
            setattr(single, name, getattr(options, name))
    return single


def _differ(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.shape for part in parts}) > 1


TREATMENTS: Mapping[str, Callable[..., Any] | None] = {
    # gloo itself copies the tensors of these methods through pinned host memory.
    "allreduce": None,
    "broadcast": None,
    "reduce": None,
    "gather": None,
    "scatter": None,
    "alltoall": None,
    "alltoall_base": None,
    "all_to_all_single": None,
    # torch 2.15 adds these methods. Gather into a list instead, as for the method gather above.
    "gather_single": _gather_as_list,
    "gather_into_tensor": _gather_as_list,
    # gloo itself copies the tensors of these methods, but only if all parts have the same size.
    "allgather": _gather_unequal,
    "_allgather_base": None,
    "all_gather_single": None,
    # gloo implements these methods with all-reduce, which accepts GPU tensors, but requires parts
    # of equal size.
    "reduce_scatter": _scatter_unequal_sums,
    "_reduce_scatter_base": None,
    "reduce_scatter_single": None,
    "reduce_scatter_tensor_coalesced": None,
    "reduce_scatter_single_coalesced": None,
    # gloo rejects GPU tensors in this method with the error "unsupported device type cuda".
    "allreduce_coalesced": _reduce_one_by_one,
    # gloo wrongly treats the addresses of GPU tensors as host addresses in these methods.
    "allgather_coalesced": _gather_lists_one_by_one,
    "allgather_into_tensor_coalesced": _gather_one_by_one,
    "all_gather_single_coalesced": _gather_one_by_one,
    "send": _send_from_host,
    "recv": _receive_on_host,
    "recv_anysource": _receive_on_host,
    # These methods have no tensor arguments.
    "barrier": None,
    "monitored_barrier": None,
}
"""Functions that run instead of gloo's methods if tensors are on a GPU, keyed by method.

``None`` means that the method works and is not replaced, except in groups with a single rank. The
list contains the methods of ``ProcessGroupGloo.cpp`` in torch 2.6 to 2.11, additional names that
torch 2.13 has for some of them, and the methods that torch 2.15 adds.
"""


def install() -> None:
    """Replaces the process group methods that fail or are slow if gloo handles GPU tensors.

    The change applies to the whole process. CPU tensors and groups of other backends are not
    affected. A second call does nothing.
    """
    for name, treatment in TREATMENTS.items():
        alone = _ALONE.get(name)
        original = getattr(dist.ProcessGroup, name, None)
        is_kept = treatment is None and alone is None
        if is_kept or original is None or hasattr(original, "__wrapped__"):
            continue
        setattr(dist.ProcessGroup, name, _treated(original, treatment, alone))


def _treated(
    original: _Method, treatment: Callable[..., Any] | None, alone: Callable[..., None] | None
) -> _Method:
    @functools.wraps(original)
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        gpu_tensor = next((tensor for tensor in _tensors(arguments) if tensor.is_cuda), None)
        if gpu_tensor is None or group._get_backend(gpu_tensor.device).name() != "gloo":
            return original(group, *arguments, **named)
        if alone is not None and group.size() == 1:
            with torch.no_grad():
                alone(*arguments)
            return _AllWorks([])
        if treatment is None:
            return original(group, *arguments, **named)
        # Some replacements copy into the caller's tensors, which may be leaves that require a
        # gradient. As in torch's own collectives, these copies are not part of the autograd graph.
        with torch.no_grad():
            return treatment(group, original, *arguments, **named)

    return call


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)
