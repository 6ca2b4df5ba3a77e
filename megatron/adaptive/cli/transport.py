"""Implements ``transport``, which finds the transports that connect two nodes or processes.

::

    python -m megatron.adaptive transport --check          checks two processes on this machine
    torchrun ... -m megatron.adaptive transport --check    checks all processes of a job

Each transport is tried between two ranks for about two seconds. A table shows the latency and
bandwidth of each transport, or the reason why the transport does not work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from megatron.adaptive.cli import launch
from megatron.adaptive.cli.common import leave_reason, show
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import ConfigError

_SECONDS = 2.0
_MEETING_S = 120.0
_EXIT_CHOSEN_FAILED = 1
_COLUMNS = ("ranks", "transport", "half round trip", "bandwidth", "")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of checking one transport between two ranks.

    Attributes:
        ranks: Global ranks of the two processes.
        hosts: Host names of the two processes.
        transport: Name of the transport.
        chosen: Whether a run would use this transport between the two ranks.
        works: Whether the transport connected the ranks and delivered payloads unchanged.
        latency_us: Half of the round-trip time of a 1 KiB message, in microseconds.
        gb_per_s: Bandwidth with 4 MiB messages, in 10^9 bytes per second.
        note: Reason why the transport does not work, or why a run would use it.
    """

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    transport: str
    chosen: bool = False
    works: bool = False
    latency_us: float | None = None
    gb_per_s: float | None = None
    note: str = ""


def main(argv: Sequence[str]) -> int:
    """Checks the transports between the ranks of a job. Rank 0 prints a table.

    Returns:
        1 if the transport that a run would use does not work; otherwise 0.
    """
    options = _parser().parse_args(argv)
    if not options.check:
        raise ConfigError("transport requires --check, its only mode; see --help")
    environment = Environment.read()
    if not environment.is_launched:
        shape = ["--standalone", "--nproc-per-node", "2", "-m"]
        return launch.main([*shape, "megatron.adaptive", "transport", *argv])
    return _check(options, environment)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} transport",
        description="Check which transports connect the ranks of a pipeline, and how fast.",
    )
    add = parser.add_argument
    add("--check", action="store_true", help="try all transports between two ranks")
    seconds = number(float, 0.001, 3600)
    text = "seconds to try each transport between two ranks"
    add("--seconds", type=seconds, default=_SECONDS, help=text)
    add("--json", action="store_true", help="print the results as JSON")
    group = parser.add_argument_group("transport, as in training")
    for spec in fields_of(TransportConfig):
        group.add_argument(*spec.names, **spec.options())
    return parser


def _check(options: argparse.Namespace, environment: Environment) -> int:
    """Takes part in the check as one rank of the job, and returns the exit status."""
    from megatron.adaptive.profiling.transport_check import TransportCheck

    names = {spec.dest for spec in fields_of(TransportConfig)} & vars(options).keys()
    config = TransportConfig(**{name: getattr(options, name) for name in names})
    if environment.world_size < 2:
        raise ConfigError(
            "transport --check requires at least two ranks, got one; start more processes"
        )
    check = TransportCheck(config, environment, timedelta(seconds=_MEETING_S))
    outcomes = [Outcome(**facts) for facts in check.outcomes(options.seconds)]
    # A launcher kills all ranks as soon as one rank fails, so print the table before any rank can
    # exit.
    if environment.rank == 0:
        _print(outcomes, as_json=options.json)
    check.close()
    bad = any(outcome.chosen and not outcome.works for outcome in outcomes)
    if not bad:
        return 0
    leave_reason("transport --check: the chosen transport does not work; see the output of rank 0")
    return _EXIT_CHOSEN_FAILED


def _print(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
        return
    rows = [_COLUMNS]
    for outcome in outcomes:
        low, high = outcome.ranks
        rows.append(
            (
                f"{low}-{high}",
                ("* " if outcome.chosen else "  ") + outcome.transport,
                "-" if outcome.latency_us is None else f"{outcome.latency_us:.1f} us",
                "-" if outcome.gb_per_s is None else f"{outcome.gb_per_s:.2f} GB/s",
                outcome.note if outcome.works else f"no: {outcome.note}",
            )
        )
    for row, cells in zip(rows, aligned([row[:4] for row in rows], 2), strict=True):
        show(f"{cells}  {row[4]}".rstrip())
    pairs = {outcome.ranks: outcome.hosts for outcome in outcomes}
    hosts = ", ".join(f"{low}-{high}: {a} to {b}" for (low, high), (a, b) in pairs.items())
    show(f"\n* marks the transport that a run would use. {hosts}")
