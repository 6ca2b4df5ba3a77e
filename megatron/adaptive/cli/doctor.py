"""``doctor``: checks whether a node is fit for a run, and says how to mend what is not."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict

from megatron.adaptive.cluster.doctor import Check, answer_peers, check_node, check_way
from megatron.adaptive.cluster.host import interface_of, resolve
from megatron.adaptive.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Check and print.

    Returns:
        1 if something is missing without which a run cannot work.

    Raises:
        ConfigError: an option is wrong.
        SetupError: the master's name does not resolve.
    """
    parser = CommandParser(
        prog="python -m megatron.adaptive doctor",
        description="Check this node; with --master-addr also the way between nodes: give the "
        "same address on two nodes, one of which has it.",
    )
    add = parser.add_argument
    add("--master-addr", help="address of one of the nodes that is checked")
    add("--master-port", type=int, default=29500, help="its port (29500)")
    add("--timeout", type=float, default=60.0, help="seconds to wait for the other node (60)")
    add("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    checks = check_node(options.master_port)
    if options.master_addr is not None:
        address = resolve(options.master_addr)
        if interface_of(address) is not None:
            checks += answer_peers(options.master_port, options.timeout)
        else:
            checks += check_way(address, options.master_port, options.timeout)
    _print(checks, as_json=options.json)
    return int(any(check.state == "error" for check in checks))


def _print(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        told = {"host": socket.gethostname(), "checks": [asdict(check) for check in checks]}
        print(json.dumps(told, indent=2))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:8} {check.name:{width}}  {check.text}")
        if check.mend:
            print(f"{'':8} {'':{width}}  -> {check.mend}")
