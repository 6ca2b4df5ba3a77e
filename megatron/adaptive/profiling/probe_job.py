"""Connects ranks like a training job of a layout would, and probes them, for ``doctor --probe``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.profiling.check_job import CheckJob
from megatron.adaptive.profiling.links import make_connector
from megatron.adaptive.profiling.probe import (
    MOST_IN_FLIGHT,
    Probe,
    ProbedGroup,
    ProbeReport,
    message_bytes,
)
from megatron.adaptive.profiling.probe_layout import ProbeLayout


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Selects what to probe.

    Attributes:
        layout: Parallel sizes of the job.
        transport: Transport settings given by the user.
        folder: Checkpoint folder to write to, ``None`` for none.
        seconds: Time in seconds of each measurement of a rank, beyond a few repetitions.
        timeout: Maximum time to wait until all ranks have met.
    """

    layout: ProbeLayout
    transport: TransportConfig
    folder: Path | None
    seconds: float
    timeout: timedelta


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """Holds the result of probing a job.

    Attributes:
        report: Figures and outliers.
        hosts: Host name of each global rank.
    """

    report: ProbeReport
    hosts: list[str]


def probe_job(
    options: ProbeOptions, environment: Environment, show: Callable[[JobReport], None]
) -> JobReport:
    """Connects all ranks, probes them, and disconnects. Collective over all ranks.

    Args:
        options: Selection of what to probe; equal on all ranks.
        environment: Rank of this process, number of ranks, and address where ranks meet.
        show: Function that rank 0 calls with the result before ranks disconnect. A launcher may end
            all ranks as soon as one has ended with another status than 0.

    Raises:
        SetupError: A pair of ranks cannot use the transport that the user forced.
        TransportError: The ranks could not find each other, or a rank has ended.
    """
    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    checked = CheckJob(environment, options.timeout)
    job = checked.job
    transport = None
    links = options.layout.links()
    if links:
        size = options.transport.transport_slot_bytes or message_bytes(job.accelerator)
        settings = replace(options.transport, transport_slot_bytes=size)
        connector = make_connector(job, in_flight=MOST_IN_FLIGHT)
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
    """Makes the process groups of a layout, and returns those of this rank. Collective."""
    made: dict[str, ProbedGroup] = {}
    for kind, groups in layout.groups().items():
        for ranks in groups:
            group: Any = dist.new_group(list(ranks))
            if rank in ranks:
                made[kind] = ProbedGroup(ranks=ranks, group=group)
    return made
