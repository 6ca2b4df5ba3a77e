"""Copies a rank's state to memory that outlives the rank's process, while training continues.

::

    step 7 ── settle: snapshot of 6 kept everywhere? ── take 7 ── forward, backward ── update ── ...
                                                           └── copying 7 ─────────────┘
                                                               keeper sends 7 ...............┘

Only the optimizer's update changes the state, which allows the snapshot of a step to be copied
during the next forward and backward passes. A step is reported as done only after the snapshot of
the previous step is complete on every node. If ranks fail at any moment, all other nodes therefore
have snapshots of the same step, and at most one reported step is lost. The node's agent runs a
keeper (``checkpoint.snapshot_keeper``), which stores the snapshots and sends them to another node,
the buddy.

The training program provides its state through a subclass of :class:`SnapshotState`.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import lock_pages
from megatron.adaptive.checkpoint.snapshot_keeper import ALIGN, SLOTS, SnapshotFile, slot_bytes
from megatron.adaptive.checkpoint.writer import Part, Piece, entry_of, overlay
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.profiling.free_memory import available_host_bytes

_SHARE = 0.8  # Snapshots may use at most this fraction of the machine's available memory.
_GIB = 1024**3
_KEPT_S = 60.0
_ROOM_BYTES = 1 << 16  # Additional space in a slot, because the non-tensor state may grow.
_MIB = 1024**2
_MESSAGE = 1 << 16
_FAILED = 2
_CHANGED = 1


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Settings for snapshots, which the node's agent passes to the ranks that it starts.

    Attributes:
        address: Address of the abstract Unix socket on which the keeper listens.
        run: Identifier of this start of the ranks. Each restart uses a new identifier.
        node: Name of the node on which the ranks run.
        domain: Name of the failure domain (the set of ranks that fail together), which is a node or
            a machine with several nodes.
        buddy: Name of the node that also stores this node's snapshots, or ``None`` if there is no
            such node.
        every: Number of iterations between two snapshots.
        limit_bytes: Maximum size in bytes of all snapshots on a node, or ``None`` for no limit.
    """

    address: str
    run: str
    node: str
    domain: str
    buddy: str | None
    every: int
    limit_bytes: int | None

    @classmethod
    def read(cls, text: str) -> SnapshotSettings:
        """Parses the settings from ``text``, a JSON object in an environment variable."""
        return cls(**parse_json(text))


class SnapshotState(ABC):
    """Provides access to the state of a rank. Each training program has a subclass."""

    @abstractmethod
    def take(self) -> tuple[Mapping[Part, Piece] | None, bytes]:
        """Returns the current tensors, and all other state as bytes, called the extra bytes.

        All ranks must call this together. If all tensors have the same addresses as in the last
        call, the method returns ``None`` instead of the tensors. The extra bytes begin with a line
        of JSON.
        """

    @abstractmethod
    def head(self) -> Mapping[str, Any]:
        """Returns the values that a restore needs and that do not change between steps.

        ``has_common`` is True if this rank also copies the values that all ranks share.
        The trainer adds ``manifest``, the manifest for a checkpoint of the state.
        """

    def is_changed(self) -> bool:
        """Returns whether the number or shapes of tensors have changed since the last snapshot."""
        return False


class NoSnapshots:
    """Replaces :class:`Snapshots` if snapshots are turned off. Its methods do nothing."""

    def settle(self, iteration: int) -> None:
        """Waits until the previous snapshot is stored on all nodes.

        This method must be called before a step is reported as done.

        Args:
            iteration: Iteration that was just completed.
        """

    def take(self, iteration: int) -> None:
        """Starts to copy the current state. The copy continues during the next iteration.

        Args:
            iteration: Iteration that was completed last.
        """

    def before_update(self) -> None:
        """Waits until the state is copied, so that the optimizer may change it."""

    def close(self) -> None:
        """Waits for the running copy and stops taking snapshots. Safe to call more than once."""


class Snapshots(NoSnapshots):
    """Takes snapshots of this rank's state after steps. All ranks must call each method together.

    Args:
        state: Object that returns this rank's tensors and other state.
        job: Rank, process groups and environment of this process.
        settings: Settings that the node's agent passed to this rank.
        report: Function that writes a status line to the progress file.
        say: Function that writes a line to the user's log.
    """

    def __init__(
        self,
        state: SnapshotState,
        job: Job,
        settings: SnapshotSettings,
        report: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._job = job
        self._settings = settings
        self._report = report
        self._say = say
        self._file: SnapshotFile | None = None
        self._socket: socket.socket | None = None
        self._sources: list[torch.Tensor] = []
        # Element i lists the tensors of slot i.
        self._slots: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
        self._parts: list[Part] = []
        self._pool: ThreadPoolExecutor | None = None
        self._copying: Future[None] | None = None
        self._registered = 0
        self._stream: Any = None
        self._is_off = False
        self._is_outgrown = self._has_changed = False
        self._failure = ""
        self._count = 0

    def settle(self, iteration: int) -> None:
        if self._is_off or self._copying is None or iteration % self._settings.every:
            return
        self.before_update()
        failure = self._failure or ("" if self._is_outgrown else self._kept())
        changed = self._is_outgrown or self._state.is_changed()
        flag = torch.tensor([_FAILED if failure else _CHANGED if changed else 0])
        if len(self._job.places) > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._job.control_group)
        self._copying = None
        self._has_changed = int(flag) == _CHANGED
        if int(flag) == _FAILED:
            self._turn_off(next(filter(None, self._job.gather(failure))))

    def take(self, iteration: int) -> None:
        if self._is_off or iteration % self._settings.every:
            return
        if self._has_changed:
            self._release()
        pieces, extra = self._state.take()
        if self._pool is None:
            assert pieces is not None
            self._begin(pieces, len(extra))
            if self._is_off:
                return
        elif pieces is not None:
            self._sources = [pieces[part].tensor for part in self._parts]
        assert self._pool is not None
        if self._file is not None and len(extra) > self._file.head["extra_bytes"]:
            # The file is too small, so skip the snapshot of this step. Before the next snapshot,
            # all ranks create new, larger files.
            self._is_outgrown = True
            self._copying = self._pool.submit(lambda: None)
            return
        slot, self._count = self._count % SLOTS, self._count + 1
        event = None
        if self._job.accelerator.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copying = self._pool.submit(
            self._copy, slot, iteration, extra, event, self._versions()
        )

    def before_update(self) -> None:
        if self._copying is not None:
            try:
                self._copying.result()
            except (OSError, RuntimeError, ValueError) as error:
                self._failure = self._failure or f"rank {self._job.rank}: {error}"

    def close(self) -> None:
        self.before_update()
        self._copying = None
        self._is_off = True
        self._release()

    def _release(self) -> None:
        """Closes the file in this process. The keeper keeps the file and the snapshots in it."""
        self._is_outgrown = self._has_changed = False
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._sources = []
        self._slots = [[] for _ in range(SLOTS)]
        if self._registered:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(self._registered)
            self._registered = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, pieces: Mapping[Part, Piece], extra_bytes: int) -> None:
        """Plans which ``pieces`` of the state this rank copies, and creates the snapshot file.

        The file has space for more than twice ``extra_bytes``, because the non-tensor state may
        grow. All ranks must call this together.
        """
        job = self._job
        settings = self._settings
        extra_bytes = 2 * extra_bytes + _ROOM_BYTES
        parts_here = RankParts(
            node=settings.node,
            domain=settings.domain,
            buddy=settings.buddy,
            machine=str(job.places[job.rank]["machine"]),
            available_bytes=available_host_bytes(),
            extra_bytes=extra_bytes,
            parts={part: piece.tensor.nbytes for part, piece in pieces.items()},
        )
        gathered = job.gather((parts_here, time.time_ns()))
        ranks = [parts for parts, _ in gathered]
        plan = make_plan(ranks)
        reason = why_not(plan, ranks, settings.limit_bytes)
        if reason is not None:
            self._turn_off(reason)
            return
        self._parts = plan.copied_by(job.rank, parts_here)
        needs = {need: number for number, need in enumerate(dict.fromkeys(plan.needs.values()))}
        entries = []
        offset = 0
        for part in self._parts:
            position = {"at": offset, "need": needs[plan.needs[part]]}
            entries.append(entry_of(part, pieces[part]) | position)
            offset += _within_slot(pieces[part].tensor.nbytes)
        head = {
            "rank": job.rank,
            "extra_bytes": extra_bytes,
            "sent_bytes": plan.sent_bytes[job.rank],
            "tensor_bytes": plan.tensor_bytes[job.rank],
            "needs": [dataclasses.asdict(need) for need in needs],
            "entries": entries,
            **self._state.head(),
        }
        try:
            self._open(json.dumps(head).encode(), gathered[0][1])
        except OSError as error:
            self._failure = f"rank {job.rank}: {error}"
        self._place([pieces[part].tensor for part in self._parts], entries)
        self._announce(sum(plan.sent_bytes), sum(plan.tensor_bytes))

    def _open(self, head: bytes, generation: int) -> None:
        """Creates the snapshot file, and passes its file descriptor to the keeper.

        ``head`` is the file's JSON header. ``generation`` distinguishes this file from earlier
        files of the run.
        """
        self._file = SnapshotFile.create(head, whole=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_KEPT_S)
        self._socket.connect(f"\0{self._settings.address}")
        message = {
            "what": "store",
            "run": self._settings.run,
            "rank": self._job.rank,
            "generation": generation,
        }
        socket.send_fds(self._socket, [json.dumps(message).encode()], [self._file.descriptor])

    def _place(self, tensors: list[torch.Tensor], entries: list[dict[str, Any]]) -> None:
        """Creates tensors for the copies of ``tensors``, in both slots of the file.

        ``entries`` contains the position of each tensor within a slot.
        """
        self._pool = ThreadPoolExecutor(
            1, "snapshots", initializer=self._job.accelerator.make_current
        )
        if self._file is None:
            return
        memory = self._file.memory
        if self._job.accelerator.is_cuda:
            self._stream = torch.cuda.Stream()
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            # Pin the memory. Otherwise, the driver copies through a separate buffer, and blocks the
            # device.
            if lock_pages(start, len(memory), self._job.accelerator.device):
                self._registered = start
        for tensor, entry in zip(tensors, entries, strict=True):
            for slot in range(SLOTS):
                offset = self._file.tensors_offset(slot) + entry["at"]
                self._slots[slot].append(overlay(memory, offset, tensor.dtype, tensor.shape))
        self._sources = tensors

    def _versions(self) -> list[int]:
        """Returns the version counter of each tensor.

        torch increments the counter at each in-place change.
        """
        return [source._version for source in self._sources]

    def _copy(self, slot: int, step: int, extra: bytes, event: Any, versions: list[int]) -> None:
        """Writes the snapshot of ``step`` into ``slot``. Runs in the copying thread.

        Args:
            slot: Index of the slot in the file.
            step: Step of the snapshot.
            extra: Non-tensor state, serialized.
            event: CUDA event to wait for before copying, or ``None`` on a CPU.
            versions: Version counters of the tensors when the copy was requested.
        """
        if self._failure or self._file is None or self._socket is None:
            return
        file = self._file
        file.begin(slot, step)
        start = file.extra_offset(slot)
        file.memory[start : start + len(extra)] = extra
        with torch.no_grad():
            if event is None and self._sources:
                # Copy all tensors in a single call, which does not need the GIL. With one call per
                # tensor, the training thread would often have to wait for the GIL.
                torch._foreach_copy_(self._slots[slot], self._sources)
            elif event is not None:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(event)
                    for target, source in zip(self._slots[slot], self._sources, strict=True):
                        target.copy_(source, non_blocking=True)
                self._stream.synchronize()
        if self._versions() != versions:
            raise ValueError(
                "weights or optimizer state changed while they were copied, between the end "
                f"of step {step} and the next update; change them only at the end of a step"
            )
        file.finish(slot, step, len(extra))
        self._socket.send(json.dumps({"what": "taken", "step": step, "slot": slot}).encode())

    def _kept(self) -> str:
        """Waits until the last snapshot is stored. Returns an error message, or ``""``."""
        if self._socket is None:
            return ""
        rank = self._job.rank
        try:
            data = self._socket.recv(_MESSAGE)
        except TimeoutError:
            return f"rank {rank}: the node's agent did not confirm a copy within {_KEPT_S:g} s"
        except OSError as error:
            return f"rank {rank}: {error}"
        if not data:
            return f"rank {rank}: the node's agent closed the connection over which copies are sent"
        return str(parse_json(data).get("failed", ""))

    def _announce(self, sent: int, copied: int) -> None:
        every = "step" if self._settings.every == 1 else f"{self._settings.every} steps"
        kept = f"{copied / _MIB:.1f} MiB copied and {sent / _MIB:.1f} MiB sent every {every}"
        self._report(kept)
        self._say(f"  copies of the state are kept in memory: {kept}")

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._report(f"off: {why}")
        self._say(
            f"warning: no copies of the state are kept in memory: {why}; if a node fails without"
            " notice, training resumes from the last checkpoint"
        )


def make_snapshots(
    job: Job,
    state: Callable[[], SnapshotState],
    report: Callable[[str], None],
    say: Callable[[str], None],
) -> NoSnapshots:
    """Returns an object that takes snapshots, or that does nothing if snapshots are turned off.

    Args:
        job: Rank, process groups and environment of this process.
        state: Function that creates the object that provides this rank's state. It is only called
            if snapshots are turned on.
        report: Function that writes a status line to the progress file.
        say: Function that writes a line to the user's log.
    """
    settings = job.environment.copies
    if settings is None:
        return NoSnapshots()
    return Snapshots(state(), job, SnapshotSettings.read(settings), report, say)


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """State and node of one rank, as input of :func:`make_plan`.

    Attributes:
        node: Name of the rank's node.
        domain: Name of the failure domain (the set of ranks that fail together), which is a node or
            a machine with several nodes.
        buddy: Name of the node that also stores this node's snapshots, or ``None`` if there is no
            such node.
        machine: Name of the node's machine.
        available_bytes: Free memory of the machine in bytes.
        extra_bytes: Maximum size of a step's non-tensor state, in bytes.
        parts: Size in bytes of each part of the state that this rank has, keyed by part.
    """

    node: str
    domain: str
    buddy: str | None
    machine: str
    available_bytes: int
    extra_bytes: int
    parts: dict[Part, int]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Describes which ranks copy a part of the state, and whether another node stores the copy.

    Attributes:
        ranks: Ranks that copy the part. Each failure domain that has the part has one such rank.
        is_sent: Whether the copy is also sent to a node in another failure domain, because only
            one failure domain has the part.
    """

    ranks: tuple[int, ...]
    is_sent: bool


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """Assignment of the parts of the state to the ranks that copy them.

    Some parts of the state, such as data-parallel replicas and tied embeddings, exist in several
    failure domains. One rank in each of these domains copies such a part, and no rank sends it. A
    part that exists in a single domain is copied by one rank, and sent to another node (the buddy
    of the rank's node) if there is one. All ranks compute the same plan.

    Attributes:
        needs: Ranks that copy each part, and whether the copy is sent, keyed by part.
        sent_bytes: Number of bytes of tensors that each rank sends per snapshot.
        tensor_bytes: Number of bytes of tensors that each rank copies per snapshot.
    """

    needs: dict[Part, Need] = field(default_factory=dict)
    sent_bytes: list[int] = field(default_factory=list)
    tensor_bytes: list[int] = field(default_factory=list)

    def copied_by(self, rank: int, rank_parts: RankParts) -> list[Part]:
        """Returns the parts in ``rank_parts`` that ``rank`` copies.

        The parts that ``rank`` also sends to another node come first.
        """
        copied = [part for part in rank_parts.parts if rank in self.needs[part].ranks]
        return sorted(copied, key=lambda part: (not self.needs[part].is_sent, part))


def _within_slot(size: int) -> int:
    """Returns ``size`` in bytes, rounded up to the alignment of tensors in a slot."""
    return -(-size // ALIGN) * ALIGN


def make_plan(ranks: Sequence[RankParts]) -> SnapshotPlan:
    """Assigns the parts of the state to ranks that copy them, with similar numbers of bytes.

    Args:
        ranks: State and node of each rank, ordered by rank.
    """
    holders: dict[Part, list[int]] = {}
    sizes: dict[Part, int] = {}
    for rank, rank_parts in enumerate(ranks):
        for part, size in rank_parts.parts.items():
            holders.setdefault(part, []).append(rank)
            sizes[part] = size
    load = [0] * len(ranks)
    plan = SnapshotPlan()
    for part in sorted(holders, key=lambda part: (-sizes[part], part)):
        chosen: dict[str, int] = {}
        for rank in holders[part]:
            best = chosen.setdefault(ranks[rank].domain, rank)
            if load[rank] < load[best]:
                chosen[ranks[rank].domain] = rank
        copying = tuple(sorted(chosen.values()))
        for rank in copying:
            load[rank] += _within_slot(sizes[part])
        is_sent = len(copying) == 1 and ranks[copying[0]].buddy is not None
        plan.needs[part] = Need(ranks=copying, is_sent=is_sent)
    for rank, rank_parts in enumerate(ranks):
        sizes_here = rank_parts.parts
        copied = plan.copied_by(rank, rank_parts)
        sent = [part for part in copied if plan.needs[part].is_sent]
        plan.sent_bytes.append(sum(_within_slot(sizes_here[part]) for part in sent))
        plan.tensor_bytes.append(sum(_within_slot(sizes_here[part]) for part in copied))
    return plan


def why_not(plan: SnapshotPlan, ranks: Sequence[RankParts], limit_bytes: int | None) -> str | None:
    """Returns why the snapshots do not fit into the memory of a node, or ``None`` if they fit.

    Args:
        plan: Assignment of parts of the state to the ranks that copy them.
        ranks: State and node of each rank, ordered by rank.
        limit_bytes: Maximum size of all snapshots on a node in bytes, or ``None`` for no limit.
    """
    taken: dict[str, int] = defaultdict(int)
    for rank, parts in enumerate(ranks):
        taken[parts.node] += SLOTS * slot_bytes(parts.extra_bytes, plan.tensor_bytes[rank])
        if plan.sent_bytes[rank] and parts.buddy is not None:
            taken[parts.buddy] += SLOTS * slot_bytes(parts.extra_bytes, plan.sent_bytes[rank])
    for node, size in taken.items():
        if limit_bytes is not None and size > limit_bytes:
            return (
                f"the copies need {size / _GIB:.3g} GiB on node {node}, but --replicate-memory "
                f"allows only {limit_bytes / _GIB:.3g} GiB; increase --replicate-memory"
            )
    nodes = {parts.node: parts.machine for parts in ranks}
    for parts in ranks:
        size = sum(taken[node] for node, machine in nodes.items() if machine == parts.machine)
        if size > _SHARE * parts.available_bytes:
            return (
                f"the copies need {size / _GIB:.3g} GiB on the machine of node {parts.node}, which "
                f"is more than four fifths of its {parts.available_bytes / _GIB:.3g} GiB of "
                "available memory; use more nodes, or free memory on this machine"
            )
    return None
