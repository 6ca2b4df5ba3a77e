"""Trains GPT as ``pretrain_gpt.py`` does, with one rank that gets less of the processors.

Variables of the environment:

``HINDERED``  global rank
``PINNED``    processor to which this rank is bound, perhaps beside another program
``GROUP``     folder of a control group that this rank joins
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402

if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["HINDERED"]:
        if "PINNED" in os.environ:
            os.sched_setaffinity(0, {int(os.environ["PINNED"])})
        if "GROUP" in os.environ:
            Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    sys.exit(run())
