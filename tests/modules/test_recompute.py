"""Checks that recomputed segments give the same results and keep fewer activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint, Pipeline, Profiler
from megatron.adaptive.modules.assembly import PipelineSettings
from megatron.adaptive.modules.request_checks import request_signature
from megatron.adaptive.modules.sizes import choose_orders

from .models import SHARED, Tower, knotty, make_batch, viewed, viewer

SAMPLE = [viewed(2, 5, 1), viewed(0, 4, 2)]
VIEWER: dict[str, Any] = {
    "shared_weights": [["words.weight", "head.weight"]],
    "decisive_entries": ["sizes"],
}


def trained(pipeline: Pipeline, batch: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Trains ``pipeline`` for two steps on ``batch``.

    Returns the losses, the last gradients and buffers, and the number of bytes that are kept for
    the backward pass.
    """
    with pipeline:
        losses = [pipeline.step(batch)[0] for _ in range(2)]
        tensors = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
        tensors |= dict(pipeline.model.named_buffers())
        programs = pipeline._assembly.recordings.of(
            batch[0] if isinstance(batch, list) else {n: t[:2] for n, t in batch.items()}, 1
        )
        return losses, tensors, programs.meter.bytes_of(0)


def require_equal(result: Any, expected: Any) -> None:
    assert result[0] == expected[0]
    assert result[1].keys() == expected[1].keys()
    for name, tensor in result[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=0, atol=0)


@pytest.mark.parametrize("split", [False, True])
def test_recomputed_segments_give_equal_numbers(split: bool) -> None:
    """Checks that recomputation gives equal results.

    The model has dropout, running means and shared weights, and may use autocast.
    """

    def run(recompute: Any, **options: Any) -> Any:
        pipeline = Pipeline(
            knotty(dropout=0.3),
            make_batch(4),
            micro_batch_size=2,
            shared_weights=SHARED,
            split_backward=split,
            recompute=recompute,
            **options,
        )
        return trained(pipeline, make_batch(6, 3))

    for precision in (None, "bf16"):
        plain = run(None, mixed_precision=precision)
        kept = [plain[2]]
        for recompute in ([2, 5], "all"):
            result = run(recompute, mixed_precision=precision)
            require_equal(result, plain)
            kept.append(result[2])
        assert kept == sorted(kept, reverse=True)
        assert kept[2] < kept[0]


@pytest.mark.parametrize("schedule", ["adaptive", "hinted"])
def test_recomputing_everything_keeps_whole_backward_passes_by_default(schedule: str) -> None:
    def splits(recompute: Any, *, split: bool | None = None) -> bool:
        settings = PipelineSettings(
            knotty(), make_batch(2), schedule=schedule, recompute=recompute, split_backward=split
        )
        return choose_orders(settings, 2, 0).weight_pieces > 0

    assert splits(None)
    assert splits("selective")
    assert not splits("all")
    assert splits("all", split=True)


def test_attention_is_recomputed_in_microbatches_of_any_content() -> None:
    batch = [viewed(3, 40, 5), viewed(0, 9, 6)]
    results = {
        recompute: trained(
            Pipeline(viewer(dropout=0.2), SAMPLE, recompute=recompute, **VIEWER), batch
        )
        for recompute in (None, "selective", "all")
    }
    for recompute in ("selective", "all"):
        require_equal(results[recompute], results[None])
        assert results[recompute][2] < results[None][2]


class Attention(nn.Module):
    """Model that computes attention in separate operations, and may change a tensor in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mix = nn.Linear(8, 24)
        self.cut = CutPoint()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).split(8, dim=-1)
        scores = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, dim=-1)
        y = self.cut(scores @ v)
        z = y.square()
        return (y.add_(1) if self.in_place else y + 1).sum() + z.sum()


def test_an_attention_of_single_operations_is_found() -> None:
    batch = {"x": torch.randn(4, 32, 8, generator=torch.Generator().manual_seed(0))}
    plain, selective = (
        trained(
            Pipeline(Attention(in_place=False), batch, micro_batch_size=2, recompute=recompute),
            batch,
        )
        for recompute in (None, "selective")
    )
    require_equal(selective, plain)
    assert selective[2] < plain[2]


def test_what_cannot_be_recomputed_is_named() -> None:
    batch = {"x": torch.randn(4, 6, 8)}
    for model, recompute, message in (
        (Attention(in_place=True), "all", r"1 changes an input tensor of shape \[2, 6, 8\]"),
        (Attention(in_place=False), [2], "segment 2, but the cut points make 2 .* from 0 to 1"),
        (Attention(in_place=False), "attention", "recompute must be .* got 'attention'"),
        (Attention(in_place=False), [-1], r"recompute must be .* got \[-1\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            Pipeline(model, batch, micro_batch_size=2, recompute=recompute)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="recompute='selective' .* neither"):
        Pipeline(
            knotty(),
            make_batch(4),
            micro_batch_size=2,
            shared_weights=SHARED,
            recompute="selective",
        )


def test_the_profile_has_the_memory_of_recomputed_segments() -> None:
    batch = make_batch(4)
    rows = []
    for recompute in (None, [3]):
        profiler = Profiler(
            knotty(), batch, shared_weights=SHARED, micro_batch_sizes=[2], recompute=recompute
        )
        samples = profiler.run().samples
        rows.append({sample.segment: sample.kept_bytes for sample in samples})
    less = {segment for segment, kept in rows[1].items() if kept < rows[0][segment]}
    assert less == {3}


def test_recomputation_changes_the_signature_of_a_measured_model() -> None:
    def signature(recompute: Any) -> str:
        batch = {"x": torch.ones(4, 16)}
        return request_signature(PipelineSettings(Tower(), batch, recompute=recompute))

    signatures = {signature(recompute) for recompute in (None, "all", "selective", [0], (0, 1))}
    assert len(signatures) == 5
    assert signature([0, 1]) == signature((0, 1))
    # This signature must not change, so that jobs planned by earlier versions recognize their
    # model.
    assert signature(None) == "cc20b04990f2eeba5e01f2020becbe5e"
