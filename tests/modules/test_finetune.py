"""Tests which samples each process encodes during fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")

from megatron.adaptive.modules import finetune
from megatron.adaptive.modules.finetune import FineTuning
from megatron.adaptive.modules.samples import SampleFile, SampleReader, num_learned

from ..support.tuned_models import make_tokenizer


class SecondOfTwo:
    """Replaces the pipeline on the second of two replicas, and stores the numbers of items."""

    replicas = 2
    steps = 0
    grad_norm = 0.0

    def __init__(self) -> None:
        self.trained: list[list[float]] = []
        self.evaluated: list[list[float]] = []

    def set_optimizer(self, make: Any, *, clip_norm: float) -> None:
        """Ignores the optimizer."""

    def loop(self, total: int, **settings: Any) -> Iterable[int]:
        return range(total)

    def share(self, batch: Sequence[Any]) -> list[Any]:
        return list(batch[1::2])

    def step(self, batch: Any, *, num_items: list[float]) -> tuple[float, bool]:
        assert num_learned(batch) == num_items
        self.trained.append(num_items)
        return 1.0, False

    def eval(self, batch: Any, *, num_items: list[float]) -> float:
        assert len(batch) == len(num_items)
        self.evaluated.append(num_items)
        return 2.0


def test_a_layout_is_chosen_for_the_largest_sample(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a" * length}) for length in (3, 9, 4)))
    samples = SampleReader(processor=make_tokenizer()).read(path)
    batch = finetune._alike(samples, 2)
    assert {name: entry.shape for name, entry in batch.items()} == {
        name: (2, *entry.shape[1:]) for name, entry in samples[1].items()
    }


def test_a_process_encodes_only_samples_of_its_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a process without a cache encodes only the samples of its replica."""
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"text": "a" * (number + 2)}) for number in range(11)]
    path.write_text("\n".join(lines))
    samples = SampleReader(processor=make_tokenizer(), kept_bytes=0).read(path)
    assert samples.num_learned == [number + 1 for number in range(11)]
    encoded: list[int] = []
    encode = SampleFile._encode

    def counted(self: SampleFile, line: Any) -> Any:
        encoded.append(line.number)
        return encode(self, line)

    monkeypatch.setattr(SampleFile, "_encode", counted)
    monkeypatch.setattr(finetune.torch.distributed, "get_rank", lambda: 1)
    settings = FineTuning(
        model=tmp_path, data=path, output=tmp_path / "tuned", batch_size=4, eval_share=0.28
    )
    pipeline = SecondOfTwo()
    run: Any = finetune._Run(settings, pipeline, samples)  # type: ignore[arg-type]
    run.train()
    # Each of two steps trains four samples, and the evaluation has three samples. The second
    # replica evaluates one of these.
    assert [len(items) for items in pipeline.trained] == [2, 2]
    assert len(encoded) == 4 + 1
    assert run._evaluate() == pytest.approx(2.0)
    # If an evaluation has a single sample, the second replica repeats this sample, which counts
    # only once.
    run._held_out = run._held_out[:1]
    assert run._evaluate() == pytest.approx(2.0)
    assert pipeline.evaluated[-1] == [0.0]
