"""Tests which layouts the planner chooses for a measured model and the available nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster.incarnation import ScriptProgram, is_trainer, model_file
from megatron.adaptive.cluster.job_state_file import IncarnationProgress
from megatron.adaptive.cluster.layout_planner import PlannerChooser, plan_script
from megatron.adaptive.cluster.layout_rule import Offer, ParallelLayout
from megatron.adaptive.config.environment import JOB_VARIABLE, JobOrder
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.planner.measured_module import MeasuredHost, MeasuredModule

SECONDS = (0.01, 0.01, 0.01, 0.03, 0.01, 0.01)


def profile(memory: float = 1e6) -> dict[str, Any]:
    """Returns a profile of six pieces. The fourth piece takes three times as long as any other."""
    held = {"parameters": memory / 16}
    sizes = {"output_elements": 100, "activation_bytes": 100, "workspace_bytes": 0, **held}
    rows = [
        {
            "kind": f"cut-{stage}",
            "gpu": "cpu",
            "tp": 1,
            "micro_batch": size,
            "forward_s": seconds * size,
        }
        | {
            "backward_input_s": 2 * seconds * size,
            "backward_weight_s": 0.0,
            "kept_bytes": 100 * size,
        }
        | held
        for stage, seconds in enumerate(SECONDS)
        for size in (1, 2)
    ]
    layers = [{"kind": f"cut-{stage}", **sizes} for stage in range(len(SECONDS))]
    return {
        "format": 1,
        "model": {"name": "net", "precision": "fp32", "layers": layers},
        "nodes": {},
        "layers": rows,
        "links": [],
        "all_reduce": [],
        "optimizer_s_per_parameter": {"cpu": 1e-9},
        "action_sigma": 0.0,
    }


def module(**changes: Any) -> MeasuredModule:
    host = MeasuredHost(
        host="h0", type="cpu", gpu="cpu", processes=2, memory_bytes=1e9, shares_memory=True
    )
    measured = MeasuredModule(
        signature="s",
        name="net",
        whole=profile(),
        split=None,
        element_bytes=4,
        hosts=(host,),
        batch_size=12,
        most=2,
        schedule="1f1b",
        chunks=1,
    )
    return replace(measured, **changes)


def nodes(*slots: int) -> list[Offer]:
    return [
        Offer(name=f"n{number}", slots=count, hosts=("localhost", f"h{number}"))
        for number, count in enumerate(slots)
    ]


def planned(tmp_path: Path, *slots: int, **changes: Any) -> ParallelLayout:
    path = tmp_path / "model.json"
    module(**changes).write(path)
    return plan_script(path, nodes(*slots))


def test_a_module_that_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.json"
    assert MeasuredModule.read(path) is None
    written = module(partition=(3, 3), weights=(1.0,) * 6)
    written.write(path)
    assert MeasuredModule.read(path) == written
    former = json.loads(path.read_text())
    former["hosts"][0]["cores"] = 2  # Profiles of an earlier release contain this key.
    path.write_text(json.dumps(former))
    assert MeasuredModule.read(path) == written
    path.write_text('{"format": 0}')
    # The format number is unknown, so the model must be measured again.
    assert MeasuredModule.read(path) is None
    path.write_text("{")
    with pytest.raises(ConfigError, match="remove it to measure the model again"):
        MeasuredModule.read(path)


def test_all_processes_are_used_that_a_shape_can_use(tmp_path: Path) -> None:
    layout = planned(tmp_path, 2, 2)
    assert layout.world_size == 4
    assert layout.places == (("n0", 2), ("n1", 2))
    assert layout.step_s is not None
    assert layout.unit == "segments"
    # The planner chooses a pipeline of five stages, because five replicas cannot share this batch
    # equally.
    five = planned(tmp_path, 2, 2, 1)
    assert (five.pipeline, five.data) == (5, 1)
    # The model has only six segments, so one process is unused.
    seven = planned(tmp_path, 2, 2, 2, 1)
    assert seven.world_size == 6


def test_no_microbatch_is_smaller_than_the_smallest_measured(tmp_path: Path) -> None:
    whole = profile()
    assert planned(tmp_path, 2, 2, whole=whole).micro_batch == 1
    # The planner must not choose microbatches of a single sample if these were not measured.
    whole["layers"] = [row for row in whole["layers"] if row["micro_batch"] == 2]
    assert planned(tmp_path, 2, 2, whole=whole).micro_batch == 2


def test_the_heavy_piece_gets_a_stage_of_its_own(tmp_path: Path) -> None:
    assert planned(tmp_path, 1, 1, 1, pipeline_size=3).partition == (3, 1, 2)
    even = planned(tmp_path, 1, 1, 1, pipeline_size=3, weights=(1.0,) * 6)
    assert even.partition == (2, 2, 2)
    settings = {"pipeline_size": 3, "partition": (1, 1, 4)}
    assert planned(tmp_path, 1, 1, 1, **settings).partition == (1, 1, 4)
    assert len(planned(tmp_path, 1, 1, **settings).partition) == 2


def test_a_slow_node_gets_less(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    module(pipeline_size=2, weights=None).write(path)
    assert module().costs(1) == pytest.approx([3 * seconds for seconds in SECONDS])
    assert module().costs(9) == pytest.approx([6 * seconds for seconds in SECONDS])
    offers = nodes(1, 1)
    even = plan_script(path, offers)
    assert even.pace == {"n0": 1.0, "n1": 1.0}
    slow = plan_script(path, [offers[0], replace(offers[1], slowness=3.0)])
    assert slow.places == (("n0", 1), ("n1", 1))
    assert slow.pace == {"n0": 1.0, "n1": 3.0}
    assert slow.partition[1] < even.partition[1]
    assert even.step_s is not None
    assert slow.step_s is not None
    assert slow.step_s > even.step_s
    # If both nodes are on one machine, they share its memory, and the slow node must come last.
    here = [replace(offer, hosts=("localhost", "h0")) for offer in offers]
    same = plan_script(path, [replace(here[0], slowness=3.0), here[1]])
    assert same.places == (("n1", 1), ("n0", 1))
    tight = module(pipeline_size=2, whole=profile(5e8))
    tight.write(path)
    for slowness in (1.0, 3.0):
        with pytest.raises(ConfigError):
            plan_script(path, [here[0], replace(here[1], slowness=slowness)])


def test_a_pipeline_size_is_a_wish(tmp_path: Path) -> None:
    layouts = [planned(tmp_path, *[1] * count, pipeline_size=2) for count in (4, 3, 2, 1)]
    assert [(layout.pipeline, layout.data) for layout in layouts] == [
        (2, 2),
        (3, 1),
        (2, 1),
        (1, 1),
    ]


def test_the_microbatch_stays_where_it_must(tmp_path: Path) -> None:
    kept = planned(tmp_path, 1, 1, micro_batch_size=1)
    assert (kept.micro_batch, kept.microbatches * kept.data) == (1, 12)
    path = model_file(tmp_path)
    path.parent.mkdir()
    module(is_random=True).write(path)
    script = ScriptProgram(tmp_path / "train.py", ["--lr", "1"], tmp_path)
    layout = plan_script(path, nodes(2))
    command, variables = script.command(layout, 2, 0, tmp_path / "progress")
    assert command == ["--lr", "1"]
    order = JobOrder.from_text(variables[JOB_VARIABLE])
    assert (order.signature, order.pipeline_size) == ("s", layout.pipeline)
    assert order.partition == layout.partition
    after = MeasuredModule.read(path)
    assert after is not None
    assert after.micro_batch_size == layout.micro_batch


def test_memory_says_what_cannot_be(tmp_path: Path) -> None:
    small = replace(module().hosts[0], memory_bytes=1e6)
    with pytest.raises(ConfigError, match="no pipeline and microbatch size fit into memory"):
        planned(tmp_path, 1, hosts=(small,), whole=profile(1e8))


def test_more_processes_are_better_and_then_time(tmp_path: Path) -> None:
    chooser = PlannerChooser([], [], 1.0, model=tmp_path / "model.json")
    chooser.close()
    two, three = planned(tmp_path, 1, 1), planned(tmp_path, 1, 1, 1)
    assert chooser.is_better(three, two)
    assert not chooser.is_better(two, three)
    assert two.step_s is not None
    assert chooser.is_better(replace(two, step_s=0.9 * two.step_s), two)
    assert not chooser.is_better(replace(two, step_s=0.99 * two.step_s), two)


def test_what_a_script_did_not_do_is_said(tmp_path: Path) -> None:
    script = ScriptProgram(tmp_path / "train.py", [], tmp_path)
    began = IncarnationProgress(begun_ns=1)
    assert script.goes_on(began, [0, 0]) == ""
    for _ in range(3):
        assert script.goes_on(IncarnationProgress(), [79, 79])
    with pytest.raises(SetupError, match="a different model, .* at each of 3 starts"):
        script.goes_on(IncarnationProgress(), [79, 79])
    with pytest.raises(SetupError, match="train.py exited without training"):
        script.goes_on(IncarnationProgress(), [0, 0])


def test_the_trainer_is_told_from_a_script_by_its_text(tmp_path: Path) -> None:
    own_script, wrapped = tmp_path / "train.py", tmp_path / "wrapped.py"
    own_script.write_text("from megatron.adaptive import Pipeline\n")
    wrapped.write_text("from megatron.adaptive.cli.pretrain_gpt import run\n")
    assert is_trainer(Path("pretrain_gpt.py"))
    assert is_trainer(wrapped)
    assert not is_trainer(own_script)


def test_an_order_of_somebody_else_is_refused() -> None:
    for text in ("3", "{", "{}"):
        with pytest.raises(ConfigError, match="unset it"):
            JobOrder.from_text(text)
