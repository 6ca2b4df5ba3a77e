"""Tests predictions of published runs, and the errors about folders without a data set."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from studies.planning.measured import errors_of, literature_rows, read_sets
from studies.tests.staged_set import staged_plan, write_staged_set

PUBLISHED = os.environ.get("PLANNER_DATA", "")


@pytest.mark.parametrize(
    ("folder", "text"),
    [("missing", "does not exist"), ("empty", "has no data set"), ("damaged", "cannot be read")],
)
def test_errors_are_one_line(tmp_path: Path, folder: str, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    for name in ("measured_any.json", "model.json"):
        (tmp_path / "damaged" / name).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=text) as info:
        read_sets(tmp_path / folder)
    assert "\n" not in str(info.value)


def write_rows_set(folder: Path, *, names: Sequence[str], swapped: bool) -> None:
    """Writes a data set in which each row is a run.

    ``names`` contains the names of the cluster, the model, the fast GPU and the slow GPU. If
    ``swapped`` is true, the node with the slow GPU comes first.
    """
    run, model, fast, slow = names
    folder.mkdir()
    nodes = [
        {
            "gpu": gpu,
            "gpus_per_node": 2,
            "inter_node_bits_per_s": 25e9,
            "intra_node_bits_per_s": 100e9,
            "memory_gb_per_gpu": 16,
        }
        for gpu in ((slow, fast) if swapped else (fast, slow))
    ]
    described = {
        "hidden_size": 256,
        "sequence_length": 128,
        "global_batch_size": 8,
        "precision": "fp16",
        "parameters_per_layer": {"transformer": 786432.0, "embedding": 1e6},
        "boundary_activation_elements_per_sample": {"transformer": 32768, "embedding": 32768},
    }
    other = {**described, "global_batch_size": 16}
    files = {
        "cluster.json": {"clusters": {run: {"nodes": nodes}}},
        "model.json": {"source": {"paper": "2022"}, "models": {model: described, "other": other}},
    }
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    times = ["model,gpu,tp,layer_index,layer_kind,forward_s"]
    for gpu, seconds in ((fast, 0.002), (slow, 0.004)):
        for tp in (1, 2):
            times.append(f"{model},{gpu},{tp},0,embedding,0.0001")
            times += [f"{model},{gpu},{tp},{layer},transformer,{seconds}" for layer in (1, 2, 3)]
    runs = [
        "tp,dp,pp,microbatch_size,num_microbatches,partition,measured_s,status",
        "1,2,2,1,4,2-2,0.1,ok",
        "1,4,1,2,1,4,0.2,ok",
        "2,1,2,4,2,2-2,,failed",
    ]
    (folder / "layer_times.csv").write_text("\n".join(times), encoding="utf-8")
    (folder / f"measured_{run}.csv").write_text("\n".join(runs), encoding="utf-8")


def test_names_and_the_order_of_mixed_nodes_come_from_the_data(tmp_path: Path) -> None:
    write_rows_set(tmp_path / "a", names=("one", "gpt", "V100", "T4"), swapped=False)
    write_rows_set(tmp_path / "b", names=("odd-name", "net", "A100", "a10"), swapped=True)
    sets = read_sets(tmp_path)
    assert list(sets) == ["a one", "b odd-name"]
    first, second = ([run.predicted() for run in runs] for runs in sets.values())
    # In the first data set, the fast node has the first stage. In the second data set, it has the
    # second stage.
    quick, slow = (stage.forward_s for stage in first[0].stages)
    assert quick < slow
    assert second[0].stages[0].forward_s > second[0].stages[1].forward_s
    # All replicas have to wait for the slow node, whose times are the same in both data sets.
    assert first[1].stages[0].forward_s == second[1].stages[0].forward_s


def test_runs_that_no_model_of_the_set_has_are_refused(tmp_path: Path) -> None:
    write_rows_set(tmp_path / "a", names=("one", "gpt", "V100", "T4"), swapped=False)
    path = tmp_path / "a" / "measured_one.csv"
    path.write_text(path.read_text("utf-8").replace("2-2", "2-3"), encoding="utf-8")
    with pytest.raises(ConfigError, match="0 models of model.json have 5 layers"):
        read_sets(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        {"stages": [{"replicas": [{"gpu": "V100", "tp": 1, "count": 9}]}]},
        {"measured_s": None},
        {"partition": "9-9-9"},
        {"model": "another"},
    ],
)
def test_a_run_that_the_set_leaves_out_stops_no_other(
    broken: dict[str, Any], tmp_path: Path
) -> None:
    doubts = ["its figures were pasted; leave out of error figures"]
    sound = [staged_plan(0.2), staged_plan(0.3, global_batch_size=8)]
    write_staged_set(
        tmp_path, [sound[0], {**staged_plan(1.0), **broken, "doubts": doubts}, sound[1]]
    )
    ((name, runs),) = read_sets(tmp_path).items()
    assert name.endswith("two")
    assert [run.seconds for run in runs] == [0.2, 0.3]
    assert errors_of(runs)[0]["runs"] == 2
    write_staged_set(tmp_path, [*sound, {**staged_plan(1.0), **broken}])
    with pytest.raises(ConfigError):
        errors_of(read_sets(tmp_path)[name])


@pytest.mark.skipif(not PUBLISHED, reason="PLANNER_DATA is not a folder of published data sets")
def test_published_runs_are_predicted() -> None:
    for name, runs in read_sets(Path(PUBLISHED)).items():
        found, memory = errors_of(runs)
        assert found["median_error"] <= 0.10, name
        assert found["rank_correlation"] >= 0.9, name
        assert found["place_of_best"] <= 3, name
        assert all(abs(error) <= 0.15 for error in memory), name


def test_runs_of_the_literature_fit_and_take_what_was_printed() -> None:
    assert all(row.met for row in literature_rows())
