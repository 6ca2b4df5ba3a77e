"""Defines :class:`Family`, the base class for families of Hugging Face models.

A family is a subclass in a file of this folder, where ``registry.py`` finds it. The attributes of
the class are tables of keys, settings and weights. :meth:`Family.adjust` computes settings that the
tables cannot express.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron.adaptive.config.families.config_keys import (
    ACTIVATION,
    COMMON,
    DEFAULTS,
    EXPERTS,
    HEADS,
    READ,
    ROUTER,
    SIZES,
    TANH,
    WITHOUT_EFFECT,
    Keys,
    Settings,
    check_numbers,
    count_of,
    plain_value,
    read_key,
    scaling_of,
    whole_keys,
)
from megatron.adaptive.config.families.layer_settings import (
    expert_settings,
    scaled_rotation,
    window_settings,
)
from megatron.adaptive.config.families.refusals import REFUSE, Check, Verdict
from megatron.adaptive.config.own_code import line_of_error
from megatron.adaptive.errors import ConfigError

_LONGEST = 4096
"""Upper limit in tokens for the default of ``--seq-length``."""


class Family:
    """Describes the Hugging Face models that share an architecture.

    A subclass sets at least ``model_types``, ``settings``, ``layer_weights`` and ``outer_weights``,
    or inherits them from a different family.

    Attributes:
        model_types: Values of ``model_type`` in ``config.json`` that belong to the family.
            Subclasses do not inherit this attribute.
        settings: Trainer settings shared by all models of the family, keyed by field name in
            ``config/model.py`` or in megatron-core.
        needed: Keys that all models of the family must have in addition to the usual keys. Each
            setting is mapped to its keys in ``config.json``.
        keys: Optional keys of the family's models. Each setting is mapped to its keys in
            ``config.json``, which replace the setting's usual keys (``config_keys.py``).
        attention_keys: Optional keys for the sizes of attention. Each setting is mapped to its keys
            in ``config.json``.
        other_keys: Additional keys of ``config.json`` that :meth:`adjust` reads, or that have no
            effect.
        defaults: Values that ``transformers`` uses for models of the family if keys are absent.
        window_period: Period n if every n-th layer attends to all tokens and all other layers have
            a sliding window, or 0 if all layers have a sliding window. The period is used only
            if ``config.json`` does not specify which layers have a sliding window.
        refuse: Keys for which only some values are supported, each with a function that checks the
            value.
        missing_feature: Feature of the models that the trainer's layers do not support, or empty if
            the trainer can build the models. The planner accepts the models in both cases.
        nearest: ``model_type`` of the most similar family that the trainer can build. The error
            message about ``missing_feature`` suggests it.
        layer_prefix: Prefix of the module names of a layer in Hugging Face files. ``{}`` stands for
            the index of the layer.
        layer_weights: Names of the modules of a layer, in model order. Each name in Hugging Face
            files is mapped to the name in megatron-core. If several modules have the same name in
            megatron-core, their matrices are stacked by rows. ``{}`` stands for the index of an
            expert.
        outer_weights: Names of the modules outside of layers. Each name in Hugging Face files is
            mapped to the name in megatron-core.
        predicts: Whether multi-token prediction layers may follow the transformer layers.
        is_transposed: Whether the matrices of linear layers are stored as ``[inputs, outputs]``.
        is_grouped: Whether the rows for queries, keys and values are in a single matrix, sorted by
            groups of heads as in megatron-core.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[Mapping[str, Any]] = {}
    needed: ClassVar[Keys] = {}
    keys: ClassVar[Keys] = {}
    attention_keys: ClassVar[Keys] = HEADS
    other_keys: ClassVar[Sequence[str]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    window_period: ClassVar[int] = 0
    refuse: ClassVar[Mapping[str, Check]] = REFUSE
    missing_feature: ClassVar[str] = ""
    nearest: ClassVar[str] = "llama"
    layer_prefix: ClassVar[str] = "model.layers.{}."
    layer_weights: ClassVar[Mapping[str, str]] = {}
    outer_weights: ClassVar[Mapping[str, str]] = {}
    predicts: ClassVar[bool] = False
    is_transposed: ClassVar[bool] = False
    is_grouped: ClassVar[bool] = False

    def adjust(self, config: Mapping[str, Any], settings: Settings) -> None:
        """Computes settings that the tables of keys cannot express.

        Args:
            config: Contents of ``config.json``, with ``defaults`` for absent keys.
            settings: Settings read from ``config.json``. This method modifies them.
        """

    def rotation(self, config: Mapping[str, Any]) -> Settings:
        """Returns the settings that scale the frequencies of the rotary embedding.

        Args:
            config: Contents of ``config.json``, with ``defaults`` for absent keys.
        """
        return scaled_rotation(config)

    @functools.cached_property
    def layer_modules(self) -> Mapping[str, list[str]]:
        """Hugging Face names of the modules of a layer, keyed by name in megatron-core."""
        return _inverted(self.layer_weights)

    @functools.cached_property
    def outer_modules(self) -> Mapping[str, list[str]]:
        """Hugging Face names of the modules outside of layers, keyed by name in megatron-core.

        Each value is a list with a single name.
        """
        return _inverted(self.outer_weights)

    def is_in_layer(self, name: str) -> bool:
        """Returns whether the tensor ``name`` in Hugging Face files belongs to a layer."""
        return name.startswith(self.layer_prefix.partition("{}")[0])

    @property
    def known_keys(self) -> frozenset[str]:
        """Keys that are read or that have no effect. All other keys must be absent or ``null``."""
        return (READ | WITHOUT_EFFECT).union(self._own_keys, self.other_keys)

    @property
    def _own_keys(self) -> frozenset[str]:
        tables = (self.needed, self.keys, self.attention_keys)
        return frozenset(key for table in tables for keys in table.values() for key in keys)

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``config`` with defaults, and with the rotary embedding's keys at the top level.

        Args:
            config: Contents of ``config.json``.
        """
        rotation = scaling_of(config)
        if "full_attention" in rotation:
            # Layers with a sliding window have their own rotation settings. The trainer can give
            # these layers a different base, but no other settings, so only the base is copied.
            in_windows = rotation.get("sliding_attention") or {}
            key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
            rotation = rotation["full_attention"] or {}
            config = {**config, key: rotation}
            if base := in_windows.get("rope_theta"):
                config["rope_local_base_freq"] = base
        # A key may be present both at the top level and in the rotation settings. transformers then
        # uses the value in the rotation settings.
        inner_keys = ("rope_theta", "partial_rotary_factor")
        inner = {key: rotation[key] for key in inner_keys if rotation.get(key) is not None}
        return {**self.defaults, **config, **inner}

    def read(self, config: Mapping[str, Any], where: str, sequence: int | None = None) -> Settings:
        """Returns the settings of the model that ``config`` describes.

        Args:
            config: Contents of ``config.json``.
            where: Path of the file, shown in error messages.
            sequence: Number of tokens per sample. The default is the longest sequence that the
                model supports, but at most 4,096 tokens.

        Raises:
            ConfigError: A key is missing, or the value of a key is not supported.
        """
        config = self.complete(config)
        whole = whole_keys(self.needed, self.keys, self.attention_keys)
        check_numbers(config, whole, where)
        count_keys = {**EXPERTS, **self.keys}["num_moe_experts"]
        has_experts = any(plain_value(config, key) for key in count_keys)
        settings = {**self.settings, **self._read_keys(config, has_experts, where)}
        _drop_idle(config, settings)
        self._add_attention(config, settings, where)
        layers = count_of(config, {**SIZES, **self.keys}["num_layers"], where)
        if has_experts:
            settings |= expert_settings(config, layers, where)
        settings |= window_settings(config, self.window_period, layers, where)
        if settings.get("position_embedding_type") == "rope":
            settings |= self.rotation(config)
        activation = next((config[key] for key in ACTIVATION if config.get(key)), None)
        is_gated = settings.get("swiglu") or settings.get("geglu")
        if activation in TANH and not is_gated:
            settings["openai_gelu"] = True
        if config.get("use_parallel_residual"):
            settings["parallel_residual"] = True
        self._adjust(config, settings, where)
        settings["make_vocab_size_divisible_by"] = 1
        longest = int(settings["max_position_embeddings"])
        settings["seq_length"] = sequence or min(longest, _LONGEST)
        return settings

    def _adjust(self, config: Mapping[str, Any], settings: Settings, where: str) -> None:
        if type(self).__module__.startswith(__package__ or ""):
            self.adjust(config, settings)
            return
        try:
            self.adjust(config, settings)
        except ConfigError:
            raise
        except Exception as error:  # A user's method may raise any exception.
            line = line_of_error(error, type(self))
            raise ConfigError(
                f"{where}: the method adjust of {type(self).__name__} ({line}) raised"
                f" {type(error).__name__}: {error}"
            ) from error

    def _read_keys(self, config: Mapping[str, Any], has_experts: bool, where: str) -> Settings:
        """Returns the settings whose values depend on only one key of ``config``."""
        needed = {**SIZES, **(EXPERTS if has_experts else {}), **self.needed}
        optional = {**COMMON, **self.keys, **(ROUTER if has_experts else {}), **self.attention_keys}
        settings: Settings = {}
        for setting, keys in {**needed, **optional}.items():
            value = read_key(config, setting, keys, where)
            if value is None and setting in needed:
                raise ConfigError(
                    f"{where}: {' or '.join(keys)} is missing, but every model needs it"
                )
            if value is None:
                value = DEFAULTS.get(setting)
            if value is not None:
                settings[setting] = value
        return settings

    def _add_attention(self, config: Mapping[str, Any], settings: Settings, where: str) -> None:
        """Adds the settings for grouped queries, biases and the output layer to ``settings``."""
        heads = count_of(config, {**SIZES, **self.keys}["num_attention_heads"], where)
        groups = config.get("num_key_value_heads")
        is_latent = settings.get("multi_latent_attention")
        if groups is not None and groups != heads and not is_latent:
            settings |= {"group_query_attention": True, "num_query_groups": groups}
        if config.get("attention_bias") and not settings.get("add_bias_linear", True):
            settings["add_qkv_bias"] = True
        if not config.get("tie_word_embeddings", False):
            settings["untie_embeddings_and_output_weights"] = True

    def check(self, document: Mapping[str, Any], settings: Settings, where: str) -> None:
        """Checks that the trainer's layers support all features of a model.

        Args:
            document: Contents of ``config.json``.
            settings: Settings read from the file.
            where: Path of the file, shown in error messages.

        Raises:
            ConfigError: A feature is not supported. The message contains the key, its value and the
                nearest supported value.
        """
        config = self.complete(document)
        accepted = self.known_keys.union(self.refuse)
        for key, value in document.items():
            verdict = self.refuse[key](value, config, settings) if key in self.refuse else None
            if key not in accepted:
                verdict = Verdict(
                    not value, "something unknown", "null, if that does not change the model"
                )
            if verdict is not None and not verdict.is_supported:
                raise ConfigError(
                    f"{where}: {key} {value!r} requests {verdict.feature}, which this trainer's "
                    f"layers do not support; the nearest supported value is {verdict.nearest}"
                )


def _inverted(names: Mapping[str, str]) -> dict[str, list[str]]:
    inverted: dict[str, list[str]] = {}
    for name_in_folder, name in names.items():
        inverted.setdefault(name, []).append(name_in_folder)
    return inverted


def _drop_idle(config: Mapping[str, Any], settings: Settings) -> None:
    """Removes settings whose values have no effect, such as a scaling factor of 1."""
    is_in_groups = config.get("topk_method") != "greedy" and config.get("n_group") != 1
    for setting in ("moe_router_num_groups", "moe_router_group_topk", "mtp_num_layers"):
        is_about_groups = setting != "mtp_num_layers"
        if not settings.get(setting) or (is_about_groups and not is_in_groups):
            settings.pop(setting, None)
    if settings.get("moe_router_topk_scaling_factor") == 1:
        del settings["moe_router_topk_scaling_factor"]
