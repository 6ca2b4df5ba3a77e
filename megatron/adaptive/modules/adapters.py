"""Adds PEFT's low-rank adapters (LoRA, rsLoRA) to models on the ``meta`` device.

PEFT creates the parameters of an adapter on the same device as the adapted layer. On the ``meta``
device, parameters have no data. Each process therefore initializes the adapters of its own stages
later. The initial values depend only on a seed and on the layer's name, not on the number of
processes.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.errors import ConfigError

_SUPPORTED = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout", "modules_to_save"),
    *("peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "target_parameters", "task_type", "use_rslora"),
}
"""Settings of a ``LoraConfig`` that the user may change. All other settings must have their default
values.
"""


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"adapters need the package peft ({error}); install peft") from None


def is_adapted(model: torch.nn.Module) -> bool:
    """Returns whether ``model`` has adapters that PEFT added."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def add_adapters(model: torch.nn.Module, config: Any, folder: Path) -> torch.nn.Module:
    """Adds adapters to ``model``, freezes its other weights and returns the adapted model.

    Args:
        model: Model of ``transformers``; PEFT changes its layers in place.
        config: ``LoraConfig`` of PEFT.
        folder: Folder of the model, recorded in the adapters' configuration as the base model.

    Raises:
        ConfigError: If PEFT is not installed, or the configuration is not supported.
    """
    peft = _peft()
    if not isinstance(config, peft.LoraConfig):
        raise ConfigError(f"adapter must be a LoraConfig of peft, got a {type(config).__name__}")
    start = config.init_lora_weights
    if start not in (True, "gaussian"):
        raise ConfigError(
            f"adapter has init_lora_weights={start!r}, but this initialization would need weights "
            'that other processes hold; use init_lora_weights=True or "gaussian"'
        )
    defaults = peft.LoraConfig()
    for name, value in vars(config).items():
        if name not in _SUPPORTED and value != getattr(defaults, name, None):
            raise ConfigError(
                f"adapter has {name}={value!r}, which Pipeline does not support; remove it"
            )
    config = copy.deepcopy(config)
    config.base_model_name_or_path = str(folder)
    try:
        with warnings.catch_warnings():
            # PEFT uses a deprecated attribute of the transformers library. Ignore its warning.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: torch.nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"adapter: {str(error).splitlines()[0]}") from error
    return adapted


def initialize_adapters(model: Any, seed: int) -> None:
    """Randomly initializes the adapters of this process, except adapters on the ``meta`` device.

    Args:
        model: Model with adapters.
        seed: Seed of the random numbers.
    """
    for path, module in model.named_modules():
        reset = getattr(module, "reset_lora_parameters", None)
        if reset is None:
            continue
        parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if "lora_" in name and not parameter.is_meta
        ]
        if not parameters:
            continue
        digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
        devices = [parameters[0].device] if parameters[0].device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int.from_bytes(digest, "little"))
            for name, config in model.peft_config.items():
                reset(name, config.init_lora_weights)


def adapter_file(
    model: Any, tensors: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the adapters' configuration and tensors in the format that PEFT saves.

    Args:
        model: Model with adapters.
        tensors: Trained parameters of the whole model, keyed by name.
    """
    peft = _peft()
    name = model.active_adapter
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    state: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False
    )
    return config, state
