"""Tests how ``conf.sh`` and plan files are read, and that error messages contain wrong values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.cluster.conf import SETTINGS, LaunchConf, load_conf
from megatron.adaptive.cluster.node_processes import (
    NodePlace,
    check_files,
    check_trainer,
    node_command,
    trainer_flags,
)
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes a ``conf.sh`` to a folder whose name contains a space."""

    def make(text: str) -> Path:
        path = tmp_path / "my run" / "conf.sh"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return make


def test_the_template_is_sound_and_names_every_variable() -> None:
    text = (ROOT / "conf.sh").read_text()
    conf = load_conf(ROOT / "conf.sh", ["NPROC_PER_NODE=1"])
    assert (conf.nodes, conf.world_size) == (2, 2)
    check_trainer(conf, 2, Path("/nowhere"))
    named = set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=", text, re.MULTILINE))
    assert named == set(SETTINGS)


def test_bash_computes_and_helpers_are_free(write: Write) -> None:
    path = write(
        "gpus=2\nNNODES=3\nNPROC_PER_NODE=$((gpus))\nWORLD_SIZE=$((NNODES * NPROC_PER_NODE))\n"
        "export NCCL_DEBUG=INFO\nWANDB_MODE=offline\nLOG_DIR='here and there'\n"
    )
    conf = load_conf(path)
    assert conf.processes == (2, 2, 2)
    assert conf.environment == {"NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert conf.path("LOG_DIR") == path.parent / "here and there"


def test_mixed_nodes_keep_their_order(write: Write) -> None:
    conf = load_conf(
        write(
            "HOMOGENEOUS_CLUSTER=false\nNODES='v100:1x2 a10:2x4'\n"
            "SLURM_PARTITION='a10=fast v100=old'\nSLURM_GRES=gpu\n"
        )
    )
    assert conf.processes == (2, 4, 4)
    assert [group.partition for group in conf.groups] == ["old", "fast"]
    assert [group.gres for group in conf.groups] == ["gpu", "gpu"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WORLD_SIZE=5\nNNODES=2\nNPROC_PER_NODE=2", ["WORLD_SIZE=5", "2 + 2 = 4"]),
        ("NNODES=2\nNPROC_PER_NODE=2\nPIPELINE_MP_SIZE=3", ["WORLD_SIZE=4", "1 x 3 = 3"]),
        ("NNODES=2\nNPROC_PER_NODE=2\nDP_SIZE=3", ["DP_SIZE=3", "must be 4"]),
        (
            "NNODES=2\nNPROC_PER_NODE=4\nPIPELINE_MP_SIZE=2\nCONTEXT_MP_SIZE=2\nDP_SIZE=4",
            ["DP_SIZE=4", "must be 2", "CONTEXT_MP_SIZE = 1 x 2 x 2 = 4"],
        ),
        ("NPROC_PER_NODE=3\nSTAGE_DP_SIZES=2-1\nDP_SIZE=2", ["STAGE_DP_SIZES=2-1", "DP_SIZE=2"]),
        ("NPROC_PER_NOD=2", ["NPROC_PER_NOD ", "nearest is NPROC_PER_NODE"]),
        ("NNODES=two", ["NNODES=two", "integer"]),
        ("MASTER_PORT=70000", ["MASTER_PORT=70000", "65535"]),
        ("LR=0", ["LR=0", "more than 0"]),
        ("SEQUENCE_SLICES=0", ["SEQUENCE_SLICES=0", "at least 1; auto is also allowed"]),
        ("SEQUENCE_SLICES=many", ["SEQUENCE_SLICES=many", "integer; auto is also allowed"]),
        ("PROFILE=maybe", ["PROFILE=maybe", "True or False"]),
        ("CONTAINER=docker", ["CONTAINER=docker", "apptainer"]),
        ("CONTAINER=pyxis", ["CONTAINER=pyxis", "IMAGE"]),
        ("NODES=a10:2x4", ["NODES=a10:2x4", "HOMOGENEOUS_CLUSTER=false"]),
        ("HOMOGENEOUS_CLUSTER=false", ["NODES="]),
        ("HOMOGENEOUS_CLUSTER=false\nNODES=a10:2", ["'a10:2'", "TYPE:NODESxGPUS"]),
        (
            "HOMOGENEOUS_CLUSTER=false\nNODES='a:1x1 b:1x1'\nSLURM_PARTITION=a=x",
            ["SLURM_PARTITION=a=x", "the type b"],
        ),
        ("HOMOGENEOUS_CLUSTER=false\nNODES=a:1x1\nNNODES=2", ["NNODES=2", "which has 1 nodes"]),
        ('TRAINER_FLAGS="--x \'y"', ["TRAINER_FLAGS", "quot"]),
        ("NNODES=(1 2)", ["NNODES is an array"]),
        ("if true; then", ["conf.sh", "line", "syntax error"]),
        ("LR=$undefined", ["line 1", "unbound variable"]),
        ("NSYS=true\nNCU=true", ["NSYS=true", "NCU=true"]),
    ],
)
def test_a_mistake_is_named(text: str, expected: list[str], write: Write) -> None:
    with pytest.raises(ConfigError) as info:
        load_conf(write(text + "\n"))
    message = str(info.value)
    assert len(message.splitlines()) == 1
    for word in expected:
        assert word in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "MODEL=tiny\nPIPELINE_MP_SIZE=2\nPARTITION=2-3",
            ["PARTITION=2-3 has 5 layers", "--num-layers of MODEL=tiny is 4"],
        ),
        ("PARTITION=4-x", ["PARTITION: '4-x' is not a partition"]),
        ("PARTITION=4-4", ["PARTITION=4-4 has 2 stages", "requires 1"]),
        ("STAGE_DP_SIZES=2-x", ["STAGE_DP_SIZES: '2-x'", "as in 2-1-1"]),
        (
            "PIPELINE_MP_SIZE=2\nSTAGE_DP_SIZES=2-1",
            ["STAGE_DP_SIZES=2-1 needs 3 processes, but this run has 2"],
        ),
        (
            "GLOBAL_BATCH_SIZE=5",
            ["GLOBAL_BATCH_SIZE=5 is not a multiple of MICRO_BATCH_SIZE=1 x", "2 = 2"],
        ),
        ("MODEL=gpt-345", ["MODEL=gpt-345", "nearest name is gpt-345m"]),
        ("SCHEDULE=fastest", ["SCHEDULE: 'fastest'"]),
        ("TRAINER_FLAGS=--bf61", ["--bf61", "--bf16"]),
        ("DATA=no/such/corpus", ["no/such/corpus"]),
        ("LOCAL_CHECKPOINT_DIR=/disk", ["LOCAL_CHECKPOINT_DIR=/disk", "requires CHECKPOINT_DIR"]),
    ],
)
def test_the_trainers_rules_are_checked_beforehand(
    text: str, expected: list[str], write: Write
) -> None:
    conf = load_conf(write(f"{text}\nNNODES=2\nNPROC_PER_NODE=1\n"))
    with pytest.raises(Exception, match=re.escape(expected[0])) as info:
        check_data_and_trainer(conf)
    for word in expected:
        assert word in str(info.value)


def check_data_and_trainer(conf: LaunchConf) -> None:
    check_trainer(conf, 2, Path("/nowhere"))
    check_files(conf)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_one_that_the_trainer_takes(model: str) -> None:
    conf = load_conf(None, [f"MODEL={model}", "NNODES=1", "NPROC_PER_NODE=1"])
    check_trainer(conf, 1, Path("/nowhere"))


def test_a_file_of_flags_is_a_model(write: Write) -> None:
    path = write("MODEL=shape.args\n")
    (path.parent / "shape.args").write_text("--num-layers 2 # few\n--hidden-size 16\n")
    assert trainer_flags(load_conf(path), Path("/x"))[:4] == [
        *("--num-layers", "2", "--hidden-size", "16")
    ]


def test_the_command_of_a_node() -> None:
    folders = ["CHECKPOINT_DIR=/shared/run", "LOCAL_CHECKPOINT_DIR=/scratch/run"]
    conf = load_conf(None, ["TRACE=true", "TRAINER_FLAGS=--seed 7", *folders])
    node = NodePlace(node_rank=1, processes=(2, 4), master_addr="10.0.0.1", master_port=2000)
    text = " ".join(node_command(conf, node, Path("/logs/1")))
    assert "--world-size 6 --nnodes 2 --node-rank 1 --nproc-per-node 4" in text
    assert "--master-addr 10.0.0.1 --master-port 2000" in text
    assert "--save /shared/run --load /shared/run" in text
    assert "--save-local /scratch/run" in text
    assert text.endswith("--trace-dir /logs/1/traces --seed 7")


@pytest.mark.parametrize("slices", ["auto", "8"])
def test_a_number_of_slices_or_auto_reaches_the_trainer(slices: str, write: Write) -> None:
    conf = load_conf(
        write(
            f"SEQUENCE_SLICES={slices}\nSCHEDULE=auto\nPIPELINE_MP_SIZE=2\n"
            "NNODES=2\nNPROC_PER_NODE=1\n"
        )
    )
    flags = trainer_flags(conf, Path("/nowhere"))
    assert flags[flags.index("--sequence-slices") + 1] == slices
    check_trainer(conf, 2, Path("/nowhere"))


def test_the_plan_of_the_documentation(write: Write, tmp_path: Path) -> None:
    text = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.DOTALL)
    assert text is not None
    plan = tmp_path / "plan.json"
    plan.write_text(text[1])
    conf = load_conf(write("MODEL=small\nGLOBAL_BATCH_SIZE=32\n"), plan=plan)
    assert conf.processes == (2, 2, 2)
    assert (conf["PIPELINE_MP_SIZE"], conf["DP_SIZE"], conf["PARTITION"]) == (3, 2, "3-3-2")
    check_trainer(conf, 6, tmp_path)
    with pytest.raises(ConfigError, match=r"SIZE=8 contradicts PLAN=.* sets GLOBAL_BATCH_SIZE=32"):
        load_conf(write("GLOBAL_BATCH_SIZE=8\n"), plan=plan)
    assert load_conf(None, ["GLOBAL_BATCH_SIZE=16"], plan)["GLOBAL_BATCH_SIZE"] == 16
