"""Converts the ``config.json`` of a Hugging Face model to settings of the trainer.

The model's family (``config/families``) defines the keys of the file. The planner also accepts
models that the trainer cannot build. The trainer uses :func:`load_config`, which rejects such
models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.config_keys import Settings
from megatron.adaptive.config.families.registry import family_of, find_family, supported_types
from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.safetensors_header import read_header
from megatron.adaptive.errors import ConfigError, DamagedCheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LOAD_FLAG = "--load-hf"
FLAGS_FILE = "model_flags.txt"
"""Name of the file with the model's flags in a checkpoint folder. ``evaluate`` reads this file.
"""

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_OTHER_INPUT = ("vision_config", "audio_config", "vision_encoder", "audio_encoder")


class HuggingFaceModel(NamedTuple):
    """A model's ``config.json``, with the settings and family derived from it.

    Attributes:
        document: Contents of the file.
        settings: Values of the trainer's settings for the model, keyed by field name.
        family: Family of the model.
    """

    document: dict[str, Any]
    settings: Settings
    family: Family


def is_config(document: Any) -> bool:
    """Returns whether ``document`` was read from the ``config.json`` of a Hugging Face model."""
    return isinstance(document, dict) and "model_type" in document and "format" not in document


def read_settings(
    document: Mapping[str, Any],
    where: str,
    sequence: int | None = None,
    hf_family: str | None = None,
) -> tuple[Settings, Family]:
    """Converts a ``config.json`` to settings of the trainer.

    Args:
        document: Contents of the file.
        where: Path of the file, shown in error messages.
        sequence: Number of tokens per sample. The default is the longest sequence that the model
            supports, but at most 4,096 tokens.
        hf_family: Value of ``--hf-family``, or ``None`` if it is absent.

    Returns:
        Values of the trainer's settings, keyed by field name, and the family of the model.

    Raises:
        ConfigError: The architecture is unknown or not supported, or a key is missing.
    """
    with _expected_kinds(where):
        # If the model also accepts images or sound, only the part of the file that describes its
        # text model is used.
        text = _text_part(document)
        config: Mapping[str, Any] = document if text is None else text
        family = family_of({"model_type": document["model_type"], **config}, where, hf_family)
        if text is not None and "tie_word_embeddings" in document:
            config = {"tie_word_embeddings": document["tie_word_embeddings"], **config}
        return family.read(config, where, sequence), family


def load_config(folder: Path, hf_family: str | None = None) -> HuggingFaceModel:
    """Reads the ``config.json`` of a model, and checks that the trainer can build this model.

    Args:
        folder: Folder of a Hugging Face model.
        hf_family: Value of ``--hf-family``, or ``None`` if it is absent.

    Raises:
        ConfigError: The trainer cannot build the model. The message contains the unsupported key,
            its value and the nearest supported value.
    """
    path = folder / CONFIG
    document = read_json(path, "pass the folder of a Hugging Face model")
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ConfigError(f"{path} has no model_type, so it does not describe a Hugging Face model")
    _refuse_other_input(document, str(path), hf_family)
    family = family_of(document, str(path), hf_family)
    settings, text_family = read_settings(document, str(path), hf_family=hf_family)
    with _expected_kinds(str(path)):
        if feature := text_family.missing_feature:
            raise ConfigError(
                f"{path}: model_type {document['model_type']} requests {feature}, which "
                "megatron-core's layers do not support; the nearest supported family is "
                f"{family.nearest}"
            )
        family.check(document, settings, str(path))
        # config.json may list layers for multi-token prediction whose weights are not in the
        # folder, because the transformers library does not save these layers.
        prefix = family.layer_prefix.format(settings["num_layers"])
        if "mtp_num_layers" in settings and not _has_weights(folder, prefix):
            del settings["mtp_num_layers"]
    return HuggingFaceModel(document, settings, family)


def _text_part(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the keys of the text model, if the model also accepts images or sound.

    The result is ``None`` for all other models.
    """
    parts = (document.get(key) for key in _TEXT_PARTS)
    return next((part for part in parts if isinstance(part, dict)), None)


def _refuse_other_input(document: Mapping[str, Any], where: str, hf_family: str | None) -> None:
    """Raises an error if a model accepts input other than text.

    Raises:
        ConfigError: The model also accepts images or sound. The message explains whether its text
            part can be used on its own.
    """
    text = _text_part(document)
    kind = document["model_type"]
    has_other_input = text is not None or any(document.get(key) for key in _OTHER_INPUT)
    if not has_other_input or find_family(kind, hf_family) is not None:
        return
    part = str(kind if text is None else text.get("model_type"))
    family = find_family(part, hf_family)
    if text is None:
        rule = "the file does not separate the keys of its text part"
    elif family is not None and not family.missing_feature:
        key = next(key for key in _TEXT_PARTS if document.get(key) is text)
        rule = (
            f"this trainer can load its text part, {part}; save only that part, with {key} as the "
            f"whole {CONFIG} and with the weight names of {part}"
        )
    else:
        families = ", ".join(supported_types())
        rule = f"its text part, {part}, does not belong to a supported family ({families})"
    raise ConfigError(f"{where}: model_type {kind!r} accepts input other than text; {rule}")


@contextlib.contextmanager
def _expected_kinds(where: str) -> Iterator[None]:
    """Converts Python errors about values of the wrong type to a :class:`ConfigError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: a value has another type than in files that the transformers library "
            f"writes ({error}); restore the file"
        ) from None


def _has_weights(folder: Path, prefix: str) -> bool:
    """Returns whether ``folder`` contains weights whose names begin with ``prefix``.

    The names are read from the index file, or from the header of the weight file.
    """
    names: Iterable[str] = ()
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "copy the file again", DamagedCheckpointError)
        table = index.get("weight_map") if isinstance(index, dict) else None
        names = table if isinstance(table, dict) else ()
    elif (folder / SINGLE).is_file():
        names = read_header(folder / SINGLE)
    return any(name.startswith(prefix) for name in names)
