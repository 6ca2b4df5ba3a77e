"""Runs one of two ranks, which join and close a job N times, where N is the argument."""

from __future__ import annotations

import os
import sys
import time

import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.modules.mesh import join_job, make_mesh  # noqa: E402

if __name__ == "__main__":
    # The launcher does not provide a store to the ranks if AGENT_STORE is False.
    if os.environ["AGENT_STORE"] == "False":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
    for turn in range(int(sys.argv[1])):
        mesh = make_mesh(join_job(20.0), 2)
        time.sleep(0.05 * (mesh.rank ^ turn % 2))  # Let the ranks take turns in arriving first.
        assert mesh.gather(mesh.rank + turn) == [turn, turn + 1]
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor)
        assert tensor.item() == 2
        mesh.close()
