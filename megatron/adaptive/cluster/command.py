"""The commands that a configuration turns into: the trainer's flags and each node's torchrun."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.models import model_flags
from megatron.adaptive.config.partition import parse_partition
from megatron.adaptive.config.plan import further_flags
from megatron.adaptive.errors import ConfigError

__all__ = [
    "ROOT",
    "NodePlace",
    "check_trainer",
    "in_container",
    "node_command",
    "python_of",
    "run_record",
    "trainer_flags",
]

ROOT = Path(__file__).resolve().parents[3]
_MOCK_VOCABULARY = "50303"


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """What a node is told of the job when all have met.

    Attributes:
        node_rank: of this node.
        processes: processes of each node, by node rank.
        master_addr: where the first node listens.
        master_port: its port.
    """

    node_rank: int
    processes: tuple[int, ...]
    master_addr: str
    master_port: int


def trainer_flags(conf: LaunchConf, run_dir: Path) -> list[str]:
    """Return the flags of ``pretrain_gpt.py``.

    Args:
        conf: the configuration.
        run_dir: folder of this job's logs, for traces and profiles.

    Raises:
        ConfigError: the model is unknown.
    """
    flags = model_flags(conf["MODEL"], conf.folder)
    for name, flag in (
        ("TENSOR_MP_SIZE", "--tensor-model-parallel-size"),
        ("PIPELINE_MP_SIZE", "--pipeline-model-parallel-size"),
        ("MICRO_BATCH_SIZE", "--micro-batch-size"),
        ("GLOBAL_BATCH_SIZE", "--global-batch-size"),
        ("SCHEDULE", "--pipeline-schedule"),
        ("PARTITION", "--partition"),
        ("STAGE_DP_SIZES", "--stage-data-parallel-sizes"),
        ("TRAIN_ITERS", "--train-iters"),
    ):
        if conf[name] is not None:
            flags += [flag, str(conf[name])]
    flags += ["--lr", repr(conf["LR"]), "--log-interval", "1", "--eval-iters", "0"]
    if conf["MODEL_CHUNKS"] > 1:
        flags += ["--model-chunks", str(conf["MODEL_CHUNKS"])]
    flags += further_flags(conf.values)
    flags += _data_flags(conf)
    if conf["CHECKPOINT_DIR"]:
        folder = str(conf.path("CHECKPOINT_DIR"))
        flags += ["--save", folder, "--load", folder, "--save-interval", str(conf["SAVE_INTERVAL"])]
        if conf["LOCAL_CHECKPOINT_DIR"]:
            flags += ["--save-local", str(conf.path("LOCAL_CHECKPOINT_DIR"))]
    if conf["TRACE"]:
        flags += ["--trace-dir", str(run_dir / "traces")]
    if conf["PROFILE"] or conf["NSYS"] or conf["NCU"]:
        flags.append("--profile")
    if conf["PROFILE"]:
        flags += ["--use-pytorch-profiler", "--tensorboard-dir", str(run_dir / "profile")]
    return flags + shlex.split(conf["TRAINER_FLAGS"] or "")


def _data_flags(conf: LaunchConf) -> list[str]:
    if conf["DATA"] == "mock":
        return f"--mock-data --tokenizer-type NullTokenizer --vocab-size {_MOCK_VOCABULARY}".split()
    data = conf.path("DATA")
    files = {"VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt"}
    paths = {
        name: str(conf.path(name) if conf[name] else data.parent / default)
        for name, default in files.items()
    }
    flags = ["--data-path", str(data), "--tokenizer-type", "GPT2BPETokenizer"]
    return [*flags, "--vocab-file", paths["VOCAB_FILE"], "--merge-file", paths["MERGE_FILE"]]


def check_trainer(conf: LaunchConf, world_size: int, run_dir: Path) -> None:
    """Check the trainer's own rules before anything starts.

    Raises:
        ConfigError: names the variable where the rule is about one, else the trainer's flag.
    """
    flags = trainer_flags(conf, run_dir)
    if conf["LOCAL_CHECKPOINT_DIR"] and not conf["CHECKPOINT_DIR"]:
        raise ConfigError(
            f"LOCAL_CHECKPOINT_DIR={conf['LOCAL_CHECKPOINT_DIR']}: checkpoints there are on their"
            " way to CHECKPOINT_DIR, which is not given: give it, on storage that all nodes share"
        )
    if conf["PARTITION"] is not None and "--num-layers" in flags:
        layers = flags[len(flags) - 1 - flags[::-1].index("--num-layers") + 1]
        total = sum(parse_partition(conf["PARTITION"]))
        if layers.isdigit() and total != int(layers):
            raise ConfigError(
                f"PARTITION={conf['PARTITION']}: it holds {total} layers, but MODEL="
                f"{conf['MODEL']} has {layers}"
            )
    parse(flags, world_size=world_size, last_wins=True)


def python_of(conf: LaunchConf) -> str:
    """Return the Python that nodes run."""
    return conf["PYTHON"] or sys.executable


def node_command(conf: LaunchConf, place: NodePlace, run_dir: Path) -> list[str]:
    """Return the command that starts a node's processes."""
    command = [*_profiler(conf, place.node_rank, run_dir), python_of(conf)]
    command += ["-m", "megatron.adaptive", "launch", "--world-size", str(sum(place.processes))]
    command += ["--nnodes", str(len(place.processes)), "--node-rank", str(place.node_rank)]
    command += ["--nproc-per-node", str(place.processes[place.node_rank])]
    command += ["--master-addr", place.master_addr, "--master-port", str(place.master_port)]
    return [*command, str(ROOT / "pretrain_gpt.py"), *trainer_flags(conf, run_dir)]


def _profiler(conf: LaunchConf, node_rank: int, run_dir: Path) -> list[str]:
    target = str(run_dir / f"profile-node{node_rank}")
    if conf["NSYS"]:
        flags = "--trace cuda,nvtx,osrt --capture-range cudaProfilerApi --capture-range-end stop"
        return ["nsys", "profile", "--force-overwrite", "true", "-o", target, *flags.split()]
    if conf["NCU"]:
        flags = "--target-processes all --profile-from-start off"
        return ["ncu", "--force-overwrite", "-o", target, *flags.split()]
    return []


def in_container(conf: LaunchConf, command: Sequence[str], run_dir: Path) -> list[str]:
    """Return ``command`` as it runs inside the image; pyxis is Slurm's to start."""
    if conf["CONTAINER"] not in ("apptainer", "enroot"):
        return list(command)
    mounts = [f"{ROOT}:{ROOT}", f"{run_dir}:{run_dir}"]
    mounts += [word for word in (conf["CONTAINER_MOUNTS"] or "").split(",") if word]
    gpu = ["--nv"] if conf["DEVICE"] == "gpu" else []
    if conf["CONTAINER"] == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpu, *binds, str(conf["IMAGE"]), *command]
    binds = [word for mount in mounts for word in ("--mount", mount)]
    return ["enroot", "start", "--rw", *binds, str(conf["IMAGE"]), *command]


def run_record(conf: LaunchConf, place: NodePlace, run_dir: Path) -> str:
    """Return what ``run.json`` says: the job's latest start, its settings, every node's part."""
    told = {
        "started_unix_s": round(time.time(), 1),
        "conf": conf.texts(),
        "processes": place.processes,
        "world_size": sum(place.processes),
        "master": f"{place.master_addr}:{place.master_port}",
        "flags": trainer_flags(conf, run_dir),
    }
    return json.dumps(told, indent=2) + "\n"
