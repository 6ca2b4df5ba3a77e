"""Compares step times predicted for other settings of a ``Pipeline`` with runs that use them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.schedule.microbatch_assignment import deal
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Workload, order_by_cost
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.trace.whatif import content as content_module
from megatron.adaptive.trace.whatif.answers import what_if
from megatron.adaptive.trace.whatif.content import Treatment
from megatron.adaptive.trace.whatif.operations import pipelines_of, read_operations
from megatron.adaptive.trace.whatif.replay import RecordedStep
from megatron.adaptive.trace.whatif.result import WhatIf
from tests.support import synthetic_trace
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

RANKS, REPLICAS, MICROBATCHES, STEPS = 4, 2, 8, 3
ENCODER, SEGMENTS = 8, 16
# Seconds that a segment needs for the forward pass, the input gradient and the weight gradient, per
# unit of a microbatch's content.
KINDS_S = np.array([0.004, 0.004, 0.003])
DELAY_S = 0.0002


def content() -> Any:
    """Returns the amounts of images and text in each microbatch of each step.

    The result has the shape ``[steps, 2, microbatches]``.
    """
    random = np.random.default_rng(5)
    images = np.minimum(random.lognormal(0.0, 1.0, (STEPS, REPLICAS * MICROBATCHES)), 8.0)
    return np.stack([images, 1 + 0.2 * random.random(images.shape)], axis=1)


CONTENT = content()


def segment_times(step: int) -> Any:
    """Returns the duration of each segment's passes in seconds, for all microbatches of ``step``.

    The result has the shape ``[3, segments, microbatches]``. The first index selects forward
    passes, input gradients or weight gradients.
    """
    images, texts = CONTENT[step]
    each = [images if segment < ENCODER else texts for segment in range(SEGMENTS)]
    return KINDS_S[:, None, None] * np.array(each)


class ContentRun:
    """Synthetic run of a ``Pipeline`` whose action times depend on the content of microbatches.

    Args:
        partition: Number of segments in each stage.
        schedule: Name of the schedule.
        order: Value of the trace header's ``order``, which states how microbatches are ordered.
        dealing: Value of the trace header's ``dealing``, which states how microbatches are
            distributed over replicas.
        group: The number of microbatches on each replica must be a multiple of this number.
        is_sized: Whether the activations have a different size for each microbatch.
    """

    def __init__(
        self,
        partition: Sequence[int],
        schedule: str,
        order: str = "given",
        dealing: str = "turns",
        group: int = 1,
        is_sized: bool = False,
    ) -> None:
        self.partition = tuple(partition)
        self.schedule = schedule
        self.order = order
        self.dealing = dealing
        self.group = group
        self.is_sized = is_sized

    def shares(self, step: int) -> list[list[int]]:
        """Returns the microbatches of each replica in execution order, as indices in the batch."""
        costs = segment_times(step).sum(axis=(0, 1)).tolist()
        numbers = range(len(costs))
        shares = [list(numbers[replica::REPLICAS]) for replica in range(REPLICAS)]
        if self.dealing != "turns":
            shares = [list(share) for share in deal([costs] * REPLICAS, group=self.group)]
        if self.order != "given":
            shares = [
                [share[index] for index in order_by_cost([costs[n] for n in share], RANKS)]
                for share in shares
            ]
        return shares

    def sizes(self, step: int, replica: int) -> list[int]:
        """Returns the activation bytes of each microbatch of ``replica``, in execution order."""
        contents = CONTENT[step].sum(axis=0)
        return [round(1e6 * contents[number]) for number in self.shares(step)[replica]]

    def draw(
        self, run: SyntheticRun, placement: Placement, iteration: int, replica: int, seed: int
    ) -> tuple[Workload, Any]:
        times = segment_times(iteration - 1)
        ends = np.cumsum(self.partition)
        stages = [
            times[:, end - size : end].sum(axis=1)
            for end, size in zip(ends, self.partition, strict=True)
        ]
        share = self.shares(iteration - 1)[replica]
        sizes = self.sizes(iteration - 1, replica)
        durations = np.stack(stages, axis=1)[:, :, share]
        if not run.weight_pieces:
            durations[1] += durations[2]
            durations[2] = 0
        shape = (2, placement.num_stages, len(share))
        work = Workload(
            durations_ps=np.rint(durations * PS_PER_S).astype(np.int64),
            delays_ps=np.full(shape, round(DELAY_S * PS_PER_S)),
            occupancy_ps=np.zeros((RANKS, RANKS), dtype=np.int64),
            sizes=tuple(np.array(sizes) / np.mean(sizes)) if self.is_sized else (),
        )
        return work, np.zeros(len(share))

    def write(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **header: Any) -> WhatIf:
        """Writes the traces of the run to ``folder``, and returns the run's what-if analysis."""
        monkeypatch.setattr(synthetic_trace, "draw_step", self.draw)
        run = SyntheticRun(
            num_ranks=RANKS,
            replicas=REPLICAS,
            num_chunks=len(self.partition) // RANKS,
            num_microbatches=MICROBATCHES,
            iterations=STEPS,
            schedule=self.schedule,
            weight_pieces=int(self.schedule == "adaptive" and len(self.partition) > RANKS),
        )
        write_synthetic(folder, run)
        sizes = {"layers": self.partition, "layer_work": self.work(), "work": []}
        for path in folder.iterdir():
            first, rest = path.read_text().split("\n", 1)
            settings = {"order": self.order, "dealing": self.dealing, **sizes, **header}
            former = json.loads(first)
            if self.is_sized:
                rest = "\n".join(self._sized(line, former["dp_rank"]) for line in rest.split("\n"))
            path.write_text(json.dumps({**former, **settings}) + "\n" + rest)
        return what_if(read_run(folder))

    def _sized(self, line: str, replica: int) -> str:
        """Returns ``line`` of a trace file, with activation sizes if it begins an iteration."""
        if not line.startswith('{"begin_iteration"'):
            return line
        marker = json.loads(line)
        return json.dumps({**marker, "sizes": self.sizes(marker["begin_iteration"] - 1, replica)})

    def recorded_s(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
        """Writes the traces of the run to ``folder``, and returns the mean step time in seconds."""
        # Only the recorded times are needed. With empty settings, no alternatives are analyzed.
        answer = self.write(folder, monkeypatch, order="", dealing="")
        return float(answer.recorded_s.mean())

    def work(self) -> list[float]:
        """Returns the mean time of each segment over all steps, in seconds."""
        times = [segment_times(step).sum(axis=(0, 2)) for step in range(STEPS)]
        return [float(time) for time in np.mean(times, axis=0)]


def step_of(answer: WhatIf, text: str) -> float:
    """Returns the predicted step time of the repair with the description ``text``, in seconds."""
    return next(r.step_s for r in answer.repairs if r.description == text)


@pytest.mark.parametrize(
    ("schedule", "former", "is_sized"),
    [
        ("1f1b", (4, 4, 4, 4), False),
        ("adaptive", (2, 2, 2, 2, 1, 1, 1, 5), False),
        ("adaptive", (2, 2, 2, 2, 1, 1, 1, 5), True),
    ],
)
def test_predictions_are_the_times_of_runs_with_these_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    former: tuple[int, ...],
    is_sized: bool,
) -> None:
    answer = ContentRun(former, schedule, is_sized=is_sized).write(tmp_path / "now", monkeypatch)
    assert answer.launch_slowdown == pytest.approx(1.0, abs=0.01)
    by_flag = {repair.flag: repair.step_s for repair in answer.repairs}
    ordered = ContentRun(former, schedule, order="time", is_sized=is_sized)
    ordered_s = ordered.recorded_s(tmp_path / "ordered", monkeypatch)
    # If ordering the microbatches saves no time, the analysis does not list this setting.
    predicted_s = by_flag.get('order="time"', answer.recorded_s.mean())
    assert min(predicted_s, answer.recorded_s.mean()) == pytest.approx(
        min(ordered_s, answer.recorded_s.mean()), rel=0.01
    )
    # The analysis must suggest a better partition, and a run with it must take as long as
    # predicted.
    better = next(r for r in answer.repairs if r.description.startswith("partition "))
    named = re.fullmatch(r'partition="([\d-]+)" \(or repartition="auto"\)', better.flag)
    assert named is not None
    partition = tuple(map(int, named[1].split("-")))
    assert sum(partition) == SEGMENTS
    moved = ContentRun(partition, schedule, is_sized=is_sized)
    moved_s = moved.recorded_s(tmp_path / "moved", monkeypatch)
    assert better.step_s == pytest.approx(moved_s, rel=0.02)
    assert better.step_s < answer.recorded_s.mean() * 0.99
    assert not [r for r in answer.repairs if "--" in r.flag]
    # The analysis must not also list the partition that is based only on the number of segments.
    assert "stages of equal work" not in [repair.description for repair in answer.repairs]


def test_dealing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks predicted step times for distributing microbatches over replicas by cost.

    If a run already uses this setting, the analysis must not suggest it.
    """
    # Search for batches in which each replica gets the same number of microbatches, because the
    # generator of synthetic traces requires this.
    seeds = iter(range(1000))
    batches = []
    while len(batches) < STEPS:
        random = np.random.default_rng(next(seeds))
        batch = np.array([random.uniform(0, 4, REPLICAS * MICROBATCHES), [3.0] * 16])
        if len(deal([batch.sum(axis=0).tolist()] * REPLICAS)[0]) == MICROBATCHES:
            batches.append(batch)
    monkeypatch.setattr(f"{__name__}.CONTENT", np.stack(batches))
    even = (SEGMENTS // RANKS,) * RANKS
    answer = ContentRun(even, "1f1b").write(tmp_path / "now", monkeypatch)
    dealt = ContentRun(even, "1f1b", dealing="time")
    dealt_s = dealt.recorded_s(tmp_path / "dealt", monkeypatch)
    assert step_of(answer, "microbatches dealt over replicas by cost") == pytest.approx(
        dealt_s, rel=0.01
    )
    both = ContentRun(even, "1f1b", "time", "time").write(tmp_path / "both", monkeypatch)
    assert step_of(answer, "microbatches ordered and dealt over replicas by cost") == pytest.approx(
        both.recorded_s.mean(), rel=0.01
    )
    for text in ("ordered", "dealt"):
        assert not [r for r in both.repairs if text in r.description]


def test_dealing_keeps_the_groups_of_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that replicas get multiples of the pipeline size if the schedule requires this."""
    batches: list[Any] = []
    for seed in range(10_000):
        random = np.random.default_rng(seed)
        batch = np.array([random.lognormal(0.0, 1.0, REPLICAS * MICROBATCHES), [1.0] * 16])
        costs = [batch.sum(axis=0).tolist()] * REPLICAS
        free, grouped = (len(deal(costs, group=group)[0]) for group in (1, RANKS))
        # Keep only batches in which each replica gets the same number of microbatches, because the
        # generator of synthetic traces requires this.
        if free % RANKS and grouped == MICROBATCHES:
            batches.append(batch)
        if len(batches) == STEPS:
            break
    monkeypatch.setattr(f"{__name__}.CONTENT", np.stack(batches))
    even = (SEGMENTS // (2 * RANKS),) * (2 * RANKS)
    answer = ContentRun(even, "interleaved").write(tmp_path / "now", monkeypatch)
    dealt = ContentRun(even, "interleaved", dealing="time", group=RANKS)
    dealt_s = dealt.recorded_s(tmp_path / "dealt", monkeypatch)
    # The analysis lists only settings that save time. This setting saves no time here, so read its
    # prediction directly.
    run = read_run(tmp_path / "now")
    ops = read_operations(run, pipelines_of(run), run.iterations)
    saved_s = content_module.content_answers(run, [ops]).saved_s
    saved = saved_s["microbatches dealt over replicas by cost", 'dealing="time"']
    assert answer.recorded_s.mean() - saved == pytest.approx(dealt_s, rel=0.01)


def test_equal_content_needs_neither_order_nor_dealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.CONTENT", np.ones_like(CONTENT))
    even = (SEGMENTS // RANKS,) * RANKS
    answer = ContentRun(even, "1f1b").write(tmp_path / "now", monkeypatch)
    assert not [r for r in answer.repairs if "by cost" in r.description or "partition" in r.flag]
    # The schedule of the second run is unknown. A note must report that it cannot be simulated.
    uneven = ContentRun((2, 2, 4, 8), "1f1b")
    unknown = uneven.write(tmp_path / "own", monkeypatch, schedule="mine")
    assert any("are not simulated: " in note for note in unknown.notes)
    assert "stages of equal work" in [repair.description for repair in unknown.repairs]


def test_a_trace_without_some_actions_is_not_said_to_differ_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = (SEGMENTS // RANKS,) * RANKS
    ContentRun(even, "1f1b").write(tmp_path, monkeypatch)
    path = next(path for path in tmp_path.iterdir() if '"pp_rank": 0' in path.read_text())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("[1,0,7,")))
    assert [note for note in what_if(read_run(tmp_path)).notes if "not simulated" in note] == [
        "changes of order, dealing and partition are not simulated: the trace lacks F or "
        "B actions of some microbatches"
    ]


def test_no_partition_is_searched_if_a_header_does_not_name_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a trace header without the partition of the run does not cause an error."""
    even = (SEGMENTS // RANKS,) * RANKS
    run = ContentRun(even, "1f1b")
    answer = run.write(tmp_path, monkeypatch, layers=(8, 8), layer_work=[])
    assert 'order="time"' in [repair.flag for repair in answer.repairs]
    assert not [repair for repair in answer.repairs if "instead of" in repair.description]


class MeasuredSegments:
    """Replaces the ``RankTrace`` of a rank, and provides the times of its segments."""

    iterations = (1, 2)

    def layers(self, iteration: int) -> list[tuple[int, int, int, int]]:
        """Returns the index, forward ns, backward ns and number of passes of each segment."""
        return [(0, 30, 0, 1), (1, 30, 0, 1), (2, 10, 20, 1), (3, 30, 60, 1)]


def test_forward_and_backward_of_a_stage_are_divided_separately() -> None:
    """Checks that frozen segments get no share of a stage's backward time."""
    header = TraceHeader(
        run="",
        rank=0,
        world_size=1,
        pp_rank=0,
        num_ranks=1,
        num_chunks=2,
        num_microbatches=1,
        schedule="1f1b",
        layers=(1, 3),
    )
    run: Any = SimpleNamespace(ranks={0: MeasuredSegments()})
    forward, backward, weight = content_module._segment_shares(run, header)
    assert forward == pytest.approx([1, 3 / 7, 1 / 7, 3 / 7])
    assert backward == pytest.approx([1, 0, 0.25, 0.75])
    assert weight == pytest.approx([1, 0, 0.25, 0.75])


@pytest.mark.parametrize("partition", [(7, 3, 3, 3), (5, 4, 4, 3), (2, 5, 5, 4)])
def test_trained_segments_keep_their_backward_passes_in_another_partition(
    partition: tuple[int, ...],
) -> None:
    """Checks that the step time is predicted if segments move to or from a frozen stage."""
    header = TraceHeader(
        run="",
        rank=0,
        world_size=RANKS,
        pp_rank=0,
        num_ranks=RANKS,
        num_chunks=1,
        num_microbatches=MICROBATCHES,
        schedule="adaptive",
        layers=(4, 4, 4, 4),
    )
    segments_s = np.repeat(KINDS_S[:, None], SEGMENTS, axis=1)
    segments_s[1:, : header.layers[0]] = 0.0

    def step_of(partition: Sequence[int], frozen_stages: int) -> RecordedStep:
        stages = [segments_s[:, part].sum(axis=1) for part in content_module._slices(partition)]
        durations_s = np.repeat(np.stack(stages, axis=1)[:, :, None], MICROBATCHES, axis=2)
        delays_ps = np.zeros((2, *durations_s.shape[1:]), dtype=np.int64)
        return RecordedStep(durations_s, delays_ps, 1, frozen_stages=frozen_stages)

    steps = [[step_of(header.layers, 1)] * REPLICAS]
    simulation = content_module._Simulation(header, steps, np.full((3, SEGMENTS), 0.25))
    predicted_s = simulation._mean_s(Treatment(partition=partition))
    moved = step_of(partition, int(partition[0] <= header.layers[0]))
    assert predicted_s == pytest.approx(moved.simulated_s(header))
    dealt_s = simulation._mean_s(Treatment(is_dealt=True))
    assert dealt_s == pytest.approx(simulation._mean_s(Treatment()))
