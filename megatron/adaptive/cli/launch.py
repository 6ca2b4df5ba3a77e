"""torchrun, with the trainer's options checked beforehand and a short message at the end.

Takes torchrun's own command line. Differences: bad options of ``pretrain_gpt.py`` end it before any
process starts; a failed job ends with the failed rank and no traceback of the launcher; Ctrl-C is
passed on to the ranks, which save a checkpoint and end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR
from megatron.adaptive.config.arguments import parse

_TRAINER = "pretrain_gpt.py"


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``.

    Returns:
        The job's exit status: that of the rank that failed first, 128 + N after signal N.

    Raises:
        ConfigError: the trainer's options break a rule.
    """
    # Imports torch: about a second.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = parse_args(list(argv))  # type: ignore[no-untyped-call]
    _check_trainer(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _quiet_torchrun()
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return _report(error)
    except SignalException as error:
        print(f"stopped by signal {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + int(error.sigval)
    return 0


def _quiet_torchrun() -> None:
    """Its messages repeat what the failed rank said, in many lines."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _check_trainer(options: Any) -> None:
    """Parse the trainer's options here, once, instead of in every rank."""
    counts = options.nproc_per_node, options.nnodes
    if Path(options.training_script).name != _TRAINER or not all(c.isdigit() for c in counts):
        return
    world_size = int(options.nproc_per_node) * int(options.nnodes)
    parse(options.training_script_args, world_size=world_size, last_wins=True)


def _report(error: Any) -> int:
    """Name the rank that failed first; returns the exit status for the whole job."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    if code == EXIT_EXPECTED_ERROR:
        return code  # the rank has said what was wrong
    if code < 0:
        name = signal.Signals(-code).name
        how = f"was killed by signal {-code} ({name})"
        if name == "SIGKILL":
            how += "; if nobody did, the machine ran out of memory (see dmesg)"
    else:
        how = f"ended with status {code}; its message is above"
    print(f"error: rank {rank} (pid {failure.pid}) {how}", file=sys.stderr, flush=True)
    return 1 if code < 0 else code
