"""Runs a user's loop around a ``Pipeline``. One process hangs as ``HANG`` describes in JSON.

Usage: ``hanging_pipeline.py FOLDER STEPS HANG_AFTER_S ON_HANG``. See ``hanging_trainer.py``.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.adaptive import CutPoint, Pipeline
from tests.soak.hanging_trainer import Fault, read_for_ever

WIDTH, SAMPLES = 16, 4


class Tower(torch.nn.Module):
    """Model that stacks layers, with a cut point after each layer except the last.

    Args:
        layers: Number of layers.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(layers - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number < len(self.cuts):
                x = self.cuts[number](x)
        return x.square().mean()


class Rows(Dataset[torch.Tensor]):
    """Data set of random samples.

    If ``fault`` is a hang of the kind ``reader``, one sample can never be read completely.

    Args:
        fault: Description of the hang.
        count: Number of samples.
    """

    def __init__(self, fault: Fault, count: int) -> None:
        self.fault, self.count = fault, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        fault = self.fault
        is_due = number // SAMPLES + 1 == fault.settings["iteration"]
        if fault.kind == "reader" and fault.is_here and is_due:
            read_for_ever(fault.settings["folder"])
        return torch.full((WIDTH,), number / self.count)


def main() -> None:
    """Trains until the job hangs, or until all steps are completed."""
    steps = int(sys.argv[2])
    fault = Fault(json.loads(os.environ["HANG"]))
    fault.put()
    torch.manual_seed(1)
    ranks, stages, _ = fault.settings["shape"]
    with Pipeline(
        Tower(2 * stages),
        {"x": torch.zeros(SAMPLES, WIDTH)},
        micro_batch_size=1,
        pipeline_size=stages,
        timeout_s=3600.0,
        trace_dir=f"{sys.argv[1]}/traces",
        hang_after_s=float(sys.argv[3]),
        on_hang=sys.argv[4],
    ) as pipeline:
        pipeline.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        reader = DataLoader(Rows(fault, SAMPLES * steps), batch_size=SAMPLES)
        for number, batch in enumerate(reader, 1):
            fault.begins(number)
            if fault.pauses is not None:
                fault.pauses.begins(number)
                if number % fault.settings["iteration"] == 0:
                    pipeline.save(f"{sys.argv[1]}/saved", keep=1)
                    for _ in range(3):
                        pipeline.eval({"x": batch})
            loss, _ = pipeline.step({"x": batch})
            if os.environ["RANK"] == "0":
                print(f"step {number} of {steps} on {ranks} ranks: loss {loss:.5f}", flush=True)


if __name__ == "__main__":
    main()
