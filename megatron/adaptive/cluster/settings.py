"""The variables of ``conf.sh``: names, kinds, defaults and meanings, and how one is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.adaptive.errors import ConfigError

__all__ = ["PASSED_ON", "SETTINGS", "Setting", "check_names", "read_value"]

Kind = Literal["count", "number", "switch", "choice", "text", "port"]


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        kind: how its text is read; ``count`` is a whole number from 1 on.
        default: its text where it is not set; empty for none.
        meaning: one line.
        choices: allowed texts of a ``choice``.
    """

    kind: Kind
    default: str
    meaning: str
    choices: tuple[str, ...] = ()


SETTINGS: Mapping[str, Setting] = {
    "JOB_NAME": Setting("text", "megatron-adaptive", "name of the job"),
    "PLAN": Setting("text", "", "plan file; see docs/plan.md"),
    "MODEL": Setting("text", "small", "name of a model, or a file of the trainer's flags"),
    "GLOBAL_BATCH_SIZE": Setting("count", "", "samples of each step over all ranks"),
    "MICRO_BATCH_SIZE": Setting("count", "1", "samples of each microbatch"),
    "TENSOR_MP_SIZE": Setting("count", "1", "ranks that share each layer"),
    "PIPELINE_MP_SIZE": Setting("count", "1", "ranks that the layers are spread over"),
    "DP_SIZE": Setting("count", "", "copies of the model"),
    "STAGE_DP_SIZES": Setting("text", "", "ranks of each stage where they differ, as in 2-1"),
    "MODEL_CHUNKS": Setting("count", "1", "model chunks of each pipeline rank"),
    "PARTITION": Setting("text", "", "layers of each stage, as in 0-11-8-8"),
    "SCHEDULE": Setting("text", "adaptive", "order of work in the pipeline"),
    "RECOMPUTE": Setting(
        "choice", "none", "what backwards compute again", ("none", "selective", "full")
    ),
    "DISTRIBUTED_OPTIMIZER": Setting("switch", "false", "copies divide the optimizer state"),
    "OVERLAP_GRAD_REDUCE": Setting("switch", "false", "reduce gradients while backwards run"),
    "SEQUENCE_PARALLEL": Setting("switch", "false", "split the sequence outside the matrices"),
    "PRECISION": Setting("choice", "", "type of parameters", ("fp32", "fp16", "bf16")),
    "TRAIN_ITERS": Setting("count", "100", "iterations of the whole training"),
    "LR": Setting("number", "1e-4", "highest learning rate"),
    "DATA": Setting("text", "mock", "prefix of .bin and .idx, or mock for made-up samples"),
    "VOCAB_FILE": Setting("text", "", "vocabulary; vocab.json beside DATA by default"),
    "MERGE_FILE": Setting("text", "", "merges; merges.txt beside DATA by default"),
    "TRAINER_FLAGS": Setting("text", "", "further flags of pretrain_gpt.py; the last of one wins"),
    "CHECKPOINT_DIR": Setting("text", "", "folder of checkpoints to save and to go on from"),
    "LOCAL_CHECKPOINT_DIR": Setting("text", "", "folder on each node's own disk, written first"),
    "SAVE_INTERVAL": Setting("count", "100", "iterations between checkpoints"),
    "LOG_DIR": Setting("text", "logs", "folder that holds a folder of logs for each job"),
    "TRACE": Setting("switch", "false", "write traces of the pipeline"),
    "HOMOGENEOUS_CLUSTER": Setting("switch", "true", "all nodes are equal"),
    "NNODES": Setting("count", "", "number of nodes"),
    "NPROC_PER_NODE": Setting("count", "", "processes of each node, one for each GPU"),
    "WORLD_SIZE": Setting("count", "", "number of all processes"),
    "NODES": Setting("text", "", "mixed nodes in order of the ranks, as in a10:2x4 v100:1x2"),
    "DEVICE": Setting("choice", "gpu", "what a process computes on", ("gpu", "cpu")),
    "MASTER_ADDR": Setting("text", "", "address of the first node, where it is not found"),
    "MASTER_PORT": Setting("port", "", "port of the first node on which all meet"),
    "IFNAME": Setting("text", "", "network interface, where it is not found"),
    "MEETING_TIMEOUT_S": Setting("number", "600", "how long nodes wait for each other"),
    "SLURM_PARTITION": Setting("text", "", "partition, or TYPE=PARTITION for each node type"),
    "SLURM_GRES": Setting("text", "gpu", "kind of GPU, or TYPE=GRES for each type; none"),
    "SLURM_TIME": Setting("text", "", "time limit of the job, as in 2:00:00"),
    "SLURM_ACCOUNT": Setting("text", "", "account that is charged"),
    "SLURM_FLAGS": Setting("text", "", "further options of sbatch"),
    "CPUS_PER_TASK": Setting("count", "", "processors of each node that the job takes"),
    "REQUEUE": Setting(
        "switch", "true", "go on in the same job after an early stop or the loss of a node"
    ),
    "CONTAINER": Setting(
        "choice", "none", "what runs the image", ("none", "pyxis", "enroot", "apptainer")
    ),
    "IMAGE": Setting("text", "", "container image"),
    "CONTAINER_MOUNTS": Setting("text", "", "further folders in the container, FROM:TO,..."),
    "RELOAD_CONTAINER": Setting("switch", "false", "make the container anew"),
    "PROFILE": Setting("switch", "false", "PyTorch profiler, into LOG_DIR"),
    "NSYS": Setting("switch", "false", "Nsight Systems around each node's processes"),
    "NCU": Setting("switch", "false", "Nsight Compute around each node's processes"),
    "PYTHON": Setting("text", "", "Python of the nodes; this one by default"),
}

# Variables that other programs read: given to every process as they are.
PASSED_ON = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "CUDA_", "OMP_", "MKL_", "UCX_", "HF_"),
    *("PYTORCH_", "NVTE_", "MEGATRON_ADAPTIVE_", "PYTHONUNBUFFERED", "TRITON_", "LD_LIBRARY_"),
)
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def check_names(variables: Mapping[str, str], where: str) -> None:
    """Refuse names in capitals that nobody reads; others are the file's own helpers.

    Raises:
        ConfigError: names the nearest that there is.
    """
    for name in variables:
        if name in SETTINGS or name.startswith(PASSED_ON) or not name[:1].isupper():
            continue
        nearest = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
        hint = f"the nearest is {nearest[0]}" if nearest else "see conf.sh for those there are"
        raise ConfigError(
            f"{where}: {name} is not a variable of the launcher: {hint}; helpers of your own are "
            "written in small letters"
        )


def read_value(name: str, text: str) -> object:
    """Read the text of a variable; ``None`` where it is empty and there is no default.

    Returns:
        An ``int``, ``float``, ``bool`` or ``str``.

    Raises:
        ConfigError: the text breaks the rule of its kind.
    """
    setting = SETTINGS[name]
    text = text.strip() or setting.default
    if not text:
        return None
    if setting.kind in ("count", "port"):
        limit = 65535 if setting.kind == "port" else 10**9
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= limit):
            what = (
                "a port from 1 to 65535" if setting.kind == "port" else "a whole number from 1 on"
            )
            raise _wrong(name, text, what)
        return int(text)
    if setting.kind == "number":
        return _number(name, text)
    if setting.kind == "switch":
        if text.lower() not in _TRUE + _FALSE:
            raise _wrong(name, text, "true or false")
        return text.lower() in _TRUE
    if setting.kind == "choice" and text not in setting.choices:
        raise _wrong(name, text, f"one of {', '.join(setting.choices)}")
    return text


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise _wrong(name, text, "a number above 0")
    return value


def _wrong(name: str, text: str, rule: str) -> ConfigError:
    return ConfigError(f"{name}={text}: it must be {rule} ({SETTINGS[name].meaning})")
