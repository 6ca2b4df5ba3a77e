"""Builds models from folders saved by ``transformers``, and reads only this process's tensors.

::

    config.json ──transformers──> model on the meta device
    *.safetensors ──names as transformers converts them──> tensors of this process, one at a time

The names and layouts of the tensors in a folder may differ from those of the model's tensors. When
``transformers`` loads a model, it renames tensors, and merges or splits some of them, such as the
weights of experts. This module uses the same rules and functions. Each conversion first runs on the
``meta`` device, to determine the names and shapes of its results without reading the files.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from megatron.adaptive.checkpoint.safetensors import ALL_DTYPES, TensorFolder
from megatron.adaptive.config.hugging_face import CONFIG
from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.modules.adapters import add_adapters, initialize_adapters


def transformers_module(name: str = "") -> Any:
    """Imports and returns ``transformers`` or its submodule ``name``.

    Raises:
        ConfigError: If ``transformers`` is not installed, or does not have the submodule.
    """
    try:
        return importlib.import_module(f"transformers{name and '.'}{name}")
    except ImportError as error:
        raise ConfigError(
            f"loading a model folder requires transformers 5.20 or newer ({error}); install "
            "transformers"
        ) from None


def read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Reads the configuration of the model in a folder with ``transformers``.

    Args:
        folder: Folder of the model.
        trust_remote_code: Whether Python code in the folder may be run.

    Raises:
        ConfigError: If there is no ``config.json``, or the model is quantized, has an unknown type,
            or requires Python code that is not trusted.
    """
    path = folder / CONFIG
    document = read_json(path, "pass the folder of a model saved by the transformers library")
    kind = document.get("model_type") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(
            f"{path} has no model_type; pass the folder of a model saved by the transformers "
            "library"
        )
    if document.get("quantization_config"):
        raise ConfigError(
            f"{path}: the weights are quantized, but training needs them in 16 or 32 bits; save "
            "the model without quantization_config"
        )
    transformers = transformers_module()
    known_types = transformers.CONFIG_MAPPING
    if kind not in known_types and "auto_map" in document and not trust_remote_code:
        raise ConfigError(
            f"{path}: model_type {kind!r} needs the Python code in its folder; read the code, then "
            "pass trust_remote_code=True"
        )
    if kind not in known_types and "auto_map" not in document:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} does not support model_type "
            f"{kind!r}; install a newer version"
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: {(str(error).splitlines() or ['not readable'])[0]}") from error


def build_on_meta(folder: Path, config: Any, dtype: torch.dtype | None) -> torch.nn.Module:
    """Builds the model described by ``config`` on the ``meta`` device, in training mode.

    Buffers that the files do not contain, such as the frequencies of rotary embeddings, are
    computed in host memory.

    Args:
        folder: Folder of the model.
        config: Configuration of the model, from :func:`read_config`.
        dtype: Dtype of the parameters; ``None`` uses the dtype in the configuration.

    Raises:
        ConfigError: If the configuration does not name a class of ``transformers``.
    """
    kind = _model_class(folder, config)
    saved = getattr(config, "dtype", None)
    chosen = dtype or (saved if isinstance(saved, torch.dtype) else torch.float32)
    with torch.device("meta"):
        model: Any = kind._from_config(copy.deepcopy(config), dtype=chosen)
    _apply_dtype_plan(model, chosen)
    computed = dict(model.named_non_persistent_buffers())
    for name, buffer in model.named_buffers():
        if name in computed:
            _set(model, name, torch.empty_like(buffer, device="cpu"))
        else:
            buffer._is_hf_initialized = True
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    model.train()
    built: torch.nn.Module = model
    return built


def _model_class(folder: Path, config: Any) -> Any:
    """Returns the model class that ``config`` names in ``architectures``.

    If the class is not part of ``transformers``, it is loaded from the Python code in ``folder``.
    """
    transformers = transformers_module()
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    remote: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    for reference in (text for text in remote.values() if isinstance(text, str)):
        if reference.rpartition(".")[2] in names:
            dynamic = transformers_module("dynamic_module_utils")
            return dynamic.get_class_from_dynamic_module(
                reference, str(folder), local_files_only=True
            )
    raise ConfigError(
        f"{folder / CONFIG}: architectures {names} does not name a class of transformers "
        f"{transformers.__version__}; install a newer version, or correct the name"
    )


def _apply_dtype_plan(model: Any, dtype: torch.dtype) -> None:
    """Casts the parameters of ``model`` that require a dtype other than ``dtype``.

    For example, some models require float32 for the router's weights.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    loading = transformers_module("core_model_loading")
    pattern, by_group, _ = loading.build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        match = pattern.search(name)
        if match is not None:
            parameter.data = parameter.data.to(plan[by_group[match.lastgroup]])


def _set(model: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    model.get_submodule(module)._buffers[attribute] = buffer


def plain_name(name: str) -> str:
    """Returns the tensor name ``name`` without the parts that PEFT adds to it."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return re.sub(r"\.(original_module|modules_to_save\.\w+)\.", ".", name)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Describes how one or more tensors in the folder are converted to tensors of the model.

    Attributes:
        target: Name of a tensor of the model, to which ``transformers`` maps the names in
            ``sources``. If the conversion splits tensors, ``target`` is only one of the names in
            ``targets``.
        sources: Names of the converted tensors in the folder, each with the pattern that it
            matches.
        converter: Converter from ``transformers``; ``None`` if the tensor is only renamed.
        targets: Shapes of the resulting model tensors, keyed by name.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    converter: Any
    targets: Mapping[str, tuple[int, ...]]

    def convert(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Converts ``tensors`` from the folder, and returns the resulting model tensors."""
        if self.converter is None:
            return {self.target: tensors[self.sources[0][0]]}
        converter = copy.deepcopy(self.converter)
        for source, pattern in self.sources:
            converter.add_tensor(self.target, source, pattern, tensors[source])
        results = converter.convert(self.target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }


class PretrainedWeights:
    """Reads tensors of a model from a folder of ``safetensors`` files.

    Args:
        folder: Folder of the model.
        model: Model from :func:`build_on_meta`, without adapters.

    Attributes:
        folder: Folder of the model.

    Raises:
        CheckpointError: If a file is missing or damaged, or the names or shapes of the tensors in
            the folder differ from those of the model.
    """

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        self.folder = folder
        self._model: Any = model
        self._first_names: dict[int, str] = {}
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self._name_of = {
            name: self._first_names.setdefault(id(tensor), name) for name, tensor in named
        }
        with TensorFolder(folder, dtypes=ALL_DTYPES) as files:
            self._conversions = list(self._find_conversions(files))
        self._check(dict(named))

    def initialize(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills ``tensors`` with values from the folder, converted to the model's layout.

        Args:
            tensors: Tensors to fill, keyed by their names in the model.
        """
        by_name: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            plain = plain_name(name)
            by_name.setdefault(self._name_of.get(plain, plain), []).append(tensor)
        with TensorFolder(self.folder, dtypes=ALL_DTYPES) as files, torch.no_grad():
            for conversion in self._conversions:
                names = [(name, self._name_of[name]) for name in conversion.targets]
                targets_by_name = {
                    name: by_name[first] for name, first in names if first in by_name
                }
                if targets_by_name:
                    self._fill(files, conversion, targets_by_name)

    def _fill(
        self,
        files: TensorFolder,
        conversion: Conversion,
        targets_by_name: Mapping[str, list[torch.Tensor]],
    ) -> None:
        """Reads the tensors for ``conversion`` from ``files``, and fills the target tensors.

        ``targets_by_name`` contains the tensors to fill, keyed by name in the model.
        """
        direct = None if conversion.converter is not None else targets_by_name[conversion.target][0]
        sources = {name: files.read_whole(name, direct) for name, _ in conversion.sources}
        for name, value in conversion.convert(sources, self._model).items():
            for target in targets_by_name.get(name, ()):
                if value is not target:
                    target.copy_(value)

    def _find_conversions(self, files: TensorFolder) -> Iterator[Conversion]:
        """Yields the conversions of all tensors in ``files``."""
        loading = transformers_module("core_model_loading")
        rules = transformers_module("conversion_mapping").get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        state = self._model.state_dict()
        prefix = self._model.base_model_prefix
        groups: dict[str, list[tuple[str, str | None]]] = {}
        self._extra: set[str] = set()
        for source in sorted(files.tensors, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(
                source, renamings, converters, prefix, state
            )
            if target not in state and source in state:
                target, pattern = loading.rename_source_key(
                    source, [], [], base_model_prefix=prefix, meta_state_dict=state
                )
            if target in state:
                groups.setdefault(target, []).append((source, pattern))
            else:
                self._extra.add(target)
        # Keep only the rules that were used. When the model is saved, the transformers library
        # applies all rules in this list in reverse.
        self._model._weight_conversions = [rule for rule in rules if rule.was_used()]
        for target, sources in groups.items():
            pattern = sources[0][1]
            shapes = {
                source: torch.empty(
                    files.tensors[source].shape, dtype=files.dtype_of(source), device="meta"
                )
                for source, _ in sources
            }
            conversion = Conversion(
                target=target,
                sources=tuple((source, key or source) for source, key in sources),
                converter=None if pattern is None else by_pattern[pattern],
                targets={},
            )
            results = conversion.convert(shapes, self._model)
            targets = {name: tuple(value.shape) for name, value in results.items()}
            yield Conversion(**{**vars(conversion), "targets": targets})

    def _check(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raises ``CheckpointError`` if the folder's tensors differ from the model's tensors.

        ``named`` contains the model's tensors, keyed by name.
        """
        shapes = {name: tuple(named[name].shape) for name in self._model.state_dict()}
        read: set[str] = set()
        for conversion in self._conversions:
            for name, shape in conversion.targets.items():
                if name not in shapes:
                    self._extra.add(name)
                elif shapes[name] != shape:
                    raise CheckpointError(
                        f"{self.folder}: {name} has shape {list(shape)}, but {CONFIG} requires "
                        f"{list(shapes[name])}; copy the weights and {CONFIG} from the same model"
                    )
                else:
                    read.add(self._name_of[name])
        missing = {name for name in shapes if self._name_of[name] not in read}
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks tensors that {type(self._model).__name__} requires "
                f"({_first_of(missing)}); use a folder that contains all tensors "
                f"of the model in its {CONFIG}"
            )
        report = SimpleNamespace(missing_keys=set(), unexpected_keys=self._extra)
        self._model._adjust_missing_and_unexpected_keys(report)
        if report.unexpected_keys:
            raise CheckpointError(
                f"{self.folder} contains {_first_of(report.unexpected_keys)}, which "
                f"{type(self._model).__name__} does not use; correct architectures in its "
                f"{CONFIG}"
            )


def _first_of(names: set[str]) -> str:
    """Returns the alphabetically first name, followed by the number of other names, as text."""
    return f"{min(names)}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Contains a model on the ``meta`` device and the folder with its weights.

    Attributes:
        model: Model on the ``meta`` device, with the adapters if only adapters are trained.
        weights: Object that reads the tensors in the folder.
        arguments: Keyword arguments for the model's ``forward`` in training.
        has_adapters: Whether only adapters are trained.
    """

    model: torch.nn.Module
    weights: PretrainedWeights
    arguments: Mapping[str, Any]
    has_adapters: bool

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the user's pipeline settings, with ``initialize`` and ``arguments`` added.

        Raises:
            ConfigError: If the settings contain ``initialize``.
        """
        if "initialize" in settings:
            raise ConfigError(
                "initialize cannot be used with from_pretrained, which reads all tensors from "
                "the folder; remove it, or build the model on the meta device and call Pipeline"
            )

        def initialize(tensors: Mapping[str, torch.Tensor]) -> None:
            self.weights.initialize(tensors)
            if self.has_adapters:
                initialize_adapters(self.model, settings.get("seed", 1234))

        arguments = {**self.arguments, **(settings.get("arguments") or {})}
        return {**settings, "arguments": arguments, "initialize": initialize}


def open_pretrained(
    folder: Path,
    *,
    adapter: Any,
    dtype: torch.dtype | Literal["auto"] | None,
    trust_remote_code: bool,
) -> Pretrained:
    """Builds the model in ``folder`` on the ``meta`` device, and checks its weight files.

    Args:
        folder: Folder of the model.
        adapter: ``LoraConfig`` of PEFT; ``None`` to train all parameters.
        dtype: Dtype of the parameters; ``auto`` and ``None`` use the dtype in the configuration.
        trust_remote_code: Whether Python code in the folder may be run.

    Raises:
        CheckpointError: If a file is missing or damaged, or does not fit the configuration.
        ConfigError: If the model is quantized or cannot be built, or the adapter is not supported.
    """
    if dtype == "auto":
        dtype = None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "dtype must be a floating-point torch.dtype, such as torch.bfloat16, or 'auto', got "
            f"{dtype!r}"
        )
    config = read_config(folder, trust_remote_code=trust_remote_code)
    model = build_on_meta(folder, config, dtype)
    weights = PretrainedWeights(folder, model)
    parameters = inspect.signature(model.forward).parameters
    return Pretrained(
        model=model if adapter is None else add_adapters(model, adapter, folder),
        weights=weights,
        arguments={"use_cache": False} if "use_cache" in parameters else {},
        has_adapters=adapter is not None,
    )
