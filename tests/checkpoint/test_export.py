"""Adapters: trained as PEFT trains them, in its format in and out, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..multiprocess.launch import run_ranks, tail

WORKER = Path(__file__).parents[1] / "multiprocess" / "lora_worker.py"
LOSSES, GRADIENTS = 1e-5, 1e-4
MODELS = ("llama", "qwen3", "gpt2", "gpt_neox", "phi3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of some families, adapters and their training."""
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("peft_models.py")
    subprocess.run([sys.executable, str(script), str(folder), *MODELS], check=True)
    return folder


def compare(folder: Path, cases: list[tuple[str, str]], world_size: int) -> None:
    """Trains adapters in shapes and compares with PEFT; each case is to have said it."""
    (folder / "cases.json").write_text(
        json.dumps([{"model": name, "flags": flags.split()} for name, flags in cases])
    )
    log = folder.with_name(f"{folder.name}-{world_size}.log")
    status = run_ranks([str(WORKER), str(folder)], world_size=world_size, log=log, limit_s=280.0)
    assert status == 0, tail(log)
    said = [line.split() for line in log.read_text().splitlines()]
    losses = [line for line in said if line[:1] == ["LOSSES"]]
    gradients = [line for line in said if line[:1] == ["GRADIENTS"]]
    assert len(losses) == len(cases)
    sharded = sum("--use-distributed-optimizer" in flags for _, flags in cases)
    assert len(gradients) == len(cases) - sharded
    assert [line for line in losses if not float(line[1]) < LOSSES] == []
    assert [line for line in gradients if not float(line[1]) < GRADIENTS] == []


@pytest.mark.multiprocess
def test_one_rank_trains_as_peft_does(models: Path) -> None:
    cases = [(name, "") for name in MODELS]
    compare(models, [*cases, ("llama", "--recompute-activations")], 1)


_TENSOR = "--tensor-model-parallel-size 2"
_PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
_V = "--num-virtual-stages-per-pipeline-rank 2 --pipeline-placement v"


@pytest.mark.multiprocess
def test_two_ranks_train_as_peft_does(models: Path) -> None:
    cases = [
        ("llama", f"{_PIPELINE} 1f1b"),
        ("llama", f"{_PIPELINE} zb-h1"),
        ("llama", f"{_PIPELINE} adaptive {_V}"),
        ("qwen3", f"{_PIPELINE} zb-v {_V}"),
        ("qwen3", f"{_PIPELINE} adaptive --partition 0-4"),
        ("llama", f"{_PIPELINE} interleaved --num-virtual-stages-per-pipeline-rank 2"),
        ("llama", _TENSOR),
        ("llama", f"{_TENSOR} --sequence-parallel"),
        ("gpt2", _TENSOR),
        ("phi3", f"{_TENSOR} --sequence-parallel"),
        ("deepseek_v3", f"{_TENSOR} --sequence-parallel"),
        ("llama", "--use-distributed-optimizer"),
        ("llama", "--context-parallel-size 2"),
    ]
    compare(models, cases, 2)


@pytest.mark.multiprocess
def test_four_ranks_train_as_peft_does(models: Path) -> None:
    both = f"{_TENSOR} --sequence-parallel {_PIPELINE} adaptive {_V}"
    sharded = f"{_PIPELINE} zb-h1 --use-distributed-optimizer --overlap-grad-reduce"
    compare(models, [("llama", both), ("gpt2", sharded)], 4)
