"""Prints the state of a job; ``get_result.sh`` calls it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.adaptive.cluster.node import ROOT
from megatron.adaptive.cluster.status import JobStatus, NodeStatus, read_status
from megatron.adaptive.config.command_parser import CommandParser

_PERIOD_S = 5.0
_GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Prints the state of a job.

    Returns:
        1 if it is stalled, a node was lost or a node reported an error.

    Raises:
        ConfigError: an option is wrong.
        SetupError: nobody knows the job.
    """
    parser = CommandParser(
        prog="get_result.sh", description="Report the state of a job.", allow_abbrev=False
    )
    add = parser.add_argument
    add("job", help="its id, which is the name of its folder of logs")
    add("--log-dir", type=Path, default=ROOT / "logs", help="LOG_DIR of conf.sh (logs)")
    add("--follow", action="store_true", help="print again every 5 s until it has ended")
    add("--json", action="store_true", help="as JSON; with --follow a line each time")
    options = parser.parse_args(argv)
    while True:
        status = read_status(options.job, options.log_dir)
        if options.json:
            print(json.dumps(asdict(status), indent=None if options.follow else 2), flush=True)
        else:
            print(_text(status), flush=True)
        if not options.follow or status.is_over:
            return int(status.is_stalled or status.has_errors)
        time.sleep(_PERIOD_S)


def _text(status: JobStatus) -> str:
    reason = f" ({status.reason})" if status.reason else ""
    lines = [f"job {status.job}: {status.state or 'not known to Slurm'}{reason}"]
    lines += [f"LOST: node {name}: {why}" for name, why in status.lost.items()]
    if not status.nodes:
        lines.append(f"no logs in {status.folder} yet; another LOG_DIR is given with --log-dir")
    elif status.iteration is None:
        lines.append("no iteration yet")
    else:
        speed = "" if status.tokens_per_s is None else f", {status.tokens_per_s:.0f} tokens/s"
        lines.append(
            f"iteration {status.iteration} of {status.iterations}, {status.iteration_ms:.1f} ms "
            f"each{speed}; the latest {status.since_s:.0f} s ago"
        )
    if status.is_stalled:
        lines.append("STALLED: no iteration for more than 5 times the usual; see each node's use")
    for name, wanted, found in status.differences:
        lines.append(f"DIFFERENT: {name} is {found}, {wanted} was requested")
    for node in status.nodes:
        lines += _node_lines(node)
    return "\n".join(lines)


def _node_lines(node: NodeStatus) -> list[str]:
    if node.is_former:
        return [f"--- {node.name}: took part in an earlier start of the job only"]
    lines = [f"--- {node.name}: {_use(node)}"]
    for title, found in (
        ("error", node.errors),
        ("warning", node.warnings),
        ("out", node.out),
        ("err", node.err),
    ):
        lines += [f"{title:8} {line.rstrip()}" for line in found]
    return lines


def _use(node: NodeStatus) -> str:
    if node.use is None:
        return "no sample of its use"
    gpus = [
        f"GPU {gpu['index']} {gpu['used_percent']}% "
        f"{gpu['memory_used_bytes'] / _GIB:.1f} GiB, {len(gpu['pids'])} processes"
        for gpu in node.use["gpus"]
    ]
    processes = node.use["processes"]
    memory = sum(one["memory_bytes"] for one in processes) / _GIB
    used = sum(one["cpu_percent"] for one in processes)
    age_s = time.time() - node.use["unix_s"]
    own = f"{len(processes)} processes, {used:.0f}% CPU, {memory:.1f} GiB"
    return "; ".join([*gpus, own, f"sampled {age_s:.0f} s ago"])
