"""Tests that recipes fit into the memory of their GPUs, and that smaller models can be trained."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.adaptive.cli.plan import main as plan
from megatron.adaptive.cli.pretrain_gpt import load_recipe
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.preprocess import PreprocessSpec, preprocess

from ..multiprocess.launch import run_ranks, tail

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "common")
GIVEN = ("tokenizer_model=made", "data_path=made", "transformer_impl=local")
# These pairs of recipe and number of GPUs need more memory than H100 GPUs have. Weights and
# optimizer state take 16 bytes for each parameter.
LARGE = {("llama3.1-8b", "2"), ("qwen3-8b", "2"), ("mistral-7b", "2"), ("qwen3-30b-a3b", "8")}
LARGE |= {("qwen3-30b-a3b", "2x4"), ("qwen3-30b-a3b", "1")}
SMALL = ("llama3.2-1b", "qwen3-0.6b")
MIXED = ("deepseek-v2-lite", "qwen3-30b-a3b")


CASES = [
    pytest.param(path, str(gpus), id=f"{path.stem}-{gpus}")
    for path in RECIPES
    for gpus in load_recipe(path)["variants"]["gpus"]
]


def _read(path: Path, *arguments: str) -> tuple[TrainerConfig, list[str]]:
    recipe = read_recipe(load_recipe(path), [*GIVEN, *arguments], str(path))
    config = parse(recipe.flags, world_size=recipe.nodes * recipe.processes_per_node)
    return config, recipe.flags


@pytest.mark.parametrize(("path", "gpus"), CASES)
def test_memory_fits(path: Path, gpus: str, tmp_path: Path) -> None:
    is_alone = path.stem not in SMALL and (gpus == "1" or (path.stem in MIXED and gpus == "2"))
    for task in ("pretrain", "continue", "lora" if is_alone else "finetune"):
        config, flags = _read(path, f"gpus={gpus}", f"task={task}")
    needs_more = (path.stem, gpus) in LARGE
    assert _plan(config, flags, gpus, "H200" if needs_more else "H100", tmp_path) == 0
    # LoRA needs less memory, because the base model has no gradients and no optimizer state.
    if needs_more and "a3b" not in path.stem:
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
    arguments = ["--model", " ".join(flags), "--cluster", str(file), "--attention", "fused"]
    arguments += ["--tp", "1", "--pp", str(parallel.pipeline_model_parallel_size), "--all-nodes"]
    arguments += ["--dp", str(parallel.data_parallel_size), "--micro-batch-sizes", "1"]
    arguments += ["--recompute", config.recompute.recompute_granularity or "none"]
    arguments += ["--expert-parallel-size", str(parallel.expert_model_parallel_size)]
    arguments += ["--distributed-optimizer", "on" if parallel.data_parallel_size > 1 else "off"]
    arguments += ["--global-batch-size", "64"]
    return plan(arguments)


def _tenth(content: dict[str, Any], stages: int) -> dict[str, Any]:
    """Returns settings that reduce the recipe ``content`` to a tenth of its width."""
    heads = max(2, content["num_attention_heads"] // 8)
    small = {
        "num_layers": 2 * stages,
        "hidden_size": content["hidden_size"] // 10 // 32 * 32,
        "ffn_hidden_size": content["ffn_hidden_size"] // 10 // 16 * 16,
        "num_attention_heads": heads,
        "moe_ffn_hidden_size": content.get("moe_ffn_hidden_size", 0) // 10 // 8 * 8,
        "moe_shared_expert_intermediate_size": 96,
        "kv_channels": 32,
        "num_query_groups": 2,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": f"[0]*1+[1]*{2 * stages - 1}",
        "kv_lora_rank": 48,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    }
    changed = {name: value for name, value in small.items() if name in content}
    run = "vocab_size=500 seq_length=64 train_iters=3 global_batch_size=8 lr_warmup_iters=0"
    run += " moe_grouped_gemm= bf16=false lr=1e-3 min_lr= partition= eval_iters=0 log_interval=1"
    run += " tokenizer_type=HuggingFaceTokenizer transformer_impl=local save_interval=3"
    return changed | dict(word.split("=", 1) for word in run.split())


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that contains a chat tokenizer, conversations and a text file."""
    folder = tmp_path_factory.mktemp("data")
    vocabulary = {f"w{number}": number for number in range(400)}
    encoder = Tokenizer(
        models.WordLevel({**vocabulary, "<end>": 400, "user": 401}, unk_token="user")
    )
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder.save(str(folder / "tokenizer.json"))
    template = "{% for one in messages %}{{ one.role }} {{ one.content }} <end> {% endfor %}"
    settings = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(1)

    def text() -> str:
        return " ".join(f"w{draw.randrange(20)}" for _ in range(draw.randrange(8, 25)))

    lines = [
        [{"role": role, "content": text()} for role in ("user", "assistant")] for _ in range(64)
    ]
    (folder / "said.jsonl").write_text(
        "".join(json.dumps({"messages": message}) + "\n" for message in lines)
    )
    preprocess(
        PreprocessSpec(
            inputs=(_texts(folder, [text() for _ in range(200)]),),
            output_prefix=str(folder / "text"),
            append_eod=True,
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder),
        )
    )
    return folder


def _texts(folder: Path, texts: list[str]) -> Path:
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def train(path: Path, gpus: str, tasks: tuple[str, ...], data: Path, folder: Path) -> None:
    """Trains a recipe at a tenth of its width. Each task continues from the previous task."""
    variant = load_recipe(path)["variants"]["gpus"][int(gpus) if gpus.isdigit() else gpus]
    stages = variant.get("pipeline_model_parallel_size", 1)
    ranks = variant.get("processes_per_node", 1) * variant.get("nodes", 1)
    begin = 0.0
    for number, task in enumerate(tasks):
        changes = {"gpus": gpus, "task": task, **_tenth(load_recipe(path), stages)}
        changes |= {
            "tokenizer_model": data,
            "save": folder / task,
            "data_path": data / "said.jsonl",
        }
        if task in ("pretrain", "continue"):
            changes["data_path"] = data / "text_text_document"
        if task == "lora":
            changes["lr"] = 3e-3
        if number:
            changes["load"] = folder / tasks[number - 1]
        log = folder / f"{task}.log"
        arguments = [f"{name}={value}" for name, value in changes.items()]
        command = ["-m", "megatron.adaptive", "train", "recipe", str(path), *arguments]
        assert run_ranks(command, world_size=ranks, log=log, limit_s=120) == 0, tail(log)
        losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log.read_text())]
        assert len(losses) == 3
        begin = begin or losses[0]
        # A later task starts from trained weights, so even its first loss must be lower.
        assert losses[0 if number else -1] < begin


# Each task starts from the checkpoint of the previous task. Only the long tests run all of these
# tasks on two and on eight GPUs.
IN_TURN = ("pretrain", "continue", "finetune")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "gpus", "tasks"),
    [
        pytest.param("llama3.1-8b", "1", IN_TURN, marks=pytest.mark.long),
        ("mistral-7b", "1", ("lora",)),
        pytest.param("qwen3-8b", "2", IN_TURN[:1], marks=pytest.mark.long),
        pytest.param("qwen3-8b", "2", IN_TURN, marks=pytest.mark.long),
        pytest.param(
            "qwen3-30b-a3b", "2", ("pretrain", "finetune", "lora"), marks=pytest.mark.long
        ),
        pytest.param("deepseek-v2-lite", "8", ("lora",), marks=pytest.mark.long),
        pytest.param("llama3.2-1b", "8", IN_TURN[:1], marks=pytest.mark.long),
        pytest.param("llama3.2-1b", "8", IN_TURN, marks=pytest.mark.long),
        pytest.param("qwen3-0.6b", "2x4", ("pretrain",), marks=pytest.mark.long),
    ],
)
def test_trains_at_a_tenth(
    name: str, gpus: str, tasks: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    """Checks that small versions of the recipes can be trained."""
    (path,) = (recipe for recipe in RECIPES if recipe.stem == name)
    train(path, gpus, tasks, data, tmp_path)
