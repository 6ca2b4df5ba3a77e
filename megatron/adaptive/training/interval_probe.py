"""Tests between training steps whether ranks, links or groups are slow (``--probe-interval``).

Such a test is called a probe. In an elastic job, the first probe runs before the first step. The
names of failed nodes are written to ``progress.jsonl``, which the job's manager reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.engine.progress import Value
from megatron.adaptive.gpt.setup import Run, payload_shape
from megatron.adaptive.profiling.failed_nodes import find_failed_nodes
from megatron.adaptive.profiling.probe import Probe, ProbedGroup
from megatron.adaptive.profiling.probe_layout import CONTEXT, DATA, EXPERT, TENSOR

_MOST_SHARE = 0.01
"""Maximum fraction of the training time that probes may take. The first probe always runs."""
_SECONDS = 0.02


class Report(Protocol):
    """Function that writes values to ``progress.jsonl``."""

    def __call__(self, **values: Value) -> None: ...


class IntervalProbe:
    """Probes a run every ``interval`` iterations. All ranks must call the same methods.

    A probe is skipped if it would take more than 1% of the time since the previous probe.

    Args:
        interval: Number of iterations between two probes; 0 disables probes.
        say: Function that writes a line to the log.
        report: Function that writes values to ``progress.jsonl``.
    """

    def __init__(self, interval: int, say: Callable[[str], None], report: Report) -> None:
        self._interval = interval
        self._say = say
        self._report = report
        self._count = 0
        self._cost_s = 0.0
        self._end_s = time.perf_counter()

    def is_due(self, iteration: int) -> bool:
        """Returns whether to probe after ``iteration``. All ranks get the same result."""
        return self._interval > 0 and iteration % self._interval == 0

    def is_due_at_start(self, run: Run) -> bool:
        """Returns whether to probe ``run`` before the first step: true for elastic jobs."""
        return self._interval > 0 and run.job.environment.lease is not None

    def run(self, run: Run) -> None:
        """Probes ``run``, unless probes take too much time. All ranks must call this.

        No messages between stages may be in flight during this call.
        """
        since_s = time.perf_counter() - self._end_s
        if not run.job.from_first(self._cost_s <= _MOST_SHARE * since_s):
            return
        self._count += 1
        locations = run.job.places
        hosts = [str(location["host"]) for location in locations]
        # Prefer the node names of an elastic job: several of its nodes may run on one machine, and
        # then have the same host name.
        nodes = run.job.gather(run.job.environment.node or hosts[run.job.rank])
        with run.tracing.host_span("probe"):
            probe = Probe(
                run.job,
                f"probe-{self._count}",
                transport=None if run.wiring is None else run.wiring.transport,
                message=_message(run),
                groups=_groups(),
                seconds=_SECONDS,
                nodes=nodes,
            )
            report = probe.run()
        self._cost_s = report.seconds
        self._end_s = time.perf_counter()
        for outlier in report.outliers:
            self._say(f"  probe: {outlier.text}: {outlier.remedy}")
        failed = find_failed_nodes(report.outliers, report.figures, nodes)
        self._report(probe=self._count, failed_nodes=[node.to_dict() for node in failed])
        if not report.outliers:
            self._say(
                f"  probe: no outliers among {len(report.figures)} measured values, "
                f"{report.seconds:.2f} s"
            )


def _message(run: Run) -> torch.Tensor:
    """Returns a message with the shape and dtype of the messages between stages of ``run``."""
    return torch.zeros(
        *payload_shape(run.job.config),
        dtype=run.core.pipeline_dtype,
        device=run.job.accelerator.device,
    )


def _groups() -> dict[str, ProbedGroup]:
    """Returns this rank's process groups that have at least two ranks, keyed by kind."""
    present = {
        TENSOR: parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        CONTEXT: parallel_state.get_context_parallel_group(check_initialized=False),
        DATA: parallel_state.get_data_parallel_group(),
        EXPERT: parallel_state.get_expert_model_parallel_group(check_initialized=False),
    }
    groups = {}
    for kind, group in present.items():
        if group is None:
            continue
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if len(ranks) > 1:
            groups[kind] = ProbedGroup(ranks=ranks, group=group)
    return groups
