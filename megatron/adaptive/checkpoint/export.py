"""Writes checkpoints as Hugging Face folders, and reads and writes adapters as PEFT does.

::

    checkpoint ──> model.safetensors, config.json, tokenizer     the model, adapters merged into it
               ──> adapter_model.safetensors, adapter_config.json
    adapter_model.safetensors ──> adapters of a built model

Names and places of tensors are :mod:`~megatron.adaptive.checkpoint.hugging_face_weights`'s. An
adapter's ``b`` has the rows of the weight that it is beside, and ``a`` a block of rows for each of
theirs.
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
    BESIDE,
    CORE_MEANINGS,
    DESCRIPTION,
    EMBEDDING,
    HuggingFaceReader,
    OurTensor,
    RowRun,
    copies_of,
    meet,
    our_tensors,
    rows_of,
    their_shapes,
)
from megatron.adaptive.checkpoint.megatron_lm import MEANINGS, SHAPES
from megatron.adaptive.checkpoint.reader import CheckpointReader, WantedPart
from megatron.adaptive.checkpoint.safetensors import INDEX, SINGLE, TensorFolder, write_folder
from megatron.adaptive.config import adapters as peft
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.hugging_face import CONFIG, load_config
from megatron.adaptive.config.input_files import read_whole
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.lora import MARK

_ANY_RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
ADAPTERS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_About = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class _Exported(NamedTuple):
    """Holds an open checkpoint, and the folder of theirs, ``like``, whose model it has."""

    path: Path
    reader: CheckpointReader
    config: TrainerConfig  # whose vocab_size counts the rows of theirs
    like: Path
    document: Mapping[str, Any]
    tensors: Mapping[str, OurTensor]


@contextlib.contextmanager
def _opened(
    checkpoints: Path, step: int | None, like: Path | None, output: Path, files: Sequence[str]
) -> Iterator[_Exported]:
    """Opens a checkpoint and makes the folder, which must have none of ``files``."""
    found = CheckpointFolder(checkpoints)
    step = found.latest() if step is None else step
    if step is None:
        raise CheckpointError(f"{checkpoints} holds no checkpoint: name the folder of --save")
    path, manifest = found.open(step)
    config = TrainerConfig.from_dict(manifest["config"])
    like = like or (Path(config.checkpoint.load_hf) if config.checkpoint.load_hf else None)
    if (like is None or not like.exists()) and (checkpoints / DESCRIPTION).is_dir():
        like = checkpoints / DESCRIPTION
    if like is None or not (like / CONFIG).is_file():
        raise CheckpointError(
            f"{path} does not say which {CONFIG} its model has"
            + (f" ({like} is gone)" if like else "")
            + ": give a folder with one as --config"
        )
    document, words = load_config(like)
    require_same(config, words, f"{like / CONFIG}", path)
    if any((output / name).exists() for name in files):
        raise CheckpointError(f"{output} holds a model already: name another --output")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, vocab_size=rows_of(words)),
        checkpoint=dataclasses.replace(config.checkpoint, load_hf=str(like)),
    )
    tensors = our_tensors(config, str(document["model_type"]))
    with CheckpointReader(path, manifest["files"], manifest["blocks"]) as reader:
        try:
            output.mkdir(parents=True, exist_ok=True)
            yield _Exported(path, reader, config, like, document, tensors)
        except OSError as error:
            raise CheckpointError(f"{output} cannot be written: {error.strerror}") from None


class _TheirTensors:
    """Puts tensors of theirs together from ``tensors`` of ours; ``copies`` name some again."""

    def __init__(
        self, reader: CheckpointReader, tensors: Mapping[str, OurTensor], copies: Mapping[str, str]
    ) -> None:
        if absent := [name for name in tensors if name not in reader.tensors]:
            raise CheckpointError(
                f"{reader.path} has no {absent[0]}: it is of another model than its configuration"
                " says"
            )
        self._reader, self._ours = reader, tensors
        self._holders: dict[str, list[tuple[str, RowRun]]] = {}
        for name, our in tensors.items():
            for one in our.rows:
                self._holders.setdefault(one.name, []).append((name, one))
        self.about = {
            name: (reader.tensors[self._holders[name][0][0]].dtype, shape)
            for name, shape in their_shapes(tensors).items()
        }
        for copied, name in copies.items():
            if "layers" in copied:  # a head that is the embedding is not written
                self._holders[copied], self.about[copied] = self._holders[name], self.about[name]

    def read_theirs(self, name: str) -> torch.Tensor:
        """Returns a tensor of theirs."""
        kind, shape = self.about[name]
        target = torch.empty(shape, dtype=kind)
        wanted = []
        for our, one in self._holders[name]:
            whole = target.t() if one.turned else target
            region = whole[one.first : one.first + one.count]
            offset = [one.at, *([0] if self._ours[our].columns else [])]
            if self._ours[our].experts:
                region, offset = region[None], [one.expert, *offset]
            wanted.append(WantedPart(name=our, offset=offset, target=region))
        self._reader.read(wanted)
        return target


def export_folder(
    checkpoints: Path,
    step: int | None,
    like: Path | None,
    output: Path,
    *,
    kind: str,
    shard_bytes: int,
) -> None:
    """Writes a checkpoint of ours as a folder of theirs, tensor by tensor.

    Args:
        checkpoints: folder of them.
        step: iteration, by default the latest.
        like: folder of theirs with configuration and tokenizer; by default the one that the run
            came from, or what came with its weights.
        output: folder that is made, and must not hold a model.
        kind: ``model``; ``adapters`` as PEFT does, whose configuration stays as it was if they were
            loaded; or ``merged``: the model with what adapters add to its weights, those that the
            checkpoint does not hold from ``like``.
        shard_bytes: size of the largest file.

    Raises:
        AdaptiveError: the checkpoint is of another model than the configuration, or damaged; or
            the output cannot be written.
    """
    files = (peft.ADAPTER_CONFIG, ADAPTERS) if kind == "adapters" else (CONFIG, SINGLE, INDEX)
    with _opened(checkpoints, step, like, output, files) as found:
        if kind == "adapters":
            theirs, size = _adapters_of(found), 1 << 62
            write_folder(
                output, theirs.about, theirs.read_theirs, shard_bytes=size, single=ADAPTERS
            )
            write_files(output, {peft.ADAPTER_CONFIG: _adapter_config(found)})
            return
        about, read = _merged(found) if kind == "merged" else _plain(found)
        write_folder(output, about, read, shard_bytes=shard_bytes)
        dtype = str(next(iter(about.values()))[0]).removeprefix("torch.")
        write_files(output, {CONFIG: _config_of(found.like / CONFIG, found.document, dtype)})
        for name in BESIDE:
            if (found.like / name).is_file():
                shutil.copyfile(found.like / name, output / name)


def _plain(found: _Exported) -> tuple[_About, Callable[[str], torch.Tensor]]:
    """Returns what describes the tensors of a model without adapters, and what reads one."""
    if found.config.lora.is_on:
        raise CheckpointError(
            f"{found.path} holds adapters: write them with --lora, or the model with --merge-lora"
        )
    theirs, known = _whole(found), found.tensors
    if more := [one for one in found.reader.tensors if _is_weight(one) and one not in known]:
        raise CheckpointError(
            f"{found.path} has {more[0]}, which models of type {found.document['model_type']}"
            " have no place for: export a run without it"
        )
    return theirs.about, theirs.read_theirs


def _merged(found: _Exported) -> tuple[_About, Callable[[str], torch.Tensor]]:
    """Returns the same of a model with its adapters merged into it."""
    turned = {one.name for our in found.tensors.values() for one in our.rows if one.turned}
    adapters, is_whole = _adapters_of(found), EMBEDDING in found.reader.tensors
    base = _whole(found) if is_whole else HuggingFaceReader(found.like, found.config)

    def read(name: str) -> torch.Tensor:
        weight, module = base.read_theirs(name), f"{_PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in adapters.about:
            return weight
        first, second = (
            adapters.read_theirs(f"{module}.lora_{one}.weight").float() for one in "AB"
        )
        change = found.config.lora.scale * (second @ first)
        change = change.t() if name in turned else change
        return (weight.float() + change).to(weight.dtype)

    return base.about, read


def _whole(found: _Exported) -> _TheirTensors:
    copies = copies_of(found.config, str(found.document["model_type"]))
    return _TheirTensors(found.reader, found.tensors, copies)


def _is_weight(name: str) -> bool:
    return name.startswith(("decoder.", "mtp.", "embedding.", "output_layer."))


def _config_of(path: Path, document: Mapping[str, Any], dtype: str) -> bytes:
    """Returns the file as it is, but for the type of the tensors where they have another."""
    key = "dtype" if "dtype" in document else "torch_dtype"
    if document.get(key) in (None, dtype) and "quantization_config" not in document:
        return read_whole(path)
    document = {name: one for name, one in document.items() if name != "quantization_config"}
    return (json.dumps({**document, key: dtype}, indent=2) + "\n").encode()


def require_same(config: TrainerConfig, words: Sequence[str], where: str, path: Path) -> None:
    """Checks that a checkpoint's settings are those of a configuration.

    Raises:
        CheckpointError: one differs, which is named.
    """
    their = parse([*words, *_ANY_RUN], world_size=1, last_wins=True)
    for group, names in (("model", (*SHAPES, *MEANINGS)), ("core", CORE_MEANINGS)):
        for name in names:
            saved = getattr(getattr(config, group), name)
            given = getattr(getattr(their, group), name)
            # As far as the rotation goes, so do positions.
            is_free = name == "max_position_embeddings" and "rope" in words
            if saved != given and not is_free:
                raise CheckpointError(
                    f"{path} has {name.replace('_', ' ')} {saved}, and {where} {given}: give the"
                    " configuration of its own model as --config"
                )


def adapter_tensors(
    config: TrainerConfig, tensors: Mapping[str, OurTensor]
) -> dict[str, OurTensor]:
    """Returns the adapters beside the tensors of a model, by their names in a checkpoint."""
    rank, found = config.lora.lora_rank or 0, dict[str, OurTensor]()
    parts = peft.adapted_parts(config)
    for name, our in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not (marks := parts.get(module.split(".", 3)[-1], ())):
            continue
        theirs = dict.fromkeys(one.name.removesuffix(".weight") for one in our.rows)
        has = [f"{_PREFIX}{one}" for one, mark in zip(theirs, marks, strict=True) if mark]
        first = [
            RowRun(rank * index, rank, 0, f"{one}.lora_A.weight", 0, False)
            for index, one in enumerate(has)
        ]
        second = [
            one._replace(name=f"{full}.lora_B.weight", turned=False)
            for one in our.rows
            if (full := f"{_PREFIX}{one.name.removesuffix('.weight')}") in has
        ]
        found[f"{module}{MARK}a"] = OurTensor(0, rank * len(has), our.columns, first)
        found[f"{module}{MARK}b"] = OurTensor(0, our.height, rank, second)
    return found


def load_adapters(chunks: Sequence[torch.nn.Module], folder: Path, config: TrainerConfig) -> None:
    """Fills the adapters of this rank's chunks from a folder of PEFT.

    Raises:
        AdaptiveError: they are of another model, of other targets or of another rank.
    """
    base = config.checkpoint.load_hf
    family = "deepseek_v3" if config.core.multi_latent_attention else "llama"
    family = family if base is None else str(load_config(Path(base))[0]["model_type"])
    ours = adapter_tensors(config, our_tensors(config, family))
    file = folder / ADAPTERS
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {ADAPTERS}: name a folder that PEFT wrote")
    weights = megatron_state.sharded_model(chunks, megatron_state.METADATA)
    apply_factories(weights)
    with TensorFolder(folder, ADAPTERS) as theirs:
        expected = their_shapes(ours)
        for name in sorted(expected.keys() | theirs.tensors.keys()):
            there = theirs.tensors[name].shape if name in theirs.tensors else None
            if there != (wanted := expected.get(name)):
                has, asked = (list(shape) if shape else "none" for shape in (there, wanted))
                raise CheckpointError(
                    f"{file}: of {name} the shape is {has} there and {asked} in this model with"
                    f" --lora-rank {config.lora.lora_rank} and --lora-targets"
                    f" {config.lora.lora_targets}: leave these out, or it is of another model"
                )
        with torch.no_grad():
            for shard in nested_values(weights):
                if isinstance(shard, ShardedTensor) and MARK in shard.key:
                    place = (ours[shard.key], shard.global_offset, shard.data)
                    for rows, row, column, region in meet(*place):
                        theirs.read(rows.name, row, column, region)


def _adapters_of(found: _Exported) -> _TheirTensors:
    """Returns the adapters that a checkpoint holds, as layers of its model can have them."""
    if not found.config.lora.is_on:
        raise CheckpointError(f"{found.path} holds no adapters: leave --lora and --merge-lora out")
    ours = adapter_tensors(found.config, found.tensors)
    for name, our in ours.items():
        saved = found.reader.tensors.get(name)
        if saved is not None and list(saved.size) != our.shape:
            raise CheckpointError(
                f"{found.path} has {name} with shape {list(saved.size)}, and layers of {found.like}"
                f" have {our.shape}: train adapters with --load-hf, for the names that they have"
            )
    return _TheirTensors(found.reader, ours, {})


def _adapter_config(found: _Exported) -> bytes:
    """Returns the file that adapters came with, or one like those of PEFT."""
    lora = found.config.lora
    given = None if lora.load_lora is None else Path(lora.load_lora)
    if given is not None and (given / peft.ADAPTER_CONFIG).is_file():
        words = peft.adapter_arguments(given, peft.base_of(found.config))
        rank, alpha, dropout, targets = words[1::2]
        numbers = (int(rank), float(alpha), float(dropout))
        if (*numbers, targets) == tuple(dataclasses.asdict(lora).values())[:4]:
            return read_whole(given / peft.ADAPTER_CONFIG)
    names = lora.lora_targets.split(",")
    if names == ["all-linear"]:
        theirs = peft.linear_names(found.config).values()
        names = sorted({name.rpartition(".")[2] for one in theirs for name in one})
    scaled = lora.lora_alpha or lora.lora_rank or 0
    document = {
        "base_model_name_or_path": str(found.like),
        "bias": "none",
        "fan_in_fan_out": any(one.turned for our in found.tensors.values() for one in our.rows),
        "inference_mode": True,
        "lora_alpha": int(scaled) if scaled == int(scaled) else scaled,
        "lora_dropout": lora.lora_dropout,
        "peft_type": "LORA",
        "r": lora.lora_rank,
        "target_modules": names,
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(document, indent=2, sort_keys=True).encode()
