"""Recipes: their memory fits the GPUs that they name, and each trains at a tenth of its width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.adaptive.cli.plan import main as plan
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.trainer import TrainerConfig

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.yaml"))
GIVEN = ("tokenizer_model=made", "data_path=made", "transformer_impl=local")
# 16 bytes of weights and optimizer for each of 8 billion parameters exceed these GPUs.
LARGE = {("llama3.1-8b", "2"), ("qwen3-8b", "2"), ("mistral-7b", "2"), ("qwen3-30b-a3b", "8")}
LARGE |= {("qwen3-30b-a3b", "2x4")}


def _content(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


CASES = [
    pytest.param(path, str(gpus), id=f"{path.stem}-{gpus}")
    for path in RECIPES
    for gpus in _content(path)["variants"]["gpus"]
]


def _read(path: Path, *words: str) -> tuple[TrainerConfig, list[str]]:
    recipe = read_recipe(_content(path), [*GIVEN, *words], str(path))
    config = parse(recipe.flags, world_size=recipe.nodes * recipe.processes_per_node)
    return config, recipe.flags


@pytest.mark.parametrize(("path", "gpus"), CASES)
def test_memory_fits(path: Path, gpus: str, tmp_path: Path) -> None:
    for task in ("pretrain", "continue", "finetune"):
        config, flags = _read(path, f"gpus={gpus}", f"task={task}")
    cluster = {
        "format": 1,
        "nodes": [
            {
                "gpu": "H200" if (path.stem, gpus) in LARGE else "H100",
                "count": 2 if gpus == "2x4" else 1,
                "gpus_per_node": 4 if gpus == "2x4" else int(gpus),
                "link": {"bandwidth": "300 GB/s", "latency": "5 us"},
            }
        ],
        "network": {"bandwidth": "200 Gbit/s", "latency": "10 us"},
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    parallel = config.parallel
    words = ["--model", " ".join(flags), "--cluster", str(file), "--attention", "fused"]
    words += ["--tp", "1", "--pp", str(parallel.pipeline_model_parallel_size), "--all-nodes"]
    words += ["--dp", str(parallel.data_parallel_size), "--micro-batch-sizes", "1"]
    words += ["--recompute", config.recompute.recompute_granularity or "none"]
    words += ["--expert-parallel-size", str(parallel.expert_model_parallel_size)]
    words += ["--distributed-optimizer", "on" if parallel.data_parallel_size > 1 else "off"]
    words += ["--global-batch-size", "64"]
    assert plan(words) == 0
