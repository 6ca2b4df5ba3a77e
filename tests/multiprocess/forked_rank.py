"""Runs ``python PROGRAM`` in a process that was forked by a fork server of ``launch.py``.

Usage: ``forked_rank.py JSON PROGRAM [ARGUMENT ...]`` or ``forked_rank.py JSON -m MODULE ...``. The
JSON object contains the paths of the output files, and the names of the environment variables to
keep.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any


def shorten_mock_data() -> None:
    """Reduces megatron-core's mock data to a tenth of the samples, which saves a second per rank.

    Does nothing if the mock data set is not imported, or if ``TESTS_ALL_MOCK_DATA`` is set. The
    full data set has 13 million samples of 16 tokens, which are shuffled.
    """
    if (module := sys.modules.get("megatron.core.datasets.gpt_dataset")) is not None:
        module.MockGPTLowLevelDataset.size = (
            100_000 if "TESTS_ALL_MOCK_DATA" in os.environ else 10_000
        )


def share_gloo_device() -> None:
    """Makes all gloo groups of this process share a single device, and thus a single thread.

    Otherwise, each group would have a separate thread that wakes up a hundred times per second. A
    dozen groups would use 1% of a processor per rank.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    made, devices = ProcessGroupGloo.__init__, list[Any]()
    if made.__name__ == "connect":
        # If the fork server itself was forked in this way, it has already replaced the method.
        return

    # torch 2.15 passes additional options, all with their default values.
    def connect(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if not devices:
            devices.append(
                ProcessGroupGloo.create_device(interface=interface)
                if interface
                else ProcessGroupGloo.create_default_device()
            )
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = devices, 2, timeout
        made(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = connect


def add_python_path() -> None:
    """Adds the folders in ``PYTHONPATH`` to the import path, unless the path contains them."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]


def main() -> None:
    """Redirects the output, and runs the program as ``__main__`` in this process."""
    settings = json.loads(sys.argv[1])
    command = sys.argv[2:]
    for number, name in ((1, "output"), (2, "error")):
        file = os.open(settings[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for variable in set(os.environ).difference(settings["names"]):
        del os.environ[variable]
    tempfile.tempdir = None
    if (folder := os.environ.pop("FORKED_FOLDER", None)) is not None:
        os.chdir(folder)
    shorten_mock_data()
    share_gloo_device()
    # Restore the signal handler and the signal mask with which a new process starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    add_python_path()
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
