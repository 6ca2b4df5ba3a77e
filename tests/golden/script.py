"""Trains a small Pipeline. ``train elastic`` runs this script, and ranks import it.

The argument is a JSON object with the arguments of :func:`train`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from megatron.adaptive import CutPoint, Pipeline

WORDS, WIDTH, BATCH, LENGTH = 11, 8, 8, 4


class Net(torch.nn.Module):
    """Model with three blocks, dropout, a buffer, and weights that embedding and head share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of ``tokens``, which are int64 numbers of the shape ``[B, S]``."""
        x = self.embedding(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(x + functional.dropout(torch.tanh(block(x)), 0.1, self.training))
        return functional.cross_entropy(self.head(self.norm(x.flatten(0, 1))), labels.flatten())


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Returns the samples of step ``step``, which are the same in every call."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def checksum(tensor: torch.Tensor) -> str:
    """Returns a short checksum of the bytes of ``tensor``."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def train(
    *,
    report_dir: str,
    total: int,
    pipeline: dict[str, Any],
    loop: dict[str, Any] | None = None,
    load: str = "",
    save: str = "",
) -> None:
    """Trains, and writes the results of each rank to ``<report_dir>/rank-<rank>.json``.

    Args:
        report_dir: Folder for the results.
        total: Number of steps of the whole training, including earlier runs.
        pipeline: Additional arguments of ``Pipeline``.
        loop: Arguments of ``Pipeline.loop``, or ``None`` if the script counts the steps itself.
        load: Folder of the checkpoints to continue from. It must be empty if ``loop`` is given.
        save: Folder for a checkpoint after the last step. It must be empty if ``loop`` is given.
    """
    torch.manual_seed(1)
    shared = [["embedding.weight", "head.weight"]]
    net = Net()
    pipe = Pipeline(net, batch_of(0), shared_weights=shared, **pipeline)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    pipe.set_optimizer(optimizer, clip_norm=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = {"scheduler": scheduler}
    results: dict[str, Any] = {"losses": {}, "grad_norms": {}}
    if load:
        results["extra"] = pipe.load(load, state=state, trust_checkpoint=True)
        held = {name: tensor for name, tensor in net.state_dict().items() if not tensor.is_meta}
        for name, parameter in pipe.named_parameters():
            state_of_parameter = optimizer.state[parameter]
            held |= {f"{name}.{key}": tensor for key, tensor in state_of_parameter.items()}
        results["loaded"] = {name: checksum(tensor) for name, tensor in held.items()}
    steps = (
        range(pipe.steps, total)
        if loop is None
        else pipe.loop(total, state=state, trust_checkpoint=True, **loop)
    )
    for step in steps:
        loss, _ = pipe.step(pipe.share(batch_of(step)))
        scheduler.step()
        results["losses"][step] = float(loss).hex()
        results["grad_norms"][step] = float(pipe.grad_norm).hex()
        results["learning_rate"] = optimizer.param_groups[0]["lr"]
    if save:
        pipe.save(save, extra={"note": ["kept", 1.5]}, state=state)
    path = Path(report_dir) / f"rank-{os.environ.get('RANK', '0')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    pipe.close()


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
