"""Tests how steps are measured, and how the loads of ranks are computed from measurements."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.engine.executor import RankTimes  # noqa: E402
from megatron.adaptive.rebalance import repartition  # noqa: E402
from megatron.adaptive.rebalance.judgement import Lanes, Move, StepMeasurements, loads_of  # noqa: E402
from megatron.adaptive.rebalance.repartition import Repartitioner  # noqa: E402
from megatron.adaptive.schedule.action import ActionKind  # noqa: E402
from megatron.adaptive.schedule.catalog import Candidate  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
LOOP = Placement(num_ranks=3, num_chunks=1)
MS = 1e6


def lanes(milliseconds: float, chunk: int = 0) -> Lanes:
    """Returns the times of ``chunk``: F takes ``milliseconds``, and B takes twice as long."""
    return {(F, chunk): milliseconds * MS, (B, chunk): 2 * milliseconds * MS}


def measured(
    rank: int, *steps: Lanes, shares: tuple[float, ...] = (1.0,), **more: object
) -> StepMeasurements:
    """Returns measurements of rank ``rank`` in ``steps``, which are all equally long."""
    spans = (1.0,) * len(steps)
    return StepMeasurements(pp_rank=rank, steps=steps, spans_s=spans, shares=shares, **more)  # type: ignore[arg-type]


def test_layers_are_separated_from_what_is_beside_them() -> None:
    samples = [
        measured(0, lanes(5), shares=(0.8,)),
        measured(1, lanes(6)),
        measured(2, lanes(8), shares=(0.5,)),
    ]
    loads = loads_of(samples, LOOP, (2, 2, 2), units=3)
    assert [sum(each) for (each,) in loads.layer_s] == pytest.approx([6e-3, 9e-3, 6e-3])
    assert [sum(each) for each in loads.beside_s] == pytest.approx([3e-3, 0, 12e-3])
    assert loads.slowness == pytest.approx((1.0, 1.5, 1.0))
    assert loads.paces((2, 2, 2)) == pytest.approx([15e-3, 18e-3, 24e-3])


def test_the_slowest_replica_counts_and_medians_forget_a_slow_step() -> None:
    samples = [measured(rank, lanes(4), lanes(4), lanes(90)) for rank in range(3)]
    samples += [measured(rank, *(lanes(4 + 2 * (rank == 1)),) * 3) for rank in range(3)]
    loads = loads_of(samples, LOOP, (2, 2, 2), units=3)
    assert loads.slowness == pytest.approx((1.0, 1.5, 1.0))


def test_a_rank_without_layers_is_taken_for_a_usual_one() -> None:
    samples = [measured(0, lanes(4)), measured(1, lanes(6)), measured(2, lanes(2))]
    loads = loads_of(samples, LOOP, (2, 2, 0), units=3)
    assert sum(loads.layer_s[2][0]) == pytest.approx(6e-3)
    assert sum(loads.beside_s[2]) == pytest.approx(6e-3)


def test_chunks_of_a_rank_measure_together_what_its_layers_take() -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    samples = [
        measured(0, lanes(2) | lanes(10, 1), shares=(1.0, 0.4)),
        measured(1, lanes(4) | lanes(4, 1), shares=(1.0, 1.0)),
    ]
    loads = loads_of(samples, placement, (1, 2, 2, 2), units=2)
    assert [sum(each) for (each,) in loads.layer_s] == pytest.approx([6e-3, 6e-3])
    assert sum(loads.beside_s[3]) == pytest.approx(18e-3)


def test_memory_limits_the_layers_of_a_rank() -> None:
    memory = {"kept_bytes": (20,), "held_bytes": (40,)}
    samples = [
        # The rank can use 900 bytes. Its two layers store 3 x 20 bytes, so 840 bytes are free. Each
        # additional layer needs 20 + 30 bytes.
        measured(0, lanes(2), free_bytes=1000, **memory),
        measured(1, lanes(2), free_bytes=10, **memory),
        measured(2, lanes(2)),
    ]
    loads = loads_of(samples, LOOP, (2, 2, 2), units=3)
    assert loads.most_layers == (2 + 840 // 50, 2, math.inf)


def test_kinds_of_layers_are_separated_from_ranks() -> None:
    """Checks that measured times are split into costs of layer kinds and speeds of ranks."""
    samples = [
        measured(
            0, lanes(16), layer_bytes=((40, 40, 90, 90),), parts=((1 / 8, 1 / 8, 3 / 8, 3 / 8),)
        ),
        measured(1, lanes(8), shares=(0.75,), layer_bytes=((90, 90),), parts=((),)),
        measured(2, lanes(2), layer_bytes=((7,),), parts=((),)),
    ]
    loads = loads_of(samples, LOOP, (4, 2, 1), units=3)
    assert loads.kinds == (1, 1, 2, 2, 2, 2, 0)
    times = [[sum(kind) * 1e3 / 3 for kind in rank] for rank in loads.layer_s]
    # Layers of the last kind are only on the last rank, so this rank is assumed to have normal
    # speed.
    assert times == [
        pytest.approx(expected, rel=1e-3) for expected in ([4, 2, 6], [2, 1, 3], [2, 1, 3])
    ]
    assert loads.paces((4, 2, 1)) == pytest.approx([48e-3, 24e-3, 6e-3])
    # The two layers of the first rank move to the second rank, which is twice as fast.
    assert loads.paces((0, 6, 1)) == pytest.approx([0, 48e-3, 6e-3], rel=1e-3)


def test_layers_that_hold_more_fill_a_rank_sooner() -> None:
    memory = {"kept_bytes": (20,), "held_bytes": (80,)}
    samples = [
        # A layer keeps 3 x 20 / 2 bytes of activations. With its parameters, a layer of mean size
        # needs 30 + 40 bytes, and a large layer needs 30 + 60 bytes.
        measured(
            0, lanes(2), free_bytes=300, layer_bytes=((20, 60),), parts=((0.5, 0.5),), **memory
        ),
        measured(1, lanes(2), layer_bytes=((20, 20),), parts=((),)),
        measured(2, lanes(2), layer_bytes=((60, 60),), parts=((),)),
    ]
    loads = loads_of(samples, LOOP, (2, 2, 2), units=3)
    assert loads.most_layers[0] == 2 + (270 - 60) // 70
    assert loads.sizes[0] == pytest.approx((50 / 70, 90 / 70))
    assert loads.fits((5, 0, 1))  # Rank 0 needs 2 x 90 + 3 x 50 bytes.
    assert not loads.fits((6, 0, 0))


class _Share:
    """Imitates ``LayerShare``, which these tests do not need."""

    def begin(self) -> None:
        pass


@pytest.mark.parametrize(
    ("gained", "next_gain", "goes_back"),
    [(0.11, 0.05, False), (0.04, 0.1, False), (0.005, 0.1, True), (-0.2, 0.1, True)],
)
def test_a_move_that_gained_nothing_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, gained: float, next_gain: float, goes_back: bool
) -> None:
    after_s = 2.0 * (1 - gained)
    lines: list[str] = []
    job = SimpleNamespace(
        gather=lambda measured: [measured], on_first=lambda decide: (None, after_s, False)
    )
    schedule = SimpleNamespace(repartition_gain=0.05)
    job.config = SimpleNamespace(schedule=schedule, constant_slices=1)
    repartitioner = object.__new__(Repartitioner)
    vars(repartitioner).update(
        _run=SimpleNamespace(job=job, slices=None),
        _message=lines.append,
        _interval=1,
        _may_move=True,
        _partition=(4, 2),
        _first_partition=(3, 3),
        _checks=0,
        _gain=0.05,
        _steps=deque(maxlen=4),
        _skip=0,
        _since=0,
        _share=_Share(),
        _promise=Move(
            partition=(4, 2), present_s=2.0, step_s=1.8, why="", before_s=2.0, former=(3, 3)
        ),
    )
    monkeypatch.setattr(repartitioner, "_measurements", lambda: None)
    times = RankTimes(busy_s=1.0, span_s=after_s)
    # The parameter ``may_decide`` is false while ``auto`` still measures. Steps are recorded, but
    # nothing is decided.
    assert repartitioner.after_step(times, 4, may_decide=False) is None
    assert lines == []
    move = repartitioner.after_step(times, 4)
    assert repartitioner._gain == next_gain
    assert (move is not None) == goes_back
    if move is not None:
        assert (move.partition, move.former, move.is_return) == ((3, 3), (4, 2), True)
    # A move back to an earlier partition is not checked again.
    assert repartitioner.after_step(RankTimes(busy_s=1.0, span_s=after_s), 4) is None
    assert len(lines) == 1


def test_layers_that_auto_moved_are_checked_until_they_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks after which steps a moved partition is judged again, until the layers move back."""
    monkeypatch.setattr(repartition, "_layer_bytes", lambda run: ())
    monkeypatch.setattr(repartition, "_layer_share", lambda run, layer_bytes: _Share())
    schedule = SimpleNamespace(repartition="off", repartition_interval=50, repartition_gain=0.05)
    answers: list[Move | None] = []
    checked_at: list[int] = []
    steps = 0

    def built(layers_per_stage: tuple[int, ...]) -> Any:
        config = SimpleNamespace(
            schedule=schedule, layers_per_stage=layers_per_stage, constant_slices=1
        )
        job = SimpleNamespace(config=config, gather=lambda measured: [measured], on_first=decide)
        return SimpleNamespace(job=job, slices=None, placement=Placement(num_ranks=2, num_chunks=1))

    def decide(_: Any) -> tuple[Move | None, float, bool]:
        checked_at.append(steps)
        return answers.pop(0), 1.8, False

    moves = {"present_s": 2.0, "step_s": 1.8, "before_s": 2.0}
    away = Move(partition=(4, 2), former=(3, 3), why="auto", **moves)
    back = Move(partition=(3, 3), former=(4, 2), why="equal ranks", **moves)
    repartitioner = Repartitioner(built((3, 3)), lambda line: None)
    monkeypatch.setattr(repartitioner, "_measurements", lambda: None)
    assert not repartitioner.is_needed
    repartitioner.expect(away, built((4, 2)))
    answers += [None] * 6 + [back]
    move = None
    while move is None:
        assert repartitioner.is_needed
        move = repartitioner.after_step(RankTimes(busy_s=1.0, span_s=1.8), 4)
        steps += 1
    # Compare the number of steps between successive checks. The first step after a move is not
    # measured.
    assert [end - start for start, end in pairwise([0, *checked_at])] == [
        *(8, 8, 16, 32, 64),
        *(128, 128),
    ]
    assert move is back
    repartitioner.moved(move, built((3, 3)), 0.1)
    answers.append(None)
    for _ in range(9):
        assert repartitioner.is_needed
        assert repartitioner.after_step(RankTimes(busy_s=1.0, span_s=1.8), 4) is None
    assert not repartitioner.is_needed


def test_the_first_step_of_a_run_that_was_built_again_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repartition, "_layer_bytes", lambda run: ())
    monkeypatch.setattr(repartition, "_layer_share", lambda run, layer_bytes: _Share())
    config = SimpleNamespace(
        schedule=SimpleNamespace(repartition="auto", repartition_interval=8, repartition_gain=0.05),
        layers_per_stage=(3, 3),
        constant_slices=1,
    )
    run: Any = SimpleNamespace(job=SimpleNamespace(config=config), slices=None)
    repartitioner = Repartitioner(run, print)
    for built in range(2):
        if built:
            # The trainer calls ``adopt`` when the number of slices has changed.
            repartitioner.adopt(run)
        for span_s in (9.0, 2.0, 2.0):
            assert repartitioner.after_step(RankTimes(busy_s=1.0, span_s=span_s), 4) is None
        assert [span_s for _, span_s in repartitioner._steps] == [2.0, 2.0]


def test_steps_with_other_numbers_of_slices_are_scaled_and_simulated_by_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repartition, "_layer_bytes", lambda run: ())
    monkeypatch.setattr(repartition, "_layer_share", lambda run, layer_bytes: _Share())
    config = SimpleNamespace(
        schedule=SimpleNamespace(repartition="auto", repartition_interval=8, repartition_gain=0.05),
        layers_per_stage=(3, 3),
        constant_slices=1,
        slice_tokens=16,
        data=SimpleNamespace(variable_seq_lengths=True),
    )
    slices = SimpleNamespace(count=1)
    run: Any = SimpleNamespace(job=SimpleNamespace(config=config), slices=slices)
    repartitioner = Repartitioner(run, print)
    # The first step is not measured. In the others, the time is proportional to the number of
    # slices.
    for count, span_s in (((1, 1, 1), 9.0), ((3, 2, 1), 6.0), ((8, 1, 3), 12.0), (4, 12.0)):
        slices.count = count
        repartitioner.after_step(RankTimes(busy_s=1.0, span_s=span_s), 3)
    assert [span_s for _, span_s in repartitioner._steps] == [6.0, 6.0, 6.0]
    candidate = Candidate(name="adaptive", placement=LOOP, cap=1.5, num_slices=1)
    # The last step has 4 slices per row. However, a rank must have memory for the longest row of
    # all steps, which has 8.
    assert repartitioner._in_slices(candidate).cap == 8.0
    wide = Candidate(name="adaptive", placement=LOOP, cap=3.0, num_slices=1)
    assert repartitioner._in_slices(wide).cap == 12.0
    # If sequences have equal lengths, all steps are equal, so their times are not scaled.
    config.data.variable_seq_lengths = False
    other = Repartitioner(run, print)
    assert other._step_scale(3) == 1.0
    assert other._in_slices(candidate) is candidate
