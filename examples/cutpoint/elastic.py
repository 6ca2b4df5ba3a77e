"""Trains on machines that may join or leave, and adapts the numbers of stages and replicas.

python -m megatron.adaptive train elastic --machines machines.txt --checkpoint checkpoints \
    examples/cutpoint/elastic.py --steps 2000

The program also runs under torchrun and in a single process. In these cases, it saves to the folder
``--save``, and continues from the newest checkpoint there.
"""

from __future__ import annotations

import argparse

import torch

from megatron.adaptive import CutPoint, Pipeline

WIDTH, LAYERS, CLASSES = 64, 8, 10


class Net(torch.nn.Module):
    """Model with residual layers, dropout, and a cut point after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)
            )
            for _ in range(LAYERS)
        )
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the inputs ``x [n, WIDTH]`` with the classes ``label [n]``."""
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = cut(x + layer(x))
        return torch.nn.functional.cross_entropy(self.head(x), label)


def batch_of(step: int, samples: int) -> dict[str, torch.Tensor]:
    """Returns the global batch of ``step``. Each call with the same step returns an equal batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, WIDTH, generator=generator)
    return {"x": x, "label": x[:, :CLASSES].argmax(dim=1)}


def main() -> None:
    """Trains the model until the last step, and prints the loss of an evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of training steps")
    parser.add_argument(
        "--batch-size", type=int, default=24, help="samples per step, over all replicas"
    )
    parser.add_argument(
        "--save", metavar="FOLDER", help="folder for checkpoints (ignored with train elastic)"
    )
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument(
        "--log-interval", type=int, default=10, help="steps between two printed losses"
    )
    options = parser.parse_args()

    torch.manual_seed(1)  # All processes must build the same model.
    with Pipeline(Net(), batch_of(0, options.batch_size)) as pipeline:
        optimizer = pipeline.set_optimizer(
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), clip_norm=1.0
        )
        assert optimizer is not None  # Every process trains some of the parameters.
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        steps = pipeline.loop(
            options.steps,
            folder=options.save,
            save_interval=options.save_interval,
            keep=2,
            state={"scheduler": scheduler},
        )
        first = torch.distributed.get_rank() == 0
        for step in steps:
            loss, _ = pipeline.step(pipeline.share(batch_of(step, options.batch_size)))
            scheduler.step()
            if first and (step + 1) % options.log_interval == 0:
                shape = f"PP {pipeline.pipeline_size} x DP {pipeline.replicas}"
                print(f"step {step + 1}: loss {loss:.4f}, {shape}", flush=True)
        # If the program is asked to stop, it exits inside the loop. This line runs only after the
        # last step.
        evaluated = pipeline.eval(pipeline.share(batch_of(options.steps, options.batch_size)))
        if first:
            print(f"evaluation: loss {evaluated:.4f}", flush=True)


if __name__ == "__main__":
    main()
