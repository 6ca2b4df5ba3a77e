"""Runs torchrun, but checks the trainer's options first and reports errors in one line.

The command line is the same as that of torchrun. The differences from torchrun are:

- Wrong options of ``pretrain_gpt.py`` are reported before any process starts.
- A failed job prints one line about the failed rank, without torchrun's traceback.
- Ctrl-C and SIGHUP (sent when the terminal is closed) are forwarded to the ranks, which save a
  checkpoint and exit. Under ``nohup``, SIGHUP stays ignored.
- A SIGTERM or SIGHUP that follows another signal has no effect: the ranks finish saving. A second
  Ctrl-C stops the job.
- This process ignores SIGUSR1, because the ranks handle this signal. Slurm sends SIGUSR1 to all
  processes of a job shortly before the job's time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron.adaptive.cli.common import (
    EXIT_EXPECTED_ERROR,
    has_left_reason,
    interrupts_end_at_once,
)
from megatron.adaptive.cluster.inventory import loopback_variables
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.command_parser import PROGRAM, count
from megatron.adaptive.config.environment import require_files
from megatron.adaptive.config.input_files import natural, printable
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.files import drop_closed_terminal

_TRAINER = "pretrain_gpt.py"
_MEETINGS = ("static", "c10d", "etcd", "etcd-v2")
_NODES = re.compile(r"[1-9]\d*(:[1-9]\d*)?")
_MAX_PROCESSES = 4096
_PORT = 29400  # torchrun uses this port if an endpoint has no port.
_MASTER_PORT = 29500  # torchrun uses this port if --master-port is not set.
_LOOK_UP_S = 30.0
_SAY_S = 30.0
_WAIT_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Runs torchrun with the arguments ``argv``, and returns the exit status of the job.

    Returns:
        Exit status of the job: 0, the status of the rank that failed first, or 128 + N after signal
        N.
    """
    # Ranks inherit this setting. Otherwise, SIGUSR1 would kill ranks that have not installed their
    # handlers yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Importing torch takes about a second, and an interrupt during the import may be reported as a
    # different error. torchrun installs its signal handlers only shortly before it starts the
    # ranks.
    with interrupts_end_at_once():
        return _launch(argv)


def _launch(argv: Sequence[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    from megatron.adaptive.engine.rendezvous import MeetingError

    options = _read_options(argv)
    script = Path(options.training_script)
    # Report a missing script once here. Otherwise, each rank would report it.
    if not (options.module or options.no_python or script.is_file()):
        problem = "is a folder" if script.is_dir() else "no such file"
        raise ConfigError(f"{script}: {problem}; pass the script to start, such as {_TRAINER}")
    _check_trainer(options)
    least = options.nnodes.partition(":")[0]
    require_files(options.world_size or int(options.nproc_per_node) * int(least))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # When this process is killed, torch prints a warning with a C++ stack trace on each rank. Hide
    # these warnings.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.nnodes in ("1", "1:1"):
        os.environ |= loopback_variables(os.environ)
    for name in list(logging.root.manager.loggerDict):
        # Hide the lines in which torch repeats a rank's error, because the rank has already printed
        # this error.
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    _end_once()
    try:
        _wait_for_store(options)
        run(options)
    except ChildFailedError as error:
        return _report(error)
    except (DistError, MeetingError, RendezvousError) as error:
        raise _no_meeting(options, error) from error
    except SignalException as error:
        drop_closed_terminal()
        print(f"stopped by signal {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + int(error.sigval)
    return 0


def _end_once() -> None:
    """Makes torchrun ignore a SIGTERM or SIGHUP that arrives after another signal.

    While torchrun waits for its ranks to save, a second signal would make torchrun exit
    immediately. The ranks would then lose their key-value store before they have saved. For
    example, the kernel may send SIGTERM several times if the parent process is killed (see
    :func:`megatron.adaptive.config.parent_process.end_with_parent`).
    """
    from torch.distributed.elastic.multiprocessing import api

    end = api._terminate_process_handler
    has_asked = False

    def end_or_wait(number: int, frame: FrameType | None) -> None:
        nonlocal has_asked
        if has_asked and number in (signal.SIGTERM, signal.SIGHUP):
            return
        has_asked = True
        end(number, frame)

    # torchrun looks up its handler under this name shortly before it starts the ranks.
    vars(api)["_terminate_process_handler"] = end_or_wait


def _read_options(argv: Sequence[str]) -> Any:
    """Parses torchrun's options in ``argv``. Shortens the error message for a wrong option."""
    from torch.distributed.run import determine_local_world_size, get_args_parser

    parser: Any = get_args_parser()
    parser.prog = f"{PROGRAM} job launch"
    help_text = "total number of processes, if nodes have different numbers of processes"
    parser.add_argument("--world-size", type=count, help=help_text)

    def complain(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {parser.prog} --help")

    parser.error = complain
    options = parser.parse_args(list(argv))
    if not _NODES.fullmatch(options.nnodes):
        raise ConfigError(f"--nnodes must be a positive integer or MIN:MAX, got {options.nnodes}")
    if options.rdzv_backend not in _MEETINGS:
        raise ConfigError(
            f"--rdzv-backend must be one of {', '.join(_MEETINGS)}, got {options.rdzv_backend}"
        )
    text = options.nproc_per_node
    try:
        number = natural(text)
        number = determine_local_world_size(text) if number is None else number
    except ValueError as error:
        reason = "not a number" if text in str(error) else str(error).rstrip(".")
        raise ConfigError(
            "--nproc-per-node must be a number of processes, cpu for one process per CPU core, or "
            f"gpu for one process per GPU, got {text} ({reason})"
        ) from None
    if not 1 <= number <= _MAX_PROCESSES:
        raise ConfigError(f"--nproc-per-node must be from 1 to {_MAX_PROCESSES}, got {text}")
    options.nproc_per_node = str(number)
    if options.master_port is None:
        # torchrun 2.13 and later versions also set these options, but too late for the code below.
        most = options.nnodes.rpartition(":")[2]
        if options.rdzv_backend == "static" and not options.rdzv_endpoint and most == "1":
            options.standalone = True
        else:
            options.master_port = _MASTER_PORT
    handled = getattr(options, "signals_to_handle", None)
    if handled is not None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        kept = [name for name in handled.split(",") if name != signal.SIGHUP.name]
        options.signals_to_handle = ",".join(kept)
    return options


def _wait_for_store(options: Any) -> None:
    """Waits until the key-value store on the first node accepts connections, and prints progress.

    The nodes find each other through this store. torchrun itself would wait for the store without a
    timeout and without a message.

    Raises:
        MeetingError: The host name cannot be resolved, no program listens at the address before the
            timeout, or the program that listens at the address is not a store.
    """
    if options.standalone or options.rdzv_backend.startswith("etcd"):
        return
    from torch.distributed.elastic.rendezvous.utils import (
        _parse_rendezvous_config,
        parse_rendezvous_endpoint,
    )

    from megatron.adaptive.engine.rendezvous import MeetingError, NotAStoreError, connect, reach

    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    try:
        host, port = parse_rendezvous_endpoint(endpoint, _PORT)
        wait_s = float(_parse_rendezvous_config(options.rdzv_conf).get("timeout", _WAIT_S))
    except ValueError as error:
        raise MeetingError(str(error)) from None
    begin_s = time.monotonic()
    end_s = begin_s + wait_s
    reach(host, port, begin_s + _LOOK_UP_S, only_look_up=True)
    # Do not wait for the store here, because with the c10d backend this node may have to create it.
    # Only check that no other program already listens at the address.
    if options.rdzv_backend == "c10d":
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), 1.0).close()
            connect(host, port, time.monotonic() + 1.0)
        return
    if options.node_rank == 0:
        return
    while True:
        try:
            connect(host, port, min(end_s, time.monotonic() + _SAY_S))
            return
        except NotAStoreError:
            raise
        except MeetingError as error:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
            text = f"waiting for node 0 at {host}:{port} ({error}); {left_s:.0f} s left"
            print(printable(text), file=sys.stderr, flush=True)


def _no_meeting(options: Any, error: Exception) -> SetupError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    return SetupError(
        f"the processes of the job cannot connect at {endpoint} ({reason}): the port may be in "
        "use, or the host may be unreachable; on one machine use --standalone; otherwise choose "
        "another port, and open it and all ports above 1023 between the nodes in the firewall; to "
        "check the connection between two nodes, run doctor --master-addr HOST on both"
    )


def _check_trainer(options: Any) -> None:
    """Parses the trainer's options, so that an error is reported once instead of by each rank."""
    least, _, most = options.nnodes.partition(":")
    if Path(options.training_script).name != _TRAINER or most not in ("", least):
        return
    world_size = options.world_size or int(options.nproc_per_node) * int(least)
    parse(options.training_script_args, world_size=world_size, last_wins=True)


def _report(error: Any) -> int:
    """Prints which rank failed first according to ``error``, and returns the job's exit status."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    if code == EXIT_EXPECTED_ERROR or has_left_reason(failure):
        return code  # The rank has already printed the reason.
    if code < 0:
        name = signal.Signals(-code).name
        description = f"was killed by signal {-code} ({name})"
        if name == "SIGKILL":
            description += "; if no message is printed above, memory may have run out (see dmesg)"
    else:
        description = f"exited with status {code}; its message is above"
    print(f"error: rank {rank} (pid {failure.pid}) {description}", file=sys.stderr, flush=True)
    return 1 if code < 0 else code
