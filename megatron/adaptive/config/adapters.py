"""Derives settings from ``--load-hf`` and ``--load-lora``, and finds the layers with adapters.

``--load-hf`` takes a folder with a Hugging Face model. ``--load-lora`` takes a folder with low-rank
adapters (LoRA) that the PEFT library wrote.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.config.command_parser import flags_in
from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.config_keys import Settings
from megatron.adaptive.config.families.registry import built_in_families
from megatron.adaptive.config.hugging_face import CONFIG, LOAD_FLAG, load_config
from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.trainer import TrainerConfig, flag_specs
from megatron.adaptive.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
# Keys in PEFT's file that need no check, because they do not affect the results of the adapters, or
# because other functions in this module read them.
_IDLE = frozenset(
    """
    peft_type r lora_alpha lora_dropout target_modules task_type base_model_name_or_path revision
    inference_mode peft_version auto_mapping fan_in_fan_out megatron_core qalora_group_size
    """.split()
)
# Users cannot change these settings, because the weights in the folder determine them.
_SIZES = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim
    """.split()
)
_LONGEST_PATTERN = 1000
# This pattern matches nested repetitions such as (a*)*. They are rejected, because matching them
# may take exponential time.
_ENDLESS = re.compile(r"[*+}][^()]*\)[*+{]")
# PEFT leaves the base model's weights unchanged for these values of init_lora_weights.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def model_settings_of(values: Mapping[str, Any], argv: Sequence[str]) -> Settings:
    """Returns the settings implied by ``--load-hf`` and ``--load-lora`` that the user has not set.

    Args:
        values: Settings on the command line, keyed by field name.
        argv: Command line of the trainer, quoted in error messages.

    Raises:
        ConfigError: A folder cannot be read, its model or adapters are not supported, or a size on
            the command line contradicts the model.
    """
    implied: Settings = {}
    if (folder := values.get("load_hf")) is not None:
        implied = load_config(Path(folder), values.get("hf_family")).settings
        for name, size in implied.items():
            if name in _SIZES and values.get(name, size) != size:
                typed = _typed_flag(name, argv)
                raise ConfigError(
                    f"{typed} {values[name]} contradicts the value {size} in {CONFIG} of "
                    f"{LOAD_FLAG} {folder}; remove {typed}"
                )
    if (folder := values.get("load_lora")) is not None:
        implied |= adapter_settings(Path(folder), _base_of({**implied, **values}))
    return {name: value for name, value in implied.items() if name not in values}


def _typed_flag(name: str, argv: Sequence[str]) -> str:
    """Returns the flag of the setting ``name``, as spelled in ``argv``."""
    spellings = flag_specs()[name].names
    return next((flag for flag in flags_in(argv) if flag in spellings), spellings[0])


def linear_names(config: TrainerConfig) -> dict[str, list[str]]:
    """Maps each linear layer of megatron-core to the names of its counterparts in ``transformers``.

    A linear layer of megatron-core may combine several linear layers of ``transformers`` by
    stacking the rows of their matrices. Without ``--load-hf``, the names are those of Llama, or
    those of DeepSeek if the model has latent attention.
    """
    family = base_of(config).family
    absent = ["q_proj"] if config.core.q_lora_rank is not None else ["q_down_proj", "q_up_proj"]
    names = {
        core: parts
        for core, parts in family.layer_modules.items()
        if ".linear_" in core and "expert" not in core and core.split("linear_")[1] not in absent
    }
    if not config.model.is_gated:
        names["mlp.linear_fc1"] = names["mlp.linear_fc1"][-1:]
    return names


def adapted_parts(config: TrainerConfig) -> dict[str, tuple[bool, ...]]:
    """Returns which parts of megatron-core's linear layers have adapters, keyed by layer.

    The parts of a layer are the linear layers of ``transformers`` that it combines, in the order of
    :func:`linear_names`. Each value has one boolean per part. Only layers with at least one adapter
    are included.

    Raises:
        ConfigError: A name in ``--lora-targets`` is not a linear layer of this architecture.
    """
    names = linear_names(config)
    targets = config.lora.lora_targets.split(",")
    adapted = {core: (False,) * len(parts) for core, parts in names.items()}
    for target in targets:
        suffix = "" if target == "all-linear" else f".{target}"
        matches = {
            core: tuple(f".{name}".endswith(suffix) for name in parts)
            for core, parts in names.items()
        }
        if not any(map(any, matches.values())):
            short = [name.rpartition(".")[2] for parts in names.values() for name in parts]
            (nearest,) = difflib.get_close_matches(target, short, n=1, cutoff=0.0)
            raise ConfigError(
                f"--lora-targets {target} is not a linear layer of this architecture; the nearest "
                f"is {nearest}, and the available layers are {', '.join(dict.fromkeys(short))}"
            )
        for core, marks in matches.items():
            adapted[core] = tuple(map(max, adapted[core], marks))
    return {core: marks for core, marks in adapted.items() if any(marks)}


@dataclass(frozen=True, kw_only=True)
class Base:
    """Base model of the adapters.

    Attributes:
        family: Model family. The adapters use its module names in ``transformers``.
        layers: Number of transformer layers in the model.
    """

    family: Family
    layers: int


def base_of(config: TrainerConfig) -> Base:
    """Returns the base model of the adapters that a run with the settings ``config`` trains."""
    settings = config.checkpoint
    is_latent = config.core.multi_latent_attention
    family = base_family(settings.load_hf, settings.hf_family, is_latent=is_latent)
    return Base(family=family, layers=config.model.num_layers)


def base_family(folder: str | None, hf_family: str | None, *, is_latent: bool) -> Family:
    """Returns the model family whose module names the adapters use.

    Args:
        folder: Value of ``--load-hf``. If it is ``None``, the adapters use the module names of
            Llama, or those of DeepSeek if the model has latent attention.
        hf_family: Value of ``--hf-family``.
        is_latent: Whether the model has latent attention.
    """
    if folder is not None:
        return load_config(Path(folder), hf_family).family
    return built_in_families()["deepseek_v3" if is_latent else "llama"]


def _base_of(values: Mapping[str, Any]) -> Base:
    """Returns the base model for the settings ``values``, which may not be validated yet."""
    family = base_family(
        values.get("load_hf"),
        values.get("hf_family"),
        is_latent=values.get("multi_latent_attention", False),
    )
    return Base(family=family, layers=values.get("num_layers", 1))


def adapter_settings(folder: Path, base: Base) -> Settings:
    """Returns the trainer's settings for a folder with adapters from PEFT, keyed by field name.

    Args:
        folder: Folder written by PEFT's ``save_pretrained``.
        base: Base model of the adapters.

    Raises:
        ConfigError: The folder does not contain adapters, or this trainer does not support them.
    """
    path = folder / ADAPTER_CONFIG
    document = read_json(path, "pass a folder that PEFT's save_pretrained wrote")
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type must be LORA, the only supported type")
    for key, value in document.items():
        plain = _PLAIN_STARTS if key == "init_lora_weights" else (None, False, "none", [], {})
        if key not in _IDLE and value not in plain:
            raise ConfigError(
                f"{path}: {key} {value!r} is not supported; train the adapters without it"
            )
    settings: Settings = {}
    # PEFT uses these defaults if a key is absent.
    for key, default in (("r", 8), ("lora_alpha", 8), ("lora_dropout", 0.0)):
        value = document.get(key, default)
        is_whole = key != "r" or type(value) is int
        if not is_whole or isinstance(value, bool) or not isinstance(value, int | float):
            kind = "an integer" if key == "r" else "a number"
            raise ConfigError(f"{path}: {key} must be {kind}, got {value!r}")
        settings["lora_rank" if key == "r" else key] = value
    targets = _targets(document.get("target_modules"), base, str(path))
    return {**settings, "lora_targets": ",".join(targets)}


def _targets(modules: Any, base: Base, where: str) -> list[str]:
    """Returns the names of the linear layers with adapters, following PEFT's rules.

    Args:
        modules: Value of ``target_modules``. This is a list of names, ``all-linear``, or a regular
            expression that must match the full name of a module.
        base: Base model of the adapters.
        where: Path of the file, shown in error messages.

    Raises:
        ConfigError: ``modules`` is invalid, matches no linear layer, or matches different linear
            layers in different layers of the model.
    """
    if isinstance(modules, str):
        is_all = modules.lower() == "all-linear"
        return ["all-linear"] if is_all else _matching(modules, base, f"{where}: target_modules")
    is_list = isinstance(modules, list) and all(isinstance(name, str) for name in modules)
    if not is_list or not modules or any("," in name or not name for name in modules):
        raise ConfigError(
            f"{where}: target_modules must be a list of names, a regular expression or "
            f"all-linear, got {modules!r}"
        )
    return sorted(modules)


def _matching(pattern: str, base: Base, where: str) -> list[str]:
    """Returns the names of linear layers whose full module names match ``pattern``."""
    family = base.family
    inside = {
        name
        for core, parts in family.layer_modules.items()
        for name in parts
        if ".linear_" in core and "expert" not in core
    }
    if len(pattern) > _LONGEST_PATTERN or _ENDLESS.search(pattern):
        raise ConfigError(
            f"{where} {pattern[:60]!r} is too long or has nested repetitions; list the names of "
            "the layers instead"
        )
    try:
        fits = re.compile(pattern).fullmatch
    except re.error as error:
        raise ConfigError(
            f"{where} {pattern!r} is not a valid regular expression ({error})"
        ) from None
    by_layer = [
        frozenset(name for name in inside if fits(family.layer_prefix.format(number) + name))
        for number in range(base.layers)
    ]
    beyond = [name for name in family.outer_weights if fits(name)]
    if beyond:
        raise ConfigError(
            f"{where} {pattern!r} matches {beyond[0]}, which cannot have adapters; change the "
            "pattern"
        )
    if not any(by_layer):
        raise ConfigError(
            f"{where} {pattern!r} matches no linear layer of {family.model_types[0]}; change the "
            "pattern"
        )
    if len({*by_layer}) > 1:
        number = next(number for number, fitting in enumerate(by_layer) if fitting != by_layer[0])
        raise ConfigError(
            f"{where} {pattern!r} matches different linear layers in layer {number} and in layer "
            "0, but adapters must be on the same linear layers in every layer"
        )
    return sorted(by_layer[0])
