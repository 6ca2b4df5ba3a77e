"""Chooses the device that this process uses for computation.

:class:`Accelerator` represents this device. Its methods hide the differences between CUDA and CPU
(memory, synchronization, backend). :func:`install`, which lets megatron-core run without CUDA, is
defined in :mod:`~megatron.adaptive.without_cuda`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import logging
import mmap
import os
import resource
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from megatron.adaptive import device_collectives
from megatron.adaptive.config.control_groups import lines_of
from megatron.adaptive.errors import SetupError
from megatron.adaptive.without_cuda import install, install_for_trainer

__all__ = [
    "Accelerator",
    "CpuClock",
    "CudaClock",
    "CudaMark",
    "current_device",
    "default_generator",
    "detect",
    "device_identity",
    "install",
    "install_for_trainer",
    "keep_freed_memory",
    "lock_pages",
    "locked_memory",
    "make_current",
    "quiet_imports",
    "quiet_libraries",
    "to_device",
    "why_no_gpu",
]

_CPU = torch.device("cpu")

# Parameters of the C function mallopt and their values, as in <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_HEAP_KEPT_BYTES = 1 << 30
MAPPED_FROM_BYTES = 32 << 20
"""Minimum size in bytes of a CPU tensor that malloc maps outside the heap.

This is the largest value that glibc allows.
"""

_ANCHOR_FOR_NS = 1_000_000_000
"""Time in nanoseconds after which :class:`CudaClock` replaces its reference event (the anchor)."""
_MOST_DRIFT_NS = 2_000_000
"""Largest plausible drift of the device's clock, in nanoseconds, relative to one anchor."""
_NO_DELAY_NS = 1 << 62

# Value of the flag cudaHostRegisterPortable, which locks pages for all CUDA contexts of the
# process.
_PORTABLE = 1


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Device that this process uses for computation.

    Attributes:
        device: Device that holds the parameters and activations.
        backend: Backend of ``torch.distributed`` for collectives, ``nccl`` or ``gloo``.
        name: Product name of the GPU, or ``CPU`` if the device is a CPU.
        shares: Number of ranks that use this GPU, or 1 on a CPU.
        asked_backend: Backend that the user selected, or ``None`` if the user did not select one.
    """

    device: torch.device
    backend: str
    name: str
    shares: int = 1
    asked_backend: str | None = None

    @property
    def is_shared(self) -> bool:
        """Returns whether other ranks share this GPU, so that their work affects measured times."""
        return self.shares > 1

    @property
    def is_cuda(self) -> bool:
        """Returns whether the device is a CUDA GPU."""
        return self.device.type == "cuda"

    @property
    def gpu_uuid(self) -> str:
        """Returns the GPU's ID as shown by ``nvidia-smi -L``, or ``""`` if the ID is unknown."""
        if not self.is_cuda:
            return ""
        properties: Any = torch.cuda.get_device_properties(self.device)
        uuid = str(getattr(properties, "uuid", ""))
        return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else ""

    def make_current(self) -> None:
        """Makes this device the calling thread's current CUDA device. Does nothing on a CPU."""
        make_current(self.device)

    def synchronize(self) -> None:
        """Waits until the device has completed all queued work. Does nothing on a CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def memory_in_use_bytes(self) -> int:
        """Returns the size in bytes of all tensors on the GPU, or of the whole process on a CPU."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        return int(psutil.Process().memory_info().rss)

    def peak_memory_bytes(self) -> int:
        """Returns the peak of :meth:`memory_in_use_bytes`, in bytes.

        On a GPU, this is the peak size of all tensors. On a CPU, it is the peak size of the
        process.
        """
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        # Linux updates the peak with a delay, so the peak that it reports can be below the current
        # size.
        return max(_peak_resident_bytes(), self.memory_in_use_bytes())

    def free_unused_memory(self) -> None:
        """Frees tensors in unreachable reference cycles, and torch's cached memory on the GPU.

        A model is usually part of such a cycle, so its memory is not freed without this call.
        """
        free_unused_memory(self.device)

    def clock(self) -> CpuClock | CudaClock:
        """Returns a clock that measures when the device completes its work."""
        return CudaClock() if self.is_cuda else CpuClock()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``tensor`` on this device. See :func:`to_device`."""
        return to_device(tensor, self.device)


def _peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    # Read VmHWM, because ru_maxrss also covers the program that started this process.
    for line in lines_of(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class CpuClock:
    """Measures when CPU work was completed, with the same methods as :class:`CudaClock`.

    A mark is a point in the sequence of work. On a CPU, it is simply the current time from
    ``time.monotonic_ns``, because CPU work is complete when the function that does it returns.
    """

    def mark(self) -> int:
        """Returns the current monotonic time in nanoseconds as a mark."""
        return time.monotonic_ns()

    def resolve_ns(self, mark: int) -> int:
        """Returns ``mark`` unchanged, because it is already a time in nanoseconds."""
        return mark

    def is_passed(self, mark: int) -> bool:
        """Returns ``True``, because all work before ``mark`` is already complete."""
        return True

    def wait(self, mark: int) -> None:
        """Returns immediately, because all work before ``mark`` is already complete."""


class CudaMark(NamedTuple):
    """Event in a CUDA stream, and the host time at which the event was recorded."""

    event: torch.cuda.Event
    host_ns: int


class CudaClock:
    """Measures when GPU work was completed, using events in the current CUDA stream.

    Recording and resolving events, which are called marks, does not make the host wait for the GPU.

    CUDA only measures the time between two events. To compute the host time of a mark, the clock
    uses an anchor, which is a reference event with a known host time. The first anchor is recorded
    while the device is idle. CUDA returns elapsed times as 32-bit floats in milliseconds, which are
    too coarse to time a kernel after some minutes. Therefore, about once a second, a mark becomes
    the new anchor.

    The clocks of device and host drift apart. The device never passes a mark before the host has
    recorded it, but passes some marks immediately afterwards. The smallest delay of a mark during
    the last second is therefore an estimate of the drift.
    """

    def __init__(self) -> None:
        self._anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()
        self._least_delay_ns = _NO_DELAY_NS

    def mark(self) -> CudaMark:
        """Records an event in the current stream and returns it as a mark."""
        # Use a blocking event. A thread that waits for it sleeps, so receiver threads can use the
        # CPU.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        host_ns = time.monotonic_ns()
        event.record()
        return CudaMark(event, host_ns)

    def resolve_ns(self, mark: CudaMark) -> int:
        """Returns the host time in nanoseconds at which the device passed ``mark``.

        This method may only be called after the device has passed the mark.
        """
        passed_ns = int(self._anchor.elapsed_time(mark.event) * 1e6)
        time_ns = self._anchor_ns + passed_ns
        self._least_delay_ns = min(self._least_delay_ns, time_ns - mark.host_ns)
        if passed_ns > _ANCHOR_FOR_NS:
            # A delay of _MOST_DRIFT_NS or more is not caused by drift. The device was never idle,
            # and every mark had to wait for earlier work.
            if abs(self._least_delay_ns) < _MOST_DRIFT_NS:
                time_ns -= self._least_delay_ns
            self._anchor = mark.event
            self._anchor_ns = time_ns
            self._least_delay_ns = _NO_DELAY_NS
        return time_ns

    def is_passed(self, mark: CudaMark) -> bool:
        """Returns whether the GPU has completed all work that was queued before ``mark``."""
        is_passed: bool = mark.event.query()
        return is_passed

    def wait(self, mark: CudaMark) -> None:
        """Sleeps until the device has completed all work before ``mark``.

        Meanwhile, other threads may run.
        """
        mark.event.synchronize()


def lock_pages(address: int, size_bytes: int, device: torch.device) -> bool:
    """Locks (pins) pages of host memory, so that a GPU can access the memory by DMA.

    To unlock the pages, call ``torch.cuda.cudart().cudaHostUnregister``.

    Args:
        address: Address of the first byte of the memory.
        size_bytes: Size of the memory in bytes.
        device: GPU that will access the memory. It must be the current CUDA device.

    Returns:
        Whether the pages are now locked. The driver locks no pages beyond the system's limit on
        locked memory.
    """
    if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)) == 0:
        return True
    # CUDA reports the failed call again as an error of the next kernel. Launch a kernel here to
    # consume this error, so that the caller's next kernel does not fail.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
    return False


class _LockedMemory(mmap.mmap):
    """Holds host memory, and unlocks its pages when it is garbage-collected."""

    address = 0  # Address of the locked pages, or 0 while no pages are locked.

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # CUDA may already be shut down when Python exits.
                torch.cuda.cudart().cudaHostUnregister(self.address)


def locked_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocates page-locked (pinned) host memory, which a GPU can access by DMA.

    The memory has exactly the size ``size_bytes``, whereas torch rounds the size of pinned memory
    up to a power of two.

    Args:
        size_bytes: Size of the memory in bytes.
        device: GPU that will access the memory. It must be the current CUDA device.

    Returns:
        Tensor ``[size_bytes] uint8``. Its pages stay locked as long as the tensor or a view of it
        exists. If the driver refuses to lock more memory, the pages of the returned tensor are not
        locked.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = _LockedMemory(-1, size_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if lock_pages(tensor.data_ptr(), size_bytes, device):
        memory.address = tensor.data_ptr()
    return tensor


def free_unused_memory(device: torch.device) -> None:
    """Frees tensors in unreachable reference cycles, and torch's cached memory on ``device``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of ``tensor`` on ``device``, or ``tensor`` itself if it is there already.

    The host does not wait for the GPU. CUDA can copy from host memory asynchronously only if the
    memory is page-locked (pinned) and contiguous. Other host tensors are therefore first copied
    into page-locked memory, which torch reuses after the GPU has read it.

    Args:
        tensor: Tensor on any device. The caller must not modify it before the GPU has read it.
        device: CPU or GPU.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        is_ready = tensor.is_contiguous() and tensor.is_pinned()
        tensor = tensor if is_ready else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def make_current(device: torch.device) -> None:
    """Makes ``device`` the calling thread's current CUDA device. Does nothing for a CPU.

    Every thread that uses CUDA must call this function first, because a new thread's current device
    is always GPU 0. Without the call, torch creates a CUDA context on GPU 0 when the thread leaves
    a ``torch.cuda.stream()`` context. A CUDA context takes about 0.5 GB per process.

    Args:
        device: Device of this process. If the device is a GPU, its index must be set.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def current_device() -> torch.device:
    """Returns the current CUDA device, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's default random number generator of ``device``."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def detect(local_rank: int, *, backend: str | None = None) -> Accelerator:
    """Chooses the device of this process and makes it the current CUDA device.

    If a node has more processes than GPUs, several processes share a GPU. These processes
    communicate over gloo, because NCCL does not support two ranks on one device. A process cannot
    always detect alone whether its GPU is shared, so :func:`agree_on_sharing` later makes the final
    choice. If the process groups already exist, use ``engine.process_context.device_in_groups``
    instead.

    Args:
        local_rank: Index of the process on its node, starting at 0.
        backend: Backend that the user selected, ``nccl`` or ``gloo``. ``None`` selects the backend
            that suits the hardware.

    Raises:
        SetupError: The user selected ``nccl``, but there are fewer GPUs than ranks, or
            ``CUDA_VISIBLE_DEVICES`` lists GPUs, but the machine has none.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _require_devices(backend, ranks)
    if not torch.cuda.is_available():
        return Accelerator(device=_CPU, backend="gloo", name="CPU")
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return Accelerator(
        device=device,
        backend=backend or ("gloo" if ranks > count else "nccl"),
        asked_backend=backend,
        name=torch.cuda.get_device_name(device),
        shares=len(range(local_rank % count, max(ranks, local_rank + 1), count)),
    )


def agree_on_sharing(
    accelerator: Accelerator, store: Any, *, rank: int, world_size: int
) -> Accelerator:
    """Counts the ranks that share this rank's GPU, and chooses the backend of the job.

    All ranks must call this function together. A launcher may show only one GPU to each rank, as
    Slurm does with ``--gpus-per-task``. In this case, a rank alone cannot detect whether another
    rank uses the same GPU.

    Args:
        accelerator: Device of this rank, as returned by :func:`detect`.
        store: Key-value store of the job, through which the ranks exchange the IDs of their GPUs.
            The store's timeout limits how long this rank waits for the other ranks.
        rank: Global rank of this process.
        world_size: Number of ranks of the job.

    Raises:
        SetupError: The user selected ``nccl``, but two ranks share a GPU. All ranks raise this
            error.
    """
    identity = device_identity(accelerator, rank)
    keys = [f"gpu-of-rank/{other}" for other in range(world_size)]
    store.set(keys[rank], identity)
    if not accelerator.is_cuda:
        return accelerator
    owners: dict[str, list[int]] = {}
    for other, gpu in enumerate(store.multi_get(keys)):  # This call waits until all keys exist.
        owners.setdefault(gpu.decode(), []).append(other)
    shared = next((ranks for ranks in owners.values() if len(ranks) > 1), None)
    if shared is not None and accelerator.asked_backend == "nccl":
        raise SetupError(
            f"--distributed-backend nccl: ranks {', '.join(map(str, shared))} share a GPU, but "
            f"NCCL does not support two ranks on one GPU; start {len(owners)} ranks, or remove "
            "the flag, or use gloo, which allows ranks to share a GPU"
        )
    backend = accelerator.asked_backend or ("nccl" if shared is None else "gloo")
    if backend == "gloo":
        device_collectives.install()
    return dataclasses.replace(accelerator, backend=backend, shares=len(owners[identity]))


def device_identity(accelerator: Accelerator, rank: int) -> str:
    """Returns a string that is equal for two ranks only if they use the same GPU.

    Args:
        accelerator: Device of this rank.
        rank: Global rank of this process.
    """
    if not accelerator.is_cuda:
        return f"no GPU at rank {rank}"
    properties: Any = torch.cuda.get_device_properties(accelerator.device)
    if hasattr(properties, "uuid"):
        return str(properties.uuid)
    bus_address = [
        getattr(properties, f"pci_{part}_id", "") for part in ("domain", "bus", "device")
    ]
    return f"{socket.gethostname()} {bus_address}"


def _require_devices(backend: str | None, ranks: int) -> None:
    """Checks that this machine has enough GPUs for its ranks, if the user requested GPUs.

    Args:
        backend: Backend that the user selected (``nccl`` or ``gloo``), or ``None`` if the user did
            not select one.
        ranks: Number of ranks on this node.

    Raises:
        SetupError: The machine has too few GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = None if torch.cuda.is_available() else why_no_gpu()
    names_gpus = torch.version.cuda is not None and (visible or "").strip() not in ("", "-1")
    if reason is not None and (backend == "nccl" or names_gpus):
        setting = f"CUDA_VISIBLE_DEVICES={visible}"
        if backend == "nccl":
            setting = "--distributed-backend nccl"
        raise SetupError(f"{setting}: no GPU can be used here, because {reason}")
    count = torch.cuda.device_count() if reason is None else 0
    # If the variable is not set, every rank sees all GPUs of the node.
    if backend == "nccl" and ranks > count and visible is None:
        raise SetupError(
            f"--distributed-backend nccl: {ranks} ranks on this node have {count} "
            f"GPU{'' if count == 1 else 's'}, but NCCL does not support two ranks on one GPU; "
            f"start at most {count} ranks per node, or remove the flag, or use gloo, which "
            "allows ranks to share a GPU"
        )


def why_no_gpu() -> str:
    """Returns a message that explains why torch finds no GPU, and what the user can do about it."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a torch with CUDA "
            "(requirements-gpu.txt), or remove the setting, or use gloo on CPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return (
            "CUDA_VISIBLE_DEVICES is empty; unset it, or list GPUs in it as nvidia-smi numbers them"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        if "driver" in cause and ("too old" in cause or "insufficient" in cause):
            return (
                f"the NVIDIA driver is older than CUDA {torch.version.cuda}, which torch "
                f"{torch.__version__} was built with ({cause}); update the driver, or install a "
                "torch for an older CUDA"
            )
        if "driver" in cause or "NVML" in cause:
            return f"no working NVIDIA driver was found ({cause}); check it with nvidia-smi"
        if visible is None:
            return f"{cause}; check whether nvidia-smi lists a GPU"
    if visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={visible} contains no GPU of this machine; use indices that "
            "nvidia-smi lists, or unset the variable"
        )
    return "the NVIDIA driver lists no GPU; run nvidia-smi to find the cause"


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory for later tensors. Does nothing if there is a GPU.

    By default, the C library returns the top of the heap to the system in nearly every backward
    pass, and then allocates the memory again, page by page. For a GPT with hidden size 256, this
    causes 2,000 page faults per backward pass, which take 3-5% of the pass.

    The setting applies to the whole process. Therefore, call this function when training begins,
    not when a module is imported.
    """
    if torch.cuda.is_available():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # Some C libraries do not have the function mallopt.
        mallopt(_M_TRIM_THRESHOLD, _HEAP_KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def quiet_libraries() -> None:
    """Silences library warnings that users cannot act on.

    These warnings concern missing optional GPU packages and internals of torch. Use this function
    in this project's own processes, such as the trainer, and use :func:`quiet_imports` in a user's
    process. Call the function before megatron-core is imported, because that import causes most of
    the warnings.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", message=".*(Apex|cuda_graph_scope|deprecated).*")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences the same warnings as :func:`quiet_libraries`, but only until the context exits."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    with warnings.catch_warnings():
        quiet_libraries()
        try:
            yield
        finally:
            logger.setLevel(level)


def freeze_imports() -> None:
    """Excludes all current objects, such as imported modules, from later garbage collections.

    The exclusion ends at exit. Otherwise, triton 3.9 and newer would print a list of objects that
    are not freed.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
