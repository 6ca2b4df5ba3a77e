"""Runs the RDMA lab from the command line."""

from __future__ import annotations

import argparse
import signal
import sys

from . import MACHINES, LabError, __doc__, prepare, qemu, run


def main() -> int:
    """Runs a command on all nodes, prints its output as ``[rank] line``, and returns its status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.labs.rdma_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument(
        "--memory",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory of each node in MiB (default: 1024)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="timeout in seconds, including the boot (default: 300)",
    )
    parser.add_argument(
        "--machine", choices=MACHINES, default=MACHINES[0], help="kind of the nodes (default: uml)"
    )
    parser.add_argument(
        "--prepare", action="store_true", help=("only prepare the files that nodes boot from")
    )
    parser.add_argument("command", nargs="*", help="program and its arguments, after --")
    options = parser.parse_args()
    # Raise an exception on SIGTERM, so that the nodes are terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.prepare:
            print(prepare() if options.machine == "uml" else qemu.prepare())
            return 0
        if not options.command or options.nodes < 1:
            parser.error("COMMAND is missing, or --nodes is less than 1")
        result = run(
            options.command,
            nodes=options.nodes,
            timeout_s=options.timeout,
            memory_mib=options.memory,
            on_line=lambda rank, line: print(f"[{rank}] {line}", flush=True),
            machine=options.machine,
        )
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return result.status


if __name__ == "__main__":
    sys.exit(main())
