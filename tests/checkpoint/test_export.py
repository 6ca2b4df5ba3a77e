"""Tests that adapters train as with PEFT, and are read and written in PEFT's format."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.adaptive.checkpoint.export import ADAPTERS
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.reader import CheckpointReader
from megatron.adaptive.checkpoint.safetensors import SINGLE
from megatron.adaptive.cli.checkpoint import export_hf, import_hf
from megatron.adaptive.config.adapters import ADAPTER_CONFIG, Base, adapter_settings
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.families.registry import built_in_families
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.gpt.lora import MARK

from ..multiprocess.launch import run_ranks, tail

WORKER = Path(__file__).parents[1] / "multiprocess" / "lora_worker.py"
LOSSES, GRADIENTS = 1e-5, 1e-4
MODELS = ("llama", "gemma3_text", "qwen3", "gpt2", "gpt_neox", "phi3")
MODELS += ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "predicting")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with small models, their adapters, and PEFT's training results."""
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("peft_models.py")
    subprocess.run([sys.executable, str(script), str(folder), *MODELS], check=True)
    return folder


def compare(folder: Path, cases: list[tuple[str, str]], world_size: int) -> None:
    """Checks that training adapters on ``world_size`` ranks gives the same results as PEFT.

    ``cases`` contains pairs of a model in ``folder`` and flags with parallel sizes.
    """
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


@pytest.mark.long
@pytest.mark.multiprocess
def test_one_rank_trains_as_peft_does(models: Path) -> None:
    # PEFT trains without the loss of the multi-token prediction layer, so set its factor to 0.
    cases = [(name, "--mtp-loss-scaling-factor 0" * (name == "predicting")) for name in MODELS]
    compare(models, [*cases, ("llama", "--recompute-activations")], 1)


_TENSOR = "--tensor-model-parallel-size 2"
_PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
_V = "--num-virtual-stages-per-pipeline-rank 2 --pipeline-placement v"


@pytest.mark.long
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
        ("deepseek_v3", f"{_PIPELINE} zb-h1"),
        ("deepseek_v3", f"{_TENSOR} --sequence-parallel"),
        ("mixtral", f"{_PIPELINE} adaptive {_V}"),
        ("deepseek_v2", "--expert-model-parallel-size 2"),
        ("llama", "--use-distributed-optimizer"),
        ("llama", "--context-parallel-size 2"),
    ]
    compare(models, cases, 2)


@pytest.mark.long
@pytest.mark.multiprocess
def test_four_ranks_train_as_peft_does(models: Path) -> None:
    both = f"{_TENSOR} --sequence-parallel {_PIPELINE} adaptive {_V}"
    sharded = f"{_PIPELINE} zb-h1 --use-distributed-optimizer --overlap-grad-reduce"
    compare(models, [("llama", both), ("gpt2", sharded)], 4)


# The following tests read and write files with adapters.


def _train(folder: Path, flags: str, world_size: int = 2) -> list[str]:
    """Trains with ``flags`` on ``world_size`` ranks, and returns the loss of each iteration.

    The log of the run is written to ``folder``.
    """
    log = folder / "train.log"
    command = ["-m", "megatron.adaptive", "train", "rank", *shlex.split(flags)]
    assert run_ranks(command, world_size=world_size, log=log, limit_s=120.0) == 0, tail(log)
    return re.findall(r"lm loss: (\S+)", log.read_text())


_RUN = "--mock-data --micro-batch-size 1 --global-batch-size 4 --seq-length 12 --eval-iters 0"
_RUN += " --log-interval 1 --vocab-size 95 --save-interval 2 --lr-decay-iters 4"
_SHAPE = f"{_PIPELINE} adaptive {_V}"


def _adapters(checkpoints: Path, output: Path) -> dict[str, torch.Tensor]:
    export_hf([str(checkpoints), "--output", str(output), "--lora"])
    return load_file(output / ADAPTERS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v2"])
def test_adapters_come_out_as_they_went_in(name: str, models: Path, tmp_path: Path) -> None:
    source, saved = models / name / "adapters", tmp_path / "saved"
    start = f"--load-hf {models / name} --load-lora {source} {_RUN} {_SHAPE}"
    _train(tmp_path, f"{start} --lr 1e-30 --train-iters 2 --save {saved}")
    adapters = _adapters(saved, tmp_path / "out")
    for file in (ADAPTERS, ADAPTER_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    # A checkpoint contains only the adapters, because the weights of the model can be loaded from
    # its folder.
    path, manifest = CheckpointFolder(saved).open(2)
    with CheckpointReader(path, manifest["files"], manifest["blocks"]) as reader:
        weights = [name for name in reader.tensors if not name.startswith("optimizer.")]
        assert all(MARK in name for name in reader.tensors)
    assert len(weights) == len(adapters) if name != "llama" else len(weights) < len(adapters)
    export_hf([str(saved), "--output", str(tmp_path / "merged"), "--merge-lora"])
    before, after = (load_file(folder / SINGLE) for folder in (models / name, tmp_path / "merged"))
    config = json.loads((source / ADAPTER_CONFIG).read_text())
    for key, weight in before.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapters:
            first, second = (adapters[f"{module}.lora_{letter}.weight"] for letter in "AB")
            change = second @ first * (config["lora_alpha"] / config["r"])
            weight = weight + (change.t() if name == "gpt2" else change)
        assert torch.allclose(after[key], weight, atol=1e-6), key


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_run_goes_on_bit_for_bit(models: Path, tmp_path: Path) -> None:
    start = f"--load-hf {models / 'llama'} --lora-rank 4 --lora-dropout 0.2 --bf16 --lr 1e-2"
    start += f" --lora-targets q_proj,v_proj,down_proj --use-distributed-optimizer {_RUN}"
    once, twice = tmp_path / "once", tmp_path / "twice"
    whole = _train(tmp_path, f"{start} {_SHAPE} --train-iters 4 --save {once}")
    _train(tmp_path, f"{start} {_SHAPE} --train-iters 2 --save {twice}")
    again = f"{start} {_SHAPE} --train-iters 4 --load {twice} --save {twice}"
    assert _train(tmp_path, again) == whole[2:]
    # A run with other parallel sizes must be able to continue from this checkpoint. Its results
    # differ slightly, because it sums in a different order.
    other = f"{start} {_TENSOR} --sequence-parallel --lora-dropout 0 --train-iters 3"
    _train(tmp_path, f"{other} --load {twice} --ckpt-step 2")
    first, second = (
        _adapters(folder, folder.with_name(f"{folder.name}-out")) for folder in (once, twice)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[key]) for key, weight in first.items())
    assert any(weight.count_nonzero() for key, weight in first.items() if "lora_B" in key)
    assert not any("k_proj" in key for key in first)
    # PEFT must be able to load the exported adapters.
    check = "import peft, sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained"
    check += "(sys.argv[1]); peft.PeftModel.from_pretrained(m, sys.argv[2])"
    arguments = [str(models / "llama"), str(tmp_path / "once-out")]
    done = subprocess.run([sys.executable, "-c", check, *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.multiprocess
def test_adapters_beside_a_checkpoint(models: Path, tmp_path: Path) -> None:
    """Checks that model and adapters are saved together, and can be merged in the export."""
    import_hf([str(models / "llama"), "--output", str(tmp_path / "imported")])
    flags = (tmp_path / "imported" / "model_flags.txt").read_text()
    start = f"{flags} {_RUN} --lora-rank 2 --lr 1e-2"
    saved = tmp_path / "saved"
    first = f"{start} --load {tmp_path / 'imported'} --finetune --train-iters 2 --save {saved}"
    losses = _train(tmp_path, first, world_size=1)
    again = f"{start} --load {saved} --train-iters 4 --save {saved}"
    assert _train(tmp_path, again, world_size=1)[0] < losses[0]
    like = ["--config", str(models / "llama")]
    with pytest.raises(CheckpointError, match="contains adapters; use --lora to export"):
        export_hf([str(saved), "--output", str(tmp_path / "whole"), *like])
    export_hf([str(saved), "--output", str(tmp_path / "whole"), "--merge-lora", *like])
    export_hf([str(saved), "--output", str(tmp_path / "adapters"), "--lora", *like])
    with pytest.raises(CheckpointError, match="contains no adapters; remove --lora"):
        export_hf([str(tmp_path / "imported"), "--output", str(tmp_path / "no"), "--lora"])
    before, after = (
        load_file(folder / SINGLE) for folder in (models / "llama", tmp_path / "whole")
    )
    assert before.keys() == after.keys()
    changed = {key for key, weight in before.items() if not torch.equal(weight, after[key])}
    assert changed == {key for key in before if "proj" in key}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--lora-targets q_prj",
            "--lora-targets q_prj is not .* the nearest is q_proj, and .* are q_",
        ),
        ("--lora-targets lm_head", "lm_head is not a linear layer of this architecture"),
        ("--lora-rank 0", "--lora-rank: 0 is too small; give at least 1"),
        ("--lora-rank -2", "--lora-rank: -2 is too small"),
        ("--lora-dropout 1", "--lora-dropout: 1.0 is too large"),
        ("--num-experts 4", "experts cannot have adapters; .*q_proj,k_proj,v_proj,o_proj.$"),
    ],
)
def test_adapters_that_cannot_be_are_refused(flags: str, message: str) -> None:
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 12"
    model += " --seq-length 12 --vocab-size 90 --swiglu --micro-batch-size 1 --train-iters 1"
    arguments = f"{model} --lr 1e-3 --mock-data --lora-rank 4 {flags}".split()
    with pytest.raises(ConfigError, match=message) as info:
        parse(arguments, world_size=1, last_wins=True)
    assert "\n" not in str(info.value)
    without = arguments[: arguments.index("--lora-rank")]
    with pytest.raises(ConfigError, match="--lora-alpha 2 requires --lora-rank"):
        parse([*without, "--lora-alpha", "2"], world_size=1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"something_new": 3}, "something_new 3 is not supported"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"target_modules": 5}, "target_modules must be a list of names.*got 5"),
        ({"target_modules": []}, r"target_modules must be a list of names.*got \[\]"),
        ({"target_modules": ".*[qv_proj"}, r"target_modules '.*' is not a valid regular"),
        ({"target_modules": "(a+)+q_proj"}, "has nested repetitions; list the names"),
        ({"target_modules": "nothing"}, "target_modules 'nothing' matches no linear layer of"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "matches lm_head, which cannot have adapters"),
        ({"target_modules": r".*layers\.[12]\.self_attn.*q_proj"}, "in layer 1 and in layer 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number.*got None"),
        ({"r": 2.5}, "r must be an integer.*got 2.5"),
        ({"r": None}, "r must be an integer.*got None"),
        ({"lora_dropout": "0.1"}, "lora_dropout must be a number.*got '0.1'"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **keys}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        adapter_settings(tmp_path, Base(family=built_in_families()["llama"], layers=4))


@pytest.mark.multiprocess
def test_adapters_of_another_model_are_named(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    flags = f"--load-hf {models / 'qwen3'} --load-lora {models / 'llama' / 'adapters'} {_RUN}"
    flags += " --lora-targets q_proj,v_proj --train-iters 2 --lr 1e-3"
    command = ["-m", "megatron.adaptive", "train", "rank", *flags.split()]
    assert run_ranks(command, world_size=1, log=log, limit_s=120.0) == 2
    assert re.search(r"error: .*.*lora_A.weight has shape \[.*\], but this model", log.read_text())


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen3"])
@pytest.mark.parametrize(
    "pattern",
    [
        ".*(q|v)_proj",
        ".*_proj",
        r"model\.layers\.\d+\.self_attn\..*_proj",
        r"transformer\.h\..*\.c_.*",
        ".*mlp.*",
        ".*attn.*",
        r".*\.(qkv|o|gate_up)_proj",
        "(?:model|transformer).*",
    ],
)
def test_a_pattern_is_resolved_as_peft_does(
    family: str, pattern: str, models: Path, tmp_path: Path
) -> None:
    """Checks that a pattern selects the same linear layers as in PEFT."""
    import peft
    import transformers

    document = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": pattern}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(document))
    config = transformers.AutoConfig.from_pretrained(models / family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    expected = {
        name.split(".", 3)[-1]
        for name, module in model.named_modules()
        if isinstance(module, linear)
        and peft.tuners.tuners_utils.check_target_module_exists(
            peft.LoraConfig(target_modules=pattern), name
        )
    }
    try:
        base = Base(family=built_in_families()[family], layers=4)
        targets = adapter_settings(tmp_path, base)["lora_targets"]
    except ConfigError as error:
        message = str(error)
        assert not expected or "cannot have adapters" in message
        return
    assert targets.split(",") == sorted(expected)
