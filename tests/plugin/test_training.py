"""Tests that the plugin does not change the losses and gradients of a user's program."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.schedule_file import save
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.kernels import kernel_figures, kernels_path, read_steps
from megatron.adaptive.trace.monitor import LiveRun
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.status_files import ENDED, read_now

from ..multiprocess.launch import ROOT, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("user_pretrain.py")
REL = 1e-6
V = {"placement": "v"}
CHUNKS = {"pp": 2, "chunks": 2, "deallocate": False}
EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}
SPREAD = {**EXPERTS, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
TWO_RANKS: list[dict[str, Any]] = [
    {
        # Microbatches are smaller in evaluation, so the tensors between stages have a different
        # shape.
        "shape": {"pp": 2, "timers": True, "eval_micro_batch_size": 1},
        "runs": {
            "adaptive": {},
            "hinted": {"schedule": "hinted", "activation_cap": 2},
            "1f1b": {"schedule": "1f1b"},
            "gpipe": {"schedule": "gpipe"},
            "own": {"schedule": "examples.own_schedule.oldest_first:oldest_first"},
            "own transport": {"transport": "examples.own_transport.files:Files"},
        },
        "refused": {
            "shapes": {"arguments": {"adjust_tensor_shapes_fn": "a function"}},
            "groups": {"arguments": {"pg_collection": "other groups"}},
            "messages": {"arguments": {"p2p_communicator": "another pipeline's"}},
            "again": {"again": True},
            "settings": {"schedules": ["adaptive", "gpipe"]},
        },
    },
    {
        "shape": {"pp": 2, "chunks": 2, "deallocate": False},
        "refused": {"fewer": {"fewer chunks": True}},
        "steps": 5,
        "runs": {
            "adaptive": {},
            "auto": {"schedule": "auto"},  # The tuner chooses a schedule after four steps.
            "file": {"schedule": "file", "schedule_file": "order.json"},
            "interleaved": {"schedule": "interleaved"},
            "by hand": {"schedule": "megatron", "trace_dir": "own"},
        },
    },
    {
        "shape": {"pp": 2, "chunks": 2, "deallocate": False, "dropout": 0.1},
        "runs": {
            name: {"schedule": name, "keyed_dropout": True}
            for name in ("adaptive", "breadth-first", "interleaved")
        },
    },
    {
        # Both runs load weights that were saved with a loop placement. The first run uses a V and
        # then a loop, and the second run uses a loop and then a V.
        "shape": CHUNKS,
        "from": "tied",
        "runs": {
            "v, then loop": {**V, "then": None},
            "loop, then v": {"schedule": "hinted", "then": {"schedule": "hinted", **V}},
        },
    },
    {
        # All runs draw the initial weights of each layer separately. The run "plain" does not, so
        # compare them with the run "loop".
        "shape": CHUNKS,
        "runs": {
            name: {**settings, "first_weights": "by-layer"}
            for name, settings in {
                "loop": {"schedule": "interleaved"},
                "own": {"schedule": "megatron"},
                "v": {"schedule": "zb-v"},
            }.items()
        },
    },
    {
        "shape": {**CHUNKS, "tied": False, "per_token": True},
        "from": "untied",
        "runs": {
            "zb-v": {"schedule": "zb-v"},
            "v-half": {"schedule": "v-half"},
            "gpipe": {"schedule": "gpipe", **V},
        },
    },
    {"shape": {"pp": 2, "more": EXPERTS}, "runs": {"adaptive": {}, "zb-h1": {"schedule": "zb-h1"}}},
    {
        "shape": {"pp": 2, "chunks": 1},
        "runs": {
            "whole": {"split_backward": False},
            "zb-h1": {"schedule": "zb-h1"},
            "traced": {
                "split_backward": True,
                "weight_pieces": 1,
                "trace_dir": "traces",
                "trace_detail": "kernels",
                "profile_ranks": [1],
                "profile_step_start": 2,
                "profile_step_end": 4,
                "transport": "tcp",
            },
        },
    },
]
FOUR_RANKS: list[dict[str, Any]] = [
    {"shape": {"tp": 2, "pp": 2}, "runs": {"adaptive": {}}},
    {"shape": {"tp": 2, "pp": 2, "chunks": 2, "deallocate": False}, "runs": {"adaptive": {}}},
    {
        "shape": {"pp": 2, "chunks": 2, "deallocate": False, "overlap": True, "per_token": True},
        "runs": {"adaptive": {}},
    },
    {
        "shape": {**CHUNKS, "pp": 4, "more": {"num_layers": 8}},
        "from": "8 layers",
        "runs": {"adaptive": V, "zb-v": {"schedule": "zb-v"}},
    },
    {"shape": {**CHUNKS, "tp": 2}, "from": "tp", "runs": {"adaptive": {**V, "then": None}}},
    {
        "shape": {**CHUNKS, "distributed": True, "overlap": True},
        "from": "replicas",
        "runs": {"adaptive": V},
    },
    {
        "shape": {**CHUNKS, "more": SPREAD},
        "runs": {"adaptive": {}, "interleaved": {"schedule": "interleaved"}},
    },
]


def run(
    cases: list[dict[str, Any]],
    world_size: int,
    folder: Path,
    *,
    fresh: bool = True,
    python_path: str = str(ROOT),
) -> list[dict[str, Any]]:
    """Runs each case with megatron-core's own schedule and with the plugin, in one job.

    If ``fresh`` is true, the job runs in new processes, which install the plugin first and exit
    normally.
    """
    cases_path, results_path = folder / "cases.json", folder / "results.json"
    plain: dict[str, Any] = {"plain": None}
    asked = [{**case, "runs": plain | case["runs"]} for case in cases]
    for case in asked:
        if "from" in case:
            case["from"] = str(folder / case["from"])
    cases_path.write_text(json.dumps(asked))
    torchrun(
        PROGRAM,
        [str(cases_path), str(results_path)],
        world_size=world_size,
        log=folder / "output.txt",
        # The timeout is long, because other tests may slow down the machine.
        limit_s=300.0,
        fresh=fresh,
        python_path=python_path,
    )
    results: list[dict[str, Any]] = json.loads(results_path.read_text())
    return results


def check_numbers(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        plain = result["runs"].pop("plain")
        assert len(plain[-1]["trained"]["losses"]) in (3, 5)
        assert len(plain[-1]["evaluated"]["collected"]) == 4
        for name, ranks in result["runs"].items():
            for rank, (run, reference) in enumerate(zip(ranks, plain, strict=True)):
                where = f"case {number}, {name}, rank {rank}"
                assert numbers_of(run) == pytest.approx(numbers_of(reference), rel=REL), where
                assert run["trained"]["losses"][:1] == reference["trained"]["losses"][:1], where
                assert run["weights"] > 1, where


def numbers_of(seen: Any) -> list[float]:
    """Returns all numbers in the nested results ``seen`` as a flat list."""
    if isinstance(seen, dict):
        return numbers_of(list(seen.values()))
    if isinstance(seen, list):
        return [number for item in seen for number in numbers_of(item)]
    return [seen]


@pytest.mark.long
def test_two_ranks(tmp_path: Path) -> None:
    order = make_schedule("interleaved", Placement(num_ranks=2, num_chunks=2), 4)
    save(order, tmp_path / "order.json")
    results = run(TWO_RANKS, 2, tmp_path)
    by_layer = results.pop(4)["runs"]
    with_dropout = results.pop(2)["runs"]
    # Dropout makes the numbers differ from those of the run "plain". However, they must not depend
    # on the order of actions.
    assert numbers_of(with_dropout["interleaved"]) != numbers_of(with_dropout.pop("plain"))
    assert with_dropout["adaptive"] == with_dropout["interleaved"] == with_dropout["breadth-first"]
    # Without the plugin, the initial weights of a layer depend on the rank that holds the layer.
    assert by_layer["loop"] != by_layer["plain"]
    check_numbers([{"runs": {**by_layer, "plain": by_layer["loop"]}}])
    check_numbers(results)
    assert results[0]["refused"] == {
        "shapes": "adjust_tensor_shapes_fn (used for distillation) is not supported, because "
        "stages exchange exactly one tensor and its shape; remove it or use --pipeline-schedule "
        "megatron",
        "groups": "pg_collection has no pp, tp, cp, dp, dp_cp, but the engine requires the "
        "groups pp, tp, cp, dp, dp_cp; set these groups, or remove pg_collection to use the "
        "groups of parallel_state",
        "messages": "p2p_communicator has a different pipeline group than the step, but the engine "
        "connects the ranks of the step's process groups; create the communicator with their pp "
        "group or use --pipeline-schedule megatron",
        "again": "",  # A second model needs separate channels, but must not cause an error.
        "settings": "schedule=gpipe on rank 1, but schedule=adaptive on rank 0; start all ranks of "
        "a job with the same settings",
    }
    assert results[1]["refused"] == {
        "fewer": "this step has 2 pipeline ranks with 1 chunks each, but the model's first step "
        "had 2 ranks with 2 chunks each; pass all chunks of the model in every step, or call "
        "megatron.adaptive.uninstall() and install() on all ranks between the steps"
    }
    said = (tmp_path / "output.txt").read_text()
    assert "megatron.adaptive: schedule interleaved on 2 pipeline ranks with 2 model chunks" in said
    assert "schedule zb-v on 2 pipeline ranks with 2 model chunks each in a V" in said
    assert said.count("megatron.adaptive: auto takes ") == 1
    # The trace of the last run must have been closed when the interpreter exited.
    traced = read_run(tmp_path / "traces")
    assert sorted(traced.ranks) == [0, 1]
    for rank in traced.ranks.values():
        # Evaluations must not be traced. In each step, a rank runs three actions for each of the 4
        # microbatches.
        actions = rank.table().of_kind("F", "B", "W")
        assert Counter(actions.iteration.tolist()) == dict.fromkeys([1, 2, 3, 4], 3 * 4)
        # Work outside of the pipeline schedule must also be traced. In this program, all ranks read
        # data.
        table = rank.table([2])
        around = {kind: int(table.where(kind).sum()) for kind in ("data", "reduce", "optimizer")}
        assert around == {"data": 4, "reduce": 1, "optimizer": 1}
        assert sorted(table.of_kind("data").microbatch.tolist()) == [0, 1, 2, 3]
        step, update = table.of_kind("step"), table.of_kind("optimizer")
        assert step.start_ns[0] < actions.start_ns[actions.iteration == 2].min()
        assert table.of_kind("reduce").end_ns[0] <= update.start_ns[0]
        assert update.end_ns[0] <= step.end_ns[0]
        # After the third step, the program has run three evaluations and saved a checkpoint.
        after = rank.table([3])
        assert [int(after.where(kind).sum()) for kind in ("evaluate", "checkpoint")] == [3, 1]
        assert step.end_ns[0] <= table.of_kind("step").end_ns[0]
        first = 2 * rank.header.pp_rank
        assert [row[0] for row in rank.layers(2)] == [first, first + 1]
        assert all(row[3] == 4 and min(row[1:3]) > 0 for row in rank.layers(2))
        assert rank.collectives(2)
        assert rank.header.transport == "tcp"
        now = read_now(tmp_path / "traces", rank.header.rank)
        assert now is not None
        assert (now.doing, now.iteration) == (ENDED, 4)

    own_schedule_table = read_run(tmp_path / "own").ranks[1].table()
    assert Counter(own_schedule_table.of_kind("F", "B").iteration.tolist()) == dict.fromkeys(
        range(1, 7), 2 * 8
    )
    # Kernels are recorded only on the selected rank in the selected iterations, and are assigned to
    # actions.
    assert not kernels_path(tmp_path / "traces", 0).exists()
    steps = read_steps(traced, 1)
    assert [step.iteration for step in steps] == [2, 3]
    for step in steps:
        matmuls = {total.action: total.number for total in step.totals if "matmul" in total.name}
        assert matmuls["B"] > 0 < matmuls["W"]
        assert any("Adam" in total.name for total in step.totals)
    assert {figure.action for figure in kernel_figures(traced, 2)} >= {"F", "B", "W", "reduce"}
    # The plugin reports the progress of training in a file, which monitoring programs read.
    snapshot = LiveRun(tmp_path / "traces").refresh()
    assert (snapshot.state, snapshot.detail, snapshot.iteration) == (
        *("ended", "the program ended"),
        4,
    )
    last = results[-1]["runs"]["traced"][-1]["trained on"]["losses"][-1]
    assert snapshot.last("loss") == pytest.approx(last, rel=REL)
    assert (snapshot.last("learning_rate"), snapshot.last("global_batch_size")) == (0.01, 8)
    assert (snapshot.last("tokens_per_s") or 0) > 0
    header = snapshot.header
    assert header is not None
    assert header.layers == (2, 2)
    assert header.work[0] == 2 < header.work[1] < 3


@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    check_numbers(run(FOUR_RANKS, 4, tmp_path, fresh=False))


@pytest.mark.long
def test_experts_exchange_tokens_beside_other_actions(tmp_path: Path) -> None:
    case = {
        "shape": {"pp": 2, "more": SPREAD},
        "runs": {"overlapped": {"overlaps": True, "trace_dir": "overlapped"}},
    }
    check_numbers(run([case], 4, tmp_path, fresh=False))
    traced = read_run(tmp_path / "overlapped")
    within = 0
    for trace in traced.ranks.values():
        actions = trace.table().of_kind("F", "B")
        actions = actions.take(np.lexsort((actions.start_ns, actions.iteration)))
        same = np.diff(actions.iteration) == 0
        within += int((actions.start_ns[1:] < actions.end_ns[:-1])[same].sum())
    # This is the number of actions that began while another action of the same rank was running.
    assert within > 0
    # A step has 16 tokens in each of 2 samples, 4 microbatches and 2 replicas. Each token is sent
    # to 2 experts.
    for iteration in (1, 2, 3):
        loads = [trace.experts[iteration] for trace in traced.ranks.values()]
        assert all(load.exchange_ns > 0 for load in loads)
        layers: Counter[int] = Counter()
        for load in loads:
            for layer, _, *counts in load.tokens:
                layers[layer] += sum(counts)
        assert dict(layers) == dict.fromkeys(range(4), 16 * 2 * 4 * 2 * 2)


@pytest.mark.long
def test_an_error_of_the_user_ends_all_ranks_with_their_own_words(tmp_path: Path) -> None:
    # Rank 0 continues with an evaluation, so it sends messages to rank 1 while rank 1 exits.
    case = {"shape": {"pp": 2}, "runs": {"adaptive": {}}, "fails_on": 1}
    with pytest.raises(AssertionError) as caught:
        run([case], 2, tmp_path)
    said = str(caught.value)
    assert "RuntimeError: the user's own error" in said
    assert "exited with status 1" in said
    assert "SIGABRT" not in said
