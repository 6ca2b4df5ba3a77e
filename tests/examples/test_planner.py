"""Tests that the planner can read the example of a cluster file."""

from pathlib import Path

from megatron.adaptive.planner.cluster import read_cluster

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "planner" / "cluster.yaml"


def test_its_nodes_and_links_are_understood() -> None:
    cluster = read_cluster(CLUSTER)
    assert [(node.name, node.gpus) for node in cluster.types] == [("a100", 4), ("a10", 4)]
    assert cluster.num_gpus == 32
    assert cluster.link_of_types(cluster.nodes[0], cluster.nodes[1]).bytes_per_s == 25e9 / 8
    assert cluster.link_of_types(cluster.nodes[1], cluster.nodes[2]).bytes_per_s == 40e9 / 8
