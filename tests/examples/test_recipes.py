"""Recipes: their memory fits the GPUs that they name, and each trains at a tenth of its width."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.adaptive.cli.plan import main as plan
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.trainer import TrainerConfig

from ..multiprocess.launch import run_ranks, tail

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.yaml"))
GIVEN = ("tokenizer_model=made", "data_path=made", "transformer_impl=local")
# 16 bytes of weights and optimizer for each of 8 billion parameters exceed these GPUs.
LARGE = {("llama3.1-8b", "2"), ("qwen3-8b", "2"), ("mistral-7b", "2"), ("qwen3-30b-a3b", "8")}
LARGE |= {("qwen3-30b-a3b", "2x4")}
SMALL = ("llama3.2-1b", "qwen3-0.6b")


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
    is_alone = gpus == "1" and path.stem not in SMALL
    for task in ("pretrain", "continue", "lora" if is_alone else "finetune"):
        config, flags = _read(path, f"gpus={gpus}", f"task={task}")
    needs_more = (path.stem, gpus) in LARGE
    assert _plan(config, flags, gpus, "H200" if needs_more else "H100", tmp_path) == 0
    if needs_more and "a3b" not in path.stem:  # without gradients and state of the base
        config, flags = _read(path, f"gpus={gpus}", "task=lora")
        assert _plan(config, flags, gpus, "H100", tmp_path) == 0


def _plan(config: TrainerConfig, flags: list[str], gpus: str, gpu: str, folder: Path) -> int:
    cluster = {
        "format": 1,
        "nodes": [
            {
                "gpu": gpu,
                "count": 2 if gpus == "2x4" else 1,
                "gpus_per_node": 4 if gpus == "2x4" else int(gpus),
                "link": {"bandwidth": "300 GB/s", "latency": "5 us"},
            }
        ],
        "network": {"bandwidth": "200 Gbit/s", "latency": "10 us"},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    parallel = config.parallel
    words = ["--model", " ".join(flags), "--cluster", str(file), "--attention", "fused"]
    words += ["--tp", "1", "--pp", str(parallel.pipeline_model_parallel_size), "--all-nodes"]
    words += ["--dp", str(parallel.data_parallel_size), "--micro-batch-sizes", "1"]
    words += ["--recompute", config.recompute.recompute_granularity or "none"]
    words += ["--expert-parallel-size", str(parallel.expert_model_parallel_size)]
    words += ["--distributed-optimizer", "on" if parallel.data_parallel_size > 1 else "off"]
    words += ["--global-batch-size", "64"]
    return plan(words)


def _tenth(content: dict[str, Any]) -> dict[str, Any]:
    """Returns sizes of the same architecture at about a tenth of its width, on two stages."""
    heads = max(2, content["num_attention_heads"] // 8)
    small = {
        "num_layers": 4,
        "hidden_size": content["hidden_size"] // 10 // 32 * 32,
        "ffn_hidden_size": content["ffn_hidden_size"] // 10 // 16 * 16,
        "num_attention_heads": heads,
        "moe_ffn_hidden_size": content.get("moe_ffn_hidden_size", 0) // 10 // 8 * 8,
        "moe_shared_expert_intermediate_size": 96,
        "kv_channels": 32,
        "num_query_groups": 2,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": "[0]*1+[1]*3",
        "kv_lora_rank": 48,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    }
    given = {name: value for name, value in small.items() if name in content}
    run = "vocab_size=500 seq_length=64 train_iters=3 global_batch_size=4 lr_warmup_iters=0"
    run += " moe_grouped_gemm= lr=1e-3 min_lr= bf16=false save_interval= eval_iters=0"
    run += " log_interval=1 mock_data=true"
    run += " tokenizer_type=NullTokenizer nodes= processes_per_node= partition= recompute_method="
    run += " recompute_granularity= recompute_num_layers= expert_model_parallel_size="
    words = dict(word.split("=", 1) for word in run.split())
    return given | words | {"pipeline_model_parallel_size": 2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("task", ["pretrain", "lora"])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_trains_at_a_tenth(path: Path, task: str, tmp_path: Path) -> None:
    given = {"task": task, **_tenth(_content(path))}
    if task == "lora":  # mock data has no conversations
        given |= {"finetune": "", "sft": "", "variable_seq_lengths": "", "lr": 1e-2}
        given["lora_dropout"] = 0
    words = [f"{name}={value}" for name, value in given.items()]
    log = tmp_path / "log.txt"
    command = ["-m", "megatron.adaptive", "train", str(path), *words]
    assert run_ranks(command, world_size=2, log=log, limit_s=120) == 0, tail(log)
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log.read_text())]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
