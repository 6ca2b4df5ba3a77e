"""Tests reading and merging profile files, and converting times per cut point into profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.model_file import preset, read_model
from megatron.adaptive.planner.profile_file import profile_of_cut_points

CSV = """\
cut_point,gpu,micro_batch,forward_s,backward_s,parameters,output_bytes,kept_bytes
0,v100,4,0.002,0.004,1000,2048,8192
1,v100,4,0.003,0.006,2000,16,4096
0,v100,8,0.004,0.008,1000,4096,16384
1,v100,8,0.006,0.012,2000,32,8192
"""


def measured(model: str = "gpt2", gpu: str = "a100", **more: Any) -> dict[str, Any]:
    times = {"forward_s": 0.01, "backward_input_s": 0.01, "backward_weight_s": 0.01}
    row = {"gpu": gpu, "tp": 1, "micro_batch": 1, **times, "kept_bytes": 5.0}
    rows = [{"kind": kind, **row} for kind in ("embedding", "transformer", "head")]
    arguments = list(preset(model).arguments)
    return {"format": 1, "model": {"name": model, "arguments": arguments}, "layers": rows, **more}


def save(folder: Path, content: Any, name: str = "profile.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_a_profile_answers_by_the_table_s_names(tmp_path: Path) -> None:
    content = profile_file.load(save(tmp_path, measured()))
    profile = profile_file.make_profile(content)
    times = profile.times("transformer", "a100-40", 1, 1)
    assert (times.forward_s, times.backward_s, times.kept_bytes) == (0.01, 0.02, 5.0)
    assert times.source == "measured"
    profile_file.check_model(content, preset("gpt2"), "p")


def test_links_of_one_and_several_pairs_are_one_link(tmp_path: Path) -> None:
    link = {"nodes": ["a", "b"], "within": False, "latency_s": 1e-5, "sizes": [[1e6, 1e9]]}
    links = [link, {**link, "pairs": 4, "sizes": [[1e6, 0.4e9]]}]
    profile = profile_file.make_profile(measured(links=links))
    merged = profile.links["a", "b"]
    assert merged.bandwidth(1e6, 1) == 1e9
    assert merged.bandwidth(1e6, 4) == pytest.approx(0.4e9)


def test_node_types_are_known_by_their_gpu(tmp_path: Path) -> None:
    link = {"nodes": ["a100-40"] * 2, "within": True, "latency_s": 0, "sizes": [[1e6, 1e9]]}
    content = measured(nodes={"a100-40": {"gpu": "a100-40"}}, links=[link])
    changed, strange = profile_file.renamed(content, {"fast": "a100-40", "slow": "t4"})
    assert changed["links"][0]["nodes"] == ["fast", "fast"]
    assert strange == []
    changed, strange = profile_file.renamed(content, {"a": "a100-40", "b": "a100-40"})
    assert changed["links"][0]["nodes"] == ["a100-40"] * 2
    assert strange == ["a100-40"]


def test_merging_puts_nodes_together(tmp_path: Path) -> None:
    first, second = measured(launch_s={"a100": 1e-3}), measured(gpu="v100", launch_s={"v100": 2e-3})
    merged = profile_file.merge([("one", first), ("other", second)])
    assert len(merged["layers"]) == 6
    assert merged["launch_s"] == {"a100": 1e-3, "v100": 2e-3}
    again = profile_file.merge([("one", first), ("again", measured(launch_s={"a100": 3e-3}))])
    assert len(again["layers"]) == 3
    assert again["launch_s"] == {"a100": 3e-3}
    with pytest.raises(ConfigError, match="b describes model gpt2-xl, but a describes gpt2; merge"):
        profile_file.merge([("a", first), ("b", measured("gpt2-xl"))])


def test_an_estimate_does_not_replace_a_measurement() -> None:
    estimate = measured()
    for row in estimate["layers"]:
        row |= {"source": "estimated", "forward_s": 0.5}
    rows = profile_file.merge([("a", measured()), ("b", estimate)])["layers"]
    assert rows == measured()["layers"]
    rows = profile_file.merge([("b", estimate), ("a", measured())])["layers"]
    assert rows == measured()["layers"]


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="p describes model gpt2, whose embedding has"):
        profile_file.check_model(measured(), preset("gpt2-xl"), "p")
    with pytest.raises(ConfigError, match="measured in bf16, but gpt2 is planned in fp16"):
        profile_file.check_model(measured(), preset("gpt2", "fp16"), "p")
    with pytest.raises(ConfigError, match="no times for layers of kind 'encoder'"):
        profile_file.check_model(measured(), preset("t5-small"), "p")


def test_experts_on_ranks_that_were_not_measured_take_what_the_nearest_do() -> None:
    rows = [
        {"kind": kind, "gpu": "cpu", "tp": 1, "micro_batch": 1, "forward_s": seconds}
        | {"backward_input_s": seconds, "kept_bytes": 1.0}
        for kind, seconds in (("experts", 1.0), ("experts/8", 2.0), ("head", 3.0), ("embedding", 0))
    ]
    content = {**measured("mixtral-8x7b"), "layers": rows}
    model = preset("mixtral-8x7b", imbalance=1.5)
    profile_file.check_model(content, model, "p")
    profile = profile_file.make_profile(content)
    by_ranks = {ranks: profile.times(f"experts/{ranks}", "cpu", 1, 1) for ranks in (2, 4, 8)}
    assert {ranks: times.forward_s for ranks, times in by_ranks.items()} == {2: 1.0, 4: 2.0, 8: 2.0}
    assert [times.source for times in by_ranks.values()] == ["estimated", "estimated", "measured"]
    assert profile.times("experts/8", "cpu", 1, 1, load=1.5).forward_s == 3.0
    assert profile.knows("experts/2", "cpu", 1)
    assert not profile.knows("transformer", "cpu", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "format must be 1.*got 0"),
        ({"layer": []}, "layer is not a key; the nearest is layers"),
        ({"launch_s": {"a100": -1}}, "launch_s.a100 must be .* got -1"),
    ],
)
def test_a_bad_profile_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_file.load(save(tmp_path, {**measured(), **change}))


def test_cut_points_make_a_profile_and_its_model(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text(CSV)
    content = profile_of_cut_points(path, "net")
    saved = save(tmp_path, content)
    profile = profile_file.make_profile(profile_file.load(saved))
    model = read_model(str(saved))
    assert model.layers == ("cut-0", "cut-1")
    assert model.parameters == 3000
    assert model.kinds["cut-0"].output_elements == 4096 / 8 / 4
    assert model.kinds["cut-1"].kept_bytes(1) == 1024
    assert profile.times("cut-1", "v100-16", 1, 8).backward_s == 0.012
    row = {"cut_point": 0, "gpu": "v100", "micro_batch": 1, "forward_s": 2e-3, "backward_s": 4e-3}
    listed = [{**row, "parameters": 9}]
    assert len(profile_of_cut_points(save(tmp_path, listed, "net.json"), "net")["layers"]) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1,v100", "3,v100", "cut point 1 has no row"),
        ("0.002", "fast", "row 1: forward_s must be .* got 'fast'"),
        ("0.002", "", "row 1: forward_s is missing"),
        ("0,v100,8", "0,v100,2.5", "row 3: micro_batch must be an integer.*got 2.5"),
        ("kept_bytes", "kept", "row 1: kept is not a key"),
    ],
)
def test_bad_cut_points_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text(CSV.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        profile_of_cut_points(path, "net")
