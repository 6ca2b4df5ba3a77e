"""Runs one of two ranks, which trains models from transformers folders and saves them.

Usage: ``pretrained_worker.py FOLDER PROGRAM ...``. ``FOLDER`` contains the models of
``test_pretrained.py``. Writes the names of the programs that passed, and the error that stopped the
run, to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from megatron.adaptive import CutPoint, Pipeline
from megatron.adaptive.modules import profiler
from megatron.adaptive.modules.recording import Forwards

LR = 0.1
FOLDER = Path(sys.argv[1])
MOST_OVER_BYTES = 200 << 20


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def reference(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], list[Any]]:
    """Trains the whole model in this process, and returns each step's loss and gradient norm.

    ``batches`` contains the batch of each step.
    """
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = sgd(trained)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for start in (0, 2):
            microbatch = {name: tensor[start : start + 2] for name, tensor in batch.items()}
            loss = model(**microbatch).loss / 2
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, float("inf"))))
        optimizer.step()
        losses.append(total)
    return losses, norms


def require_equal(pipeline: Pipeline, model: Any) -> None:
    """Checks that the pipeline's losses and gradient norms equal those of the whole ``model``."""
    batches = [make_batch(seed) for seed in range(3)]
    losses, norms = reference(model, batches)
    for batch, loss, norm in zip(batches, losses, norms, strict=True):
        assert pipeline.step(batch)[0] == pytest.approx(loss, rel=1e-5)
        assert pipeline.grad_norm == pytest.approx(norm, rel=1e-4)


def logits(model: Any) -> torch.Tensor:
    batch = make_batch(9)
    del batch["labels"]
    with torch.no_grad():
        return model.eval()(**batch).logits


def trained_and_saved(name: str, **settings: Any) -> None:
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(FOLDER / name)
    with Pipeline.from_pretrained(
        FOLDER / name, make_batch(), micro_batch_size=2, **settings
    ) as pipeline:
        pipeline.set_optimizer(sgd)
        require_equal(pipeline, model)
        assert any(parameter.is_meta for parameter in pipeline.model.parameters())
        output = pipeline.save_pretrained(FOLDER / f"{name}-trained", shard_bytes=30_000)
    saved, report = kind.from_pretrained(output, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(saved), logits(model), rtol=1e-4, atol=1e-5)
    assert (output / "tokenizer_config.json").read_text() == "{}"
    assert len(list(output.glob("model-*.safetensors"))) > 2
    assert not list(FOLDER.glob(".*.partial"))


def tied_weights_and_split_backwards() -> None:
    trained_and_saved("tied", schedule="adaptive")


def merged_experts() -> None:
    trained_and_saved("experts", schedule="1f1b")


def adapters_beside_frozen_weights() -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with Pipeline.from_pretrained(
        FOLDER / "experts", make_batch(), micro_batch_size=2, adapter=config, partition="2-3"
    ) as pipeline:
        counts: list[int] = []

        def make(parameters: list[Any]) -> torch.optim.Optimizer:
            counts.append(len(parameters))
            return sgd(parameters)

        pipeline.set_optimizer(make)
        before = pipeline.save_pretrained(FOLDER / "adapters-before")
        kind = transformers.AutoModelForCausalLM
        model = peft.PeftModel.from_pretrained(
            kind.from_pretrained(FOLDER / "experts"), str(before), is_trainable=True
        )
        require_equal(pipeline, model)
        named = dict(pipeline.named_parameters())
        trained = {name for name, parameter in named.items() if parameter.grad is not None}
        assert trained == {name for name in named if "lora_" in name}
        assert counts == [len(trained)]
        after = pipeline.save_pretrained(FOLDER / "adapters-after")
    saved = peft.PeftModel.from_pretrained(kind.from_pretrained(FOLDER / "experts"), str(after))
    torch.testing.assert_close(logits(saved), logits(model), rtol=1e-4, atol=1e-5)


def memory_of_own_part_only() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Pipeline.from_pretrained(
        FOLDER / "large", make_batch(), micro_batch_size=2, schedule="1f1b"
    ) as pipeline:
        used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        sizes = [tensor.numel() * tensor.element_size() for tensor in pipeline.parameters()]
        assert used < sum(sizes) + max(sizes) + MOST_OVER_BYTES, (used, sum(sizes), max(sizes))


def recordings_of(start: Any) -> tuple[Any, list[str]]:
    """Calls ``start``, and returns the result and the modes in which the model was recorded."""
    modes: list[str] = []
    taken = Forwards._taken

    def noted(*arguments: Any) -> Any:
        modes.extend(arguments[-1])
        return taken(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forwards, "_taken", noted)
        return start(), modes


def evaluation_is_recorded_when_it_is_used() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "tied")
    settings: dict[str, Any] = {"micro_batch_size": 2, "partition": "2-3"}
    pipeline, modes = recordings_of(
        lambda: Pipeline.from_pretrained(FOLDER / "tied", make_batch(), **settings)
    )
    with pipeline:
        is_first = os.environ["RANK"] == "0"
        assert modes == (["training", "evaluation"] if is_first else ["training"])
        batch = make_batch(5)
        with torch.no_grad():
            halves = [
                model.eval()(**{name: entry[start : start + 2] for name, entry in batch.items()})
                for start in (0, 2)
            ]
        expected = sum(float(half.loss) for half in halves) / 2
        loss, modes = recordings_of(lambda: pipeline.eval(batch))
        assert modes == ["evaluation"]
        assert loss == pytest.approx(expected, rel=1e-5)
        pipeline.set_optimizer(sgd)
        require_equal(pipeline, model)
        _, modes = recordings_of(lambda: pipeline.eval(batch))
        assert not modes


def two_sizes_are_measured_at_the_same_time() -> None:
    measured: list[int] = []
    original = profiler.measure_segments

    def noted(model: Any, tape: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        measured.append(len(batch["input_ids"]))
        return original(model, tape, batch, *arguments, **options)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "measure_segments", noted)
        pipeline, modes = recordings_of(
            lambda: Pipeline.from_pretrained(
                FOLDER / "tied", make_batch(), batch_size=8, pipeline_size=2
            )
        )
    torch.set_num_threads(threads)
    with pipeline:
        assert pipeline.plan is not None
        assert pipeline.plan.profile.micro_batch_sizes == (1, 2, 4)
        assert pipeline.plan.profile.estimated_sizes == (2,)
        is_first = os.environ["RANK"] == "0"
        if len(os.sched_getaffinity(0)) > 1:
            assert measured == ([1] if is_first else [4])
            if pipeline.micro_batch_size == 4:
                # The planner has already recorded the model, and the pipeline must reuse these
                # recordings.
                assert modes == (["training", "training", "evaluation"] if is_first else modes[:1])
        pipeline.set_optimizer(sgd)
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "tied")
        batch = {name: torch.cat([entry] * 2) for name, entry in make_batch().items()}
        loss, _ = pipeline.step(batch)
        assert loss == pytest.approx(float(model(**batch).loss), rel=1e-5)


class OwnEvaluation(torch.nn.Module):
    """Model that uses an additional parameter in evaluation mode, or that cannot be evaluated."""

    def __init__(self, *, can_evaluate: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.can_evaluate = can_evaluate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.can_evaluate):
            raise ValueError("this model has no evaluation")
        x = self.cuts[0](self.layers[0](x))
        x = self.layers[2](self.cuts[1](self.layers[1](x)))
        return (x if self.training else x * self.scale).square().mean()


def ones(tensors: Any) -> None:
    for tensor in tensors.values():
        tensor.fill_(0.5)


def evaluation_with_other_parameters_is_recorded_at_the_start() -> None:
    settings: dict[str, Any] = {"micro_batch_size": 2, "initialize": ones, "partition": "1-2"}
    with torch.device("meta"):
        model, broken = OwnEvaluation(), OwnEvaluation(can_evaluate=False)
    whole = OwnEvaluation().eval()
    with torch.no_grad():
        ones(dict(whole.named_parameters()))
    x = torch.ones(4, 4)
    pipeline, modes = recordings_of(lambda: Pipeline(model, {"x": x}, **settings))
    with pipeline:
        assert modes[-2:] == ["training", "evaluation"]
        # The scale is used only in evaluation. If evaluation had not been recorded, the scale would
        # count as unused, and the first rank would keep it.
        assert model.scale.is_meta is (os.environ["RANK"] == "0")
        loss, modes = recordings_of(lambda: pipeline.eval({"x": x}))
        assert not modes
        assert loss == pytest.approx(float(whole(x)))
    with pytest.raises(ValueError, match="this model has no evaluation"):
        Pipeline(broken, {"x": x}, **settings)


def main() -> None:
    done, error = [], ""
    try:
        for program in sys.argv[2:]:
            globals()[program]()
            done.append(program)
    except Exception:
        error = traceback.format_exc()
    rank = os.environ["RANK"]
    (FOLDER / f"{rank}.json").write_text(json.dumps({"done": done, "error": error}))
    if error:
        sys.exit(error)


if __name__ == "__main__":
    main()
