"""Tests that transformers can load the result of the fine-tuning example."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from ..multiprocess.launch import ROOT, TRANSFORMERS, run_ranks, tail

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
from ..support.tuned_models import loss_of_transformers, write_image_data, write_image_model

EXAMPLE = ROOT / "examples" / "finetune" / "finetune.py"


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_folder_with_images_is_tuned_with_adapters(tmp_path: Path) -> None:
    model, tuned = tmp_path / "model", tmp_path / "tuned"
    write_image_model(model)
    data = write_image_data(tmp_path / "data")
    command = f"{EXAMPLE} --model {model} --data {data} --output {tuned} --lora-rank 4 --lr 0.05"
    log = tmp_path / "output.txt"
    status = run_ranks(command.split(), world_size=2, log=log, limit_s=150.0, modules=TRANSFORMERS)
    assert status == 0, tail(log)
    printed = log.read_text()
    losses = re.findall(r"step (\d+): loss ([\d.]+)", printed)
    assert [int(step) for step, _ in losses] == [1, 2, 3]
    order = list(range(20))
    random.Random(1).shuffle(order)
    held_out, trained = order[:3], order[3:]
    random.Random(0).shuffle(trained)
    assert float(losses[0][1]) == pytest.approx(
        loss_of_transformers(model, data, trained[:8]), rel=1e-5
    )
    evaluated = re.search(r"evaluation loss ([\d.]+)", printed)
    assert evaluated is not None
    expected = loss_of_transformers(model, data, held_out, adapters=tuned)
    assert float(evaluated[1]) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(loss_of_transformers(model, data, held_out), rel=1e-3)
