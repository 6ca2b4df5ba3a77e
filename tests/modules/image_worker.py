"""Runs one of two ranks, which fine-tunes a vision-language model with its own processor.

Usage: ``image_worker.py FOLDER SLICING``. Reads ``FOLDER/model`` and ``FOLDER/data/train.jsonl``,
and writes ``FOLDER/tuned``. Prints the losses.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.adaptive.modules.finetune import FineTuning, fine_tune


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    settings = FineTuning(
        model=folder / "model",
        data=folder / "data" / "train.jsonl",
        output=folder / "tuned",
        batch_size=3,
        lr=5e-3,
        length_multiple=16,
        eval_share=0.25,
        slicing=sys.argv[2],  # type: ignore[arg-type]
    )
    fine_tune(settings, *settings.read())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
