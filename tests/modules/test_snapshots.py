"""Copies of a pipeline's state, kept by real keepers, become a checkpoint to go on from."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.modules import CutPoint, Pipeline
from tests.checkpoint.keepers import left_with, write_out

TOTAL = 7


class Net(torch.nn.Module):
    """With buffers that each forward changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.cut, self.last = CutPoint(), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(self.norm(self.first(x)), 0.1, self.training)
        return self.last(self.cut(x)).square().mean()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(step))}


class Diary:
    """An object of the user's whose state grows."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.text = state["text"]


class Training:
    """A pipeline in this process, with what its steps gave."""

    def __init__(self, precision: str | None, optimizer: str, folder: Path) -> None:
        torch.manual_seed(1)
        given: Any = precision
        self.pipeline = Pipeline(Net(), batch_of(0), micro_batch_size=2, mixed_precision=given)
        kind: Any = getattr(torch.optim, optimizer)
        self.optimizer = kind(self.pipeline.parameters(), lr=0.05)
        # Its first steps overflow in fp16: the optimizer has no state then.
        self.pipeline.set_optimizer(self.optimizer, initial_loss_scale=2.0**40)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.diary, self.folder = Diary(), folder
        self.losses: dict[int, float] = {}

    def run(self, last: int, before: Callable[[int], object] = lambda step: None) -> None:
        """Train, and end after a step as a process that is killed: nothing is saved."""
        state = {"scheduler": self.scheduler, "diary": self.diary}
        for step in self.pipeline.loop(TOTAL, folder=self.folder, state=state):
            if step == last:
                break
            before(step)
            self.losses[step], _ = self.pipeline.step(batch_of(step))
            self.scheduler.step()
            self.diary.text += "x" * 30000


Make = Callable[..., Training]


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, keepers: list[SnapshotKeeper], tmp_path: Path
) -> Iterator[Make]:
    """Starts a training on node ``a``, as its agent would."""
    made: list[Training] = []
    monkeypatch.delenv("MEGATRON_ADAPTIVE_JOB", raising=False)

    def begin(
        *, copies: bool = True, precision: str | None = None, optimizer: str = "AdamW"
    ) -> Training:
        settings = {"run": "run", "node": "a", "domain": "a", "buddy": "b", "every": 1}
        settings |= {"limit_bytes": None, "address": keepers[0].address}
        monkeypatch.delenv("MEGATRON_ADAPTIVE_COPIES", raising=False)
        if copies:
            monkeypatch.setenv("MEGATRON_ADAPTIVE_COPIES", json.dumps(settings))
        for one in made:
            one.pipeline.close()
        made.append(Training(precision, optimizer, tmp_path / ("of job" if copies else "none")))
        return made[-1]

    yield begin
    for one in made:
        one.pipeline.close()


@pytest.mark.parametrize(
    ("precision", "optimizer"), [(None, "AdamW"), ("fp16", "AdamW"), ("bf16", "SGD")]
)
def test_training_goes_on_bit_for_bit_from_copies(
    make: Make,
    keepers: list[SnapshotKeeper],
    capsys: pytest.CaptureFixture[str],
    precision: str | None,
    optimizer: str,
) -> None:
    kind: dict[str, Any] = {"precision": precision, "optimizer": optimizer}
    whole = make(copies=False, **kind)
    whole.run(TOTAL)
    training = make(**kind)
    training.run(4)
    training.pipeline.close()
    said = capsys.readouterr().out
    assert "copies of the state are kept in memory: every step 0.0 MiB are copied" in said
    assert "warning" not in said
    keepers[0].close()  # the node is lost with all that it kept
    source = left_with(keepers[1])
    assert source.step in (3, 4)  # the fourth was on its way
    write_out(source, training.folder, is_pipeline=True)
    later = make(**kind)
    later.run(TOTAL)
    assert sorted(later.losses) == list(range(source.step, TOTAL))
    assert training.losses | later.losses == whole.losses
    assert later.diary.text == whole.diary.text
    assert later.pipeline.loss_scale == whole.pipeline.loss_scale
    assert [one.name for one in training.folder.glob(".*")] == []
    kept, expected = later.pipeline.model.state_dict(), whole.pipeline.model.state_dict()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def test_weights_that_change_while_they_are_copied_are_told_of(
    make: Make, keepers: list[SnapshotKeeper], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a copy held was neither the step before nor the one after."""
    training, gate = make(), threading.Event()

    def change(step: int) -> None:
        copies: Any = training.pipeline._loop._snapshots  # type: ignore[union-attr]
        if step == 3:
            copies._pool.submit(gate.wait, 60.0)  # the next copy comes late
        elif step == 4:
            with torch.no_grad():
                training.pipeline.model.last.weight.mul_(2.0)
            gate.set()

    training.run(6, change)
    assert "kept in memory: rank 0: weights or optimizer state changed" in capsys.readouterr().out
    assert sorted(training.losses) == list(range(6))
    assert left_with(keepers[0]).step == 3
