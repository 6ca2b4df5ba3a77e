"""Tests that outliers in the measurements of a probe show which node is too slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.profiling import node_check
from megatron.adaptive.profiling.failed_nodes import FailedNode, find_failed_nodes
from megatron.adaptive.profiling.probe_findings import (
    ALL_REDUCE,
    LARGE_MESSAGE,
    MATRIX_PRODUCT,
    Figure,
    find_outliers,
)


def failed(figures: list[Figure], nodes: str) -> list[FailedNode]:
    return find_failed_nodes(find_outliers(figures, nodes), figures, nodes)


def links(times_s: list[float]) -> list[Figure]:
    """Returns times of large messages between neighbouring ranks, one for each of ``times_s``."""
    return [
        Figure(measure=LARGE_MESSAGE, ranks=(rank, rank + 1), peers="tcp", value=value)
        for rank, value in enumerate(times_s)
    ]


def test_a_slow_rank_is_the_fault_of_its_node_and_gives_the_limit() -> None:
    figures = [
        Figure(measure=MATRIX_PRODUCT, ranks=(rank,), peers="cpu", value=value)
        for rank, value in enumerate([2.6e10, 2.6e10, 2.6e10, 1e10])
    ]
    (node,) = failed(figures, "aabc")
    assert (node.node, node.limits) == ("c", {MATRIX_PRODUCT: pytest.approx(2e10)})
    assert node.text.startswith("rank 3 on node c: matrix product: 10 GFLOP/s, the others' median")
    assert FailedNode.from_dict(json.loads(json.dumps(node.to_dict()))) == node


@pytest.mark.parametrize(
    ("times_ms", "nodes", "at_fault"),
    [
        ([1, 1, 9, 9, 1, 1, 1, 1], "abcdefghi", ["d"]),
        # The slow link connects nodes c and d. Either of them may be slow, so neither is blamed.
        ([1, 1, 9, 1, 1, 1], "abcdefg", []),
        # The slow link connects nodes a and b. Node b also has a fast link, so a is blamed.
        ([9, 1, 1, 1, 1], "abcdef", ["a"]),
        ([9, 1, 1, 1, 1], "aabcde", ["a"]),  # Both ends of the slow link are on node a.
    ],
)
def test_a_slow_link_is_the_fault_of_the_node_with_more_slow_links(
    times_ms: list[float], nodes: str, at_fault: list[str]
) -> None:
    blamed = failed(links([value * 1e-3 for value in times_ms]), nodes)
    assert [node.node for node in blamed] == at_fault
    # Limits are for the tests that a node runs alone. A link needs two nodes, so it has no limit.
    assert all(node.limits == {} for node in blamed)


def test_nobody_is_at_fault_for_a_slow_group_of_several_nodes() -> None:
    groups = [
        Figure(measure=ALL_REDUCE, ranks=(2 * i, 2 * i + 1), peers="data", value=value)
        for i, value in enumerate([0.001, 0.001, 0.001, 0.009])
    ]
    assert failed(groups, "abcdefgh") == []
    assert [node.node for node in failed(groups, "aabbccdd")] == ["d"]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"node": 1, "text": "", "limits": {}},
        {"node": "a", "text": "", "limits": {MATRIX_PRODUCT: "x"}},
        {"node": "a", "text": "", "limits": {"another": 1.0}},
    ],
)
def test_a_damaged_entry_is_left_out(entry: object) -> None:
    assert FailedNode.from_dict(entry) is None


@pytest.mark.long
def test_a_node_passes_if_it_reaches_its_limits() -> None:
    for limit, status in ((1.0, 0), (1e30, node_check.STATUS_FAILS)):
        order = json.dumps({"limits": {MATRIX_PRODUCT: limit}})
        program = str(Path(node_check.__file__))
        command = [sys.executable, program, order]
        variables = {**os.environ, "LOCAL_RANK": "0"}
        assert subprocess.run(command, env=variables, check=False, timeout=120).returncode == status
