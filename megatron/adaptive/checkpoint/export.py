"""Exports checkpoints to Hugging Face folders, and reads and writes adapters in PEFT's format.

::

    checkpoint ──> model.safetensors, config.json, tokenizer     the model, adapters merged into it
               ──> adapter_model.safetensors, adapter_config.json
    adapter_model.safetensors ──> adapters of a built model

:mod:`~megatron.adaptive.checkpoint.hugging_face_weights` defines which rows of a megatron-core
tensor come from which Hugging Face tensor. An adapter is a pair of matrices (LoRA) whose product
``b @ a`` is added to a weight. ``b`` has the same rows as the weight. ``a`` has one block of rows
for each Hugging Face tensor in the weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron.adaptive.checkpoint import megatron_state
from megatron.adaptive.checkpoint.folder import CheckpointFolder, write_files
from megatron.adaptive.checkpoint.hugging_face_weights import (
    COMPANION_FILES,
    CORE_MEANINGS,
    DESCRIPTION,
    EMBEDDING,
    CoreTensor,
    HuggingFaceReader,
    RowRun,
    copies_of,
    core_tensors,
    hugging_face_shapes,
    meet,
)
from megatron.adaptive.checkpoint.megatron_lm import MEANINGS, SHAPES
from megatron.adaptive.checkpoint.reader import CheckpointReader, WantedPart
from megatron.adaptive.checkpoint.safetensors import TensorFolder, write_folder
from megatron.adaptive.config import adapters as peft
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.hugging_face import (
    CONFIG,
    INDEX,
    SINGLE,
    HuggingFaceModel,
    load_config,
)
from megatron.adaptive.config.input_files import read_whole
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.lora import MARK

_ANY_RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
ADAPTERS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_About = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class _Exported(NamedTuple):
    """Holds an open checkpoint and the configuration of its model."""

    path: Path
    reader: CheckpointReader
    # vocab_size in these settings is the number of rows in the Hugging Face embedding.
    config: TrainerConfig
    like: Path
    model: HuggingFaceModel
    tensors: Mapping[str, CoreTensor]


@contextlib.contextmanager
def _opened(
    checkpoints: Path,
    step: int | None,
    like: Path | None,
    output: Path,
    files: Sequence[str],
    hf_family: str | None,
) -> Iterator[_Exported]:
    """Opens a checkpoint for an export, creates the output folder, and yields the checkpoint.

    Args:
        checkpoints: Folder of checkpoints.
        step: Iteration of the checkpoint, or ``None`` for the latest checkpoint.
        like: Hugging Face folder with the model's configuration, or ``None`` to use the folder from
            which the run loaded the model.
        output: Folder to create, if it does not exist yet.
        files: Names of the files to write. The output folder must not contain any of these files.
        hf_family: Value of ``--hf-family``, or ``None`` to use the run's value.

    Raises:
        AdaptiveError: If the checkpoint does not match the configuration, or is damaged.
    """
    folder = CheckpointFolder(checkpoints)
    step = folder.latest() if step is None else step
    if step is None:
        raise CheckpointError(
            f"{checkpoints} contains no checkpoint; pass the folder that the run used as --save"
        )
    path, manifest = folder.open(step)
    config = TrainerConfig.from_dict(manifest["config"])
    like = like or (Path(config.checkpoint.load_hf) if config.checkpoint.load_hf else None)
    if (like is None or not like.exists()) and (checkpoints / DESCRIPTION).is_dir():
        like = checkpoints / DESCRIPTION
    if like is None or not (like / CONFIG).is_file():
        raise CheckpointError(
            f"{path} does not contain the {CONFIG} of its model"
            + (f", and {like} no longer exists" if like else "")
            + f"; pass a folder with this {CONFIG} as --config"
        )
    hf_family = hf_family or config.checkpoint.hf_family
    model = load_config(like, hf_family)
    require_same(config, model.settings, f"{like / CONFIG}", path)
    if any((output / name).exists() for name in files):
        raise CheckpointError(f"{output} already contains a model; choose another --output")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, vocab_size=model.settings["vocab_size"]),
        checkpoint=dataclasses.replace(config.checkpoint, load_hf=str(like), hf_family=hf_family),
    )
    tensors = core_tensors(config, model.family)
    with CheckpointReader(path, manifest["files"], manifest["blocks"]) as reader:
        try:
            output.mkdir(parents=True, exist_ok=True)
            yield _Exported(path, reader, config, like, model, tensors)
        except OSError as error:
            raise CheckpointError(f"cannot write {output}: {error.strerror}") from None


class _HuggingFaceTensors:
    """Assembles Hugging Face tensors from the tensors in a checkpoint.

    Args:
        reader: Reader of the checkpoint.
        tensors: Description of each megatron-core tensor, keyed by name.
        copies: Maps the name of each duplicate Hugging Face tensor to the name of the original
            tensor.
    """

    def __init__(
        self, reader: CheckpointReader, tensors: Mapping[str, CoreTensor], copies: Mapping[str, str]
    ) -> None:
        if absent := [name for name in tensors if name not in reader.tensors]:
            raise CheckpointError(
                f"{reader.path} does not contain the tensor {absent[0]}, which the configuration "
                "of its model requires; pass the folder of the checkpoint's model as --config"
            )
        self._reader = reader
        self._tensors = tensors
        self._holders: dict[str, list[tuple[str, RowRun]]] = {}
        for name, tensor in tensors.items():
            for run in tensor.rows:
                self._holders.setdefault(run.name, []).append((name, run))
        self.about = {
            name: (reader.tensors[self._holders[name][0][0]].dtype, shape)
            for name, shape in hugging_face_shapes(tensors).items()
        }
        for copied, name in copies.items():
            self._holders[copied] = self._holders[name]
            self.about[copied] = self.about[name]

    def read_hugging_face(self, name: str) -> torch.Tensor:
        """Reads the whole Hugging Face tensor ``name`` from the checkpoint and returns it."""
        kind, shape = self.about[name]
        target = torch.empty(shape, dtype=kind)
        parts = []
        for key, run in self._holders[name]:
            whole = target.t() if run.transposed else target
            region = whole[run.first : run.first + run.count]
            offset = [run.row, *([0] if self._tensors[key].columns else [])]
            if self._tensors[key].experts:
                region, offset = region[None], [run.expert, *offset]
            parts.append(WantedPart(name=key, offset=offset, target=region))
        self._reader.read(parts)
        return target


def export_folder(
    checkpoints: Path,
    step: int | None,
    like: Path | None,
    output: Path,
    *,
    kind: str,
    shard_bytes: int,
    hf_family: str | None = None,
) -> None:
    """Exports a checkpoint to a Hugging Face folder, one tensor at a time.

    Args:
        checkpoints: Folder of checkpoints.
        step: Iteration of the checkpoint, or ``None`` for the latest checkpoint.
        like: Hugging Face folder with configuration and tokenizer, or ``None`` to use the folder
            that the run loaded. If that folder no longer exists, the copy of its files next to the
            checkpoints is used.
        output: Folder to write. It may exist, but must not contain a model.
        kind: ``model`` exports a model without adapters. ``adapters`` exports adapters in PEFT's
            format, with their original configuration if the run loaded them. ``merged`` exports the
            model with the adapters added to its weights. If the checkpoint does not contain the
            model's weights, they are read from ``like``.
        shard_bytes: Maximum size of a file in bytes. A larger tensor gets a separate file.
        hf_family: Value of ``--hf-family``, or ``None`` to use the run's value.

    Raises:
        AdaptiveError: If the checkpoint is damaged or does not match the configuration, or if the
            output cannot be written.
    """
    files = (peft.ADAPTER_CONFIG, ADAPTERS) if kind == "adapters" else (CONFIG, SINGLE, INDEX)
    with _opened(checkpoints, step, like, output, files, hf_family) as exported:
        if kind == "adapters":
            adapters = _adapters_of(exported)
            no_limit = 1 << 62  # Do not split the adapters, because PEFT reads only a single file.
            write_folder(
                output,
                adapters.about,
                adapters.read_hugging_face,
                shard_bytes=no_limit,
                single=ADAPTERS,
            )
            write_files(output, {peft.ADAPTER_CONFIG: _adapter_config(exported)})
            return
        about, read = _merged(exported) if kind == "merged" else _plain(exported)
        write_folder(output, about, read, shard_bytes=shard_bytes)
        dtype = str(next(iter(about.values()))[0]).removeprefix("torch.")
        write_files(
            output, {CONFIG: _config_of(exported.like / CONFIG, exported.model.document, dtype)}
        )
        for name in COMPANION_FILES:
            if (exported.like / name).is_file():
                shutil.copyfile(exported.like / name, output / name)


def _plain(exported: _Exported) -> tuple[_About, Callable[[str], torch.Tensor]]:
    """Prepares the export of ``exported``, a model that has no adapters.

    Returns:
        Dtype and shape of each tensor, and a function that reads a tensor by name.
    """
    if exported.config.lora.is_on:
        raise CheckpointError(
            f"{exported.path} contains adapters; use --lora to export the adapters, or "
            "--merge-lora to export the model"
        )
    model = _whole(exported)
    described = exported.tensors
    extra = [name for name in exported.reader.tensors if _is_weight(name) and name not in described]
    if extra:
        raise CheckpointError(
            f"{exported.path} contains the tensor {extra[0]}, but Hugging Face models of type "
            f"{exported.model.document['model_type']} have no such tensor; export a "
            "checkpoint without this tensor"
        )
    return model.about, model.read_hugging_face


def _merged(exported: _Exported) -> tuple[_About, Callable[[str], torch.Tensor]]:
    """Merges the adapters of ``exported`` into its weights.

    Returns:
        Dtype and shape of each tensor, and a function that reads a tensor by name.
    """
    transposed = {
        run.name for tensor in exported.tensors.values() for run in tensor.rows if run.transposed
    }
    adapters = _adapters_of(exported)
    is_whole = EMBEDDING in exported.reader.tensors
    base = _whole(exported) if is_whole else HuggingFaceReader(exported.like, exported.config)

    def read(name: str) -> torch.Tensor:
        weight = base.read_hugging_face(name)
        module = f"{_PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in adapters.about:
            return weight
        first, second = (
            adapters.read_hugging_face(f"{module}.lora_{half}.weight").float() for half in "AB"
        )
        change = exported.config.lora.scale * (second @ first)
        change = change.t() if name in transposed else change
        return (weight.float() + change).to(weight.dtype)

    return base.about, read


def _whole(exported: _Exported) -> _HuggingFaceTensors:
    family = exported.model.family
    copies = copies_of(exported.config, family)
    # Export duplicate tensors only if they are inside a layer. An output matrix (head) that is tied
    # to the embedding is not exported.
    copies = {copied: name for copied, name in copies.items() if family.is_in_layer(copied)}
    return _HuggingFaceTensors(exported.reader, exported.tensors, copies)


def _is_weight(name: str) -> bool:
    return name.startswith(("decoder.", "mtp.", "embedding.", "output_layer."))


def _config_of(path: Path, document: Mapping[str, Any], dtype: str) -> bytes:
    """Returns the content of ``config.json`` for an exported model, as bytes.

    Args:
        path: Path of the original ``config.json``.
        document: Content of the original file.
        dtype: Dtype of the exported tensors, which replaces the original dtype.
    """
    key = "dtype" if "dtype" in document else "torch_dtype"
    if document.get(key) in (None, dtype) and "quantization_config" not in document:
        return read_whole(path)
    document = {key: value for key, value in document.items() if key != "quantization_config"}
    return (json.dumps({**document, key: dtype}, indent=2) + "\n").encode()


def require_same(
    config: TrainerConfig, settings: Mapping[str, Any], where: str, path: Path
) -> None:
    """Checks that the settings of a checkpoint match the settings in a configuration file.

    Args:
        config: Settings of the checkpoint.
        settings: Settings from the configuration file, keyed by field name.
        where: Path of the configuration file, for the error message.
        path: Path of the checkpoint, for the error message.

    Raises:
        CheckpointError: If a setting differs. The message names the setting and both values.
    """
    expected_config = parse(_ANY_RUN, world_size=1, settings=settings)
    is_rotary = settings.get("position_embedding_type") == "rope"
    for group, names in (("model", (*SHAPES, *MEANINGS)), ("core", CORE_MEANINGS)):
        for name in names:
            saved = getattr(getattr(config, group), name)
            expected = getattr(getattr(expected_config, group), name)
            # The number of positions may differ, because rotary embeddings have no weights that
            # depend on this number.
            is_free = name == "max_position_embeddings" and is_rotary
            if saved != expected and not is_free:
                raise CheckpointError(
                    f"{path} has {name.replace('_', ' ')} {saved}, but {where} has {expected}; "
                    "pass the folder of the checkpoint's model as --config"
                )


def adapter_tensors(
    config: TrainerConfig, tensors: Mapping[str, CoreTensor]
) -> dict[str, CoreTensor]:
    """Describes the adapters of a model as megatron-core tensors.

    Args:
        config: Settings of the model and of the adapters.
        tensors: Description of each tensor of the model, keyed by megatron-core's name.

    Returns:
        Descriptions of the two tensors of each adapter, keyed by their names in a checkpoint.
    """
    rank = config.lora.lora_rank or 0
    adapters: dict[str, CoreTensor] = {}
    parts = peft.adapted_parts(config)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not (marks := parts.get(module.split(".", 3)[-1], ())):
            continue
        modules = dict.fromkeys(run.name.removesuffix(".weight") for run in tensor.rows)
        adapted = [f"{_PREFIX}{part}" for part, mark in zip(modules, marks, strict=True) if mark]
        first = [
            RowRun(rank * index, rank, 0, f"{part}.lora_A.weight", 0, False)
            for index, part in enumerate(adapted)
        ]
        second = [
            run._replace(name=f"{full}.lora_B.weight", transposed=False)
            for run in tensor.rows
            if (full := f"{_PREFIX}{run.name.removesuffix('.weight')}") in adapted
        ]
        adapters[f"{module}{MARK}a"] = CoreTensor(0, rank * len(adapted), tensor.columns, first)
        adapters[f"{module}{MARK}b"] = CoreTensor(0, tensor.height, rank, second)
    return adapters


def load_adapters(chunks: Sequence[torch.nn.Module], folder: Path, config: TrainerConfig) -> None:
    """Loads adapters from the PEFT folder ``folder`` into this rank's model ``chunks``.

    Raises:
        AdaptiveError: If the adapters in the folder belong to a different base model or different
            layers, or were trained with a different ``--lora-rank``.
    """
    adapters = adapter_tensors(config, core_tensors(config, peft.base_of(config).family))
    file = folder / ADAPTERS
    if not file.is_file():
        raise CheckpointError(
            f"{folder} does not contain {ADAPTERS}; pass a folder that PEFT wrote"
        )
    weights = megatron_state.sharded_model(chunks, megatron_state.METADATA)
    apply_factories(weights)
    with TensorFolder(folder, ADAPTERS) as source:
        expected = hugging_face_shapes(adapters)
        for name in sorted(expected.keys() | source.tensors.keys()):
            shape_there = source.tensors[name].shape if name in source.tensors else None
            shape_here = expected.get(name)
            if shape_there != shape_here:
                has, asked = (
                    list(shape) if shape else "none" for shape in (shape_there, shape_here)
                )
                raise CheckpointError(
                    f"{file}: {name} has shape {has}, but this model with --lora-rank "
                    f"{config.lora.lora_rank} and --lora-targets {config.lora.lora_targets} "
                    f"requires {asked}; remove these flags, or load adapters that match"
                )
        with torch.no_grad():
            for shard in nested_values(weights):
                if isinstance(shard, ShardedTensor) and MARK in shard.key:
                    tensor = adapters[shard.key]
                    for rows, row, column, region in meet(tensor, shard.global_offset, shard.data):
                        source.read(rows.name, row, column, region)


def _adapters_of(exported: _Exported) -> _HuggingFaceTensors:
    """Returns the adapters in the checkpoint ``exported``, as Hugging Face tensors.

    Raises:
        CheckpointError: If there are no adapters, or their shapes do not match the model.
    """
    if not exported.config.lora.is_on:
        raise CheckpointError(
            f"{exported.path} contains no adapters; remove --lora and --merge-lora"
        )
    adapters = adapter_tensors(exported.config, exported.tensors)
    for name, tensor in adapters.items():
        saved = exported.reader.tensors.get(name)
        if saved is not None and list(saved.size) != tensor.shape:
            raise CheckpointError(
                f"{exported.path}: the adapter {name} has shape {list(saved.size)}, but the model "
                f"{exported.like} requires {tensor.shape}; train the adapters with --load-hf "
                f"{exported.like}, so that they match its layers"
            )
    return _HuggingFaceTensors(exported.reader, adapters, {})


def _adapter_config(exported: _Exported) -> bytes:
    """Returns the content of ``adapter_config.json`` for the adapters of ``exported``.

    If the run loaded the adapters and kept their settings, the content of the original file is
    returned.
    """
    lora = exported.config.lora
    loaded = None if lora.load_lora is None else Path(lora.load_lora)
    if loaded is not None and (loaded / peft.ADAPTER_CONFIG).is_file():
        saved = peft.adapter_settings(loaded, peft.base_of(exported.config))
        if all(getattr(lora, name) == value for name, value in saved.items()):
            return read_whole(loaded / peft.ADAPTER_CONFIG)
    names = lora.lora_targets.split(",")
    if names == ["all-linear"]:
        projections = peft.linear_names(exported.config).values()
        names = sorted({name.rpartition(".")[2] for group in projections for name in group})
    scaled = lora.lora_alpha or lora.lora_rank or 0
    document = {
        "base_model_name_or_path": str(exported.like),
        "bias": "none",
        "fan_in_fan_out": any(
            run.transposed for tensor in exported.tensors.values() for run in tensor.rows
        ),
        "inference_mode": True,
        "lora_alpha": int(scaled) if scaled == int(scaled) else scaled,
        "lora_dropout": lora.lora_dropout,
        "peft_type": "LORA",
        "r": lora.lora_rank,
        "target_modules": names,
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(document, indent=2, sort_keys=True).encode()
