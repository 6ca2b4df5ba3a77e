"""Step time of a small GPT on four ranks, over each transport, in turns within one job.

More ranks than processors: a rank that waits must not take the time of one that computes. Run by
itself, this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import gpt_steps  # noqa: E402

RANKS = 4
TRANSPORTS = ("shm", "gloo", "tcp")
SCHEDULE = "1f1b"
_JOB = "transports"
_WARMUPS = 2


class TransportsRank(gpt_steps.Rank):
    """A rank whose competitors differ in their transport only."""

    def __init__(self) -> None:
        model = list(gpt_steps.MODEL)
        model[model.index("--pipeline-model-parallel-size") + 1] = str(RANKS)
        gpt_steps.MODEL = model
        gpt_steps.JOBS[_JOB] = gpt_steps.Job("--pipeline-schedule megatron", TRANSPORTS)
        super().__init__(_JOB)

    def turns(self, rounds: int) -> dict[str, list[float]]:
        """Take turns; returns the step times in seconds of each transport, round by round."""
        times: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        for index in range(-_WARMUPS, rounds):
            start = index % len(TRANSPORTS)
            for name in TRANSPORTS[start:] + TRANSPORTS[:start]:
                elapsed_s = self._step(name)
                if index >= 0:
                    times[name].append(elapsed_s)
        return times

    def _function(self, name: str) -> gpt_steps.Function:
        return self._fed(self._over(name))

    def _over(self, name: str) -> Callable[..., list[Any]]:
        from megatron.core import parallel_state

        from megatron.adaptive.config.parallel import TransportConfig
        from megatron.adaptive.engine.build import build_executor
        from megatron.adaptive.engine.forward_backward import ForwardBackward
        from megatron.adaptive.engine.orders import Orders
        from megatron.adaptive.gpt.setup import payload_shape

        run = self._run
        wiring = build_executor(
            placement=run.placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=payload_shape(self._job.config),
            payload_dtype=run.core.pipeline_dtype,
            timeout_s=120.0,
            recorder=None,
            transport=TransportConfig(transport=name),
        )
        self._wirings.append(wiring)
        return ForwardBackward(
            executor=wiring.executor,
            orders=Orders(
                schedule=SCHEDULE,
                placement=run.placement,
                pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            ),
        )


def measure(rounds: int, limit_s: float = 600.0) -> dict[str, list[float]]:
    """Run the job; returns what :meth:`TransportsRank.turns` did.

    Raises:
        subprocess.SubprocessError: it failed, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"),
                *("--nproc-per-node", str(RANKS), __file__),
                *("--rounds", str(rounds), "--output", str(output)),
            ],
            check=True,
            timeout=limit_s,
            stdout=sys.stderr,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
        )
        times: dict[str, list[float]] = json.loads(output.read_text(encoding="utf-8"))
        return times


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, required=True, help="steps over each transport")
    parser.add_argument("--output", type=Path, required=True, help="where the times go")
    options = parser.parse_args()
    rank = TransportsRank()
    times = rank.turns(options.rounds)
    if rank.is_first:
        options.output.write_text(json.dumps(times), encoding="utf-8")
    rank.close()


if __name__ == "__main__":
    main()
