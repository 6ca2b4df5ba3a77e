"""Tests the what-if analysis: simulated steps, shares of a slowdown, causes, repairs and errors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.cli.trace import what_if_run
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.published import run_of_columns, write_run
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.whatif.answers import what_if, what_if_table
from megatron.adaptive.trace.whatif.result import WhatIf
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic
from tests.trace.imports.conftest import (
    BACKWARD_S,
    CLIP_S,
    FORWARD_S,
    OPTIMIZER_S,
    REDUCE_S,
    TRANSFER_S,
    job,
    order_of,
)

END_S = REDUCE_S + CLIP_S + OPTIMIZER_S


def answers(**changes: Any) -> WhatIf:
    return what_if(run_of_columns(job(**changes), Path("job")))


def pipeline_s(stages: int, microbatches: int, work: Callable[[str, int, int], float]) -> float:
    """Computes the step time of a 1F1B schedule recursively, as a reference, and returns it.

    ``work`` takes a kind (F or B), a stage and a microbatch, and returns the duration of the
    action.
    """
    orders = [order_of(s, stages, microbatches) for s in range(stages)]
    ends: dict[tuple[int, str, int], float] = {}

    def end(stage: int, kind: str, m: int) -> float:
        if (stage, kind, m) not in ends:
            index = orders[stage].index((kind, m))
            ready = end(stage, *orders[stage][index - 1]) if index else 0.0
            source = stage - 1 if kind == "F" else stage + 1
            if 0 <= source < stages:
                ready = max(ready, end(source, kind, m) + TRANSFER_S)
            ends[stage, kind, m] = ready + work(kind, stage, m)
        return ends[stage, kind, m]

    return max(end(s, *orders[s][-1]) for s in range(stages))


def test_even_work_loses_nothing_and_the_simulation_is_exact() -> None:
    answer = answers()
    expected = pipeline_s(3, 4, lambda kind, s, m: FORWARD_S if kind == "F" else BACKWARD_S) + END_S
    assert answer.simulated_s == pytest.approx([expected] * 2)
    assert answer.recorded_s == pytest.approx([expected] * 2)
    assert answer.slowdown == pytest.approx(1.0)
    assert (answer.cause, answer.launch_slowdown) == ("none", pytest.approx(1.0))


def test_shares_are_printed_only_if_there_is_a_slowdown_to_share_out() -> None:
    # The slowdown is so small that its shares would be quotients of rounding errors.
    even = answers(takes=lambda step, replica, stage, m: 1 + 0.01 * ((7 * m + 3 * stage) % 5))
    assert even.cause == "none"
    assert not -1 < even.last_stage_share < 1
    text = even.format()
    assert "the slowdown is too small to attribute to causes" in text
    assert "would remove" not in text

    slow = answers(takes=lambda step, replica, stage, m: 2.0 if (replica, stage) == (1, 1) else 1.0)
    text = slow.format()
    assert "too small to attribute to causes" not in text
    share = f"{slow.worker_share:.0%}" if slow.worker_share < 0.995 else "all"
    assert f"speeding up the slowest ranks would remove {share} of the slowdown" in text
    assert "speeding up the last stage, none;" in text


def test_a_slow_worker_is_named_with_its_share_and_gain() -> None:
    def takes(step: int, replica: int, stage: int, microbatch: int) -> float:
        return 2.0 if (replica, stage) == (1, 1) else 1.0

    run = run_of_columns(job(takes=takes), Path("job"))
    answer = what_if(run)
    # The factor is the mean over the six ranks (two replicas with three stages each).
    factor = (5 * 1 + 2) / 6

    def expected(work: Callable[[int], float]) -> float:
        each = {"F": FORWARD_S, "B": BACKWARD_S}
        return pipeline_s(3, 4, lambda kind, stage, m: each[kind] * work(stage)) + END_S

    assert answer.ideal_s == pytest.approx([expected(lambda stage: factor)] * 2)
    assert answer.simulated_s == pytest.approx([expected(lambda s: 2.0 if s == 1 else 1.0)] * 2)
    only_stage = expected(lambda s: 2.0 if s == 1 else factor) / answer.ideal_s[0]
    assert answer.slowdowns["stage"]["1"] == pytest.approx(only_stage)
    assert answer.slowdowns["replica"]["1"] == pytest.approx(answer.slowdown)
    assert answer.cause == "worker"
    assert [answer.where.name(worker) for worker in answer.slowest] == [
        "rank 3 (stage 1, replica 1)"
    ]
    assert answer.worker_share == pytest.approx(1.0, abs=0.35)
    ranks, stages = run_figures(run).heat(answer.where.stages)
    assert ranks[3] == pytest.approx([2 / factor] * 2)
    assert stages[1, 1] == pytest.approx(2 / factor)
    best = answer.repairs[0]
    assert best.description.startswith("rank 3 (stage 1, replica 1) as fast as others")
    assert best.step_s == pytest.approx(expected(lambda stage: 1.0))
    assert sorted(answer.repairs, key=lambda repair: -repair.gain) == list(answer.repairs)


def test_the_last_stage_and_lengths_are_distinguished() -> None:
    last = answers(takes=lambda step, replica, stage, m: 1.8 if stage == 2 else 1.0)
    assert last.cause == "last stage"
    # The share exceeds 1, because the ideal step gives every stage the mean time of all stages. The
    # other stages need less than this mean.
    assert last.last_stage_share > 1
    assert any("--partition" in repair.flag for repair in last.repairs)
    rng = np.random.default_rng(3)
    long = {key: float(rng.lognormal(0, 0.7)) for key in np.ndindex(2, 2, 8)}
    lengths = answers(
        microbatches=8, takes=lambda step, replica, stage, m: long[step - 5, replica, m]
    )
    assert lengths.cause == "sequence lengths"
    assert lengths.slowdowns["length"]["unequal lengths"] == pytest.approx(
        lengths.slowdown, rel=0.02
    )
    assert any("--balance-replicas" in repair.flag for repair in lengths.repairs)


def test_predicted_repairs_are_what_a_run_without_the_fault_takes(tmp_path: Path) -> None:
    shape = {"num_ranks": 4, "num_microbatches": 8, "iterations": 4, "schedule": "1f1b"}
    faults = (Fault(kind="slow-rank", rank=2, factor=1.5),)
    write_synthetic(tmp_path / "right", SyntheticRun(**shape))  # type: ignore[arg-type]
    right = what_if(read_run(tmp_path / "right"))
    assert (right.cause, right.slowdown) == ("none", pytest.approx(1.0, abs=0.03))
    assert right.launch_slowdown == pytest.approx(1.0, abs=1e-3)
    for replicas in (1, 2):
        folder = tmp_path / f"slow-{replicas}"
        slow = SyntheticRun(**shape, replicas=replicas, faults=faults)  # type: ignore[arg-type]
        write_synthetic(folder, slow)
        answer = what_if(read_run(folder))
        assert answer.cause == "worker"
        assert answer.where.ranks[answer.slowest[0]] == 2
        mended = next(
            repair for repair in answer.repairs if repair.description.startswith("rank 2")
        )
        assert mended.step_s == pytest.approx(right.recorded_s.mean(), rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "adaptive"])
def test_a_slow_rank_of_a_made_up_run_mended_or_under_a_rule(schedule: str, tmp_path: Path) -> None:
    def step_s(name: str, **changes: Any) -> tuple[float, WhatIf]:
        options = {"schedule": schedule, "iterations": 5, "data_s": 0.0, **changes}
        write_synthetic(tmp_path / name, SyntheticRun(**options))
        answer = what_if(read_run(tmp_path / name))
        return float(answer.simulated_s.mean()), answer

    faults = (Fault(kind="slow-rank", rank=1, factor=1.8),)
    _, answer = step_s("slow", faults=faults)
    repairs = {repair.description: repair.step_s for repair in answer.repairs}
    rank = next(description for description in repairs if "rank 1 (stage 1) as fast" in description)
    # A schedule that decides at run time may order the actions of the repaired step differently.
    # Therefore, the step must be simulated again.
    assert repairs[rank] == pytest.approx(step_s("mended")[0], rel=0.02)
    # This schedule gives two chunks to each rank, so both stages of the slow rank are slow.
    rule = {"schedule": "adaptive", "num_chunks": 2, "weight_pieces": 1}
    assert repairs["adaptive order"] == pytest.approx(
        step_s("rule", faults=faults, **rule)[0], rel=0.03
    )


def test_a_slow_rank_is_distinguished_from_the_loss_beside_its_layers(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=1, factor=2.0)
    made = SyntheticRun(
        num_ranks=2, layers=4, head=1.28, schedule="1f1b", faults=(fault,), action_sigma=0.02
    )
    write_synthetic(tmp_path, made)
    repairs = {repair.description: repair for repair in what_if(read_run(tmp_path)).repairs}
    (slow,) = (name for name in repairs if name.startswith("rank 1"))
    factor = re.search(r"not (\S+) times", slow)
    assert factor is not None
    assert float(factor[1]) == pytest.approx(2.0, rel=0.05)
    # The model takes as long as 9.28 layers: 8 layers, and a head of 1.28 layers on the last rank,
    # which has half the speed. With the partition 6-2, this rank takes as long as 6.56 layers.
    assert "--partition 6-2" in repairs["stages of equal work"].flag


def test_a_late_link_is_named() -> None:
    answer = answers(
        transfer=lambda way, r, stage, m: 0.5 if (way, r, stage) == ("forward", 0, 1) else 0.01
    )
    assert next(iter(answer.slowdowns["link"])) == "0 to 2"
    assert answer.slowdowns["kind"]["forward-pp-comm"] == pytest.approx(answer.slowdown)
    assert any(repair.description == "links without jitter" for repair in answer.repairs)


def test_files_data_frames_and_the_command_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = job(takes=lambda step, replica, stage, m: 1.0 + 0.3 * stage + 0.1 * m)
    run = run_of_columns(table, Path("job"))
    answer = what_if(run).to_json()
    write_run(run, tmp_path / "traces")
    assert what_if(read_run(tmp_path / "traces")).to_json() == answer
    rows = what_if_table(table)
    assert rows["value"][rows["what"].index("slowdown")] == answer["slowdown"]
    pandas = pytest.importorskip("pandas")
    frame = what_if_table(pandas.DataFrame(table))
    assert frame.value.tolist() == rows["value"]
    picture = tmp_path / "heat.png"
    arguments = [str(tmp_path / "traces"), "--picture", str(picture)]
    assert what_if_run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_traces_of_our_own_with_chunks(write_run: Callable[..., Path]) -> None:
    answer = what_if(read_run(write_run(2, 2, 4)))
    assert answer.simulated_s == pytest.approx(answer.recorded_s)
    assert answer.slowdown == pytest.approx(1.0, abs=0.05)


def test_the_first_contradiction_is_named() -> None:
    table = job(replicas=1, stages=2, microbatches=2, steps=(5,))
    first = (table["optype"] == "backward-compute") & (table["stage"] == 1) & (table["mb_id"] == 0)
    table["start_ts"][first] = 0.0
    with pytest.raises(
        TraceError, match="rank 1.*backward-compute of microbatch 0.*before the forward-compute"
    ):
        what_if(run_of_columns(table, Path("job")))
    # The first rank runs a backward pass before its last forward pass. The second rank runs all
    # forward passes first. These two orders contradict each other.
    table = job(replicas=1, stages=2, microbatches=2, steps=(5,))
    times = {("forward", 0): [0, 3], ("backward", 0): [1, 4]}
    times |= {("forward", 1): [10, 11], ("backward", 1): [12, 14]}
    for (way, stage), starts in times.items():
        rows = (table["optype"] == f"{way}-compute") & (table["stage"] == stage)
        table["start_ts"][rows] = starts
    with pytest.raises(TraceError, match=r"waits for another operation .* order is impossible"):
        what_if(run_of_columns(table, Path("job")))


def test_missing_ranks_are_counted() -> None:
    table = job()
    keep = table["stage"] != 1
    run = run_of_columns({name: column[keep] for name, column in table.items()}, Path("job"))
    answer = what_if(run)
    assert any("start without their input" in note for note in answer.notes)
