"""Runs one of two or four ranks, whose programs compare their batches in ``Pipeline``.

Usage: ``comparison_worker.py FOLDER PROGRAM``. Checkpoints are saved to ``FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, Knotty, knotty, make_batch, viewed, viewer

from megatron.adaptive import Pipeline
from megatron.adaptive.errors import ConfigError

SAMPLES, BATCH, INTERVAL = 32, 4, 64


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(**options: Any) -> Pipeline:
    settings: dict[str, Any] = {"model": knotty(), "sample": make_batch(BATCH), **options}
    model, sample = settings.pop("model"), settings.pop("sample")
    pipeline = Pipeline(model, sample, micro_batch_size=2, shared_weights=SHARED, **settings)
    pipeline.set_optimizer(sgd)
    return pipeline


def loader_of(seed: int) -> Iterable[dict[str, torch.Tensor]]:
    """Returns a data loader that shuffles the same samples with ``seed``."""
    whole = make_batch(SAMPLES)
    samples = [{name: tensor[n] for name, tensor in whole.items()} for n in range(SAMPLES)]
    generator = torch.Generator().manual_seed(seed)
    loader: Any = DataLoader(samples, batch_size=BATCH, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return loader  # type: ignore[no-any-return]


def refusal_of(pipeline: Pipeline, action: Callable[[], object]) -> str:
    """Checks that ``action`` raises a one-line error, and returns its message.

    Also checks that no parameter of ``pipeline`` changes.
    """
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    steps = pipeline.steps
    with pytest.raises(ConfigError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert pipeline.steps == steps
    for parameter, earlier in zip(pipeline.parameters(), before, strict=True):
        assert torch.equal(parameter, earlier)
    return text


def shared_refusal_of(pipeline: Pipeline, action: Callable[[], object]) -> str:
    """Returns the message of :func:`refusal_of`, after checking that it is equal on all ranks."""
    text = refusal_of(pipeline, action)
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts == [text] * len(texts)
    return text


def shuffled_loaders_are_refused() -> None:
    """Checks that loaders with different seeds are refused in the first step and evaluation."""
    rank = dist.get_rank()
    with make() as pipeline:
        for run in (pipeline.step, pipeline.eval):
            text = shared_refusal_of(pipeline, partial(run, next(iter(loader_of(rank)))))
            assert text.startswith(
                "ranks 0 and 1 of one replica have different values in ids, label, mask; pass "
            )
            assert "torch.Generator().manual_seed(0)" in text
            assert "compare_batches=False" in text
        losses = [pipeline.step(batch)[0] for batch in loader_of(5)]
        assert len(losses) == SAMPLES // BATCH


def batches_may_differ_on_purpose() -> None:
    """Checks that ranks may pass dummies for entries that their stages do not use."""
    batch, is_first = make_batch(BATCH), dist.get_rank() == 0
    unused = "label" if is_first else "ids"
    dummy = {**batch, unused: torch.zeros_like(batch[unused])}
    losses = []
    for options, passed in (({}, batch), ({"compare_batches": False}, dummy)):
        with make(**options) as pipeline:
            losses.append([pipeline.step(passed)[0] for _ in range(2)])
    assert losses[0] == losses[1]
    with make() as pipeline:
        assert "values in ids, label;" in shared_refusal_of(pipeline, lambda: pipeline.step(dummy))


def a_later_difference_is_found() -> None:
    """Checks that a difference is found even if it begins after the first calls."""
    rank = dist.get_rank()
    same, other = make_batch(BATCH), make_batch(BATCH, rank)
    with make() as pipeline:
        pipeline.eval(same)
        for number in range(INTERVAL):
            pipeline.step(same if number < 3 else other)
        # Evaluations are counted separately from steps.
        shared_refusal_of(pipeline, lambda: pipeline.eval(other))
        shared_refusal_of(pipeline, lambda: pipeline.step(other))
        assert pipeline.steps == INTERVAL
        pipeline.step(other)
        folder = sys.argv[1]
        pipeline.save(folder)
        pipeline.load(folder)
        shared_refusal_of(pipeline, lambda: pipeline.step(other))


class Noted(Knotty):
    """Model that ignores one of its entries."""

    def forward(self, **entries: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the loss of the batch."""
        entries.pop("note")
        return super().forward(**entries)


def only_values_that_stages_use_are_compared() -> None:
    """Checks that floating-point values and unused entries may differ between ranks."""
    rank = dist.get_rank()
    note = torch.full((BATCH, 1), rank)
    batch = {**make_batch(BATCH), "note": note}
    torch.manual_seed(3)
    with make(model=Noted(), sample=batch) as pipeline:
        pipeline.step(batch)
        wide = {**batch, "note": note.expand(BATCH, 2 + rank)}
        pipeline.eval(wide)
    with Pipeline(viewer(), [viewed(2, 5)], decisive_entries=["sizes"]) as pipeline:
        part = viewed(2, 5)
        pipeline.step([{**part, "patches": part["patches"] + rank}])
        sizes = part["sizes"].flip(0) if rank else part["sizes"]
        text = shared_refusal_of(pipeline, lambda: pipeline.step([{**part, "sizes": sizes}]))
        assert "different values in sizes;" in text


def shapes_are_compared() -> None:
    """Checks the errors about entries with different shapes and numbers of microbatches."""
    is_first = dist.get_rank() == 0
    with make() as pipeline:
        size = BATCH if is_first else 2 * BATCH
        text = shared_refusal_of(pipeline, lambda: pipeline.step(make_batch(size)))
        assert text.startswith("ranks 0 and 1 of one replica have different numbers of microb")
        longer = make_batch(BATCH, length=5 if is_first else 7)
        text = shared_refusal_of(pipeline, lambda: pipeline.step(longer))
        assert "different shapes in ids: int64 [4, 5] and int64 [4, 7]; pass" in text
        batch = make_batch(BATCH)
        if not is_first:
            batch.pop("label")
        text = refusal_of(pipeline, lambda: pipeline.step(batch))
        assert text.startswith("" if is_first else "the batch lacks 'label'")
        assert not is_first or text.startswith("rank 1 rejected its batch: the batch lacks 'label'")
    with Pipeline(viewer(), [viewed(2, 5), viewed(0, 4)], decisive_entries=["sizes"]) as pipeline:
        parts = [viewed(0, 4), viewed(0, 4) if is_first else viewed(2, 4)]
        text = shared_refusal_of(pipeline, lambda: pipeline.step(parts))
        assert "different shapes in ids in microbatch 1: int64 [1, 4] and int64 [1, 6]" in text
        parts = [viewed(2, 4), viewed(0, 6) if is_first else viewed(2, 4)]
        text = shared_refusal_of(pipeline, lambda: pipeline.step(parts))
        assert "different entries: only rank 1 has patches in microbatch 1; pass" in text


def replicas_have_batches_of_their_own() -> None:
    """Checks that each replica may have a different batch. There are four processes."""
    rank = dist.get_rank()
    with make(pipeline_size=2) as pipeline:
        for seed in range(2):
            pipeline.step(make_batch(BATCH, 10 * seed + pipeline.replica))
        pipeline.eval(pipeline.share(make_batch(2 * BATCH)))
        differs = rank == 3
        wrong = make_batch(BATCH, 7 if differs else pipeline.replica)
        text = shared_refusal_of(pipeline, lambda: pipeline.step(wrong))
        assert text.startswith("ranks 1 and 3 of one replica have different values in ids, label")
    # Each replica has only one rank, so there is nothing to compare.
    with make(pipeline_size=1) as pipeline:
        pipeline.step(make_batch(BATCH, rank))
        assert not pipeline._maker.comparison.is_due


def replicas_with_batches_of_another_kind_are_named() -> None:
    """Checks that an error is raised if one replica has a list and the other a dictionary.

    If ranks do not compare their batches, the ranks with the same position in their pipelines find
    the difference.
    """
    batch = make_batch(BATCH)
    for compares, who in ((True, "ranks 0 and 1"), (False, "replicas 0 and 1")):
        with make(pipeline_size=2, compare_batches=compares) as pipeline:
            second = pipeline.replica == 1
            listed = [make_batch(2), make_batch(2, 5)]
            kind: Any = listed if second else batch
            for run in (pipeline.step, pipeline.eval):
                text = shared_refusal_of(pipeline, partial(run, kind))
                assert text.startswith(f"{who} have different kinds of batches; pass a list of")
                items = [1.0, 2.0] if second else None
                for each in (batch, listed):
                    text = shared_refusal_of(pipeline, partial(run, each, num_items=items))
                    assert text.startswith(f"{who} disagree on num_items; pass it on all")
            loss, _ = pipeline.step(batch)
            losses: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(losses, loss)
            assert losses == [loss] * len(losses)


def a_setting_that_differs_is_named() -> None:
    with pytest.raises(ConfigError, match="compare_batches=False on rank 1, but compare_batches=T"):
        make(compare_batches=dist.get_rank() == 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[2]]()
    dist.destroy_process_group()
