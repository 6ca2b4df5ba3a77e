"""Checks that training resumes from snapshots, which real snapshot keepers keep in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from tests.checkpoint.keepers import left_with, write_out

from .models import Training

TOTAL = 7


class Diary:
    """Example of a user's object whose state grows during training."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.text = state["text"]


Make = Callable[..., Training]


def run(
    training: Training, folder: Path, last: int, before: Callable[[int], object] = lambda step: None
) -> None:
    """Trains until step ``last`` begins, and then stops as if the process was killed.

    Checkpoints are in ``folder``, and ``before`` is called with each step before the step is
    trained.
    """

    def write(step: int) -> None:
        before(step)
        training.state["diary"].text += "x" * 30000

    training.run(TOTAL, folder, last=last, before=write)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, keepers: list[SnapshotKeeper], trained: Make) -> Make:
    """Returns a function that starts a training run with the environment of node ``a``."""
    settings = {"run": "run", "node": "a", "domain": "a", "buddy": "b", "every": 1}
    encoded = json.dumps({**settings, "limit_bytes": None, "address": keepers[0].address})

    def begin(
        *, copies: bool = True, precision: str | None = None, optimizer: str = "AdamW"
    ) -> Training:
        monkeypatch.delenv("MEGATRON_ADAPTIVE_COPIES", raising=False)
        if copies:
            monkeypatch.setenv("MEGATRON_ADAPTIVE_COPIES", encoded)
        training = trained(4, precision, getattr(torch.optim, optimizer))
        training.state["diary"] = Diary()
        return training

    return begin


@pytest.mark.parametrize(
    ("precision", "optimizer"), [(None, "AdamW"), ("fp16", "AdamW"), ("bf16", "SGD")]
)
def test_training_goes_on_bit_for_bit_from_copies(
    make: Make,
    keepers: list[SnapshotKeeper],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    precision: str | None,
    optimizer: str,
) -> None:
    folder = tmp_path / "of job"
    kind: dict[str, Any] = {"precision": precision, "optimizer": optimizer}
    whole = make(copies=False, **kind)
    run(whole, tmp_path / "none", TOTAL)
    training = make(**kind)
    run(training, folder, 4)
    training.pipeline.close()
    said = capsys.readouterr().out
    assert "copies of the state are kept in memory: 0.0 MiB copied" in said
    # The first steps overflow on purpose in fp16, and the pipeline reports this when it is closed.
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert [line for line in warnings if "steps were skipped" not in line] == []
    # Closing the keeper of node ``a`` loses its copies, as if the node had failed.
    keepers[0].close()
    source = left_with(keepers[1])
    # The copy of the fourth step may not have arrived before the node failed.
    assert source.step in (3, 4)
    write_out(source, folder, is_pipeline=True)
    later = make(**kind)
    run(later, folder, TOTAL)
    assert sorted(later.losses) == list(range(source.step, TOTAL))
    assert training.losses | later.losses == whole.losses
    assert later.state["diary"].text == whole.state["diary"].text
    assert later.pipeline.loss_scale == whole.pipeline.loss_scale
    assert [path.name for path in folder.glob(".step*")] == []
    kept, expected = later.pipeline.model.state_dict(), whole.pipeline.model.state_dict()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.mark.long
def test_weights_that_change_while_they_are_copied_are_told_of(
    make: Make, keepers: list[SnapshotKeeper], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Checks that a copy is discarded if the weights change while the weights are copied."""
    training, gate = make(), threading.Event()

    def change(step: int) -> None:
        copies: Any = training.pipeline._loop._snapshots  # type: ignore[union-attr]
        if step == 3:
            copies._pool.submit(gate.wait, 60.0)  # This wait delays the next copy.
        elif step == 4:
            with torch.no_grad():
                training.pipeline.model.last.weight.mul_(2.0)
            gate.set()

    run(training, tmp_path, 6, change)
    assert "kept in memory: rank 0: weights or optimizer state changed" in capsys.readouterr().out
    assert sorted(training.losses) == list(range(6))
    assert left_with(keepers[0]).step == 3
