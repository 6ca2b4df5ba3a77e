"""Tests that two processes measure a profile, and tests the error messages of ``profile``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.plan import main as plan
from megatron.adaptive.cli.profile import main
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.model_file import read_model

from ..multiprocess.launch import forking

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
MODEL += "--max-position-embeddings 16 --vocab-size 100"
EXPERTS = f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1,1,1]"
EXPERTS += " --mtp-num-layers 1 --position-embedding-type rope --disable-bias-linear"


@pytest.mark.multiprocess
def test_two_processes_measure_layers_and_links(tmp_path: Path) -> None:
    content = profiled(tmp_path, MODEL)
    model = read_model(MODEL)
    profile_file.check_model(content, model, "p")
    rows = {(row["kind"], row["tp"]): row for row in content["layers"]}
    kinds = ("embedding", "transformer", "head")
    assert set(rows) == {(kind, tp) for kind in kinds for tp in (1, 2)}
    for (kind, tp), row in rows.items():
        assert min(row["forward_s"], row["backward_input_s"]) > 0
        assert row["kept_bytes"] > 0
        if kind == "transformer":
            assert row["backward_weight_s"] > 0
            assert row["parameters"] == model.kinds[kind].held_parameters(tp)
    profile = profile_file.make_profile(content)
    assert profile.intra_links["here"].bytes_per_s > 0
    assert profile.all_reduce["here", 2].bytes_per_s > 0
    assert profile.optimizer_s_per_parameter["cpu"] > 0
    assert content["nodes"]["here"]["processes"] == 2


@pytest.mark.long
@pytest.mark.multiprocess
def test_layers_with_experts_and_of_further_tokens_are_measured_and_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = profiled(tmp_path, EXPERTS, "--no-links", "--expert-parallel-size", "1,2")
    model = read_model(EXPERTS)
    rows = {(row["kind"], row["tp"]): row for row in content["layers"]}
    kinds = ("embedding", "transformer", "experts", "experts/2", "head", "head/2")
    assert set(rows) == {(kind, tp) for kind in kinds for tp in (1, 2)}
    for kind, tp in (("transformer", 2), ("experts", 1), ("experts", 2), ("experts/2", 1)):
        # A router has one row for each expert that this rank holds.
        routers = 2 * 32 * kind.endswith("/2")
        assert rows[kind, tp]["parameters"] == model.kinds[kind].held_parameters(tp) - routers
    node = {"type": "here", "gpu": "cpu", "count": 1, "gpus_per_node": 4, "memory": "8 GB"}
    cluster = {"format": 1, "nodes": [{**node, "link": {"bandwidth": "1 GB/s"}}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    flags = ["--model", EXPERTS, "--cluster", str(tmp_path / "cluster.json")]
    flags += ["--profile", str(tmp_path / "profile.json"), "--global-batch-size", "16"]
    assert plan([*flags, "--expert-parallel-size", "4"]) == 0
    assert "not measured" not in capsys.readouterr().out


def profiled(folder: Path, model: str, *more: str) -> dict[str, Any]:
    """Measures ``model`` with two processes, and returns the content of the profile."""
    output = folder / "profile.json"
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron.adaptive profile"
    )
    done = subprocess.run(
        [
            *(sys.executable, *command.split(), "--model", model, "--output", str(output)),
            *("--repeats", "2", "--micro-batch-sizes", "2", "--node-type", "here", *more),
        ],
        env=forking(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return profile_file.load(output)


def test_merged_cut_points_can_be_read_again(tmp_path: Path) -> None:
    head = "cut_point,gpu,micro_batch,forward_s,backward_s,parameters\n"
    for gpu in ("v100", "t4"):
        (tmp_path / f"{gpu}.csv").write_text(f"{head}0,{gpu},1,0.1,0.2,10\n")
        flags = ["--cut-points", str(tmp_path / f"{gpu}.csv"), "--name", "net"]
        assert main([*flags, "--output", str(tmp_path / f"{gpu}.json")]) == 0
    files = [str(tmp_path / "v100.json"), str(tmp_path / "t4.json")]
    assert main(["--merge", *files, "--output", str(tmp_path / "all.json")]) == 0
    content = json.loads((tmp_path / "all.json").read_text())
    assert [row["gpu"] for row in content["layers"]] == ["v100", "t4"]
