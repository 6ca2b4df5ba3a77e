"""Tests which layouts the planner chooses for the available nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from megatron.adaptive import accelerator
from megatron.adaptive.cli.run import main
from megatron.adaptive.cluster.incarnation import assign
from megatron.adaptive.cluster.layout_planner import PlannerChooser, Planning
from megatron.adaptive.cluster.layout_rule import Offer, ParallelLayout
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.errors import ConfigError

from .jobs import FLAGS, TRAINER
from .planning_files import cluster_file, profile_file

accelerator.install()

from megatron.adaptive.gpt.model_placement import placement_of  # noqa: E402

MODEL = (*FLAGS, "--num-layers", "6", "--global-batch-size", "8", "--train-iters", "9")
DRY = (*MODEL, "--attention-dropout", "0", "--hidden-dropout", "0")
SPEEDS = {"fast": 0.004, "slow": 0.008}


def nodes(names: str, slots: int = 1, **slowness: float) -> list[Offer]:
    return [Offer(name=name, slots=slots, slowness=slowness.get(name, 1.0)) for name in names]


@pytest.fixture
def planning(tmp_path: Path) -> Planning:
    files = [cluster_file(tmp_path, {"fast": "ab", "slow": "cd"}), profile_file(tmp_path, SPEEDS)]
    return Planning(files, MODEL)


def layers_of(layout: ParallelLayout, name: str) -> int:
    """Returns the number of layers on the node ``name``, which runs one process of ``layout``."""
    nodes_of_ranks = [node for node, _ in layout.places]
    pp_rank = nodes_of_ranks.index(name) // (layout.data * layout.tensor)
    config = parse([*MODEL, *layout.flags], world_size=layout.world_size, last_wins=True)
    placement = placement_of(config)
    held = (placement.stage_of(pp_rank, chunk) for chunk in range(placement.num_chunks))
    return sum(layout.partition[stage] for stage in held)


@pytest.mark.long
def test_nodes_get_layers_by_their_speed(planning: Planning) -> None:
    layout = planning.plan(nodes("cadb"))
    assert dict(layout.places) == dict.fromkeys("abcd", 1)
    assert layers_of(layout, "a") == layers_of(layout, "b") > layers_of(layout, "c")
    assert layout.step_s is not None
    assert layout.pace["c"] == pytest.approx(2 * layout.pace["a"])
    config = parse([*MODEL, *layout.flags], world_size=4, last_wins=True)
    assert config.layers_per_stage == layout.partition
    assert config.batch.global_batch_size == 8
    present = [Node(name=name, slots=1) for name in "dcba"]
    order = [node.name for node in assign(present, layout)]
    assert order == [name for name, _ in layout.places]
    assert len(assign(present[1:], layout)) == 3
    # A step takes longer if one of the fast nodes is missing or slow.
    fewer = planning.plan(nodes("acd"))
    assert set(dict(fewer.places)) <= set("acd")
    slowed = planning.plan(nodes("abcd", a=2.0))
    assert fewer.step_s is not None
    assert slowed.step_s is not None
    assert layout.step_s < slowed.step_s <= fewer.step_s
    assert layers_of(slowed, "a") < layers_of(slowed, "b")
    assert slowed.pace["a"] == pytest.approx(2 * slowed.pace["b"])


@pytest.mark.long
def test_nodes_have_the_processes_that_they_report(tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, {"fast": ""}, gpus=2), profile_file(tmp_path, {"fast": 0.004})]
    planning = Planning(files, MODEL)
    layout = planning.plan([*nodes("xy", 4), *nodes("z", 1)])
    assert {"x": 2, "y": 2, "z": 1}.items() >= dict(layout.places).items()
    assert layout.world_size == sum(count for _, count in layout.places)


@pytest.mark.long
def test_stages_of_unequal_widths_where_they_are_asked_for_and_faster(tmp_path: Path) -> None:
    # Four layers run on three nodes. With the split 1-2-1, the second stage is the slowest. If two
    # nodes share a stage of 3 layers and one node has 1 layer, each node computes at most 1.5
    # layers per microbatch.
    model = (*DRY, "--num-layers", "4", "--global-batch-size", "16")
    files = [cluster_file(tmp_path, {"fast": ""}), profile_file(tmp_path, {"fast": 0.004})]
    equal = Planning(files, model).plan(nodes("abc"))
    unequal = Planning(files, model, unequal=True).plan(nodes("abc"))
    assert equal.widths == ()
    assert sorted(unequal.widths) == [1, 2]
    assert unequal.step_s is not None
    assert equal.step_s is not None
    assert unequal.step_s < equal.step_s
    assert unequal.world_size == 3
    config = parse([*model, *unequal.flags], world_size=3, last_wins=True)
    assert config.parallel.unequal_sizes == unequal.widths
    assert str(unequal).startswith(f"PP 2 x DP {unequal.widths[0]}-{unequal.widths[1]}, layers ")
    with contextlib.closing(PlannerChooser(files, model, 60.0, unequal=True)) as chooser:
        assert asyncio.run(chooser.choose(model, nodes("abc"))) == unequal
    # Dropout requires a fixed microbatch size, so microbatches are distributed over the replicas.
    dropping = (*MODEL, "--num-layers", "4", "--global-batch-size", "16")
    kept = Planning(files, dropping, unequal=True).plan(nodes("abc"))
    assert kept.micro_batch == 1
    assert sorted(kept.widths) == [1, 2]


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-schedule zb-h1",
        "--trace-dir traces",
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --repartition auto",
    ],
)
def test_flags_that_unequal_stages_do_not_support_are_refused(flags: str, tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, {"fast": ""}), profile_file(tmp_path, {"fast": 0.004})]
    model = (*DRY, "--num-layers", "4", "--global-batch-size", "16", *flags.split())
    flag = " ".join(flags.split()[-2:])
    with pytest.raises(ConfigError, match=f"^--unequal: .*{flag}") as caught:
        Planning(files, model, unequal=True)
    assert "\n" not in str(caught.value)
    assert "remove --unequal" in str(caught.value)
    Planning(files, model)


def test_what_would_change_losses_stays(tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, {"fast": ""}, gpus=4), profile_file(tmp_path, SPEEDS)]

    def sizes(*arguments: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        options = Planning(files, arguments)._options()
        return options.tp, options.micro_batch

    assert sizes(*MODEL) == ((1,), (1,))
    assert sizes(*DRY, "--tensor-model-parallel-size", "2") == ((2,), ())


@pytest.mark.parametrize(
    ("hosts", "more", "reason"),
    [
        ({"fast": "ab", "slow": "c"}, (), "machines.txt: d is not in .*cluster.json"),
        ({"fast": "", "slow": ""}, (), "node types fast, slow have no hosts"),
        ({"fast": "abcd", "other": ""}, (), "'other-gpu' is neither in the profile nor"),
        (
            {"fast": "abcd"},
            ("--partition", "3-3"),
            "--partition cannot be combined with --plan-with",
        ),
        ({"fast": "abcd"}, ("--plan", "x"), "x: No such file or directory; pass a plan file"),
        pytest.param(
            {"fast": "abcd"},
            ("--hidden-size", "8192"),
            r"does not fit on .* on fast needs",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_starts(
    hosts: dict[str, str], more: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    files = [cluster_file(tmp_path, hosts), profile_file(tmp_path, SPEEDS)]
    machines = tmp_path / "machines.txt"
    machines.write_text("".join(f"localhost name={name} slots=1\n" for name in "abcd"))
    arguments = [word for path in files for word in ("--plan-with", str(path))]
    arguments += ["--machines", str(machines), "--checkpoint", str(tmp_path / "c"), str(TRAINER)]
    with pytest.raises(ConfigError, match=reason):
        main([*arguments, *MODEL, "--save-interval", "3", *more])
    assert not (tmp_path / "c").exists()


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, {"fast": "ab"}), profile_file(tmp_path, SPEEDS)]
    (tmp_path / "other.json").write_text(json.dumps({"format": 1}))
    for paths, reason in (
        ([tmp_path / "none.yaml"], "none.yaml: No such file"),
        ([tmp_path / "other.json"], "must be a cluster file"),
        ([files[0], files[0]], "contains two cluster files"),
        ([files[1]], "profile.json lacks a cluster file, .* add it"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Planning(paths, MODEL)


@pytest.mark.long
def test_a_plan_that_takes_too_long_is_done_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [cluster_file(tmp_path, {"fast": "ab"}), profile_file(tmp_path, SPEEDS)]
    with contextlib.closing(PlannerChooser(files, MODEL, 0.001)) as chooser:

        def said() -> str:
            return capsys.readouterr().err

        def chosen(names: str) -> ParallelLayout | None:
            return asyncio.run(chooser.choose(MODEL, nodes(names)))

        layout = chosen("ab")
        assert layout is not None
        assert layout.step_s is None
        assert "without the planner: the planner found no plan within 0.001 s" in said()
        # After a timeout, the same planner process answers the next request.
        chooser._within_s = 100.0
        layout = chosen("ab")
        assert layout is not None
        assert layout.step_s is not None
        assert chosen("x") is None
        assert chooser.why.startswith("none of the nodes x is listed in")
        layout = chosen("xa")
        assert layout is not None
        assert [name for name, _ in layout.places] == ["a"]
        assert said().endswith(
            "] warning: machines left out: x (not in the cluster file of --plan-with)\n"
        )
        chooser.close()  # Closing again must not fail.
