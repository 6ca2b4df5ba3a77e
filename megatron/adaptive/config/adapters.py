"""Reads the arguments that folders stand for, and which linear layers get adapters.

``--load-hf`` stands for those of a model, ``--load-lora`` for those of PEFT's adapters.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.adaptive.config.command_parser import flags_in, last_value
from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.hugging_face import LOAD_FLAG, load_config
from megatron.adaptive.config.hugging_face_names import NAMES
from megatron.adaptive.config.outside import read_json
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
# Keys of PEFT's file that say nothing about what adapters compute, whatever they hold.
_IDLE = frozenset(
    """
    peft_type r lora_alpha lora_dropout target_modules task_type base_model_name_or_path revision
    inference_mode peft_version auto_mapping fan_in_fan_out megatron_core qalora_group_size
    """.split()
)
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # that leave the model as it is


def expand_model(argv: Sequence[str], specs: Mapping[str, FieldSpec]) -> list[str]:
    """Adds the arguments of the model that ``--load-hf`` names, where a command line lacks them.

    Likewise those of the adapters that ``--load-lora`` names.

    Args:
        argv: a command line of the trainer.
        specs: all flags by field.

    Raises:
        ConfigError: see :func:`load_config` and :func:`adapter_arguments`.
    """
    dest_of = {name: spec.dest for spec in specs.values() for name in spec.names}
    given = {dest_of.get(word.split("=", 1)[0]) for word in argv}
    added: list[str] = []
    for flag in (LOAD_FLAG, "--load-lora"):
        if (text := last_value(argv, flag)) is None:
            continue
        folder = Path(text)
        words = load_config(folder)[1] if flag == LOAD_FLAG else adapter_arguments(folder)
        for name, values in flags_in(words).items():
            if dest_of[name] not in given:
                added += [name, *values]
    return [*argv, *added]


def linear_names(config: TrainerConfig) -> dict[str, list[str]]:
    """Returns the names of a layer's linear layers in ``transformers``, by ours.

    A linear layer of ours is one of theirs, or several one under the other. Without ``--load-hf``
    names are Llama's, with latent attention those of DeepSeek.
    """
    folder, latent = config.checkpoint.load_hf, config.core.multi_latent_attention
    kind = "deepseek_v3" if latent else "llama"
    if folder is not None:
        kind = load_config(Path(folder))[0]["model_type"]
    absent = ["q_proj"] if config.core.q_lora_rank is not None else ["q_down_proj", "q_up_proj"]
    names = {
        ours: theirs
        for ours, theirs in NAMES[kind].inside.items()
        if ".linear_" in ours and "expert" not in ours and ours.split("linear_")[1] not in absent
    }
    if not config.model.is_gated:
        names["mlp.linear_fc1"] = names["mlp.linear_fc1"][-1:]
    return names


def adapted_parts(config: TrainerConfig) -> dict[str, tuple[bool, ...]]:
    """Returns which of those that each linear layer of ours is made of get an adapter.

    Layers without any are left out.

    Raises:
        ConfigError: a target is no linear layer of this architecture.
    """
    names, targets = linear_names(config), config.lora.lora_targets.split(",")
    found = {ours: (False,) * len(theirs) for ours, theirs in names.items()}
    for target in targets:
        suffix = "" if target == "all-linear" else f".{target}"
        hits = {
            ours: tuple(f".{name}".endswith(suffix) for name in theirs)
            for ours, theirs in names.items()
        }
        if not any(map(any, hits.values())):
            short = [name.rpartition(".")[2] for theirs in names.values() for name in theirs]
            (nearest,) = difflib.get_close_matches(target, short, n=1, cutoff=0.0)
            raise ConfigError(
                f"--lora-targets {target}: layers of this architecture have no such linear layer;"
                f" the nearest is {nearest}, and there are {', '.join(dict.fromkeys(short))}"
            )
        for ours, marks in hits.items():
            found[ours] = tuple(map(max, found[ours], marks))
    return {ours: marks for ours, marks in found.items() if any(marks)}


def adapter_arguments(folder: Path) -> list[str]:
    """Returns the trainer's arguments for adapters of PEFT.

    Raises:
        ConfigError: the folder has none, or they are of a kind that is not trained here.
    """
    path = folder / ADAPTER_CONFIG
    document = read_json(path, "name a folder that save_pretrained of PEFT wrote")
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: its peft_type is not LORA, which alone is read")
    for key, value in document.items():
        plain = _PLAIN_STARTS if key == "init_lora_weights" else (None, False, "none", [], {})
        if key not in _IDLE and value not in plain:
            raise ConfigError(
                f"{path}: {key} {value!r} asks for what adapters lack here: train them without it"
            )
    targets, rank = document.get("target_modules"), document.get("r")
    if not isinstance(targets, list):
        raise ConfigError(f"{path}: target_modules {targets!r} is no list of names: write one")
    words = ["--lora-rank", rank, "--lora-alpha", document.get("lora_alpha", rank)]
    words += ["--lora-dropout", document.get("lora_dropout", 0.0)]
    return [*map(str, words), "--lora-targets", ",".join(sorted(map(str, targets)))]
