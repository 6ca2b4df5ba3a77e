"""Tests models whose first segments are frozen, such as an image encoder that is not trained."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.engine.policy_factory import Orders  # noqa: E402
from megatron.adaptive.modules import first_partition  # noqa: E402
from megatron.adaptive.modules.cutting import balanced, frozen_segments, late_calls, postpone  # noqa: E402
from megatron.adaptive.modules.first_partition import FirstPartition, quickest_partition  # noqa: E402
from megatron.adaptive.modules.profiler import Profiler  # noqa: E402
from megatron.adaptive.modules.recording import Forward, Forwards, SampledModel  # noqa: E402
from megatron.adaptive.modules.recordings import record_examples, segment_bytes  # noqa: E402
from megatron.adaptive.modules.repartition import _parts_of  # noqa: E402
from megatron.adaptive.modules.tape import SegmentWork, Tape  # noqa: E402
from megatron.adaptive.planner.choose_partition import Loads, Times, propose, simulated_step  # noqa: E402
from megatron.adaptive.rebalance.judgement import StepMeasurements, loads_of  # noqa: E402
from megatron.adaptive.schedule.action import ActionKind  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of  # noqa: E402
from megatron.adaptive.trace.read import read_run  # noqa: E402

from ..multiprocess.launch import run_ranks, tail  # noqa: E402
from .models import Tower, frozen_viewer, knotty, make_batch, viewed, viewer  # noqa: E402

RANKS, LIMIT_S = 4, 300.0
WORKER = Path(__file__).with_name("frozen_worker.py")
STATIC = ("interleaved", "zb-v", "1f1b")
ENCODER, LANGUAGE = 6, 12
"""Numbers of encoder segments and language model segments in the tests of partitions."""
MICROBATCHES = 16


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_frozen_encoder_trains_like_the_whole_model(tmp_path: Path) -> None:
    log = tmp_path / "log"
    status = run_ranks([str(WORKER), str(tmp_path)], world_size=RANKS, log=log, limit_s=LIMIT_S)
    assert status == 0, tail(log)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for name, run in (pair for of_rank in by_rank for pair in of_rank.items()):
        frozen = 0 if name in STATIC else frozen_stages_of(run["partition"], 3)
        expected = [chunk for chunk, stage in enumerate(run["stages"]) if stage >= frozen]
        assert run["backward"] == expected, name
    # The trace must be complete although some stages have no backward passes.
    traced = read_run(tmp_path / "traces")
    assert traced.complete_iterations() == (1, 2)
    assert {trace.header.frozen_stages for trace in traced.ranks.values()} == {2}
    # A step without images is complete, although the encoder's stages then run no backward passes.
    skipping = read_run(tmp_path / "skipping")
    assert {trace.header.frozen_stages for trace in skipping.ranks.values()} == {0}
    assert skipping.complete_iterations() == (1, 2, 3)
    backward = skipping.ranks[0].table().where("B")
    assert set(skipping.ranks[0].table().iteration[backward].tolist()) == {1, 3}


def record(model: torch.nn.Module, batch: dict[str, torch.Tensor], *entries: str) -> Tape:
    forward = Forward(model=model, loss=None, arguments=None, decisive_entries=entries)
    return Forwards.of(forward, batch, "record").training


def test_an_embedding_before_a_frozen_encoder_runs_behind_it() -> None:
    tape = record(frozen_viewer(), viewed(2, 5, 1), "sizes")
    assert frozen_segments(tape) == 0
    late = late_calls(tape)
    assert late is not None
    assert (late.border, late.parameters) == (3, {"words.weight"})
    functions = [call.function for call in tape.calls]
    postpone(tape, late)
    assert frozen_segments(tape) == 3
    assert not any(segment_bytes(tape)[:3])
    assert sorted(map(repr, functions)) == sorted(repr(call.function) for call in tape.calls)
    assert [call.segment for call in tape.calls] == sorted(call.segment for call in tape.calls)
    for value in tape.values:
        if value.made_by >= 0:
            made = tape.calls[value.made_by]
            numbers = [n for n, _ in made.outputs] + [new for _, new in made.changes]
            assert any(tape.values[number] is value for number in numbers)
    assert late_calls(tape) is None


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_segments_before_the_first_trained_parameter_are_frozen(frozen: int) -> None:
    tower = Tower()
    for layer in tower.layers[:frozen]:
        layer.requires_grad_(False)
    tape = record(tower, {"x": torch.randn(2, 16)})
    assert late_calls(tape) is None
    assert frozen_segments(tape) == frozen


def test_trained_models_and_frozen_layers_in_between_need_all_backward_passes() -> None:
    model = knotty()
    model.blocks[2].requires_grad_(False)  # type: ignore[operator]
    for trained, batch, entries in (
        (viewer(), viewed(2, 5, 1), ("sizes",)),
        (model, make_batch(2), ()),
    ):
        tape = record(trained, batch, *entries)
        assert late_calls(tape) is None
        assert frozen_segments(tape) == 0


def test_the_profile_of_a_frozen_segment_has_neither_gradients_nor_activations() -> None:
    tower = Tower()
    tower.layers[0].requires_grad_(False)
    profile = Profiler(
        tower, {"x": torch.randn(4, 16)}, micro_batch_sizes=(4,), split_backward=False, repeats=1
    ).run()
    frozen, *trained = profile.samples
    assert profile.parts[0].frozen_segments == 1
    assert (frozen.kept_bytes, frozen.frozen_parameters) == (0, frozen.parameters)
    assert all(sample.kept_bytes and not sample.frozen_parameters for sample in trained)
    model = profile.document()["model"]
    assert model["frozen_layers"] == 1
    assert [layer["frozen_parameters"] for layer in model["layers"]] == [256, 0, 0]


def times_of(encoder: Times) -> list[Times]:
    return [encoder] * ENCODER + [(1e-3, 1e-3, 1e-3)] * LANGUAGE


TRAINED, FROZEN = times_of((1e-3, 1e-3, 1e-3)), times_of((1e-3, 0.0, 0.0))


def orders_of(schedule: str = "adaptive", chunks: int = 1) -> Orders:
    return Orders(
        schedule=schedule,
        placement=Placement(num_ranks=RANKS, num_chunks=chunks),
        pp_rank=0,
        splits=schedule == "adaptive",
        pieces=4,
    )


def chosen(times: Sequence[Times], orders: Orders, frozen: int) -> tuple[int, ...]:
    return quickest_partition(
        balanced([sum(each) for each in times], orders.placement.num_stages),
        times,
        orders,
        num_microbatches=MICROBATCHES,
        frozen_segments=frozen,
    )


def loads(times: Sequence[Times], partition: tuple[int, ...], orders: Orders, frozen: int) -> Loads:
    placement = orders.placement
    return Loads(
        placement=placement,
        partition=partition,
        layer_s=(tuple(times),) * placement.num_ranks,
        beside_s=((0.0, 0.0, 0.0),) * placement.num_stages,
        most_layers=(math.inf,) * placement.num_ranks,
        kinds=tuple(range(len(times))),
        frozen_layers=frozen,
    )


def step_s(
    times: Sequence[Times], partition: tuple[int, ...], orders: Orders, frozen: int
) -> float:
    of_partition = loads(times, partition, orders, frozen)
    candidate = orders.candidate(MICROBATCHES)
    return simulated_step(of_partition, candidate, MICROBATCHES)(partition)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_first_partition_does_not_charge_a_frozen_encoder_for_backward_passes(
    chunks: int,
) -> None:
    orders = orders_of(chunks=chunks)
    partition = chosen(FROZEN, orders, ENCODER)
    charged = chosen(TRAINED, orders, 0)
    assert partition != charged
    assert chunks > 1 or partition[0] > charged[0]
    own_s = step_s(FROZEN, partition, orders, ENCODER)
    assert own_s <= step_s(FROZEN, charged, orders, ENCODER)
    # A static schedule runs backward passes for all segments. Even with the best partition for
    # 1F1B, a step must not be faster than with the chosen partition.
    static = chosen(TRAINED, orders_of("1f1b"), 0)
    assert own_s <= step_s(FROZEN, static, orders_of("1f1b"), 0)


def test_other_ranks_do_not_wait_long_for_simulations_of_the_first_partition(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tower = Tower(16, layers=6)
    tower.layers[0].requires_grad_(False)
    batch = {"x": torch.randn(2, 16)}
    examples = record_examples(SampledModel(tower, batch, loss=None, arguments=None), [batch])
    times = [(1.0, 0.0, 0.0), *[(1.0, 1.0, 1.0)] * 5]
    ended = threading.Event()
    monkeypatch.setattr(first_partition, "quickest_partition", lambda *_, **__: ended.wait())
    partition = FirstPartition(orders_of()).choose(
        examples, [sum(each) for each in times], tuple(times), num_microbatches=8, limit_s=0.05
    )
    ended.set()
    assert partition == balanced([sum(each) for each in times], RANKS)
    assert "took longer than the limit of 0.05 s" in capsys.readouterr().out


def test_segments_move_to_the_encoder_of_a_running_job_if_it_is_frozen() -> None:
    orders = orders_of()
    charged = chosen(TRAINED, orders, 0)

    def move(times: Sequence[Times], frozen: int) -> tuple[int, ...] | None:
        of_job = loads(times, charged, orders, frozen)
        candidate = orders.candidate(MICROBATCHES)
        proposed = propose(of_job, simulated_step(of_job, candidate, MICROBATCHES), 0.02)
        return None if proposed is None else proposed.partition

    assert move(TRAINED, 0) is None
    moved = move(FROZEN, ENCODER)
    assert moved is not None
    assert moved[0] > charged[0]


def test_a_stage_without_gradients_has_no_part_in_backward_passes() -> None:
    works = [SegmentWork(2.0), SegmentWork(1.0, 1.0, 1.0), SegmentWork(1.0, 2.0, 1.0)]
    assert _parts_of(works, splits=True) == (
        (0.5, 0.0, 0.0),
        (0.25, pytest.approx(1 / 3), 0.5),
        (0.25, pytest.approx(2 / 3), 0.5),
    )
    assert _parts_of(works, splits=False)[1] == (0.25, 0.4, pytest.approx(3 / 9))
    # Under a static schedule, a frozen stage has short backward passes that compute nothing.
    assert _parts_of([SegmentWork(1.0), SegmentWork(3.0)], splits=True)[1] == (0.75, 0.75, 0.75)


def test_a_frozen_segment_is_charged_for_the_memory_that_it_keeps() -> None:
    """Checks that the memory estimate of a frozen segment does not include activations."""
    placement = Placement(num_ranks=2, num_chunks=1)
    lanes = {(kind, 0): 1e6 for kind in ActionKind}
    measured = [
        StepMeasurements(
            pp_rank=rank,
            steps=(lanes,),
            spans_s=(1.0,),
            shares=(1.0,),
            free_bytes=10**6,
            kept_bytes=(kept,),
            held_bytes=(held,),
            layer_bytes=(sizes,),
            parts=(((0.5, 0.0, 0.0), (0.5, 1.0, 1.0)),),
            layer_kept=(layer_kept,),
        )
        for rank, kept, held, sizes, layer_kept in (
            (0, 100, 50, (10, 40), (0.0, 100.0)),
            (1, 200, 80, (40, 40), (100.0, 100.0)),
        )
    ]
    loaded = loads_of(measured, placement, (2, 2), units=2.0)
    for rank, total in ((0, 50 + 2 * 100), (1, 80 + 2 * 200)):
        frozen, trained = (size * total / 2 for size in loaded.sizes[rank])
        assert frozen == pytest.approx(10)
        assert trained == pytest.approx(240)
    assert loaded.layer_s[0][0][1:] == (0.0, 0.0)
