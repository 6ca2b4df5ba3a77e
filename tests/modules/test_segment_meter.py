"""Tests the measured times of segments, with a clock that only the model's blocks advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive import CutPoint, Pipeline
from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cutting import segment_kinds, slice_tape
from megatron.adaptive.modules.program import ProgramStages, StageProgram
from megatron.adaptive.modules.random_key import RandomKey
from megatron.adaptive.modules.recompute import recomputed_ranges
from megatron.adaptive.modules.segment_meter import SegmentMeter, segments_of
from megatron.adaptive.modules.segments import tensors_of
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.read import read_run

from .ranks import CPU, Case

WIDTH = 4
BLOCKS = 5
MICROBATCHES = 3
FORWARD_NS, BACKWARD_NS = 100, 1000


class Clock:
    """Clock that is advanced only by the model's blocks."""

    def __init__(self) -> None:
        self.now_ns = 0

    def mark(self) -> int:
        return self.now_ns

    def resolve_ns(self, mark: int) -> int:
        return mark

    def wait(self, mark: int) -> None:
        pass


CLOCK = Clock()


class Costly(torch.autograd.Function):
    """Returns the input, and advances the clock by the block's cost in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cost: int) -> torch.Tensor:
        ctx.cost = cost
        CLOCK.now_ns += cost * FORWARD_NS
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        CLOCK.now_ns += ctx.cost * BACKWARD_NS
        return gradients[0], None


class Skipping(torch.nn.Module):
    """Model with blocks of increasing cost.

    Each later block uses the first block's result and a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(BLOCKS - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        mask = x > 0
        first = x
        for number, block in enumerate(self.blocks):
            x = Costly.apply(block(x), number + 1) * mask
            if number == 0:
                first = x
            x = torch.tanh(x) + first
            if number + 1 < BLOCKS:
                x = self.cuts[number](x)
        return x.square().mean()


def stages(case: Case, stage: int, meter: SegmentMeter | None, **options: Any) -> ProgramStages:
    """Returns the object that runs the stage with index ``stage`` of a pipeline with two ranks.

    Stage 0 has the first two segments, and stage 1 has the last three. ``meter`` times the
    segments.
    """
    tape = case.forwards.training
    plan = slice_tape(tape, (2, BLOCKS - 2))[stage]
    held = tensors_of(case.model)
    recomputed = recomputed_ranges(tape, options.get("recompute"))
    return ProgramStages(
        programs=[[StageProgram(tape, plan, held, CPU, recomputed)]] * MICROBATCHES,
        microbatches=[case.microbatch(number) for number in range(MICROBATCHES)],
        random=RandomKey(7, CPU),
        held=held,
        device=CPU,
        meters=[ActivationMeter()] * MICROBATCHES,
        stores=[WeightGradientStore()] if options.get("split") else None,
        meter=meter,
    )


def step(first: ProgramStages, last: ProgramStages) -> list[float]:
    """Runs all microbatches through the stages ``first`` and ``last``, and returns their losses."""
    for number in range(MICROBATCHES):
        sent = first.forward(0, number, None)
        last.forward(0, number, sent)
    for number in range(MICROBATCHES):
        first.backward(0, number, last.backward(0, number, None))
    return [float(loss) for loss in last.losses]


def make_case() -> Case:
    return Case(Skipping(), {"x": torch.randn(2 * MICROBATCHES, WIDTH)}, 2)


@pytest.mark.parametrize("split", [False, True])
def test_a_segment_takes_what_its_block_costs(split: bool) -> None:
    case = make_case()
    meters = [SegmentMeter(segments, CLOCK) for segments in ((0, 1), (2, 3, 4))]
    for meter in meters:
        meter.begin(is_traced=True)
    measured = [stages(case, stage, meters[stage], split=split) for stage in (0, 1)]
    losses = step(measured[0], measured[1])
    rows = [row for meter in meters for row in meter.rows()]
    assert rows == [
        (
            number,
            (number + 1) * MICROBATCHES * FORWARD_NS,
            (number + 1) * MICROBATCHES * BACKWARD_NS,
            MICROBATCHES,
        )
        for number in range(BLOCKS)
    ]
    plain = step(*(stages(case, stage, None, split=split) for stage in (0, 1)))
    assert losses == plain == case.expected()[0]


def test_calls_that_run_again_count_as_backward() -> None:
    case = make_case()
    meter = SegmentMeter((2, 3, 4), CLOCK)
    meter.begin(is_traced=True)
    recompute = "all"
    step(stages(case, 0, None), stages(case, 1, meter, recompute=recompute))
    both_ns = FORWARD_NS + BACKWARD_NS
    assert [row[1:3] for row in meter.rows()] == [
        ((number + 1) * MICROBATCHES * FORWARD_NS, (number + 1) * MICROBATCHES * both_ns)
        for number in (2, 3, 4)
    ]


def test_steps_that_are_not_traced_have_no_times() -> None:
    case = make_case()
    meter = SegmentMeter((2, 3, 4), CLOCK)
    meter.begin(is_traced=False)
    step(stages(case, 0, None), stages(case, 1, None))
    assert meter.rows() == meter.passes() == []


def test_segments_of_a_rank_and_their_kinds() -> None:
    v_shape = Placement(num_ranks=2, num_chunks=2, kind="v")
    assert segments_of((1, 2, 1, 3), v_shape, 0) == [0, 4, 5, 6]
    assert segments_of((1, 2, 1, 3), v_shape, 1) == [1, 2, 3]
    # The inner segments differ from the first, which creates the mask, and the last, which computes
    # the loss.
    kinds = segment_kinds(make_case().forwards.training)
    assert len(kinds) == BLOCKS
    assert kinds[1] not in (kinds[0], kinds[-1])


class Counting(torch.nn.Module):
    """Model whose blocks all change the same buffer, so that they must be in one stage."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(BLOCKS - 1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        for block, cut in zip(self.blocks, [*self.cuts, torch.nn.Identity()], strict=True):
            self.steps.add_(1.0)
            x = cut(torch.tanh(block(x)))
        return x.square().mean()


@pytest.mark.parametrize("detail", ["layers", "collectives"])
def test_segments_of_one_stage_may_change_the_same_buffer(detail: Any, tmp_path: Path) -> None:
    """Checks that tracing does not treat each segment as a stage, which would raise an error."""
    batch = {"x": torch.randn(4, WIDTH)}
    with Pipeline(
        Counting(), batch, micro_batch_size=2, trace_dir=str(tmp_path), trace_detail=detail
    ) as pipeline:
        pipeline.step(batch)
        kinds = pipeline._assembly.segment_kinds
        assert pipeline.model.steps == 2 * BLOCKS
    assert kinds[1] == kinds[2] == kinds[3]
    assert len(set(kinds)) == 3
    assert read_run(tmp_path).complete_iterations() == (1,)


class CountingFirst(Counting):
    """Model in which only the first two blocks change the same buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        cuts = [*self.cuts, torch.nn.Identity()]
        for number, (block, cut) in enumerate(zip(self.blocks, cuts, strict=True)):
            if number < 2:
                self.steps.add_(1.0)
            x = cut(torch.tanh(block(x)))
        return x.square().mean()


@pytest.mark.parametrize("weights", [None, [9.0, *[1.0] * (BLOCKS - 1)]])
def test_segments_that_change_one_buffer_stay_together(weights: list[float] | None) -> None:
    """Checks that segments stay together even if given or measured costs would separate them."""
    batch = {"x": torch.randn(4, WIDTH)}
    torch.manual_seed(1)
    model = CountingFirst()
    with torch.no_grad():
        expected = sum(float(model(batch["x"][part])) for part in (slice(2), slice(2, 4))) / 2
    model.steps.zero_()
    with Pipeline(model, batch, micro_batch_size=2, chunks=2, weights=weights) as pipeline:
        assert len(pipeline.partition) == 2
        assert pipeline.partition[0] >= 2
        assert pipeline.step(batch)[0] == pytest.approx(expected, rel=1e-5)
        assert pipeline.model.steps == 4


class Shared(Counting):
    """Model that changes a buffer in the first block and reads it by another name in the second."""

    alias: torch.Tensor

    def __init__(self, *, only_evaluation: bool) -> None:
        super().__init__()
        self.only_evaluation = only_evaluation
        self.register_buffer("alias", self.steps.view(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        cuts = [*self.cuts, torch.nn.Identity()]
        for number, (block, cut) in enumerate(zip(self.blocks, cuts, strict=True)):
            if number == 0 and self.training:
                self.steps.add_(1.0)
            if number == 1 and self.only_evaluation != self.training:
                x = x + (self.steps if self.only_evaluation else self.alias)
            x = cut(torch.tanh(block(x)))
        return x.square().mean()


@pytest.mark.parametrize("only_evaluation", [False, True])
def test_segments_that_read_a_changed_buffer_are_with_it(only_evaluation: bool) -> None:
    """Checks that a changed buffer is in the same stage as all segments that read the buffer."""
    batch = {"x": torch.randn(4, WIDTH)}
    weights = [9.0, *[1.0] * (BLOCKS - 1)]
    model = Shared(only_evaluation=only_evaluation)
    with Pipeline(model, batch, micro_batch_size=2, chunks=2, weights=weights) as pipeline:
        assert pipeline.partition[0] >= 2
        pipeline.step(batch)


def test_a_buffer_of_all_segments_is_named_if_it_needs_more_than_one_stage() -> None:
    batch = {"x": torch.randn(4, WIDTH)}
    with pytest.raises(ConfigError, match="buffer steps changes in stage 0 and is used in stage 1"):
        Pipeline(Counting(), batch, micro_batch_size=2, chunks=2)
