"""Tests which samples each process encodes during fine-tuning."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import finetune
from megatron.adaptive.modules.finetune import FineTuning
from megatron.adaptive.modules.samples import SampleFile, SampleReader, num_learned

from ..support.tuned_models import make_tokenizer, write_text_model


class SecondOfTwo:
    """Stand-in for the pipeline on the second of two replicas.

    Stores the numbers of learned tokens that are passed to it.
    """

    replicas = 2
    steps = 0
    grad_norm = 0.0
    loss_scale = 1.0

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


class Overflowing(SecondOfTwo):
    """Stand-in for a pipeline whose gradients are never finite.

    Each step halves the loss scale.
    """

    replicas = 1

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self.loss_scale = loss_scale
        self.num_steps = 0

    def share(self, batch: Sequence[Any]) -> list[Any]:
        return list(batch)

    def step(self, batch: Any, *, num_items: list[float]) -> tuple[float, bool]:
        self.num_steps += 1
        self.loss_scale = max(1.0, self.loss_scale / 2)
        return math.nan, True


@pytest.mark.parametrize(("precision", "scale", "step"), [(None, 1.0, 1), ("fp16", 4.0, 3)])
def test_a_skipped_step_ends_the_run_unless_a_smaller_scale_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, scale: float, step: int
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([json.dumps({"text": "abc"})] * 9))
    samples = SampleReader(processor=make_tokenizer()).read(path)
    monkeypatch.setattr(finetune.torch.distributed, "get_rank", lambda: 0)
    settings = FineTuning(
        model=tmp_path,
        data=path,
        output=tmp_path / "tuned",
        batch_size=2,
        mixed_precision=precision,
    )
    pipeline: Any = Overflowing(scale)
    with pytest.raises(finetune.DivergedError) as raised:
        finetune._Run(settings, pipeline, samples).train()
    text = str(raised.value)
    assert text.startswith(f"step {step}: a gradient is infinite or NaN")
    assert ("although the loss scale is 1" in text) == (precision == "fp16")
    assert "\n" not in text
    assert pipeline.num_steps == step


def test_a_whole_float16_model_is_loaded_in_float32(tmp_path: Path) -> None:
    for saved in (torch.float16, torch.bfloat16, torch.float32):
        folder = tmp_path / str(saved)
        write_text_model(folder, saved)
        other = torch.float32 if saved == torch.float16 else saved
        for rank, dtype, loaded in (
            (0, None, other),
            (4, None, saved),
            (4, "float16", torch.float16),
            (0, "bfloat16", torch.bfloat16),
        ):
            settings = FineTuning(
                model=folder,
                data=tmp_path / "train.jsonl",
                output=tmp_path / "tuned",
                lora_rank=rank,
                dtype=dtype,
            )
            assert settings.parameter_dtype() == loaded
    whole = FineTuning(
        model=folder, data=tmp_path / "no", output=tmp_path / "tuned", dtype="float16"
    )
    with pytest.raises(ConfigError, match="--dtype float16 cannot be used to train the whole"):
        whole.read()
