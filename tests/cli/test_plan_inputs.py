"""Tests how ``plan --calibrate`` reads traces. The traces are synthetic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from megatron.adaptive.cli.plan_inputs import add_input_arguments, calibrated
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.model_description import LayerKind, Model
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

TOKENS = 32


def _model() -> Model:
    kind = LayerKind(name="transformer", parameters=1000, forward_flops=1.0)
    layers = ("transformer",) * 8
    return Model(name="m", kinds={"transformer": kind}, layers=layers, tokens_per_sample=TOKENS)


def _cluster(*types: str) -> Cluster:
    link = LinkSpeed(bytes_per_s=1e9)
    groups = tuple(
        NodePool(
            type=NodeType(name=name, gpu=f"gpu of {name}", gpus=2, memory_bytes=1e9, intra=link),
            count=1,
        )
        for name in types
    )
    return Cluster(groups=groups, network=link)


def _run(folder: Path, samples: float = 2) -> Path:
    write_synthetic(folder, SyntheticRun(num_ranks=2, schedule="1f1b", iterations=6))
    lines = [{"total_iterations": 6, "start_iteration": 0}]
    lines += [{"iteration": 1, "step_ms": 100.0, "tokens_per_s": 10 * samples * 8 * TOKENS}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"cut'
    (folder / "progress.jsonl").write_text(text, encoding="utf-8")
    return folder


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_input_arguments(parser, required=False)
    return parser.parse_args(arguments)


def test_layers_of_the_run_lie_over_the_profile(tmp_path: Path) -> None:
    old = {"kind": "transformer", "gpu": "gpu of a", "micro_batch": 2}
    old |= {"forward_s": 1.0, "backward_input_s": 1.0}
    base = profile_file.document({"name": "m"}, [{**old, "tp": tp} for tp in (1, 2)])
    options = _options("--calibrate", str(_run(tmp_path)))
    content = calibrated(options, _model(), _cluster("a"), base)
    assert content is not None
    profile = profile_file.make_profile(content)
    assert profile.times("transformer", "gpu of a", 1, 2).forward_s == pytest.approx(
        0.0025, rel=0.03
    )
    assert profile.times("transformer", "gpu of a", 2, 2).forward_s == 1.0
    assert set(profile.intra_links) == {"a"}


def test_without_runs_the_profile_stays() -> None:
    assert calibrated(_options(), _model(), _cluster("a"), None) is None


def test_hosts_of_several_types_are_told(tmp_path: Path) -> None:
    run = str(_run(tmp_path))
    (host,) = {rank.header.host for rank in read_run(tmp_path).ranks.values()}
    with pytest.raises(ConfigError, match=f"--calibrate-host {host}=TYPE"):
        calibrated(_options("--calibrate", run), _model(), _cluster("a", "b"), None)
    options = _options("--calibrate", run, "--calibrate-host", f"{host}=b")
    profile = calibrated(options, _model(), _cluster("a", "b"), None)
    assert profile is not None
    assert {row["gpu"] for row in profile["layers"]} == {"gpu of b"}
    with pytest.raises(ConfigError, match="one of the cluster's types a, b"):
        calibrated(
            _options("--calibrate", run, "--calibrate-host", "x=c"),
            _model(),
            _cluster("a", "b"),
            None,
        )


def test_other_models_and_lone_traces_are_refused(tmp_path: Path) -> None:
    run = _run(tmp_path, samples=1.5)
    with pytest.raises(ConfigError, match="pass the model that was trained"):
        calibrated(_options("--calibrate", str(run)), _model(), _cluster("a"), None)
    (run / "progress.jsonl").unlink()
    with pytest.raises(ConfigError, match="does not contain the number of tokens per step"):
        calibrated(_options("--calibrate", str(run)), _model(), _cluster("a"), None)
