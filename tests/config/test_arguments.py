"""Tests which flags are accepted, how flags are parsed, and errors about flags at the start."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.config.arguments import flag_table, make_parser, parse, read_recipe
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.flags import flag as described_field
from megatron.adaptive.config.trainer import TrainerConfig, groups
from megatron.adaptive.config.unsupported_flags import NEWER, is_idle, reason_for, refused_flags
from megatron.adaptive.errors import ConfigError

from .conftest import SMALL, cases_of, check_words, complaint, small
from .megatron_lm_flags import ALL

BARE = Installed(transformer_engine=False)

GPT3_857M = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
--max-position-embeddings 2048 --attention-backend auto
--micro-batch-size 8 --global-batch-size 128 --train-iters 500000 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce
--data-path 0.3 a_text_document 0.7 b_text_document --vocab-file vocab.json
--merge-file merges.txt --tokenizer-type GPT2BPETokenizer --data-impl mmap --split 949,50,1
--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
--save {folder}/checkpoints --load {folder}/checkpoints --tensorboard-dir {folder}/tensorboard
--tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
--log-validation-ppl-to-tensorboard --log-throughput --distributed-backend nccl
--distributed-timeout-minutes 30 --use-mcore-models --ckpt-format torch_dist
--profile-execution True --profile-name gpt --no-masked-softmax-fusion
--no-async-tensor-model-parallel-allreduce --transformer-impl local
"""

GPT_345M_OLD = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 8
--global-batch-size 64 --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000
--lr-decay-iters 320000 --save {folder}/c --load {folder}/c --data-path my-gpt2_text_document
--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1
--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations
--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
"""


def test_a_realistic_command_line_of_megatron_lm_is_read_whole(tmp_path: Path) -> None:
    argv = GPT3_857M.format(folder=tmp_path).split()
    config = parse(argv, world_size=16, installed=BARE)

    assert config.model.num_layers == 24
    assert config.model.ffn_hidden_size == 4096
    assert config.parallel.data_parallel_size == 2
    assert config.parallel.num_chunks == 2
    assert config.num_stages == 8
    assert config.layers_per_stage == (3,) * 8
    assert config.num_microbatches == 8
    assert config.precision.dtype_name == "float16"
    assert config.optimizer.lr == 6e-5
    assert config.optimizer.min_lr == 6e-6
    assert config.data.data_path == ("0.3", "a_text_document", "0.7", "b_text_document")
    assert config.checkpoint.save == f"{tmp_path}/checkpoints"
    assert config.run.profile_execution is True
    assert config.run.profile_name == "gpt"
    assert config.schedule.pipeline_schedule == "adaptive"
    assert config.schedule.pipeline_timeout_s == 30 * 60
    assert list(tmp_path.iterdir()) == []


def test_the_old_345m_example_is_read_with_its_old_name_for_recompute(tmp_path: Path) -> None:
    argv = GPT_345M_OLD.format(folder=tmp_path).split()
    config = parse(argv, world_size=8, installed=BARE)

    assert config.recompute.recompute_granularity == "full"
    assert config.recompute.recompute_method == "uniform"
    assert config.recompute.recompute_num_layers == 1
    assert config.num_microbatches == 1


TAKEN = {name for kind in groups().values() for spec in fields_of(kind) for name in spec.names}


MOST_REFUSED = 170


def test_each_flag_of_megatron_lm_is_taken_or_idle_or_refused_by_name() -> None:
    """Checks that each flag of Megatron-LM is either supported, ignored, or rejected with a reason.

    If a setting was added in a newer release of megatron-core, its flag exists only with that
    release.
    """
    flags = sorted({*ALL, *TAKEN, *refused_flags()})
    later = {flag for flag in NEWER if flag not in TAKEN}
    ways = {f: (f in TAKEN, is_idle(f), reason_for(f) is not None, f in later) for f in flags}
    assert {flag: way for flag, way in ways.items() if sum(way) != 1} == {}
    assert len(refused_flags()) <= MOST_REFUSED
    assert reason_for("--no-such-flag") is None
    assert not is_idle("--no-such-flag")
    for flag in later:
        assert "a newer megatron-core than the installed version" in complaint(flag)


def test_an_idle_flag_goes_with_its_values() -> None:
    config = small("--img-h 8 --titles-data-path a b --inference-max-requests=8 --bf16")
    assert config == small("--bf16")


def test_settings_of_megatron_core_are_flags_by_its_names() -> None:
    latent = "--multi-latent-attention --q-lora-rank 8 --mscale 0.5 --rope-type rope"
    core = small(
        f"{latent} --window-size 16,0 --no-rope-freq [0]*3+[1] --softmax-type learnable"
    ).core
    assert (core.multi_latent_attention, core.q_lora_rank, core.mscale) == (True, 8, 0.5)
    assert (core.window_size, core.no_rope_freq) == ((16, 0), "[0]*3+[1]")
    # The defaults must be those of Megatron-LM, which differ from those of megatron-core's classes.
    assert (core.kv_lora_rank, core.rotary_scaling_factor) == (32, 1.0)
    assert (
        small("--no-clone-scatter-output-in-embedding").core.clone_scatter_output_in_embedding
        is False
    )


def test_a_checkpoint_holds_settings_of_megatron_core_that_were_given() -> None:
    config = small("--multi-latent-attention --window-size 16,0")
    saved = json.loads(json.dumps(config.to_dict()))
    assert saved["core"] == {"multi_latent_attention": True, "window_size": [16, 0]}
    assert TrainerConfig.from_dict(saved) == config
    # Earlier versions of this package saved this setting, but did not use it. It must be ignored.
    saved["core"] = {"muon_split_qkv": False}
    former = TrainerConfig.from_dict(saved)
    assert (former.core, former.optimizer) == (small().core, small().optimizer)
    del saved["core"]
    assert TrainerConfig.from_dict(saved).core == small().core


def test_a_checkpoint_holds_settings_of_muon() -> None:
    config = small("--optimizer muon --muon-no-split-qkv --muon-nesterov --muon-num-ns-steps 3")
    settings = config.optimizer
    assert (settings.muon_split_qkv, settings.muon_nesterov) == (False, True)
    saved = json.loads(json.dumps(config.to_dict()))
    assert TrainerConfig.from_dict(saved) == config


def test_each_flag_is_refused_in_one_line_that_says_what_to_do() -> None:
    for flag in refused_flags():
        reason = reason_for(flag)
        assert reason is not None
        assert reason == " ".join(reason.split())
        assert ";" in reason or "use" in reason or "given with" in reason


BAD = """\
--pipline-schedule adaptive => --pipline-schedule is not a flag | the nearest is --pipeline-schedule
--num-layer 8 => the nearest is --num-layers
--num-expert 8 => the nearest is --num-experts
NOTHING --hidden-size 64 --lr 1
    => --num-layers, --num-attention-heads, --seq-length | --micro-batch-size are required
NO_RATE => --lr is required
NO_LENGTH => --train-iters or --train-samples
--delay-wgrad-compute
    => --delay-wgrad-compute is a flag | refuses | --split-backward
--fp8-format hybrid => --fp8-format is a flag of Megatron-LM that this trainer refuses | float32
--log-energy
    => --log-energy is a flag of Megatron-LM that this trainer refuses | --wandb-project
--pipeline-model-parallel-layout E|tx|L => E|tx|L | is not a layout | joined by '|'
--pipeline-model-parallel-layout t|EL => t|EL | E (embedding) comes first
--pipeline-model-parallel-layout |Et|L => must have E on the first stage
--pipeline-model-parallel-layout Et|m|mL => m on several stages
--pipeline-model-parallel-layout E((t*9999)*9999)*9999L => more than 100000
--pipeline-model-parallel-layout E(t*9999)*9999L => more than 100000
--pipeline-model-parallel-layout EttttL --partition 4
    => --pipeline-model-parallel-layout EttttL and --partition 4 exclude each other
--cuda-graph-impl local
    => --cuda-graph-impl is a flag of Megatron-LM that this trainer refuses | CUDA graph
--tp-comm-overlap
    => --tp-comm-overlap is a flag of Megatron-LM that this trainer refuses | user buffers
--local-rank 0 => --local-rank is a flag of Megatron-LM that this trainer refuses | torchrun
--batch-size=8
    => --batch-size is a flag of Megatron-LM that this trainer refuses | --micro-batch-size
--ckpt-format torch => --ckpt-format | 'torch' | torch_dist
--tokenizer-type Llama2Tokenizer => Llama2Tokenizer | --tokenizer-model
--kv-lora-rank 8 => --kv-lora-rank 8 requires | --multi-latent-attention
--multi-latent-attention --group-query-attention => --group-query-attention | remove
--window-size 8 => '8' | 128,0
--window-size=-1,0 => '-1,0' begins with -1 | remove the flag
--window-size 8,2 => '8,2' ends with 2 | give 8,0
--no-rope-freq [0]*a => [0]*a | neither a number nor a list
--rope-type linear => 'linear' | rope, yarn
--optimizer soap => 'soap' | state of adam, sgd and muon | use one of these
--optimizer dist_muon => 'dist_muon' | state of adam, sgd and muon | use one of these
--muon-momentum 0.8 => --muon-momentum 0.8 requires --optimizer muon, got --optimizer adam
--optimizer muon --fp16 => --optimizer muon and --fp16 exclude each other | use bf16
--optimizer muon --lora-rank 4 => --optimizer muon and --lora-rank 4 exclude each other | adapters
--optimizer muon --use-distributed-optimizer
    => --use-distributed-optimizer | --optimizer muon | only the state of adam
--optimizer muon --muon-scalar-optimizer lion => 'lion' | state of adam, sgd and muon
--use-layer-wise-distributed-optimizer
    => refuses | --use-distributed-optimizer
--dataloader-type cyclic => 'cyclic' is refused
--position-embedding-type mrope => 'mrope' | rope
--pipeline-schedule fastest => 'fastest' | 1f1b, adaptive, auto
--timing-log-level 3 => 3 | 0, 1, 2
--num-layers four => --num-layers | 'four' | integer
--num-layers 4.5 => '4.5' | integer
--num-layers 0 => --num-layers | 0 | at least 1
--lr fast => --lr | 'fast' | not a number
--lr nan => nan is not | finite
--lr 0 => 0 | more than 0
--hidden-dropout 1 => --hidden-dropout | 1 | less than 1
--rotary-percent 1.5 => 1.5 | at most 1
--activation-cap 0.5 => 0.5 | at least 1
--profile-execution maybe => 'maybe' | True or False
--partition 4- => --partition | '4-' | 0-11-8-8
--partition 2,2 => '2,2' | 0-11-8-8
--rampup-batch-size 2 2 => --rampup-batch-size | 3 arguments
--num-layers => --num-layers | one argument
--save= --fp16 => --save | empty
stray => 'stray' | does not belong to a flag
"""


EXCLUSIVE = """\
--fp16 --bf16
--train-iters 10 --train-samples 100
--train-iters 10 --lr-decay-samples 100
--train-iters 10 --rampup-batch-size 2 2 100
--lr-warmup-fraction 0.1 --lr-warmup-iters 1
--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2
--partition 1-0-3 --num-layers-per-virtual-pipeline-stage 1
--mock-data --data-path x
NO_DATA --data-path x --train-data-path y
NO_DATA --split 9,1,0 --train-data-path y
--checkpoint-activations --recompute-granularity selective
--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler
"""


@pytest.mark.parametrize(("flags", "world_size", "phrases"), cases_of(BAD))
def test_a_bad_flag_is_answered_with_flag_value_and_rule(
    flags: str, world_size: int, phrases: list[str]
) -> None:
    check_words(flags, world_size, phrases)


@pytest.mark.parametrize("flags", EXCLUSIVE.splitlines())
def test_flags_that_exclude_each_other_are_both_named(flags: str) -> None:
    """Checks that the error names all flags, and shows the partition as the user wrote it."""
    names = [word for word in flags.split() if word.startswith("--") or word == "1-0-3"]
    check_words(flags, 1, ["exclude each other", *names])


def test_a_repeated_flag_is_refused_unless_the_last_shall_win() -> None:
    argv = [*SMALL.split(), "--train-iters", "20"]
    with pytest.raises(ConfigError, match="--train-iters is given twice"):
        parse(argv, world_size=1, installed=BARE)
    config = parse(argv, world_size=1, installed=BARE, last_wins=True)
    assert config.run.train_iters == 20
    assert small("--num-layers=8 --partition=8").layers_per_stage == (8,)
    argv = [*SMALL.split(), "--model-chunks", "1", "--num-virtual-stages-per-pipeline-rank", "1"]
    with pytest.raises(ConfigError, match="--model-chunks and --num-virtual-stages"):
        parse(argv, world_size=1, installed=BARE)


def test_data_args_path_stands_for_data_path(tmp_path: Path) -> None:
    listing = tmp_path / "data.txt"
    listing.write_text("0.5 a\n0.5 b\n", encoding="utf-8")
    config = small(f"FILES --data-args-path {listing}")
    assert config.data.data_path == ("0.5", "a", "0.5", "b")


def test_an_unreadable_data_args_path_is_refused(tmp_path: Path) -> None:
    assert "No such file" in complaint(f"FILES --data-args-path {tmp_path}/none")
    (tmp_path / "empty").touch()
    assert "is empty" in complaint(f"FILES --data-args-path {tmp_path}/empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not valid UTF-8" in complaint(f"FILES --data-args-path {tmp_path}/binary")


def test_the_table_has_a_row_for_each_flag() -> None:
    table = flag_table()
    rows = [row for rows in table.values() for row in rows]
    shown = {flag.split()[0].rstrip(",") for flag, _, _ in rows}
    options = {action.option_strings[0] for action in make_parser()._actions}
    assert shown == options - {"-h"}
    assert all(text.endswith(".") and default for _, default, text in rows)
    assert all(table)
    group = table["Pipeline schedule and traces"]
    assert any(flag.startswith("--partition") for flag, _, _ in group)
    rate = next(default for flag, default, _ in rows if flag.startswith("--lr "))
    assert rate == "required"


def test_an_empty_list_is_shown_as_no_default() -> None:
    """Checks the help text of a default that is an empty list, as in newer megatron-core."""
    names = described_field("Names of parameters.", ())
    kind = dataclasses.make_dataclass("Names", [("names", tuple[str, ...], names)])
    (spec,) = fields_of(kind)
    assert spec.default_text == "none"


def test_help_names_a_default_only_if_there_is_one() -> None:
    text = " ".join(make_parser().format_help().split())
    assert re.search(r"\(default: none\)", text, re.IGNORECASE) is None
    assert "Maximum learning rate. (required)" in text
    assert (
        "Number of tokens to generate after the prompt. Takes effect only with --sample-prompt. ("
        in text
    )
    assert "Fixed loss scale for float16. (default: adjusted during training)" in text


def test_help_lists_the_flags_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], world_size=1, installed=BARE)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--pipeline-schedule" in text
    assert "--rampup-batch-size START INCREMENT SAMPLES" in text


def test_importing_the_command_line_imports_no_torch() -> None:
    code = (
        "import sys, megatron.adaptive.config.arguments\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')"
        " or m.startswith('megatron.core')]\n"
        "sys.exit(' '.join(bad[:5]) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The following tests check recipes.

RECIPE = {
    "hidden_size": 64,
    "disable-bias-linear": True,
    "swiglu": False,
    "rampup_batch_size": [1, 2, 3],
    "partition": [1, 3],
    "variants": {
        "task": {"a": {"lr": 1e-3, "bf16": True}, "b": {"lr": "2e-4"}},
        "gpus": {1: None, "2x4": {"nodes": 2, "processes_per_node": 4}},
    },
}


def test_a_recipe_is_a_command_line() -> None:
    base = ["--hidden-size", "64", "--disable-bias-linear"]
    base += ["--rampup-batch-size", "1", "2", "3", "--partition", "1-3"]
    recipe = read_recipe(RECIPE, [], "r.yaml")
    assert recipe == ([*base, "--lr", "0.001", "--bf16"], 1, 1)
    changes = ["task=b", "gpus=2x4", "hidden-size=8", "disable_bias_linear=false", "partition="]
    recipe = read_recipe(RECIPE, changes, "r.yaml")
    assert recipe == (["--hidden-size", "8", *base[3:7], "--lr", "2e-4"], 2, 4)
    flags = read_recipe({**RECIPE, "lr": 3}, [], "r.yaml").flags
    # The value of the variant must replace the value of the recipe.
    assert flags[flags.index("--lr") + 1] == "0.001"


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"num_layrs": 3}, [], "r.yaml: num_layrs is not a setting; the nearest is num_layers"),
        ({}, ["num_layrs=3"], "the command line: num_layrs is not a setting"),
        ({"yaml_cfg": "x"}, [], "this trainer refuses it"),
        ({"model": {}}, [], "model is not a setting"),
        ({"seed": {"x": 1}}, [], "seed must be a single value, but contains"),
        ({"swiglu": 7}, [], "swiglu must be true or false, got 7"),
        ({}, ["nodes=many"], "nodes must be a positive integer, got many"),
        ({"variants": []}, [], "variants must contain keys"),
        ({}, ["lr=1", "lr=2"], "lr is given twice"),
        ({}, ["lr"], "write key=value"),
        ({}, ["gpus=3"], "r.yaml; choose one of 1, 2x4"),
    ],
)
def test_a_wrong_recipe_is_refused(
    change: dict[str, Any], arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_recipe({**RECIPE, **change}, arguments, "r.yaml")
