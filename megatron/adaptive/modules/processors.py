"""Loads the processor (tokenizer and image processor) of a model saved by ``transformers``.

Image processors of ``transformers`` use torchvision or Pillow, but video processors require
torchvision. Samples for fine-tuning contain no videos. If torchvision is not installed, this module
therefore loads only the settings of the video processor::

    processor of Qwen2.5-VL ──┬── tokenizer
                              ├── image processor (Pillow)
                              └── VideoSettings: saved unchanged with the processor
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.pretrained import transformers_module

_VIDEO = "video_processor"
_NESTED = "processor_config.json"
_IMAGES = "preprocessor_config.json"
_VIDEOS = "video_preprocessor_config.json"
_TOKENIZER = "tokenizer_config.json"
_CORRECT = "save the processor to the folder again with its method save_pretrained"


class VideoSettings(dict[str, Any]):
    """Contains the settings of a video processor that cannot be created, and stands in for it."""

    # Attributes that processors of the transformers library read from each of their parts.
    _auto_class = None
    model_input_names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


_FAILURES = (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""Errors that the transformers library raises if files are missing, damaged or unsupported."""


def load_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Returns the processor of a model, or the tokenizer of a model that accepts only text.

    If torchvision is not installed, the processor does not support videos.

    Args:
        folder: Folder of the model.
        trust_remote_code: Whether Python code in the folder may be run.

    Raises:
        ConfigError: If the folder contains neither a tokenizer nor a processor, or a package is
            missing.
    """
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    transformers = transformers_module()
    try:
        try:
            return transformers.AutoProcessor.from_pretrained(str(folder), **options)
        except (ImportError, OSError, ValueError):
            if _has("torchvision"):
                raise
            processor = _without_videos(folder, options)
            if processor is None:
                raise
            return processor
    except _FAILURES as error:
        raise ConfigError(
            f"{folder} has no tokenizer or processor that transformers can read "
            f"({_reason(folder, error)}); pass the folder of a model"
        ) from None


def _has(package: str) -> bool:
    """Returns whether ``package`` is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def _reason(folder: Path, error: Exception) -> str:
    """Returns the reason why the processor in ``folder`` could not be loaded.

    ``error`` is the error that ``transformers`` raised.
    """
    # Replace the error message of the transformers library for a missing folder, because it
    # mentions a server, although nothing is downloaded.
    if not folder.is_dir():
        return "there is no such folder"
    # If the versions of torchvision and torch do not match, no image processor can be loaded, and
    # the error message of the transformers library does not contain the cause.
    if _has("torchvision"):
        try:
            importlib.import_module("torchvision")
        except (ImportError, OSError, RuntimeError) as cause:
            return (
                f"torchvision cannot be imported: {first_line(cause)}; install the torchvision "
                "version that matches torch, or uninstall torchvision"
            )
    # The messages of these errors contain only the name of the missing key or attribute, so include
    # the type of the error.
    name = f"{type(error).__name__} " if isinstance(error, AttributeError | LookupError) else ""
    return f"{name}{first_line(error)}"


def _without_videos(folder: Path, options: dict[str, Any]) -> Any:
    """Loads a processor in which :class:`VideoSettings` replaces the video processor.

    Returns ``None`` if the processor's class is unknown, has no video processor, or has a part that
    this function cannot load.

    Args:
        folder: Folder of the model.
        options: Keyword arguments of ``from_pretrained`` for the processor's parts.
    """
    transformers = transformers_module()
    kind = _class_of(folder, options)
    if kind is None or _VIDEO not in kind.get_attributes():
        return None

    # mypy cannot check this base class, because it is known only at run time.
    class WithoutVideos(kind):  # type: ignore[misc,valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != _VIDEO:
                super().check_argument_for_proper_class(argument_name, argument)

    made: Any = WithoutVideos
    # Keep the name of the original class, because the name is written to processor_config.json.
    made.__name__ = kind.__name__
    makers: dict[str, Callable[[], Any]] = {
        _VIDEO: lambda: VideoSettings(_video_settings(folder)),
        "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(
            str(folder), **options
        ),
        "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(str(folder), **options),
    }
    names = kind.get_attributes()
    if not makers.keys() >= set(names):
        return None
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    return made.from_args_and_dict([makers[name]() for name in names], settings)


def _class_of(folder: Path, options: dict[str, Any]) -> Any:
    """Returns the processor class for ``folder``, or ``None`` if ``transformers`` has none.

    ``options`` contains keyword arguments of ``from_pretrained``.
    """
    transformers = transformers_module()
    for name in (_NESTED, _IMAGES, _TOKENIZER):
        named = _document(folder / name).get("processor_class")
        if isinstance(named, str):
            return getattr(transformers, named, None)
    config = transformers.AutoConfig.from_pretrained(str(folder), **options)
    mapping = transformers.PROCESSOR_MAPPING
    return mapping.get(type(config), None)


def _video_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of the video processor in ``folder``."""
    nested = _document(folder / _NESTED).get(_VIDEO)
    if isinstance(nested, dict):
        return nested
    # Folders saved by older versions use the same settings for images and videos.
    return _document(folder / _VIDEOS) or _document(folder / _IMAGES)


def _document(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file ``path``, or an empty dict if there is no such file."""
    # Do not use read_json(), because it rejects numbers such as 10**30, which stands for "no length
    # limit" in the files of tokenizers.
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({first_line(error)}); {_CORRECT}") from None
    return document if isinstance(document, dict) else {}


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
