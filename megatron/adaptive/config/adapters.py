"""Reads the arguments that folders stand for, and which linear layers get adapters.

``--load-hf`` stands for those of a model, ``--load-lora`` for those of PEFT's adapters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.config.command_parser import flags_in, last_value
from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.hugging_face import CONFIG, LOAD_FLAG, load_config
from megatron.adaptive.config.hugging_face_names import NAMES
from megatron.adaptive.config.input_files import read_json
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
# Flags whose values are fixed by the shapes of the folder's weights.
_SIZES = frozenset(
    """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups
    --kv-channels --num-experts --moe-ffn-hidden-size --moe-shared-expert-intermediate-size
    --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
    """.split()
)
_LONGEST_PATTERN, _MOST_DIGITS = 1000, 6
# A repeated group that ends with a repetition, as (a*)*: a search that fails may never end.
_ENDLESS = re.compile(r"[*+}][^()]*\)[*+{]")
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
        if flag == LOAD_FLAG:
            words = load_config(folder)[1]
        else:
            words = adapter_arguments(folder, _base_of([*argv, *added]))
        sizes = {dest_of.get(name): (name, value) for name, value in flags_in(argv).items()}
        for name, values in flags_in(words).items():
            if dest_of[name] not in given:
                added += [name, *values]
            elif name in _SIZES:
                _require_size(*sizes[dest_of[name]], values, f"{flag} {folder}")
    return [*argv, *added]


def _require_size(name: str, given: Sequence[str], values: Sequence[str], where: str) -> None:
    """Refuses a given size that differs from the one of the model's folder."""
    is_number = len(given) == 1 and given[0].isdigit()
    if is_number and int(given[0]) != int(values[0]):
        raise ConfigError(
            f"{name} {given[0]} contradicts {where}, whose {CONFIG} says {values[0]}: leave it out"
        )


def linear_names(config: TrainerConfig) -> dict[str, list[str]]:
    """Returns the names of a layer's linear layers in ``transformers``, by ours.

    A linear layer of ours is one of theirs, or several one under the other. Without ``--load-hf``
    names are Llama's, with latent attention those of DeepSeek.
    """
    kind = base_of(config).family
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


@dataclass(frozen=True, kw_only=True)
class Base:
    """Names the model that adapters belong to, as ``transformers`` does.

    Attributes:
        family: Its ``model_type``, a key of :data:`NAMES`.
        layers: Number of its layers.
    """

    family: str
    layers: int


def base_of(config: TrainerConfig) -> Base:
    """Returns the model that a run trains adapters for."""
    folder = config.checkpoint.load_hf
    if folder is not None:
        return Base(family=_family_of(Path(folder)), layers=config.model.num_layers)
    family = "deepseek_v3" if config.core.multi_latent_attention else "llama"
    return Base(family=family, layers=config.model.num_layers)


def _family_of(folder: Path) -> str:
    return str(load_config(folder)[0]["model_type"])


def _base_of(argv: Sequence[str]) -> Base:
    """Returns the model of a command line that is not parsed yet."""
    layers, folder = last_value(argv, "--num-layers") or "", last_value(argv, LOAD_FLAG)
    if folder is not None:
        family = _family_of(Path(folder))
    else:
        family = "deepseek_v3" if "--multi-latent-attention" in argv else "llama"
    is_number = layers.isdigit() and len(layers) < _MOST_DIGITS
    return Base(family=family, layers=int(layers) if is_number else 1)


def adapter_arguments(folder: Path, base: Base) -> list[str]:
    """Returns the trainer's arguments for adapters of PEFT.

    Args:
        folder: Folder that PEFT wrote.
        base: Model that the adapters are for.

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
    words: list[str] = []
    # PEFT's defaults for absent keys.
    for key, default in (("r", 8), ("lora_alpha", 8), ("lora_dropout", 0.0)):
        value = document.get(key, default)
        is_whole = key != "r" or type(value) is int
        if not is_whole or isinstance(value, bool) or not isinstance(value, int | float):
            kind = "whole number" if key == "r" else "number"
            raise ConfigError(f"{path}: {key} is {value!r}: it must be a {kind}")
        words += [f"--{key.replace('_', '-')}" if key != "r" else "--lora-rank", str(value)]
    targets = _targets(document.get("target_modules"), base, str(path))
    return [*words, "--lora-targets", ",".join(targets)]


def _targets(given: Any, base: Base, where: str) -> list[str]:
    """Returns the linear layers that get adapters, as PEFT resolves ``target_modules``.

    Args:
        given: Names, ``all-linear``, or a regular expression for the whole name of a module.
        base: Model that has the layers.
        where: Path of the file, for messages.

    Raises:
        ConfigError: it is none of these, matches no linear layer, or matches a linear layer in some
            layers of the model and not in others.
    """
    if isinstance(given, str):
        is_every = given.lower() == "all-linear"
        return ["all-linear"] if is_every else _matching(given, base, f"{where}: target_modules")
    is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
    if not is_list or not given or any("," in name or not name for name in given):
        raise ConfigError(
            f"{where}: target_modules {given!r} is no list of names, no regular expression and not"
            " all-linear: write one"
        )
    return sorted(given)


def _matching(pattern: str, base: Base, where: str) -> list[str]:
    """Returns the linear layers whose whole names match a regular expression."""
    names = NAMES[base.family]
    inside = {
        name
        for ours, theirs in names.inside.items()
        for name in theirs
        if ".linear_" in ours and "expert" not in ours
    }
    if len(pattern) > _LONGEST_PATTERN or _ENDLESS.search(pattern):
        raise ConfigError(
            f"{where} {pattern[:60]!r} is too long, or repeats what repeats: write the names"
        )
    try:
        fits = re.compile(pattern).fullmatch
    except re.error as error:
        raise ConfigError(f"{where} {pattern!r} is no regular expression ({error})") from None
    found = [
        frozenset(name for name in inside if fits(names.layer.format(number) + name))
        for number in range(base.layers)
    ]
    beyond = [name for theirs in names.outside.values() for name in theirs if fits(name)]
    if beyond:
        raise ConfigError(f"{where} {pattern!r} fits {beyond[0]}, which has no adapters here")
    if not any(found):
        raise ConfigError(f"{where} {pattern!r} fits no linear layer of {base.family}")
    if len({*found}) > 1:
        number = next(number for number, hits in enumerate(found) if hits != found[0])
        raise ConfigError(
            f"{where} {pattern!r} fits other linear layers in layer {number} than in layer 0:"
            " adapters here are the same in all layers"
        )
    return sorted(found[0])
