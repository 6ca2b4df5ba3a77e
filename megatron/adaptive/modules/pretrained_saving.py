"""Writes a pipeline's model as a folder that ``transformers`` or PEFT can load.

Each rank writes the tensors of its stages to separate files, so no process has to hold the whole
model::

    rank 0   model-00001-of-00003.safetensors   config.json, index, tokenizer
    rank 1   model-00002-of-00003.safetensors
    rank 2   model-00003-of-00003.safetensors

Adapters, which are small, are gathered and written by the first rank, because PEFT reads them from
a single file.

The files are written to a folder named ``.NAME.partial``, which is renamed to ``NAME`` when it is
complete. If a process exits before that, the partial folder remains, and the next save replaces it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.checkpoint.folder import sync
from megatron.adaptive.checkpoint.hugging_face_weights import COMPANION_FILES
from megatron.adaptive.checkpoint.safetensors import (
    shard_name,
    split_shards,
    write_folder,
    write_index,
    write_shard,
)
from megatron.adaptive.config.hugging_face import SINGLE
from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError
from megatron.adaptive.modules.adapters import adapter_file, is_adapted
from megatron.adaptive.modules.batch import require_whole
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.pretrained import transformers_module

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def save_pretrained(
    folder: Path,
    model: Any,
    held: Mapping[str, torch.Tensor],
    mesh: Mesh,
    *,
    source: Path | None,
    shard_bytes: int,
) -> None:
    """Writes the model, or only its adapters if it has any. All ranks must call this.

    Args:
        folder: New or empty folder to write.
        model: Model whose parts are distributed over the ranks.
        held: Parameters and buffers of this rank, keyed by their names in the model.
        mesh: Replica and pipeline position of this process, and its process groups.
        source: Folder from which the files of tokenizer, processor and generation settings are
            copied; ``None`` copies nothing.
        shard_bytes: Maximum size of a file in bytes. A larger tensor is written to a separate file.

    Raises:
        CheckpointError: If the folder cannot be written.
        ConfigError: If the model is not a ``transformers`` model, the folder is not empty, or
            ``shard_bytes`` is not a positive integer.
    """
    require_whole(1, shard_bytes=shard_bytes)
    base: Any = model.get_base_model() if is_adapted(model) else model
    if not isinstance(base, transformers_module().PreTrainedModel):
        raise ConfigError(
            f"save_pretrained requires a model of the transformers library, got a "
            f"{type(base).__name__}; use Pipeline.save for other models"
        )
    partial = folder.parent / f".{folder.name}.partial"
    mesh.on_first(lambda: _make(folder, partial))
    if is_adapted(model):
        tensors = {n: t.detach().cpu() for n, t in held.items() if t.requires_grad}
        gathered: dict[str, torch.Tensor] = {}
        for part in mesh.gather(tensors if mesh.dp_rank == 0 else {}):
            gathered.update(part)
        mesh.on_first(lambda: guarded(lambda: _write_adapters(partial, model, gathered)))
    else:
        _write_model(partial, base, _own_tensors(base, held, mesh), mesh, shard_bytes)
        mesh.on_first(lambda: guarded(lambda: _write_settings(partial, base, source)))
    mesh.on_first(lambda: guarded(lambda: finish(partial, folder)))


def _make(folder: Path, partial: Path) -> None:
    """Creates the empty folder ``partial``, and checks that ``folder`` is new or empty.

    If an interrupted save has left a folder ``partial``, it is removed first.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose a new folder")

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    guarded(make)


def guarded(action: Callable[[], None]) -> None:
    """Calls ``action``, which writes files, and converts ``OSError`` to ``CheckpointError``."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror or error}; free space there, or use another folder"
        ) from error


def _own_tensors(
    model: Any, held: Mapping[str, torch.Tensor], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Returns the tensors in ``held`` that this rank writes, keyed by their names in the folder.

    If several ranks hold a tensor, the first of them writes it. ``transformers`` determines the
    names, and undoes its conversions. For example, it splits tensors that it merged when the folder
    was read.
    """
    saved = set(model.state_dict())
    held_names = [name for name in held if name in saved and mesh.dp_rank == 0]
    earlier: set[str] = set()
    for names in mesh.gather(held_names)[: mesh.rank]:
        earlier.update(names)
    state = {name: held[name].detach() for name in held_names if name not in earlier}
    loading = transformers_module("core_model_loading")
    tensors: dict[str, torch.Tensor] = loading.revert_weight_conversion(model, state)
    return tensors


def _write_model(
    partial: Path, model: Any, tensors: Mapping[str, torch.Tensor], mesh: Mesh, shard_bytes: int
) -> None:
    """Writes this rank's ``tensors`` to files in ``partial``. The first rank also writes an index.

    All ranks must call this. A file has at most ``shard_bytes`` bytes, unless it contains a single
    larger tensor.
    """
    about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    shards = split_shards(about, shard_bytes) if about else []
    counts = mesh.gather(len(shards))
    count = sum(counts)
    first = sum(counts[: mesh.rank])
    files: dict[str, str] = {}

    def write() -> None:
        for number, names in enumerate(shards, first):
            file = SINGLE if count == 1 else shard_name(number, count)
            files.update(dict.fromkeys(names, file))
            write_shard(
                partial / file,
                {name: about[name] for name in names},
                lambda name: tensors[name].contiguous().cpu(),
            )

    failure: AdaptiveError | None = None
    try:
        guarded(write)
    except CheckpointError as error:
        failure = error
    for rank_failure in (failure, *mesh.gather(failure)):
        if rank_failure is not None:
            raise rank_failure
    parts = mesh.gather((files, about))
    if count > 1:
        table = {name: file for part, _ in parts for name, file in part.items()}
        sizes = {name: size for _, part in parts for name, size in part.items()}
        mesh.on_first(lambda: guarded(lambda: write_index(partial, table, sizes)))


def _write_settings(partial: Path, model: Any, source: Path | None) -> None:
    """Writes the configuration of ``model`` to the folder ``partial``.

    The files of tokenizer, processor and generation settings are copied from the folder ``source``.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(partial)
    if model.can_generate():
        model.generation_config.save_pretrained(partial)
    for name in (*COMPANION_FILES, *_PROCESSOR_FILES):
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, partial / name)


def _write_adapters(partial: Path, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the adapters of ``model`` to the folder ``partial`` in PEFT's format.

    ``tensors`` contains the trained parameters of the whole model, keyed by name.
    """
    config, state = adapter_file(model, tensors)
    about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    config.save_pretrained(str(partial))
    write_folder(
        partial,
        about,
        lambda name: state[name].contiguous(),
        shard_bytes=1 << 62,  # Write a single file, because PEFT reads only one.
        single="adapter_model.safetensors",
    )


def finish(partial: Path, folder: Path) -> None:
    """Flushes the files in ``partial`` to disk, and renames ``partial`` to ``folder``."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    sync(folder.parent)
