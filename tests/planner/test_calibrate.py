"""Tests profiles that are fitted to traces of synthetic runs with known durations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import TracedRun, calibrate, rank_correlation
from megatron.adaptive.planner.cluster import LinkSpeed, NodeType
from megatron.adaptive.planner.model_description import LayerKind, Model
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.profile_file import make_profile
from megatron.adaptive.trace.read import read_run
from tests.support.sliced_run import SlicedRun
from tests.support.synthetic_trace import SyntheticRun, write_synthetic


def _model(layers: int) -> Model:
    kinds = (
        LayerKind(name="embedding", parameters=100, counted=False),
        LayerKind(name="transformer", parameters=1000, forward_flops=1.0),
        LayerKind(name="head", parameters=100, forward_flops=2.0, counted=False),
    )
    return Model(
        name="made up",
        kinds={kind.name: kind for kind in kinds},
        layers=("embedding", *["transformer"] * layers, "head"),
    )


def _traced(folder: Path, **changes: Any) -> TracedRun:
    settings: dict[str, Any] = {"num_ranks": 3, "schedule": "1f1b", "iterations": 12, "head": 2.0}
    write_synthetic(folder, SyntheticRun(**(settings | changes)))
    trace = read_run(folder)
    hosts = {rank.header.host: _node("n", "A") for rank in trace.ranks.values()}
    return TracedRun(trace=trace, micro_batch=2, hosts=hosts)


def _fitted(layers: int, run: TracedRun) -> Profile:
    return make_profile(calibrate(_model(layers), [run]))


def _node(name: str, gpu: str) -> NodeType:
    return NodeType(name=name, gpu=gpu, gpus=4, memory_bytes=1e9, intra=LinkSpeed(bytes_per_s=1e9))


@pytest.mark.parametrize(
    ("changes", "chunks", "split"),
    [
        ({}, 1, False),
        ({"schedule": "zb-h1"}, 1, True),
        ({"schedule": "adaptive", "num_chunks": 2, "weight_pieces": 2}, 2, True),
        ({"replicas": 2, "hosts": 2}, 1, False),
    ],
)
def test_layers_are_found_from_stages(
    tmp_path: Path, changes: dict[str, Any], chunks: int, split: bool
) -> None:
    profile = _fitted(12 * chunks, _traced(tmp_path, **changes))
    layer = profile.times("transformer", "A", 1, 2)
    # A rank's forward pass takes 10 ms for 4 layers, or 4 layers per chunk. The head takes as long
    # as two layers.
    each = 0.0025 / chunks
    assert layer.forward_s == pytest.approx(each, rel=0.03)
    assert layer.backward_s == pytest.approx(2 * each, rel=0.03)
    assert layer.backward_weight_s == pytest.approx(each, rel=0.03)
    head = profile.times("head", "A", 1, 2)
    assert head.forward_s == pytest.approx(2 * each, rel=0.05)
    assert profile.times("embedding", "A", 1, 2).forward_s < 0.1 * each
    assert layer.source == "measured"
    assert profile.action_sigma == pytest.approx(0.03, rel=0.4)
    assert split or layer.backward_weight_s == pytest.approx(layer.backward_input_s)


def test_links_and_optimizer(tmp_path: Path) -> None:
    profile = _fitted(12, _traced(tmp_path, optimizer_s=0.0041))
    sent = 4 << 20
    assert profile.intra_links["n"].seconds(sent) == pytest.approx(1e-4, rel=0.1)
    assert not profile.links
    # The three stages have 4100, 4000 and 4100 parameters.
    assert profile.optimizer_s_per_parameter["A"] == pytest.approx(1e-6, rel=0.05)


def test_hosts_tell_links_between_nodes_and_gpus(tmp_path: Path) -> None:
    traced = _traced(tmp_path, hosts=3)
    names = enumerate(sorted(traced.hosts))
    hosts = {host: _node("node" if i else "first", f"gpu {i}") for i, host in names}
    profile = _fitted(12, replace(traced, hosts=hosts))
    assert set(profile.links) == {("first", "node"), ("node", "node")}
    assert {gpu for _, gpu, _, _ in profile.layers} == {"gpu 0", "gpu 1", "gpu 2"}


@pytest.mark.parametrize(
    ("counted", "places"),
    [
        ((2, 1), ((0, 1, 2), (3, 4))),
        ((0, 3), ((0,), (1, 2, 3, 4))),
        ((3, 0), ((0, 1, 2, 3), (4,))),
        ((1, 1, 1), ((0, 1), (2,), (3, 4))),
    ],
)
def test_embedding_lies_first_and_head_last(
    counted: tuple[int, ...], places: tuple[tuple[int, ...], ...]
) -> None:
    assert tuple(map(tuple, _model(3).stage_layers(counted))) == places


def test_refused(tmp_path: Path) -> None:
    traced = _traced(tmp_path)
    with pytest.raises(ConfigError, match="layers 4-4-4 add up to 12, but model made up has 11"):
        calibrate(_model(11), [traced])
    with pytest.raises(ConfigError, match="trace more"):
        calibrate(_model(12), [replace(traced, skip=12)])
    sliced = _traced(tmp_path / "sliced", schedule="adaptive", num_slices=2)
    with pytest.raises(
        ConfigError, match="traced with sequence slices, .*; trace a run without --seq"
    ):
        calibrate(_model(12), [sliced])


def test_rank_correlation_shares_equal_ranks() -> None:
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.8660254)
    assert rank_correlation([1, 1], [1, 2]) == 0


@pytest.mark.parametrize("tokens", [8, 64])
def test_traces_of_slices_are_refused(tokens: int, tmp_path: Path) -> None:
    # All documents are shorter than 64 tokens. In this case, sequences are not sliced, so the trace
    # contains times of whole sequences.
    SlicedRun(documents=(30, 8, 7), tokens=tokens).write(tmp_path)
    trace = read_run(tmp_path)
    assert trace.is_sliced == (tokens == 8)
    hosts = {rank.header.host: _node("n", "A") for rank in trace.ranks.values()}
    run = TracedRun(trace=trace, micro_batch=1, hosts=hosts)
    with pytest.raises(ConfigError) as caught:
        calibrate(_model(3), [run])
    assert ("--slice-tokens" in str(caught.value)) == (tokens == 8)
