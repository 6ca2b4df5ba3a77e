"""The profile command: what it measures in two processes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.cli.profile import main
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.model_file import read_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
MODEL += "--max-position-embeddings 16 --vocab-size 100"


@pytest.mark.multiprocess
def test_two_processes_measure_layers_and_links(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron.adaptive profile"
    )
    done = subprocess.run(
        [
            *(sys.executable, *command.split(), "--model", MODEL, "--output", str(output)),
            *("--repeats", "2", "--micro-batch-sizes", "2", "--node-type", "here"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = profile_file.load(output)
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
