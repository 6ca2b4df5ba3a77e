"""Makes the fork servers of a job's nodes on this machine forks of one that has imported all.

Imports take each fork server 5 s of processor time, and a test's job has up to six. With this
folder in ``PYTHONPATH`` every Python imports this module when it starts. The one that is to be a
node's fork server hands its sockets to a process of the tests, which forks the server, and stays
until that ends.

Usage: ``sitecustomize.py SOCKET`` serves them, in a process forked by ``launch.Forkserver``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

MODULE = "megatron.adaptive.cluster.rank_forkserver"
SOCKET = "TESTS_NODE_FORKSERVERS"
PR_SET_NAME = 15


def ask(path: str, orders: int) -> None:
    """Has a fork server made that takes its orders from a descriptor; returns when it has ended."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        given = {"pid": os.getpid(), "variables": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(link, [json.dumps(given).encode() + b"\n"], [orders, 1, 2])
        os.close(orders)
        link.recv(1)


def serve(path: str) -> None:
    """Forks a fork server for each process that asks, until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            link, _ = listener.accept()
            with link:
                data, files, _, _ = socket.recv_fds(link, 1 << 18, 3)
                while not data.endswith(b"\n"):
                    data += link.recv(1 << 18)
                if os.fork() == 0:
                    listener.close()
                    become(json.loads(data), *files)
                for file in files:
                    os.close(file)


def become(given: dict[str, object], orders: int, output: int, error: int) -> None:
    """Is a node's fork server until the end of this process."""
    from megatron.adaptive.cluster import rank_forkserver

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # By this name a test finds it, with the process that asked.
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"node-{given['pid']}".encode())
    for file, number in ((output, 1), (error, 2)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(given["variables"])  # type: ignore[call-overload]
    os.chdir(given["folder"])  # type: ignore[arg-type]
    try:
        rank_forkserver.main(orders)
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
elif SOCKET in os.environ and sys.orig_argv[1:3] == ["-m", MODULE]:
    ask(os.environ[SOCKET], int(sys.orig_argv[3]))
    os._exit(0)
