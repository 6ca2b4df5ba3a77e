"""Briefly measures every rank, link and group of a job, to find slow hardware before training.

This table lists the measurements. Measurements of the same class are compared with each other:

=================  ==============================================  ============================
quantity           measurement                                     class
=================  ==============================================  ============================
matrix product     mean of products of square matrices             same device
memory bandwidth   mean of copies within the device's memory       same device
copies             pinned memory to the GPU and back               same device
clock              of the processor or GPU, after the products     same device
small message      half a round trip of 1 KiB                      same transport, within nodes
large message      512 KiB (CPU) or 4 MiB (GPU), sent in a burst   or between nodes
all-reduce         median over a group                             same kind, size and nodes
all-to-all         median over an expert-parallel group            same kind, size and nodes
checkpoint folder  a file written, flushed and read again          all nodes
=================  ==============================================  ============================

Measurements are made in batches (see ``probe_layout``). Each measurement is made twice, and the
better value is used. Outliers are measured again. ``doctor --probe`` connects the ranks for the
probe. In the trainer, the probe uses the channels and groups of the run.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.profiling.action_timing import now
from megatron.adaptive.profiling.check_job import CheckJob
from megatron.adaptive.profiling.device_probe import measure_device
from megatron.adaptive.profiling.links import Rounds, make_connector, measure_link
from megatron.adaptive.profiling.probe_findings import (
    ALL_REDUCE,
    ALL_TO_ALL,
    LARGE_MESSAGE,
    READ,
    SMALL_MESSAGE,
    WRITE,
    Figure,
    Outlier,
    better_of,
    find_outliers,
)
from megatron.adaptive.profiling.probe_layout import EXPERT, ProbeLayout, Ranks, batches
from megatron.adaptive.transport.interface import Transport

_SMALL_BYTES = 1 << 10
_LARGE_BYTES = {"cpu": 512 << 10, "cuda": 4 << 20}
_REDUCED_BYTES = {"cpu": 256 << 10, "cuda": 16 << 20}
_FILE_BYTES = 16 << 20
_LEAST_REPEATS = 3
_ROUNDS = Rounds(burst=4, least=4)
_MOST_IN_FLIGHT = 8  # Limit on the messages in flight in one direction.
_WAIT_S = 10.0
_PAUSES_S = (0.25, 0.75, 2.0)
"""Pauses in seconds before outliers are measured again, so that short-lived programs have ended."""


def _message_bytes(accelerator: Accelerator) -> int:
    """Returns the size in bytes of the largest message in a probe of ``accelerator``."""
    return _LARGE_BYTES[accelerator.device.type]


@dataclass(frozen=True, kw_only=True)
class ProbedGroup:
    """Process group that contains this rank.

    Attributes:
        ranks: Global ranks of the group's members, in ascending order.
        group: torch process group with these ranks.
    """

    ranks: Ranks
    group: Any


@dataclass(frozen=True)
class _Check:
    """Function that makes a measurement, and all groups of ranks for which it is called."""

    subjects: Sequence[Ranks]
    measure: Callable[[Ranks], list[Figure]]


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """Result of measuring the ranks, links and groups of a job.

    Attributes:
        figures: Measurements of all ranks, links and groups. Each is the better of two
            measurements.
        outliers: Measurements that are much worse than expected.
        seconds: Duration of the probe in seconds.
    """

    figures: list[Figure]
    outliers: list[Outlier]
    seconds: float


class Probe:
    """Measures the ranks, links and groups of a job. All ranks must call the same methods.

    Args:
        job: Environment of this process, with its ranks, device and process groups.
        name: Name of the probe, unique in the job.
        transport: Channels to the ranks with which this rank exchanges messages, or ``None`` if
            this rank has no channels. No messages may be in flight.
        message: Message to send if the channels accept only messages with the layout of a training
            step, or ``None`` to measure with a small and a large message.
        groups: Groups of this rank with more than one member, keyed by kind.
        folder: Checkpoint folder to write to, or ``None`` to skip this measurement.
        seconds: Duration of each measurement of a rank in seconds. Each measurement has at least a
            few repetitions.
        nodes: Name of the node of each global rank, or ``None`` for the host names.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        *,
        transport: Transport | None,
        message: torch.Tensor | None = None,
        groups: Mapping[str, ProbedGroup],
        folder: Path | None = None,
        seconds: float = 0.05,
        nodes: Sequence[str] | None = None,
    ) -> None:
        self._job = job
        self._turns = Turns(job, name)
        self._transport = transport
        self._message = message
        self._groups = dict(groups)
        self._folder = folder
        self._seconds = seconds
        self._nodes = list(nodes or (str(location["host"]) for location in job.places))
        self._machines = [str(location["machine"]) for location in job.places]
        accelerator = job.accelerator
        is_alone_on_gpu = accelerator.is_cuda and not accelerator.is_shared
        processors = len(os.sched_getaffinity(0))
        facts = {
            "most_busy": dist.get_world_size() if is_alone_on_gpu else max(1, processors),
            "device": accelerator.name,
            "links": {} if transport is None else _kinds_of(transport),
            "groups": {kind: group.ranks for kind, group in self._groups.items()},
        }
        self._facts = job.gather(facts)

    def run(self) -> ProbeReport:
        """Measures everything twice and looks for outliers.

        All ranks must call this method together.

        Outliers are measured again after a pause, because other programs on a busy machine may
        have disturbed both measurements.

        Returns:
            Measurements and outliers, which are equal on all ranks.
        """
        begin_s = time.perf_counter()
        checks = self._checks()
        figures = [figure for check in checks for figure in self._each(check)]
        again = [figure for check in checks for figure in self._each(check)]
        figures = better_of(figures, again)
        outliers = find_outliers(figures, self._nodes)
        for pause_s in _PAUSES_S:
            suspects = {outlier.ranks for outlier in outliers}
            if not suspects:
                break
            time.sleep(pause_s)
            for check in checks:
                subjects = [ranks for ranks in check.subjects if ranks in suspects]
                figures = better_of(figures, self._each(replace(check, subjects=subjects)))
            outliers = find_outliers(figures, self._nodes)
        return ProbeReport(
            figures=figures,
            outliers=outliers,
            seconds=self._job.from_first(time.perf_counter() - begin_s),
        )

    def _checks(self) -> list[_Check]:
        """Returns the measurements that the probe makes, which are equal on all ranks."""
        world = range(dist.get_world_size())
        links = {
            (min(rank, peer), max(rank, peer))
            for rank in world
            for peer in self._facts[rank]["links"]
        }
        checks = [
            _Check([(rank,) for rank in world], self._rank),
            _Check(sorted(links), self._link),
        ]
        for kind in sorted({kind for facts in self._facts for kind in facts["groups"]}):
            groups = {facts["groups"][kind] for facts in self._facts if kind in facts["groups"]}
            checks.append(_Check(sorted(groups), partial(self._group, kind=kind)))
        if self._folder is not None:
            first = {machine: rank for rank, machine in reversed([*enumerate(self._machines)])}
            checks.append(_Check([(rank,) for rank in sorted(first.values())], self._files))
        return checks

    def _each(self, check: _Check) -> list[Figure]:
        """Runs the measurement ``check`` for all its ranks, and returns all results.

        All ranks must call this method together.
        """
        most_busy = [facts["most_busy"] for facts in self._facts]
        turns = batches(check.subjects, self._machines, most_busy)
        measured = [figure for ranks in self._turns.each(turns) for figure in check.measure(ranks)]
        gathered = self._job.gather(measured)
        self._turns.finish(turns)
        return [
            figure
            for rank, figures in enumerate(gathered)
            for figure in figures
            if rank == figure.ranks[0]
        ]

    def _rank(self, ranks: Ranks) -> list[Figure]:
        """Measures the device of this rank, which is the only rank in ``ranks``."""
        return measure_device(self._job.accelerator, ranks, self._seconds)

    def _link(self, ranks: Ranks) -> list[Figure]:
        """Measures the link between the two ranks in ``ranks``, one of which must be this rank."""
        assert self._transport is not None
        peer = sum(ranks) - self._job.rank
        kind = self._facts[ranks[0]]["links"][ranks[1]]
        within = self._machines[ranks[0]] == self._machines[ranks[1]]
        peers = f"{kind} {'within' if within else 'between'} nodes"
        # Skip ranks that did not reply in time, because a late reply could be mistaken for the
        # reply to a later message.
        if any(self._turns.is_noted(str(rank)) for rank in ranks):
            return []
        figures = []
        for measure, payload in self._payloads().items():
            try:
                link = measure_link(
                    self._transport,
                    peer,
                    leads=self._job.rank == ranks[0],
                    payload=payload,
                    timeout_s=_WAIT_S,
                    rounds=_ROUNDS,
                )
            except DeadlineError as error:
                for rank in ranks:
                    self._turns.note(str(rank))
                text = str(error)
                return [Figure(measure=measure, ranks=ranks, peers=peers, value=0.0, error=text)]
            value = link.latency_s + link.occupancy_s
            figures.append(Figure(measure=measure, ranks=ranks, peers=peers, value=value))
        return figures

    def _payloads(self) -> dict[str, torch.Tensor]:
        """Returns the messages whose transfer times are measured, keyed by quantity."""
        if self._message is not None:
            return {LARGE_MESSAGE: self._message}
        accelerator = self._job.accelerator
        sizes = {SMALL_MESSAGE: _SMALL_BYTES, LARGE_MESSAGE: _message_bytes(accelerator)}
        return {
            measure: torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
            for measure, size in sizes.items()
        }

    def _group(self, ranks: Ranks, *, kind: str) -> list[Figure]:
        """Measures the collectives in this rank's group of the type ``kind``.

        ``ranks`` contains the ranks of the group.
        """
        device = self._job.accelerator.device
        group = self._groups[kind].group
        nodes = len({self._machines[rank] for rank in ranks})
        peers = f"{kind} {len(ranks)} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        width = _REDUCED_BYTES[device.type] // (4 * len(ranks)) * len(ranks)
        payload = torch.zeros(width, device=device)
        calls: dict[str, Callable[[], Any]] = {
            ALL_REDUCE: lambda: dist.all_reduce(payload, group=group)
        }
        if kind == EXPERT:
            received = torch.empty_like(payload)
            calls[ALL_TO_ALL] = lambda: dist.all_to_all_single(received, payload, group=group)
        figures = []
        for measure, call in calls.items():
            times = []
            for _ in range(1 + _LEAST_REPEATS):
                begin_s = now(device)
                call()
                times.append(now(device) - begin_s)
            value = statistics.median(times[1:])
            figures.append(Figure(measure=measure, ranks=ranks, peers=peers, value=value))
        return figures

    def _files(self, ranks: Ranks) -> list[Figure]:
        """Measures how fast this rank writes a file to the checkpoint folder and reads it.

        ``ranks`` contains only this rank.
        """
        assert self._folder is not None
        path = self._folder / f".probe-{self._job.rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                taken = _write_and_read(path)
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
        except OSError as error:
            text = f"{error.filename or path}: {error.strerror}"
            return [Figure(measure=WRITE, ranks=ranks, peers="folder", value=0.0, error=text)]
        return [
            Figure(measure=measure, ranks=ranks, peers="folder", value=_FILE_BYTES / seconds)
            for measure, seconds in zip((WRITE, READ), taken, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Selects what a probe measures.

    Attributes:
        layout: Parallel sizes of the job.
        transport: Transport settings that the user has set.
        folder: Checkpoint folder to write to, or ``None`` to skip this measurement.
        seconds: Duration of each measurement of a rank in seconds. Each measurement has at least a
            few repetitions.
        timeout: Maximum time to wait for the rendezvous of all ranks.
    """

    layout: ProbeLayout
    transport: TransportConfig
    folder: Path | None
    seconds: float
    timeout: timedelta


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """Result of a probe, with the host names of the ranks.

    Attributes:
        report: Measurements and outliers.
        hosts: Host name of each global rank.
    """

    report: ProbeReport
    hosts: list[str]


def probe_job(
    options: ProbeOptions, environment: Environment, show: Callable[[JobReport], None]
) -> JobReport:
    """Connects all ranks, probes them, and disconnects.

    All ranks must call this function together.

    Args:
        options: Measurements to make, equal on all ranks.
        environment: Rank of this process, number of ranks, and address of the rendezvous.
        show: Function that rank 0 calls with the result before the ranks disconnect. A launcher may
            kill all ranks as soon as one rank exits with a status other than 0.

    Raises:
        SetupError: A pair of ranks cannot use the transport that the user forced.
        TransportError: The rendezvous failed, or a rank has exited.
    """
    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    checked = CheckJob(environment, options.timeout)
    job = checked.job
    transport = None
    links = options.layout.links()
    if links:
        size = options.transport.transport_slot_bytes or _message_bytes(job.accelerator)
        settings = replace(options.transport, transport_slot_bytes=size)
        connector = make_connector(job, in_flight=_MOST_IN_FLIGHT)
        endpoint = connector.own_end(job.places, settings, environment.master_addr)
        peers = [sum(link) - job.rank for link in links if job.rank in link]
        transport = connector.connect(endpoint, peers, settings)
    try:
        probe = Probe(
            job,
            "probe",
            transport=transport,
            groups=_make_groups(options.layout, job.rank),
            folder=options.folder,
            seconds=options.seconds,
        )
        hosts = [str(location["host"]) for location in job.places]
        result = JobReport(report=probe.run(), hosts=hosts)
        if job.is_first:
            show(result)
    finally:
        if transport is not None:
            transport.close()
    checked.close()
    return result


def _make_groups(layout: ProbeLayout, rank: int) -> dict[str, ProbedGroup]:
    """Creates the process groups of ``layout``, and returns those of ``rank``, keyed by kind.

    All ranks must call this function together.
    """
    made: dict[str, ProbedGroup] = {}
    for kind, groups in layout.groups().items():
        for ranks in groups:
            group: Any = dist.new_group(list(ranks))
            if rank in ranks:
                made[kind] = ProbedGroup(ranks=ranks, group=group)
    return made


class Turns:
    """Lets ranks take turns in measuring. Ranks sleep until their turn.

    A barrier between turns would wake all ranks each time. With 64 ranks on two processors, this
    would take longer than the measurements. Instead, the last rank of a turn wakes the ranks of the
    next turn through the key-value store of the job::

        turn 0      ranks 0, 1    each adds 1 to "0/done"; the one that makes it 2 sets "1/go"
        turn 1      ranks 2, 3    wait for "1/go", ...

    All ranks must create this object, and call :meth:`each` the same number of times.

    Args:
        job: Environment of this process.
        name: Name of this series of turns, unique in the job.
    """

    def __init__(self, job: Job, name: str) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, default)
        self._job = job
        self._series = 0

    def each(self, batches: Sequence[Sequence[Ranks]]) -> Iterator[Ranks]:
        """Yields the ranks of each measurement that includes this rank, at the start of its turn.

        A turn ends when the caller requests the next element. The caller must iterate to the end.

        Args:
            batches: Ranks of each measurement, grouped by turn. The measurements of a turn have no
                ranks in common. This argument must be equal on all ranks.
        """
        self._series += 1
        for number, batch in enumerate(batches):
            for ranks in batch:
                if self._job.rank in ranks:
                    if number:
                        self._store.wait([self._key(number, "go")], self._job.timeout)
                    yield ranks
                    self._end(number, sum(map(len, batch)))

    def finish(self, batches: Sequence[Sequence[Ranks]]) -> None:
        """Deletes the store's keys of the last series of turns, which must have ended.

        ``batches`` contains the measurements of the series.
        """
        if self._job.is_first:
            for number in range(len(batches)):
                self._store.delete_key(self._key(number, "done"))
                self._store.delete_key(self._key(number + 1, "go"))

    def note(self, text: str) -> None:
        """Records ``text``. In later turns, :meth:`is_noted` returns true for it on all ranks."""
        self._store.set(f"noted/{text}", "")

    def is_noted(self, text: str) -> bool:
        """Returns whether any rank called :meth:`note` with ``text`` in an earlier turn."""
        return bool(self._store.check([f"noted/{text}"]))

    def _end(self, number: int, count: int) -> None:
        if self._store.add(self._key(number, "done"), 1) == count:
            self._store.set(self._key(number + 1, "go"), "")

    def _key(self, number: int, event: str) -> str:
        return f"{self._series}/{number}/{event}"


def _kinds_of(transport: Transport) -> dict[int, str]:
    """Returns the kind of transport to each peer of this rank, keyed by the peer's rank."""
    return {peer: str(link["kind"]) for peer, link in transport.describe_links().items()}


def _write_and_read(path: Path) -> tuple[float, float]:
    """Returns the times in seconds to write and flush the file ``path``, and to read it."""
    block = bytes(1 << 20)
    begin_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(_FILE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begin_s
        # Without this call, the file would be read from the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(len(block)):
            pass
    return max(written_s, 1e-9), max(time.perf_counter() - begin_s, 1e-9)
