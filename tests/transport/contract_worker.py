"""A worker of the contract suite: runs the programs that its pool asks for."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from tests.transport import contract, contract_peers
from tests.transport.contract_rank import Rank


def run_calls(connection: Any, port: int) -> None:
    """Body of a worker: run one program after the other."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            program, rank, num_ranks, call, arguments = connection.recv()
        except EOFError:
            return
        try:
            me = Rank(store, rank, num_ranks, call)
            value = PROGRAMS[program](me, **arguments)
            me.finish()
            connection.send(("done", value))
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            return


PROGRAMS = {**vars(contract), **vars(contract_peers)}

if __name__ == "__main__":
    run_calls(*WORKER)  # type: ignore[name-defined]  # noqa: F821
