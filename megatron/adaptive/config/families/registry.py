"""Finds the family of a model among the families in this folder and those that users provide.

For error messages, the module also describes how unsupported models differ from the families.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.config_keys import SETTINGS
from megatron.adaptive.config.families.weight_names import OUTER
from megatron.adaptive.config.own_code import find_object, modules_in, source_of
from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.errors import ConfigError

_STATES = "layers that keep a state instead of attention"
_FUSED = "a different order of queries, keys and values in one matrix"
_UNROTATED = "layers without rotation"
_MULTIPLIED = "scale factors of embeddings, residuals and logits"
# Features of unsupported models, keyed by model type, for error messages. No supported family has
# these features, and config.json does not show them.
_DIFFERENCES: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "rwkv", "bamba"), _STATES),
    **dict.fromkeys(("internlm2", "baichuan", "qwen", "chatglm"), _FUSED),
    **dict.fromkeys(("granite", "granitemoe", "minicpm", "minicpm3"), _MULTIPLIED),
    **dict.fromkeys(("gptj", "codegen", "falcon"), "a single norm for both blocks of a layer"),
    **dict.fromkeys(("bloom", "mpt"), "positions encoded as a bias of the scores"),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), "norms over all heads of queries and keys"),
    **dict.fromkeys(("cohere", "cohere2"), "parallel blocks, and scaled logits"),
    **dict.fromkeys(("glm", "glm4", "ernie4_5"), "rotation of neighbouring channels"),
    **dict.fromkeys(("nemotron", "arcee"), "squared ReLU"),
    **dict.fromkeys(("stablelm", "starcoder2"), "LayerNorm with a bias"),
    "deepseek_v32": "attention to tokens that an indexer selects",
    "glm4_moe": "rotation of half of each head, and experts with a bias",
    "gpt_bigcode": "a single head of keys and values with learned positions",
    "gpt_oss": "attention sinks, and experts with biases",
    "llama4_text": f"{_UNROTATED}, and attention in chunks",
    "olmo": "a norm without weights",
    "opt": "learned positions that begin at 2, and ReLU",
    "qwen3_next": f"{_STATES}, and attention gates",
    "smollm3": _UNROTATED,
}
# Error messages about an unknown model list only these of the keys in `refuse`.
_CHECKED = ("quantization_config", "sliding_window_size")

ENTRY_POINTS = "megatron_adaptive.families"
"""Name of the group of entry points through which installed packages provide families."""


@functools.cache
def built_in_families() -> Mapping[str, Family]:
    """Returns the families of this package, keyed by ``model_type``."""
    families: dict[str, Family] = {}
    package = importlib.import_module(__package__ or "")
    for module in modules_in(package):
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            if issubclass(kind, Family):
                # Skip base classes, which have no model types of their own. Model types are not
                # inherited.
                types = vars(kind).get("model_types", ())
                families |= dict.fromkeys(types, kind())
    return families


def model_settings(hf_family: str | None = None) -> frozenset[str]:
    """Returns the names of all settings that a folder with a Hugging Face model determines.

    Args:
        hf_family: Value of ``--hf-family``, or ``None`` if it is absent.
    """
    families = [*built_in_families().values()]
    if hf_family is not None:
        families.append(own_family(hf_family))
    tables = (table for family in families for table in (family.settings, family.keys))
    return SETTINGS.union(name for table in tables for name in table)


def supported_types() -> list[str]:
    """Returns the values of ``model_type`` for which the trainer can build models."""
    families = built_in_families()
    return [name for name, family in families.items() if not family.missing_feature]


def find_family(model_type: Any, hf_family: str | None = None) -> Family | None:
    """Returns the family of ``model_type``, or ``None`` if there is none.

    Args:
        model_type: Value of ``model_type`` in ``config.json``.
        hf_family: Value of ``--hf-family``, which names a user's family. The user's family takes
            precedence over the families of this package.

    Raises:
        ConfigError: The user's family cannot be imported, or the imported object is not a family.
    """
    if hf_family is not None and model_type in (family := own_family(hf_family)).model_types:
        return family
    if model_type in built_in_families() or not isinstance(model_type, str):
        return built_in_families().get(model_type)
    return _published_family(model_type)


def own_family(name: str) -> Family:
    """Imports and returns the user's family ``name``.

    Args:
        name: Class in the form ``package.module:Class``, or name of an entry point.

    Raises:
        ConfigError: The class does not exist, or is not a family with model types.
    """
    kind = find_object(name, group=ENTRY_POINTS, subject="family")
    if kind is None:
        raise ConfigError(
            f"family {name!r} is neither package.module:Class nor an entry point of an installed "
            f"package in the group {ENTRY_POINTS}"
        )
    return _instance(kind, name)


def _published_family(model_type: str) -> Family | None:
    """Returns the family that an installed package provides for ``model_type``.

    The result is ``None`` if no installed package provides such a family.
    """
    # A name with a colon would be interpreted as the path of a class, not as the name of an entry
    # point.
    if ":" in model_type:
        return None
    kind = find_object(model_type, group=ENTRY_POINTS, subject="family")
    return None if kind is None else _instance(kind, model_type)


def _instance(kind: Any, name: str) -> Family:
    """Checks the tables of ``kind``, the class of a user's family, and returns an instance of it.

    Raises:
        ConfigError: The class is not a family, or a table contains an unknown name. The message
            describes the problem.
    """
    if not inspect.isclass(kind) or not issubclass(kind, Family):
        raise ConfigError(
            f"family {name} must be a subclass of megatron.adaptive.config.families.Family, got "
            f"{kind!r:.60}"
        )
    where = f"family {name} ({source_of(kind)})"
    types = vars(kind).get("model_types")
    if not isinstance(types, tuple) or not types:
        raise ConfigError(f'{where}: model_types must be a tuple such as ("name",), got {types!r}')
    specs = flag_specs()
    for setting in (*kind.settings, *kind.needed, *kind.keys, *kind.attention_keys):
        if setting not in specs:
            (nearest,) = difflib.get_close_matches(setting, specs, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: {setting!r} is not a setting; the nearest is {nearest}")
    for module in OUTER.values():
        if module not in kind.outer_weights.values():
            raise ConfigError(
                f"{where}: outer_weights does not contain {module}; add an entry with the name of "
                "this module in your model's files"
            )
    family: Family = kind()
    return family


def family_of(config: Mapping[str, Any], where: str, hf_family: str | None = None) -> Family:
    """Returns the family of the model that ``config`` describes.

    Args:
        config: Contents of ``config.json``.
        where: Path of the file, shown in error messages.
        hf_family: Value of ``--hf-family``, or ``None`` if it is absent.

    Raises:
        ConfigError: No family has this ``model_type``, or the user's family has other model types.
            For an unknown type, the message suggests the most similar type.
    """
    name = config["model_type"]
    if hf_family is not None and name not in (types := own_family(hf_family).model_types):
        raise ConfigError(
            f"{where}: model_type {name!r} does not belong to family {hf_family}, whose "
            f"model_types are {', '.join(types)}; remove --hf-family or add the type to the class"
        )
    family = find_family(name, hf_family)
    if family is not None:
        return family
    nearest = (difflib.get_close_matches(str(name), built_in_families(), n=1) or ["llama"])[0]
    raise ConfigError(
        f"{where}: model_type {name!r} is unknown; the nearest is {nearest}, which "
        f"{_lacks(config, name, nearest)}. Known types are {', '.join(supported_types())}. To "
        'plan a model of another type, specify its sizes as `layers` of a model file (see "plan '
        '--schema model")'
    )


def _lacks(config: Mapping[str, Any], name: str, nearest: str) -> str:
    """Describes how the supported family ``nearest`` differs from an unsupported model."""
    family = built_in_families()[nearest]
    expected = family.known_keys.union(family.refuse).difference(_CHECKED)
    strange = {key for key, value in config.items() if value and key not in expected}
    parts = [_DIFFERENCES[name]] if name in _DIFFERENCES else []
    parts += [", ".join(sorted(strange))] if strange else []
    if parts:
        return f"lacks {'; '.join(parts)}"
    return (
        f"has the same keys; use {nearest} if the layers and the names of the weights are also "
        "the same"
    )
