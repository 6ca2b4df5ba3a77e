"""Steps of models with cut points: as the planner predicts them from a profile, and as measured.

Two processes of this machine. The model is profiled, the planner chooses as it does for a
``Pipeline`` without sizes, and its best shapes are trained in. Run as a program it is one rank of
that, and its arguments are a folder for what it tells, the name of a model, and steps.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cutpoint"
PROCESSES, SHAPES, LIMIT_S = 2, 2, 120.0
STEPS, QUICK_STEPS, WARM_UP = 30, 10, 3
SIZES = {"mlp": 256, "vit": 16}
"""Samples of a step of each model of ``examples/cutpoint``."""


def pieces(folder: Path, environment: Mapping[str, str], *, quick: bool) -> dict[str, Any]:
    """Compare them; prints a line for each model and shape.

    Args:
        folder: for what the ranks tell.
        environment: of the ranks.
        quick: with fewer steps.
    """
    found: dict[str, Any] = {}
    for name, samples in SIZES.items():
        (folder / name).mkdir(parents=True)
        command = [sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"]
        command += ["--nproc-per-node", str(PROCESSES), str(Path(__file__).resolve())]
        command += [str(folder / name), name, str(QUICK_STEPS if quick else STEPS)]
        _run(command, environment)
        found[name] = json.loads((folder / name / "told.json").read_text())
        for one in found[name]:
            predicted, measured = one["predicted_s"] * 1e3, one["measured_s"] * 1e3
            low, _, high = (value * 1e3 for value in one["quartiles_s"])
            off = predicted / measured - 1
            print(
                f"{name}, steps of {samples} samples, {one['shape']}: {predicted:.1f} ms predicted,"
                f" {measured:.1f} ms measured ({off:+.0%}; the middle half {low:.1f} to {high:.1f})"
            )
    return {"pieces": found}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a launcher; none of its ranks outlives it."""
    from tests.multiprocess.launch import kill_tree

    job = subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL)
    try:
        status = job.wait(LIMIT_S)
    finally:
        kill_tree(job)
    if status:
        raise RuntimeError(f"{' '.join(command)}: ended with status {status}")


def _rank(folder: Path, name: str, steps: int) -> None:
    import torch

    from megatron.adaptive import Pipeline

    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(name)

    def model() -> torch.nn.Module:
        torch.manual_seed(1)  # the same on all ranks
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
    told = []
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
            told.append(
                {
                    "shape": str(option),
                    "predicted_s": option.seconds,
                    "measured_s": statistics.median(taken),
                    "quartiles_s": statistics.quantiles(taken, n=4),
                }
            )
            if torch.distributed.get_rank() == 0:
                (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
