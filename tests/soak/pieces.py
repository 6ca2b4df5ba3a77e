"""Compares steps of models with cut points with the planner's predictions from a profile.

Two processes of this machine profile a model. Then the planner chooses shapes, as it does for a
``Pipeline`` whose sizes are not set, and the best shapes are trained. Run as a script, this file is
one rank. Its arguments are the name of a model, the number of steps, and a file for its results.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness.processes import run_ranks
from harness.report import Result, Row
from tests.multiprocess.launch import ROOT

EXAMPLES = ROOT / "examples" / "cutpoint"
PROCESSES, SHAPES, LIMIT_S = 2, 2, 120.0
STEPS, QUICK_STEPS, WARM_UP = 30, 10, 3
SIZES = {"mlp": 256, "vit": 16}
"""Number of samples per step for each model of ``examples/cutpoint``."""


def pieces(folder: Path, *, quick: bool) -> Result:
    """Compares measured with predicted step times, and returns a row for each model and shape.

    Args:
        folder: Folder to which the ranks write their results.
        quick: Whether to train fewer steps.
    """
    results: dict[str, Any] = {}
    rows = []
    for name, samples in SIZES.items():
        output = folder / f"{name}.json"
        command = [str(Path(__file__).resolve()), name, str(QUICK_STEPS if quick else STEPS)]
        run_ranks([*command, str(output)], PROCESSES, LIMIT_S)
        results[name] = json.loads(output.read_text())
        for shape in results[name]:
            title = f"{name}, steps of {samples} samples, {shape['shape']}: predicted / measured"
            low, _, high = (value * 1e3 for value in shape["quartiles_s"])
            note = f"{shape['predicted_s'] * 1e3:.1f} ms predicted, "
            note += f"{shape['measured_s'] * 1e3:.1f} ms measured"
            note += f" (the middle half {low:.1f} to {high:.1f})"
            rows.append(
                Row(what=title, value=shape["predicted_s"] / shape["measured_s"], note=note)
            )
    return Result(rows=rows, facts={"pieces": results})


def _rank(name: str, steps: int, target: Path) -> None:
    import torch

    from megatron.adaptive import Pipeline

    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(name)

    def model() -> torch.nn.Module:
        torch.manual_seed(1)  # All ranks must initialize the model with the same weights.
        wide: torch.nn.Module
        wide = example.Mlp(512, 8) if name == "mlp" else example.Vit(width=128)
        return wide

    batch = example.make_batch(SIZES[name])
    if name == "mlp":
        batch["x"] = torch.randn(SIZES[name], 512, generator=torch.Generator().manual_seed(2))
    options = {"loss": example.loss} if name == "vit" else {}
    with Pipeline(model(), batch, **options) as chosen:
        plan = chosen.plan
        assert plan is not None
    results = []
    for option in (plan.best, *plan.others)[:SHAPES]:
        with Pipeline(
            model(),
            batch,
            micro_batch_size=option.micro_batch_size,
            pipeline_size=option.pipeline_size,
            partition=option.partition,
            **options,
        ) as pipeline:
            pipeline.set_optimizer(lambda ones: torch.optim.AdamW(ones, lr=1e-3))
            part = pipeline.share(batch)
            seconds = []
            for _ in range(WARM_UP + steps):
                begin_s = time.perf_counter()
                pipeline.step(part)
                seconds.append(time.perf_counter() - begin_s)
            taken = seconds[WARM_UP:]
            results.append(
                {
                    "shape": str(option),
                    "predicted_s": option.seconds,
                    "measured_s": statistics.median(taken),
                    "quartiles_s": statistics.quantiles(taken, n=4),
                }
            )
            if torch.distributed.get_rank() == 0:
                target.write_text(json.dumps(results))


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
