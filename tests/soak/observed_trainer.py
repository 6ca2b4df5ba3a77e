"""Runs the trainer with ranks that write their ports and appear to be on two machines.

``OBSERVED_PORTS`` is the folder for the ports. Each step waits for ``OBSERVED_STEP_S`` seconds, so
that programs that connect to the listeners get processor time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator as device

device.install()  # This call must precede the import of megatron-core.
device.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.engine import executor_setup  # noqa: E402
from megatron.adaptive.trace import clock  # noqa: E402
from tests.soak.slow_trainer import slow_down  # noqa: E402


def observe(folder: Path) -> None:
    """Makes ranks appear to be on two machines.

    Each rank writes the port of its clock server to ``folder``.
    """
    start, serve = executor_setup.start_clock_sync, clock.ClockServer.__init__

    def start_between_machines(*, clock_id: str, rank: int, **more: Any) -> Any:
        return start(clock_id=f"{clock_id} {rank}", rank=rank, **more)

    def serve_observed(self: Any, *arguments: Any, **options: Any) -> None:
        serve(self, *arguments, **options)
        (folder / "clocks").write_text(str(self.port))

    executor_setup.start_clock_sync = start_between_machines
    clock.ClockServer.__init__ = serve_observed  # type: ignore[method-assign]


if __name__ == "__main__":
    observe(Path(os.environ["OBSERVED_PORTS"]))
    slow_down(float(os.environ["OBSERVED_STEP_S"]))
    sys.exit(run())
