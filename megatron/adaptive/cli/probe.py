"""``doctor --probe``: measures all ranks of a job before training, and names the slow ones.

::

    python -m megatron.adaptive doctor --probe                        processes on this machine
    job launch --nnodes 2 ... -m megatron.adaptive doctor --probe     all processes of all nodes
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.adaptive.cli import launch
from megatron.adaptive.cli.common import show
from megatron.adaptive.cluster.inventory import count_gpus
from megatron.adaptive.config.command_parser import number
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.parallel import ParallelConfig, TransportConfig
from megatron.adaptive.errors import ConfigError

if TYPE_CHECKING:
    from megatron.adaptive.profiling.probe_job import JobReport

_EXIT_OUTLIER = 1
_MEETING_S = 120.0
_SECONDS = 0.05
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``--probe`` to the parser of ``doctor``."""
    group = parser.add_argument_group(
        "probe of a job, before training",
        "measures ranks, links and groups of ranks, and compares each with the others and with the"
        " GPU's data sheet; start it on all nodes like training, by job launch or torchrun",
    )
    add = group.add_argument
    add("--probe", action="store_true", help="probe all ranks; status 1 if one is an outlier")
    text = "processes to start here if no launcher has started this one; default: one per GPU, or 2"
    add("--processes", type=number(int, 1, 4096), help=text)
    add("--save", type=Path, metavar="DIR", help="checkpoint folder, to measure it too")
    text = f"seconds of each measurement of a rank ({_SECONDS:g})"
    add("--seconds", type=number(float, 0.001, 60), default=_SECONDS, help=text)
    for spec in fields_of(ParallelConfig):
        if spec.dest in _SIZES:
            group.add_argument(*spec.names, **spec.options())
    transport = parser.add_argument_group("transport of the probe, as in training")
    for spec in fields_of(TransportConfig):
        transport.add_argument(*spec.names, **spec.options())


def probe(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Probes all ranks as one of them; rank 0 prints the outliers.

    Args:
        options: Parsed flags of ``doctor``.
        argv: The same flags as they were given, for processes that are started here.

    Returns:
        1 if a rank, link or group is an outlier or did not answer, else 0.
    """
    environment = Environment.read()
    if not environment.is_launched:
        count = options.processes or count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 2
        shape = ["--standalone", "--nproc-per-node", str(count), "-m"]
        return launch.main([*shape, "megatron.adaptive", "doctor", *argv])
    from megatron.adaptive.profiling.probe_job import ProbeOptions, probe_job
    from megatron.adaptive.profiling.probe_layout import ProbeLayout

    values = vars(options)
    if environment.world_size < 2:
        raise ConfigError("doctor --probe: a single rank has none to compare with; start two")
    sizes = {name: values[name] for name in _SIZES if name in values}
    # Without a layout, a pipeline of all ranks measures a link of every rank.
    sizes = sizes or {"pipeline_model_parallel_size": environment.world_size}
    layout = ProbeLayout(
        world_size=environment.world_size,
        tensor=sizes.get("tensor_model_parallel_size", 1),
        context=sizes.get("context_parallel_size", 1),
        expert=sizes.get("expert_model_parallel_size", 1),
        pipeline=sizes.get("pipeline_model_parallel_size", 1),
        chunks=sizes.get("num_virtual_stages_per_pipeline_rank", 1),
    )
    names = {spec.dest for spec in fields_of(TransportConfig)} & values.keys()
    result = probe_job(
        ProbeOptions(
            layout=layout,
            transport=TransportConfig(**{name: values[name] for name in names}),
            folder=options.save,
            seconds=options.seconds,
            timeout=timedelta(seconds=_MEETING_S),
        ),
        environment,
        show=partial(_print, as_json=options.json),
    )
    return _EXIT_OUTLIER if result.report.outliers else 0


def _print(result: JobReport, *, as_json: bool) -> None:
    report = result.report
    if as_json:
        content = {
            "hosts": result.hosts,
            "seconds": round(report.seconds, 3),
            "figures": [asdict(figure) for figure in report.figures],
            "outliers": [asdict(outlier) for outlier in report.outliers],
        }
        print(json.dumps(content, indent=2))
        return
    for outlier in report.outliers:
        show(f"{outlier.text}: {outlier.remedy}")
    count = len(report.outliers)
    outcome = "no outlier" if not count else f"{count} outlier{'s' if count > 1 else ''}"
    nodes = len(set(result.hosts))
    show(
        f"{outcome}: {len(report.figures)} figures of {len(result.hosts)} ranks on {nodes} "
        f"node{'s' if nodes > 1 else ''} in {report.seconds:.1f} s",
        file=sys.stderr if count else None,
    )
