"""Counts events that keep a rank from computing, such as other programs, quotas and slow disks.

The Linux kernel counts these events for every process or for the whole machine::

    /proc/self/task/*/schedstat      time that a thread waited for a processor, and the number of
                                     times that it got one
    cpu.stat of the control groups   time that a quota on processor time stopped the process
    /proc/stat                       time that all programs used, and that the host of a virtual
                                     machine took ("steal")
    /proc/pressure/{memory,io}       time that programs waited for memory or disks
    /proc/self/stat                  pages that had to be read from disk
    /proc/self/io                    bytes that this process and its children read from a disk
    TCP_INFO of open connections     TCP segments that were sent, and that were retransmitted
    /sys/devices/system/cpu          clock of a processor and its limit
    /sys/class/{net,infiniband}      errors and speed of network ports

The files stay open, so that reading all of them takes only tens of microseconds. If a file does not
exist or this process may not read it, the counters from that file are missing.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Generic, NamedTuple, TypeVar

from megatron.adaptive.config import control_groups
from megatron.adaptive.trace.gpu_counters import GPU_COUNTERS, GpuCounters
from megatron.adaptive.trace.network_counters import (
    LINK_ERRORS,
    LINK_PAUSES,
    LINK_RETRIES,
    LINK_SPEED,
    RESENT_SEGMENTS,
    SENT_SEGMENTS,
    TcpCounters,
    error_files,
    increase,
    pause_files,
    retry_files,
    speed_mbit_per_s,
)

ELAPSED = "elapsed_ns"
"""Name of the counter for the length of the measured period in ns."""

PROCESSOR_WAIT = "processor_wait_ns"
"""Name of the counter for the time in ns that a thread was ready to run but had no processor.

The value is the wait of this process's longest-waiting thread.
"""

TURN_WAIT = "turn_wait_ns"
"""Name of the counter for the mean time in ns that a thread waited until it got a processor.

The value is the mean of the longest-waiting thread among those that run actions or transfer
messages. A receiving thread that waits for a processor notices messages late, by about this time.
"""

THROTTLED = "throttled_ns"
"""Name of the counter for the time in ns during which a quota stopped a control group."""

STEAL = "steal_ns"
"""Name of the counter for the time in ns that the host took from a virtual machine's processor.

The time is averaged over the processors of the machine.
"""

MEMORY_WAIT = "memory_wait_ns"
"""Name of the counter for the time in ns that programs waited for memory (reclaim, swap)."""

DISK_WAIT = "disk_wait_ns"
"""Name of the counter for the time in ns that programs on the machine waited for a disk."""

DISK_PAGES = "disk_pages"
"""Name of the counter for memory pages that this process had to read from disk (page faults)."""

DISK_READ = "disk_read_bytes"
"""Name of the counter for bytes that this process or one of its children read from a disk.

The value is the count of the process that read most. Reads from the page cache are not included.
"""

CLOCK = "clock_khz"
"""Name of the counter for the clock rate of the processor that this process used last, in kHz."""

CLOCK_LIMIT = "clock_limit_khz"
"""Name of the counter for the configured limit of this processor's clock rate in kHz."""

FULL_CLOCK = "full_clock_khz"
"""Name of the counter for the highest clock rate that this processor supports, in kHz."""

MACHINE_BUSY = "machine_busy_ns"
"""Name of the counter for the processor time in ns that all programs on the machine used."""

OWN_BUSY = "own_busy_ns"
"""Name of the counter for the processor time in ns that this process used."""

KERNEL = "kernel_ns"
"""Name of the counter for the processor time in ns that this process spent in the kernel.

The kernel uses this time to free memory, to read pages from disk, and to copy data for system
calls.
"""

PROCESSORS = "processors"
"""Name of the counter for the number of processors that this process may currently use."""

COUNTERS = (
    ELAPSED,
    PROCESSOR_WAIT,
    THROTTLED,
    STEAL,
    MEMORY_WAIT,
    DISK_WAIT,
    DISK_PAGES,
    MACHINE_BUSY,
    OWN_BUSY,
    PROCESSORS,
    DISK_READ,
    SENT_SEGMENTS,
    RESENT_SEGMENTS,
    CLOCK,
    CLOCK_LIMIT,
    FULL_CLOCK,
    LINK_ERRORS,
    LINK_RETRIES,
    LINK_PAUSES,
    LINK_SPEED,
    TURN_WAIT,
    KERNEL,
    *GPU_COUNTERS,
)
"""Names of all counters."""

_EXPECTED = (
    PROCESSOR_WAIT,
    STEAL,
    MEMORY_WAIT,
    DISK_WAIT,
    DISK_PAGES,
    MACHINE_BUSY,
    DISK_READ,
    CLOCK,
)
"""Names of the counters that most machines provide. Many machines have no quotas or RDMA ports."""

_CLOCKS = {
    CLOCK: "scaling_cur_freq",
    CLOCK_LIMIT: "scaling_max_freq",
    FULL_CLOCK: "cpuinfo_max_freq",
}
"""Maps each counter of a clock rate to the name of the kernel file with this clock rate.
"""

_PROCESSORS = "/sys/devices/system/cpu"
_TASKS = "/proc/self/task"
_MESSAGE_THREADS = (
    "adaptive-io",
    "arrivals",
    "device-to-host",
    "gloo_tcp_loop",
    "host-to-device",
    "lane",
    "NCCL Progress",
    "NCCL Service",
    "pt_gloo_runloop",
    "receive-from-",
    "send-to-",
)
"""Prefixes of the names of threads that run actions or transfer messages.

The main thread is not included. The threads are started by the executor, by the transports, or by
the libraries that these use.
"""
_MOST_THREADS = 64
_MOST_CHILDREN = 16
_READS_PER_LISTING = 64
# List the threads again soon. Until then, every thread is read each time, because the first listing
# does not show which threads have run.
_READS_TO_SECOND_LISTING = 8
_MOST_BYTES = 1 << 14
_BUSY_FIELDS = (1, 2, 3, 6, 7)
"""Indices of the user, nice, system and interrupt times in the first line of ``/proc/stat``."""
_STEAL_FIELD = 8
"""Index of the stolen time in the first line of ``/proc/stat``."""
_MAJOR_FAULTS_FIELD = 9
"""Field of ``/proc/self/stat`` with the major page faults, counted from the state (field 0)."""
_LAST_PROCESSOR_FIELD = 36
"""Field of ``/proc/self/stat`` with the last used processor, counted from the state (field 0)."""
_NS_PER_US = 1000


_Value = TypeVar("_Value")


class _Turns(NamedTuple):
    """Contains a thread's total wait for a processor in ns, and its number of time slices."""

    waited_ns: int
    number: int


@dataclass(frozen=True)
class _Source(Generic[_Value]):
    """Reads a counter from a kernel file that stays open."""

    file: BinaryIO
    parse: Callable[[bytes], _Value]

    def value(self) -> _Value | None:
        """Returns the value of the counter, or ``None`` if the kernel does not provide it."""
        try:
            self.file.seek(0)
            return self.parse(self.file.read(_MOST_BYTES))
        except (OSError, ValueError, IndexError):
            return None


class MachineCounters:
    """Reads the counters of this process and its machine.

    All methods must be called from the same thread.

    Args:
        gpu_uuid: ID of the GPU that the process uses, as in ``nvidia-smi -L``; empty without a GPU.
        gpu_ranks: Number of ranks of the job that share the GPU.
        interface: Name of the network interface that the job uses; empty if unknown.

    Attributes:
        missing: Names of the counters that are unavailable on this machine or to this user. If no
            GPU counter can be read, a single entry with the reason replaces the names of all GPU
            counters.
        message_threads: IDs of this process's threads that run actions or transfer messages.
    """

    def __init__(self, gpu_uuid: str = "", gpu_ranks: int = 1, interface: str = "") -> None:
        self._sources = list(_sources())
        self._threads: dict[str, _Source[_Turns]] = {}
        self.message_threads: set[str] = set()
        self._readers: dict[str, _Source[int]] = {}
        self._clocks: dict[str, _Source[int]] = {}
        self._active: set[str] = set()
        self._listed: dict[str, _Turns] = {}
        self._turns: dict[str, _Turns] = {}
        self._turns_begun: dict[str, _Turns] = {}
        self._processor = -1
        self._tcp = TcpCounters()
        self._tcp_begun: dict[int, tuple[int, int]] = {}
        self._interface = interface
        self._speed = 0
        self._gpu = GpuCounters(gpu_uuid, gpu_ranks)
        self._reads = 0
        self._begun = self._read()
        counted = {name for name, _ in self._begun}
        counted |= {name for name, value in self._read_clocks().items() if value}
        missing = [name for name in _EXPECTED if name not in counted]
        if self._gpu.why_not:
            missing.append(f"all counters of the GPU ({self._gpu.why_not})")
        self.missing = (*missing, *self._gpu.missing)

    def begin(self) -> None:
        """Reads all counters. Later calls of :meth:`end` return the increase since then."""
        self._begun = self._read()
        self._turns_begun = self._turns
        self._tcp_begun = self._tcp.read()
        self._gpu.begin()

    def end(self) -> dict[str, int]:
        """Returns the increase of each counter since :meth:`begin`, keyed by the counter's name.

        For clock rates, the link speed, the number of processors and similar values, the current
        value is returned. Zeros are omitted.
        """
        counts = dict.fromkeys(COUNTERS, 0)
        for (name, source), value in self._read().items():
            # A counter may have several sources, such as nested control groups or processes. Use
            # the largest count instead of the sum, because several sources may count the same
            # event.
            counted = value - self._begun.get((name, source), value)
            counts[name] = max(counts[name], counted)
        counts[PROCESSOR_WAIT], counts[TURN_WAIT] = self._waits()
        counts[PROCESSORS] = len(os.sched_getaffinity(0))
        counts |= self._read_clocks()
        counts |= self._gpu.end()
        sent, resent = increase(self._tcp_begun, self._tcp.read())
        counts |= {SENT_SEGMENTS: sent, RESENT_SEGMENTS: resent, LINK_SPEED: self._speed}
        return {name: count for name, count in counts.items() if count > 0}

    def close(self) -> None:
        """Closes all kernel files. This method can be called more than once."""
        files = [source.file for source in self._threads.values()]
        files += [source.file for _, source in self._sources]
        files += [source.file for source in (*self._readers.values(), *self._clocks.values())]
        for file in files:
            file.close()
        self._sources, self._threads, self._readers, self._clocks = [], {}, {}, {}
        self._active = set()
        self._processor = -1

    def _read(self) -> dict[tuple[str, str], int]:
        """Returns the values of all counters, keyed by (counter name, source).

        Some counters have several sources, such as nested control groups.
        """
        if self._reads % _READS_PER_LISTING == 0 or self._reads == _READS_TO_SECOND_LISTING:
            self._list_threads()
            self._list_readers()
            self._tcp.list_connections()
            self._speed = speed_mbit_per_s(self._interface)
        self._reads += 1
        values: dict[tuple[str, str], int | None] = {
            (ELAPSED, ""): time.monotonic_ns(),
            (OWN_BUSY, ""): time.process_time_ns(),
            (KERNEL, ""): int(resource.getrusage(resource.RUSAGE_SELF).ru_stime * 1e9),
        }
        for number, (name, source) in enumerate(self._sources):
            values[name, str(number)] = source.value()
        self._turns = self._read_threads(self._active)
        for process, source in self._readers.items():
            values[DISK_READ, process] = source.value()
        return {key: value for key, value in values.items() if value is not None}

    def _read_threads(self, threads: Iterable[str]) -> dict[str, _Turns]:
        """Returns the waits of ``threads``, keyed by thread ID. Omits threads that have exited."""
        values = {thread: self._threads[thread].value() for thread in threads}
        return {thread: turns for thread, turns in values.items() if turns is not None}

    def _waits(self) -> tuple[int, int]:
        """Returns the times in ns that threads waited for a processor since :meth:`begin`.

        Returns:
            Total wait of the thread that waited longest, and the mean duration of a single wait.
            The mean is computed for the longest-waiting thread among those that run actions or
            transfer messages.
        """
        waits = {}
        for thread, turns in self._turns.items():
            begun = self._turns_begun.get(thread, turns)
            waits[thread] = _Turns(turns.waited_ns - begun.waited_ns, turns.number - begun.number)
        longest = max(waits.values(), default=_Turns(0, 0))
        of_messages = max(
            (turns for thread, turns in waits.items() if thread in self.message_threads),
            default=_Turns(0, 0),
        )
        return longest.waited_ns, of_messages.waited_ns // max(1, of_messages.number)

    def _read_clocks(self) -> dict[str, int]:
        """Returns the clock rates in kHz of the processor that this process used last.

        They are keyed by counter name.
        """
        stat = _opened("/proc/self/stat")
        if stat is None:
            return {}
        with stat:
            processor = _Source(stat, _last_processor).value()
        if processor is None:
            return {}
        if processor != self._processor:
            self._open_clocks(processor)
        return {name: source.value() or 0 for name, source in self._clocks.items()}

    def _open_clocks(self, processor: int) -> None:
        """Opens the clock files of ``processor``, and closes the files of the previous processor.

        Opening the files of all processors might exceed the limit on open files.
        """
        for source in self._clocks.values():
            source.file.close()
        files = {
            name: _opened(f"{_PROCESSORS}/cpu{processor}/cpufreq/{file_name}")
            for name, file_name in _CLOCKS.items()
        }
        self._clocks = {
            name: _Source(file, int) for name, file in files.items() if file is not None
        }
        self._processor = processor

    def _list_threads(self) -> None:
        """Opens the ``/proc`` files of new threads, and closes those of exited threads."""
        try:
            listed = set(sorted(os.listdir(_TASKS), key=int)[:_MOST_THREADS])
        except OSError:
            return
        _renew(self._threads, listed, _TASKS + "/{}/schedstat", _turns)
        # The calling thread runs the actions. Get the names of Python's threads from the
        # ``threading`` module, because the kernel does not know these names.
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        self.message_threads = {str(threading.get_native_id())} | {
            thread
            for thread in listed
            if (names.get(thread) or _name_of(thread)).startswith(_MESSAGE_THREADS)
        }
        # Most threads of a rank sleep for the whole run. Until the next listing, read only the new
        # threads and those that have run since the last listing.
        turns = self._read_threads(self._threads)
        has_run = {thread for thread in turns if turns[thread] != self._listed.get(thread)}
        self._active = has_run | (self.message_threads & turns.keys())
        self._listed = turns

    def _list_readers(self) -> None:
        """Opens the file ``/proc/PID/io`` of this process and of each child process.

        Children are included because they may read data for this process. The files of children
        that have exited are closed.
        """
        listed = {"self"}
        for thread in self._threads:
            file = _opened(f"{_TASKS}/{thread}/children")
            if file is not None:
                with file:
                    listed.update(os.fsdecode(file.read(_MOST_BYTES)).split()[:_MOST_CHILDREN])
        _renew(self._readers, listed, "/proc/{}/io", _bytes_from_disk)


def _renew(
    sources: dict[str, _Source[_Value]],
    listed: set[str],
    path: str,
    parse: Callable[[bytes], _Value],
) -> None:
    """Opens the files of new threads or processes, and closes the files of those that have exited.

    Args:
        sources: Open files, keyed by the ID of the thread or process; modified in place.
        listed: IDs of the threads or processes that currently exist.
        path: Path of the file to open, with ``{}`` as a placeholder for the ID.
        parse: Function that extracts the counter from the contents of a file.
    """
    for ended in sources.keys() - listed:
        sources.pop(ended).file.close()
    for begun in listed - sources.keys():
        file = _opened(path.format(begun))
        if file is not None:
            sources[begun] = _Source(file, parse)


def _sources() -> Iterator[tuple[str, _Source[int]]]:
    """Yields the name and an open file for each counter of the machine or of this process."""
    # The control group of the process and all groups above it may have quotas.
    quotas = [str(folder / "cpu.stat") for folder in control_groups.folders("cpu")]
    files: list[tuple[str, str, Callable[[bytes], int]]] = [
        *((THROTTLED, path, _throttled_ns) for path in quotas),
        (STEAL, "/proc/stat", _steal_ns),
        (MACHINE_BUSY, "/proc/stat", _machine_busy_ns),
        (MEMORY_WAIT, "/proc/pressure/memory", _pressure_ns),
        (DISK_WAIT, "/proc/pressure/io", _pressure_ns),
        (DISK_PAGES, "/proc/self/stat", _major_faults),
        *((LINK_ERRORS, str(path), int) for path in error_files()),
        *((LINK_RETRIES, str(path), int) for path in retry_files()),
        *((LINK_PAUSES, str(path), int) for path in pause_files()),
    ]
    for name, path, parse in files:
        file = _opened(path)
        if file is None:
            continue
        source = _Source(file, parse)
        if source.value() is None:
            file.close()
        else:
            yield name, source


def _opened(path: str) -> BinaryIO | None:
    """Opens the file at ``path``, or returns ``None`` if it cannot be read."""
    try:
        return open(path, "rb", buffering=0)
    except OSError:
        return None


def _name_of(thread: str) -> str:
    """Returns the name that the kernel has for ``thread`` of this process.

    The result is empty if the thread has exited.
    """
    file = _opened(f"{_TASKS}/{thread}/comm")
    if file is None:
        return ""
    with file:
        return _Source(file, os.fsdecode).value() or ""


def _throttled_ns(text: bytes) -> int:
    """Parses ``cpu.stat`` for the time in ns during which a quota stopped the control group."""
    fields = dict(line.split()[:2] for line in text.splitlines())
    if b"throttled_usec" in fields:  # Name of the field in cgroup v2.
        return int(fields[b"throttled_usec"]) * _NS_PER_US
    return int(fields.get(b"throttled_time", b""))


def _steal_ns(text: bytes) -> int:
    """Parses ``/proc/stat`` for the mean time in ns that the host took from a processor."""
    ticks = int(text.split(maxsplit=_STEAL_FIELD + 1)[_STEAL_FIELD])
    return ticks * _ns_per_tick() // (os.cpu_count() or 1)


def _machine_busy_ns(text: bytes) -> int:
    """Parses ``/proc/stat`` for the processor time in ns of all programs and interrupts."""
    fields = text.split(maxsplit=_STEAL_FIELD + 1)
    return sum(int(fields[field]) for field in _BUSY_FIELDS) * _ns_per_tick()


def _ns_per_tick() -> int:
    return 10**9 // os.sysconf("SC_CLK_TCK")


def _pressure_ns(text: bytes) -> int:
    """Parses a ``/proc/pressure`` file for the time in ns that at least one program waited."""
    return int(text.split(b"total=", 1)[1].split(maxsplit=1)[0]) * _NS_PER_US


def _major_faults(text: bytes) -> int:
    """Parses ``/proc/self/stat`` for the number of page faults that required a disk read."""
    return int(text.rpartition(b")")[2].split()[_MAJOR_FAULTS_FIELD])


def _last_processor(text: bytes) -> int:
    """Parses ``/proc/self/stat`` for the index of the processor that last ran the process."""
    return int(text.rpartition(b")")[2].split()[_LAST_PROCESSOR_FIELD])


def _turns(text: bytes) -> _Turns:
    """Parses a thread's ``schedstat`` file for its waits for a processor."""
    _, waited_ns, number = text.split()
    return _Turns(int(waited_ns), int(number))


def _bytes_from_disk(text: bytes) -> int:
    """Parses ``/proc/PID/io`` for the number of bytes that a process read from disks."""
    return int(text.split(b"\nread_bytes:", 1)[1].split(maxsplit=1)[0])
