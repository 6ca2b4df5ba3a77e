"""Tests the table of GPUs, cluster files in three formats, and errors about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.adaptive.config.schema_files import quantity
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import find_gpu, gpu_names, make_cluster, read_cluster
from megatron.adaptive.planner.discover_cluster import describe_cluster, describe_node

YAML = """\
format: 1
name: mixed
nodes:
  - {gpu: A100-40, count: 2, gpus_per_node: 8, link: {bandwidth: 300 GB/s, latency: 3 us},
     price_per_hour: 32.77, zone: a}
  - {type: old, gpu: V100, count: 3, gpus_per_node: 4, memory: 15.5 GiB,
     link: {bandwidth: 150 GB/s}, network: {bandwidth: 25 Gbit/s}, zone: b}
network: {bandwidth: 100 Gbit/s, latency: 15 us}
links:
  - {between: [old, a100-40], bandwidth: 1 GB/s, sizes: [[64 KiB, 0.5 GB/s], [4 MiB, 1 GB/s]]}
between_zones: {bandwidth: 1 Gbit/s, latency: 20 ms}
"""

GB = 1e9


def write(folder: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, YAML))
    fast, old = cluster.types
    assert (fast.name, fast.gpu, fast.memory_bytes) == ("a100-40", "a100-40", 40e9)
    assert (old.name, old.gpu, old.memory_bytes) == ("old", "v100-16", 15.5 * 2**30)
    assert fast.intra.bytes_per_s == 300e9
    assert not fast.intra.shared
    assert cluster.link_of_types(cluster.nodes[0], cluster.nodes[1]).bytes_per_s == 100e9 / 8
    assert cluster.link_of_types(cluster.nodes[0], cluster.nodes[1]).latency_s == pytest.approx(
        15e-6
    )
    assert cluster.link_of_types(cluster.nodes[2], cluster.nodes[3]).bytes_per_s == 25e9 / 8
    assert cluster.link_of_types(cluster.nodes[0], cluster.nodes[2]).bandwidth(2**16) == 0.5e9
    assert cluster.num_gpus == 28


def test_the_file_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert example is not None
    cluster = read_cluster(write(tmp_path, example[1]))
    assert cluster.num_gpus == 32
    assert cluster.link_of_types(cluster.nodes[0], cluster.nodes[1]).bytes_per_s == 25e9 / 8
    assert cluster.types[0].memory_bytes == 39.6 * 2**30


def test_toml_and_json_mean_the_same(tmp_path: Path) -> None:
    as_yaml = read_cluster(write(tmp_path, YAML))
    assert as_yaml == read_cluster(write(tmp_path, json.dumps(yaml.safe_load(YAML)), "c.json"))
    toml = """
format = 1
[[nodes]]
gpu = "A100-40"
count = 2
gpus_per_node = 8
link = {bandwidth = "300 GB/s", latency = "3 us"}
price_per_hour = 32.77
zone = "a"
[network]
bandwidth = "100 Gbit/s"
"""
    assert as_yaml.groups[0] == read_cluster(write(tmp_path, toml, "c.toml")).groups[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("300 GB/s", "0 GB/s", r"nodes\[0\].link.bandwidth must be above 0, got '0 GB/s'"),
        ("300 GB/s", "300", r"nodes\[0\].link.bandwidth must be text.*got 300"),
        ("type: old", "type: a100-40", "node type 'a100-40' occurs twice"),
        ("count: 3", "count: 0", r"nodes\[1\].count must be at least 1.*got 0"),
        ("count: 3", "counts: 3", r"nodes\[1\].counts is not a key; the nearest is count"),
        ("gpus_per_node: 4, ", "", r"nodes\[1\].gpus_per_node is missing"),
        ("[old, a100-40]", "[older, a100-40]", "unknown node type 'older'"),
        (
            "price_per_hour: 32.77",
            "hosts: [n1, n1]",
            "hosts contains n1 twice; list each host once",
        ),
        ("price_per_hour: 32.77", "hosts: [n1]", "lists 1 hosts, but count is 2"),
        ("format: 1", "format: 7", "format must be 1.*got 7"),
        (
            "between_zones",
            "  - {between: [a100-40, old], bandwidth: 2 GB/s}\nbetween_zones",
            "is a second link of",
        ),
    ],
)
def test_a_bad_file_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in YAML
    path = write(tmp_path, YAML.replace(old, new))
    with pytest.raises(ConfigError, match=message) as info:
        read_cluster(path)
    assert str(path) in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("200 Gbit/s", "bytes_per_s", 25e9),
        ("10Gbps", "bytes_per_s", 1.25e9),
        ("40 GB", "bytes", 4e10),
        ("2.5 ms", "s", 0.0025),
    ],
)
def test_quantities(text: str, unit: str, value: float) -> None:
    assert quantity(text, unit, "x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_names_of_files_and_drivers_are_known(written: str, name: str) -> None:
    assert find_gpu(written, "x").name == name


def test_every_row_is_sound() -> None:
    names = [find_gpu(name, "x") for name in gpu_names()]
    assert len(names) >= 30
    for gpu in names:
        assert 4 * GB <= gpu.memory_bytes <= 300 * GB
        assert 100 * GB <= gpu.memory_bytes_per_s <= 10_000 * GB
        assert gpu.flops["fp32"] < gpu.flops["fp16"]
        assert gpu.flops.get("bf16", gpu.flops["fp16"]) == gpu.flops["fp16"]
        assert gpu.source


def test_rails_carry_a_pair_each_and_switches_what_they_can() -> None:
    node: dict[str, Any] = {
        "gpu": "H100",
        "count": 2,
        "gpus_per_node": 8,
        "link": {"bandwidth": "450 GB/s"},
    }
    network: dict[str, Any] = {"bandwidth": "50 GB/s", "rails": 4, "oversubscription": 2}
    made = make_cluster({"format": 1, "nodes": [node], "network": network}, "file", {})
    link = made.link_of_types(made.nodes[0], made.nodes[1])
    assert [link.bandwidth(1e9, pairs) for pairs in (1, 2, 4, 8)] == [25e9, 25e9, 25e9, 12.5e9]
    network["sizes"] = [["1 MB", "3 GB/s"]]
    with pytest.raises(ConfigError, match="combines measured speeds .sizes, by_pairs. with rails"):
        make_cluster({"format": 1, "nodes": [node], "network": network}, "file", {})


def test_islands_nest_and_groups_of_neighbours_find_the_least() -> None:
    node = {
        "gpu": "H100-80",
        "count": 8,
        "gpus_per_node": 8,
        "link": {"bandwidth": "20 GB/s"},
        "islands": [
            {"gpus": 4, "bandwidth": "400 GB/s"},
            {"nodes": 2, "bandwidth": "50 GB/s"},
            {"nodes": 4, "bandwidth": "25 GB/s"},
        ],
    }
    document = {"format": 1, "nodes": [node], "network": {"bandwidth": "5 GB/s"}}
    (kind,) = make_cluster(document, "cluster", {}).types
    sizes = {gpus: kind.island(gpus) for gpus in (2, 3, 4, 8, 16, 24, 32, 64)}
    assert {gpus: island and island[0] for gpus, island in sizes.items()} == {
        2: 4,
        3: None,
        4: 4,
        8: None,
        16: 16,
        24: None,
        32: 32,
        64: None,
    }
    assert kind.islands[0][1].shared is False
    assert kind.islands[1][1].shared is True
    # All nodes are in one island, so any two nodes are connected by the link of this island.
    small = make_cluster({**document, "nodes": [{**node, "count": 4}]}, "cluster", {})
    assert small.link_of_types(small.nodes[0], small.nodes[3]).bytes_per_s == 25e9


@pytest.mark.parametrize(
    ("islands", "text"),
    [
        ([{"bandwidth": "1 GB/s"}], "requires either gpus .*; set exactly one"),
        ([{"gpus": 3, "bandwidth": "1 GB/s"}], "has 3 GPUs; use a larger multiple of the previous"),
        (
            [{"nodes": 4, "bandwidth": "1 GB/s"}, {"nodes": 6, "bandwidth": "1 GB/s"}],
            "use a larger multiple of the previous",
        ),
    ],
)
def test_islands_that_do_not_nest_are_refused(islands: list[Any], text: str) -> None:
    node = {"gpu": "T4", "count": 8, "gpus_per_node": 8, "link": {"bandwidth": "1 GB/s"}}
    document = {"format": 1, "nodes": [{**node, "islands": islands}]}
    with pytest.raises(ConfigError, match=text):
        make_cluster(document, "cluster", {})


LOG = """
==============NVSMI LOG==============

Timestamp                                 : Tue Nov 25 10:00:00 2025
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 4
"""
GPU = """GPU 00000000:{index}7:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Product Brand                         : NVIDIA
    GPU Link Info
        PCIe Generation
            Max                           : 4
            Current                       : 4
        Link Width
            Max                           : 16x
            Current                       : 16x
    FB Memory Usage
        Total                             : 81920 MiB
        Reserved                          : 635 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
"""
SMI = LOG + "".join(GPU.format(index=index) for index in range(4))
PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def slurm_node(name: str, gres: str, state: str = "IDLE", features: str = "(null)") -> str:
    return f"""NodeName={name} Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.10
   AvailableFeatures={features}
   ActiveFeatures={features}
   Gres={gres}
   NodeAddr={name} NodeHostName={name} Version=23.11.4
   OS=Linux 5.15.0-91-generic #101-Ubuntu SMP Tue Nov 14 13:30:08 UTC 2023
   RealMemory=1031000 AllocMem=0 FreeMem=999000 Sockets=2 Boards=1
   State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu

"""


def test_a_node_is_described_by_what_nvidia_smi_prints() -> None:
    document, assumed = describe_cluster([("q", SMI), ("topo", PAIRS)])
    (node,) = document["nodes"]
    assert (node["gpu"], node["gpus_per_node"], node["memory"]) == ("a100-80", 4, "81920 MiB")
    assert node["link"]["bandwidth"] == "25.2 GB/s"
    assert node["islands"] == [{"gpus": 2, "bandwidth": "300 GB/s", "latency": "3 us"}]
    assert "network" not in document
    assert not assumed
    whole = PAIRS.replace("SYS", "NV12")
    (node,) = describe_cluster([("q", SMI), ("topo", whole)])[0]["nodes"]
    assert node["link"]["bandwidth"] == "300 GB/s"
    assert "islands" not in node


def test_slurm_names_nodes_switches_and_gpus_and_reports_complete_them() -> None:
    nodes = [slurm_node(f"n{i}", "gpu:a100:4(S:0-1),mps:400") for i in (1, 2, 3, 4)]
    nodes += [slurm_node("n5", "gpu:a100:4", "IDLE+DRAIN"), slurm_node("login", "(null)")]
    nodes += [slurm_node("t1", "gpu:2", features="amd,T4")]
    switches = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1,3]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[2,4-5],t1
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-5],t1 Switches=leaf[1-2]
"""
    network = {"bandwidth": "200 Gbit/s", "latency": "5 us", "rails": 4}
    entry = {**describe_node(SMI, PAIRS), "network": network}
    report = json.dumps({"host": "n3", "node": entry, "checks": []})
    texts = [("nodes", "".join(nodes)), ("switches", switches), ("n3.json", report)]
    document, assumed = describe_cluster(texts)
    big, small = document["nodes"]
    assert (big["gpu"], big["memory"], big["count"]) == ("a100-80", "81920 MiB", 4)
    assert big["hosts"] == ["n1", "n3", "n2", "n4"]
    assert big["islands"][1] == {"nodes": 2, **network}
    assert (small["gpu"], small["gpus_per_node"], small["hosts"]) == ("t4", 2, ["t1"])
    assert len(assumed) == 3
    assert make_cluster(document, "found", {}).num_gpus == 18


def test_sinfo_alone_says_nodes_and_their_gpus() -> None:
    text = "NODELIST GRES STATE\nrack[01-02]n[1-2] gpu:h100:8(S:0-1) idle\nold gpu:v100:4 down*\n"
    document, assumed = describe_cluster([("sinfo", text)])
    (node,) = document["nodes"]
    assert node["hosts"] == ["rack01n1", "rack01n2", "rack02n1", "rack02n2"]
    assert (node["gpu"], node["gpus_per_node"], node["count"]) == ("h100-80", 8, 4)
    assert any("h100 is h100-80" in line for line in assumed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", r"it begins with 'hello'\); pass a file with the output of scontrol"),
        ("", r"it begins with ''\); pass a file with the output"),
        ('{"host": "n1"}', r"tool \('node' is missing\); pass a file"),
        ('{"host": "n1", "node": {"gpu": "x"}}', "'gpus_per_node' is missing"),
        ("NODELIST GRES STATE\na[1-x] gpu:h100:8 idle", r"invalid .* 'x'\); pass a file with"),
        ("SwitchName=s0 Level=x Nodes=n1", r"invalid .* 'x'\); pass a file with"),
        ("NODELIST STATE\nn1 idle", "no column GRES"),
        (slurm_node("n1", "gpu:8"), "does not report the GPU model of node n1, only 'the number"),
        (slurm_node("n1", "(null)"), "no node with GPUs is up"),
    ],
)
def test_texts_that_describe_no_cluster_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        describe_cluster([("given", text)])
    assert "\n" not in str(error.value)
