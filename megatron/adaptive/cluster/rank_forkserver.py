"""Forks ranks from a process that has already imported their modules, so that ranks start quickly.

Importing torch and megatron-core takes longer than all other parts of a rank's start. The
forkserver imports them once per node, before any rank is needed, and then forks each rank. The
forkserver has a single thread, and does not open any device. On a node with GPUs, it imports only
torch, because a process that has detected GPUs cannot be forked.

The forkserver reads commands from the file descriptor on its command line, with one JSON object per
line, and writes its replies to the same descriptor::

    {"start": {"key": "3/0", "variables": {}, "script": "", "arguments": [], "folder": "",
               "limit_s": 0}}          kill the process after limit_s seconds; 0 for no limit
    {"signal": 10}                    send this signal to all ranks
    {"signal": 9, "key": "3/0"}       send this signal to one rank
    <- {"ready": true}   <- {"started": "3/0", "pid": 7}   <- {"ended": "3/0", "status": -9}

When the other side closes the connection, the forkserver kills all its ranks. If the forkserver
itself is killed, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron.adaptive.config.parent_process import end_with_parent

_MODULES = (
    "training.pretrain",
    "training.loop",
    "training.logging",
    "gpt.initialize",
    "gpt.setup",
    "checkpoint.trainer_checkpoints",
    "engine.stop",
    "modules.pipeline",
    "modules.step_loop",
    "modules.checkpointer",
    "modules.sizes",
)


def main(descriptor: int) -> None:
    """Executes commands that arrive on a connected socket until the peer closes it.

    Args:
        descriptor: File descriptor of the socket.
    """
    orders = socket.socket(fileno=descriptor)
    end_with_parent()  # Call this before the imports, because the agent may exit during them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Only the agent handles these signals.
    _import()
    # Without this call, garbage collection in a rank would copy memory pages that ranks share.
    gc.freeze()
    _Forkserver(orders).serve()
    # Otherwise, triton 3.9 and newer would print a list of objects that are not freed at exit.
    gc.unfreeze()


def _import() -> None:
    """Imports the modules that ranks need. Ignores errors, because the ranks report them later."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch")
        if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
            return
        device = importlib.import_module("megatron.adaptive.accelerator")
        device.install()
        with device.quiet_imports():  # Hide warnings only during these imports.
            for name in _MODULES:
                importlib.import_module(f"megatron.adaptive.{name}")
            # Ranks import these modules only in the first step or when they read data. Import them
            # here, so that ranks do not have to wait for them.
            for name in ("torch._dynamo", "megatron.core.datasets.helpers"):
                importlib.import_module(name)


class _Forkserver:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._ranks: dict[int, str] = {}
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        self._send(ready=True)
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            buffer = b""
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._reap()
                if self._orders in ready:
                    data = self._orders.recv(1 << 16)
                    if not data:
                        break
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        order = json.loads(line)
                        if "start" in order:
                            self._start(order["start"])
                        else:
                            self._signal(order["signal"], order.get("key"))
        signal.set_wakeup_fd(-1)
        self._signal(signal.SIGKILL)

    def _start(self, rank: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Block SIGUSR1 before the fork, so that a signal directly after the fork stays pending
        # until the rank's training loop handles it. Like the forkserver, the forked process at
        # first ignores SIGUSR1, so the signal would otherwise be lost.
        kept_back = {signal.SIGUSR1}
        signal.pthread_sigmask(signal.SIG_BLOCK, kept_back)
        pid = os.fork()
        if pid == 0:
            self._become(rank, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, kept_back)
        os.setpgid(pid, pid)
        self._ranks[pid] = rank["key"]
        self._send(started=rank["key"], pid=pid)

    def _become(self, rank: dict[str, Any], parent: int) -> NoReturn:
        """Runs the script of ``rank`` in the forked process, and then exits the process."""
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            for end in (self._orders, self._wake, self._woken):
                end.close()
            # The default action of SIGALRM kills the process even if it hangs in a system call.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(rank.get("limit_s", 0))
            os.environ.update(rank["variables"])
            os.chdir(rank["folder"])
            sys.argv = [rank["script"], *rank["arguments"]]
            sys.path[0] = str(Path(rank["script"]).resolve().parent)
            runpy.run_path(rank["script"], run_name="__main__")
            status = 0
        except SystemExit as end_:
            status = _status(end_)
        except BaseException as error:
            status = _print_error(error)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _signal(self, number: int, only: str | None = None) -> None:
        for pid, key in self._ranks.items():
            if only not in (None, key):
                continue
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)

    def _reap(self) -> None:
        for pid, status in _ended():
            key = self._ranks.pop(pid, None)
            if key is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                # A rank's data workers may outlive the rank, so kill the whole process group.
                os.killpg(pid, signal.SIGKILL)
            self._send(ended=key, status=os.waitstatus_to_exitcode(status))

    def _send(self, **values: Any) -> None:
        with contextlib.suppress(OSError):
            self._orders.sendall(json.dumps(values).encode() + b"\n")


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _print_error(error: BaseException) -> int:
    """Prints the uncaught exception ``error``, and returns the exit status of the process."""
    errors = sys.modules.get("megatron.adaptive.errors")
    if errors is not None and isinstance(error, errors.AdaptiveError):
        from megatron.adaptive.config.input_files import say

        say(f"rank {os.environ.get('RANK', 0)}: error: {error}")
        return 2
    traceback.print_exc()
    return 1


def _status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
