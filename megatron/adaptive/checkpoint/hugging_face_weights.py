"""Converts weights between Hugging Face models and megatron-core's models or checkpoints.

A core tensor is a tensor of a megatron-core model, identified by its name in a checkpoint. A
Hugging Face tensor is a tensor in a Hugging Face folder. The model's family (``config/families``)
maps core modules to Hugging Face modules. Each core tensor is assembled from rows of Hugging Face
tensors. A list of :class:`RowRun` describes these rows, and is used for both import and export::

    core tensor, [rows, columns]                            Hugging Face tensors
    linear_qkv    q q k v | q q k v | ...  by query group    q_proj, k_proj, v_proj, or one tensor
    linear_fc1    gate | up                                  gate_proj, up_proj, or one tensor
    others        the same rows; GPT-2's matrices transposed

The run's settings determine the size of each tensor. A tensor that has a different size, or that
the model does not have, is rejected before it is read. Padding rows of the embedding are zero in
the core tensor and absent in the Hugging Face tensor. megatron-core decides how core tensors are
sharded. Each rank requests the regions of its shards, so any parallel sizes, partition and
placement of stages are supported.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron.adaptive.checkpoint import megatron_state
from megatron.adaptive.checkpoint.folder import CheckpointFolder, write_files
from megatron.adaptive.checkpoint.safetensors import DTYPES, FP8, TensorFolder
from megatron.adaptive.checkpoint.writer import Entry, common_files, indices_of, write_file
from megatron.adaptive.config.arguments import flag_words
from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.weight_names import PREDICTION
from megatron.adaptive.config.hugging_face import CONFIG, FLAGS_FILE, load_config
from megatron.adaptive.config.megatron_core_flags import LATENT_SETTINGS
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import padded_vocab_size
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.gpt.lora import MARK

# Older versions of transformers saved these buffers. They are ignored, because the trainer computes
# them again.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
"""Names of the files that are copied together with a model's ``config.json``, if they exist."""
DESCRIPTION = "hugging_face"
"""Name of the subfolder that contains the model's configuration and tokenizer."""
_SHARD = "__0_0.distcp"
# These settings of megatron-core affect a model's output even if its weights are the same.
CORE_MEANINGS = (
    "multi_latent_attention",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "window_size",
    "window_attn_skip_freq",
    "softmax_scale",
    *LATENT_SETTINGS,
)
EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


class ModuleSize(NamedTuple):
    """Size of the weight of a megatron-core module.

    Attributes:
        blocks: Number of rows of each matrix (block) that is stacked in the module's weight, such
            as the matrices for queries, keys and values.
        columns: Number of columns of the weight; 0 for a vector.
        has_bias: Whether the module has a bias.
        groups: Number of equal parts of each block. The parts of different blocks are interleaved:
            the first part of each block comes first, then the second part of each block, and so on.
        experts: Number of experts that have such a module; 0 if the module is not part of an
            expert.
    """

    blocks: tuple[int, ...]
    columns: int = 0
    has_bias: bool = False
    groups: int = 1
    experts: int = 0


class RowRun(NamedTuple):
    """Maps consecutive rows of a core tensor to rows of a Hugging Face tensor.

    Attributes:
        row: Index of the first row in the core tensor.
        count: Number of rows.
        expert: Index of the expert along the first axis of the core tensor, or 0 if there are no
            experts.
        name: Name of the Hugging Face tensor.
        first: Index of the first row in the Hugging Face tensor.
        transposed: Whether the Hugging Face tensor is stored transposed.
    """

    row: int
    count: int  # type: ignore[assignment]  # ``tuple`` has a method with this name.
    expert: int
    name: str
    first: int
    transposed: bool


class _Run(NamedTuple):
    """Consecutive rows of a module's weight that belong to the same block.

    Attributes:
        row: Index of the first row in the weight.
        count: Number of rows.
        block: Index of the block in :attr:`ModuleSize.blocks`.
        first: Index of the first row in the block.
    """

    row: int
    count: int  # type: ignore[assignment]  # ``tuple`` has a method with this name.
    block: int
    first: int


class RowRegion(NamedTuple):
    """Describes which rows and columns of a Hugging Face tensor to read, and where to store them.

    Attributes:
        rows: Rows of the core tensor that come from this Hugging Face tensor.
        row: Index of the first row to read in the Hugging Face tensor.
        column: Index of the first column to read in the Hugging Face tensor.
        target: Tensor into which the values are read.
    """

    rows: RowRun
    row: int
    column: int
    target: torch.Tensor


class CoreTensor(NamedTuple):
    """Describes a megatron-core tensor: its shape, and the Hugging Face rows that it consists of.

    Attributes:
        experts: Number of experts along the first axis; 0 if the tensor has no expert axis.
        height: Number of rows, without padding rows.
        columns: Number of columns; 0 for a vector.
        rows: Rows of Hugging Face tensors that make up the tensor, ordered by expert.
    """

    experts: int
    height: int
    columns: int
    rows: Sequence[RowRun]

    @property
    def shape(self) -> list[int]:
        """Returns the shape of the whole tensor, before sharding."""
        lead = [self.experts] if self.experts else []
        return [*lead, self.height, *([self.columns] if self.columns else [])]


def _sizes(config: TrainerConfig, layer: int | None) -> dict[str, ModuleSize]:
    """Returns the size of each module in the layer with index ``layer``, keyed by module name.

    If ``layer`` is ``None``, the result contains the modules outside of the layers.
    """
    model = config.model
    core = config.core
    hidden = model.hidden_size
    biased = model.add_bias_linear
    norm = ModuleSize((hidden,), has_bias=model.normalization == "LayerNorm")
    if layer is None:
        matrix = ModuleSize((config.data.vocab_size or 0,), hidden)
        sizes = {"embedding.word_embeddings": matrix, "decoder.final_layernorm": norm}
        if model.position_embedding_type == "learned_absolute":
            positions = ModuleSize((model.max_position_embeddings,), hidden)
            sizes["embedding.position_embeddings"] = positions
        if model.untie_embeddings_and_output_weights:
            sizes["output_layer"] = matrix
        return sizes
    sizes = {"input_layernorm": norm, "pre_mlp_layernorm": norm}
    if model.norm_block_outputs:
        sizes["post_attention_layernorm"] = sizes["post_mlp_layernorm"] = norm
    attention = _attention_sizes(config, norm)
    sizes |= {f"self_attention.{name}": size for name, size in attention.items()}

    def feed_forward(name: str, width: int, experts: int = 0) -> None:
        blocks = (width,) * (2 if model.is_gated else 1)
        sizes[f"{name}.linear_fc1"] = ModuleSize(blocks, hidden, biased, experts=experts)
        sizes[f"{name}.linear_fc2"] = ModuleSize((hidden,), width, biased, experts=experts)

    if not _has_experts(config, layer):
        feed_forward("mlp", model.ffn_hidden_size)
        return sizes
    experts = core.num_moe_experts
    feed_forward("mlp.experts.experts", core.moe_ffn_hidden_size or model.ffn_hidden_size, experts)
    sizes["mlp.router"] = ModuleSize((experts,), hidden)
    if core.moe_router_enable_expert_bias:
        sizes["mlp.router.expert_bias"] = ModuleSize((experts,))
    if core.moe_shared_expert_intermediate_size:
        feed_forward("mlp.shared_experts", core.moe_shared_expert_intermediate_size)
    return sizes


def _attention_sizes(config: TrainerConfig, norm: ModuleSize) -> dict[str, ModuleSize]:
    """Returns the size of each module in a layer's attention, keyed by name.

    Args:
        config: Settings of the model.
        norm: Size of a normalization layer of the model.
    """
    model = config.model
    core = config.core
    hidden = model.hidden_size
    heads = model.num_attention_heads
    attention: dict[str, ModuleSize] = {}
    if core.multi_latent_attention:
        rotated = core.qk_pos_emb_head_dim
        down = core.kv_lora_rank
        rank = core.q_lora_rank
        queries = heads * (core.qk_head_dim + rotated)
        value = core.v_head_dim
        if rank is None:
            attention["linear_q_proj"] = ModuleSize((queries,), hidden)
        else:
            attention["linear_q_down_proj"] = ModuleSize((rank,), hidden)
            attention["linear_q_up_proj"] = ModuleSize((queries,), rank)
            attention["q_layernorm"] = ModuleSize((rank,))
        attention["linear_kv_down_proj"] = ModuleSize((down + rotated,), hidden)
        attention["linear_kv_up_proj"] = ModuleSize((heads * (core.qk_head_dim + value),), down)
        attention["kv_layernorm"] = ModuleSize((down,))
    else:
        value = model.kv_channels
        groups = model.query_groups
        blocks = (heads * value, groups * value, groups * value)
        attention["linear_qkv"] = ModuleSize(blocks, hidden, model.add_qkv_bias, groups)
        if model.qk_layernorm:
            attention["q_layernorm"] = attention["k_layernorm"] = norm._replace(blocks=(value,))
    attention["linear_proj"] = ModuleSize((hidden,), heads * value, model.add_bias_linear)
    return attention


def _has_experts(config: TrainerConfig, layer: int) -> bool:
    # Multi-token prediction layers are numbered after the last layer, and have the same structure
    # as that layer.
    return config.expert_layers[min(layer, config.model.num_layers - 1)]


def core_tensors(config: TrainerConfig, family: Family) -> dict[str, CoreTensor]:
    """Returns the core tensors of a model, in model order, keyed by their names in a checkpoint.

    Args:
        config: Settings of the model. ``vocab_size`` is the number of rows in the Hugging Face
            embedding.
        family: Family of the model, which defines the names of the modules.
    """
    tensors: dict[str, CoreTensor] = {}
    outside = _sizes(config, None)

    def add(*modules: str) -> None:
        for module in modules:
            if module in outside:
                sources = family.outer_modules[module]
                _add(tensors, module, outside[module], sources, family, module)

    add("embedding.word_embeddings", "embedding.position_embeddings")
    norm = outside["decoder.final_layernorm"]
    hidden = config.model.hidden_size
    predictors = {
        **dict.fromkeys(PREDICTION.values(), norm),
        "eh_proj": ModuleSize((hidden,), 2 * hidden),
    }
    for layer in range(config.model.num_layers + _predictions(config, family)):
        sizes = _sizes(config, layer)
        prefix = family.layer_prefix.format(layer)
        saved = f"decoder.layers.{layer}."
        if (predicted := layer - config.model.num_layers) >= 0:
            saved = f"mtp.layers.{predicted}."
            for source, module in PREDICTION.items():
                _add(tensors, module, predictors[module], [prefix + source], family, saved + module)
            saved += "transformer_layer."
        for module, sources in family.layer_modules.items():
            if module in sizes:
                full_names = [prefix + source for source in sources]
                path = saved + _saved_module(module, config, layer)
                _add(tensors, module, sizes[module], full_names, family, path)
    add("decoder.final_layernorm", "output_layer")
    return tensors


def _predictions(config: TrainerConfig, family: Family) -> int:
    return (config.model.mtp_num_layers or 0) if family.predicts else 0


def copies_of(config: TrainerConfig, family: Family) -> dict[str, str]:
    """Returns a dict that maps each duplicate Hugging Face tensor to the name of its original.

    Duplicates are an output matrix (head) that is tied to the embedding, and the embedding and head
    in each multi-token prediction layer.
    """
    (embedding,) = family.outer_modules["embedding.word_embeddings"]
    (output,) = family.outer_modules["output_layer"]
    is_tied = not config.model.untie_embeddings_and_output_weights
    head = embedding if is_tied else output
    copies = {}
    for number in range(_predictions(config, family)):
        layer = family.layer_prefix.format(config.model.num_layers + number)
        copies[f"{layer}embed_tokens.weight"] = f"{embedding}.weight"
        copies[f"{layer}shared_head.head.weight"] = f"{head}.weight"
    if is_tied:
        copies[f"{output}.weight"] = f"{embedding}.weight"
    return copies


def _saved_module(module: str, config: TrainerConfig, layer: int) -> str:
    """Returns the name under which checkpoints store ``module`` of the layer with index ``layer``.

    megatron-core saves some normalization layers under the name of the linear layer that follows
    them.
    """
    engine = config.model.transformer_impl != "local"
    latent = config.core.multi_latent_attention
    into = {
        "input_layernorm": "" if latent else "self_attention.linear_qkv",
        "pre_mlp_layernorm": "mlp.linear_fc1" if engine or not latent else "",
    }
    if engine and latent:
        into["self_attention.q_layernorm"] = "self_attention.linear_q_up_proj"
        into["self_attention.kv_layernorm"] = "self_attention.linear_kv_up_proj"
    if engine and module == "pre_mlp_layernorm" and _has_experts(config, layer):
        return module
    return f"{into[module]}.layer_norm_" if into.get(module) else module


def _add(
    tensors: dict[str, CoreTensor],
    module: str,
    size: ModuleSize,
    sources: Sequence[str],
    family: Family,
    saved: str,
) -> None:
    """Adds a module's weight and bias to ``tensors``.

    Args:
        tensors: Description of each core tensor, keyed by name. New entries are added.
        module: Name of the module in its layer.
        size: Size of the module's weight.
        sources: Names of the Hugging Face modules that make up the module: either one name for each
            block, or a single name for all blocks.
        family: Family of the model, which defines how Hugging Face stores the model's matrices.
        saved: Name of the module in a checkpoint.
    """
    is_whole = module.endswith("expert_bias")
    is_grouped = family.is_grouped and module.endswith("linear_qkv")
    for part, columns in (("weight", size.columns), ("bias", 0)):
        if part == "bias" and not size.has_bias:
            continue
        rows: list[RowRun] = []
        for expert in range(size.experts or 1):
            for row, count, block, first in _runs(size, is_one=is_grouped):
                source = sources[min(block, len(sources) - 1)]
                before = sum(size.blocks[:block]) if len(sources) == 1 else 0
                name = (source if is_whole else f"{source}.{part}").format(expert)
                transposed = family.is_transposed and bool(columns) and "linear" in module
                rows.append(RowRun(row, count, expert, name, before + first, transposed))
        separator = "" if is_whole or saved.endswith("_") else "."
        name = f"{saved}{separator}{'' if is_whole else part}"
        tensors[name] = CoreTensor(size.experts, sum(size.blocks), columns, rows)


def _runs(size: ModuleSize, *, is_one: bool) -> Iterator[_Run]:
    """Divides the rows of a module's weight into runs of consecutive rows from the same block.

    Args:
        size: Size of the module's weight.
        is_one: Whether one Hugging Face tensor contains all rows in the same order. If so, all rows
            form one run.
    """
    if is_one:
        yield _Run(0, sum(size.blocks), 0, 0)
        return
    row = 0
    for group in range(size.groups):
        for block, height in enumerate(size.blocks):
            count = height // size.groups
            yield _Run(row, count, block, group * count)
            row += count


def hugging_face_shapes(tensors: Mapping[str, CoreTensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each Hugging Face tensor that is part of ``tensors``, keyed by name."""
    heights: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    order: dict[str, int] = {}
    for tensor in tensors.values():
        for run in tensor.rows:
            height = heights[run.name] = max(heights.get(run.name, 0), run.first + run.count)
            shape = (height, tensor.columns) if tensor.columns else (height,)
            shapes[run.name] = shape[::-1] if run.transposed else shape
            order.setdefault(run.name.rpartition(".")[0], len(order))
    # Sort by module, in the order of the model. The bias of a module follows its weight.
    names = sorted(shapes, key=lambda name: (order[name.rpartition(".")[0]], name[-4:] == "bias"))
    return {name: shapes[name] for name in names}


class HuggingFaceReader:
    """Assembles core tensors from a Hugging Face folder. Use it as a context manager.

    Args:
        folder: Folder of the Hugging Face model.
        config: Settings of the megatron-core model.

    Attributes:
        tensors: Description of each core tensor, keyed by megatron-core's name.

    Raises:
        ConfigError: If the trainer does not support the model.
        CheckpointError: If the folder does not contain all tensors of the model, or has tensors
            that the model does not have.
    """

    def __init__(self, folder: Path, config: TrainerConfig) -> None:
        self._folder = TensorFolder(folder)
        model = load_config(folder, config.checkpoint.hf_family)
        data = dataclasses.replace(config.data, vocab_size=model.settings["vocab_size"])
        self.tensors = core_tensors(dataclasses.replace(config, data=data), model.family)
        self._family = model.family
        self._copies = copies_of(config, model.family)
        self._names = self._match(hugging_face_shapes(self.tensors), folder)

    def __enter__(self) -> HuggingFaceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the core tensor ``name``.

        Raises:
            CheckpointError: If the Hugging Face tensors that make up this tensor have different
                dtypes.
        """
        types = {
            run.name: self._folder.tensors[self._names[run.name]].dtype
            for run in self.tensors[name].rows
        }
        if len({*types.values()}) > 1:
            kinds = ", ".join(f"{key} is {value}" for key, value in list(types.items())[:3])
            raise CheckpointError(
                f"{self._folder.folder}: tensors that are loaded into one parameter have different "
                f"dtypes ({kinds}); save them with the same dtype"
            )
        return DTYPES[next(iter(types.values())).replace(FP8, "BF16")]

    def read(self, name: str, offset: Sequence[int], target: torch.Tensor) -> None:
        """Reads a region of a core tensor into ``target``, and sets the padding rows to zero.

        Args:
            name: Name of the core tensor.
            offset: Index of the region's first element along each axis of the core tensor.
            target: Destination tensor, with the shape of the region.
        """
        with torch.no_grad():
            for rows, row, column, region in meet(self.tensors[name], offset, target):
                source = self._names[rows.name]
                if rows.transposed:
                    self._folder.read(source, column, row, region.t())
                else:
                    self._folder.read(source, row, column, region)

    @property
    def about(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each Hugging Face tensor, keyed by name, in model order."""
        entries = {name: self._folder.tensors[stored] for name, stored in self._names.items()}
        return {name: (DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()}

    def read_hugging_face(self, name: str) -> torch.Tensor:
        """Reads the whole Hugging Face tensor ``name`` from the folder, and returns it."""
        dtype, shape = self.about[name]
        target = torch.empty(shape, dtype=dtype)
        columns = target if len(shape) > 1 else target[:, None]
        self._folder.read(self._names[name], 0, 0, columns)
        return target

    def _match(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> dict[str, str]:
        """Checks that ``folder`` has the tensors in ``shapes``, and returns their names in it.

        ``shapes`` maps the Hugging Face name of each tensor to its expected shape. The result maps
        each of these names to the tensor's name in the folder, which may lack a prefix.
        """
        there = self._folder.tensors
        base = next(iter(shapes)).partition(".")[0] + "."
        # If the folder contains a model without its head, the names in the folder lack the first
        # part (``model.``).
        is_bare = not any(name.startswith(base) for name in there)
        names = {name: name.removeprefix(base) if is_bare else name for name in shapes}
        missing = [name for name, stored in names.items() if stored not in there]
        if missing:
            tied = (
                f" ({CONFIG} says that embedding and head are not tied)"
                if _HEAD in self.tensors and missing == [self.tensors[_HEAD].rows[0].name]
                else ""
            )
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(names)} tensors, such as "
                f"{missing[0]}{tied}; complete the folder, or use the {CONFIG} that belongs to it"
            )
        for name, shape in shapes.items():
            if there[names[name]].shape != shape:
                raise CheckpointError(
                    f"{there[names[name]].file} has {name} with shape "
                    f"{list(there[names[name]].shape)}, but the model defined by {CONFIG} and "
                    f"flags requires {list(shape)}; the file belongs to a different model"
                )
        used = {*names.values()}
        for name in there:
            if name not in used and not _COMPUTED.search(name) and not self._is_copy(name, names):
                raise CheckpointError(
                    f"{there[name].file} contains {name}, but the model defined by {CONFIG} does "
                    "not have this tensor; remove it, or load a different model"
                )
        return names

    def _is_copy(self, name: str, names: Mapping[str, str]) -> bool:
        """Returns whether the tensor ``name`` duplicates a different tensor of the model.

        ``names`` maps the model's Hugging Face names to the names in the folder.

        Raises:
            CheckpointError: If the values of the two tensors differ.
        """
        if name not in self._copies:
            return False
        embedding = names[self._copies[name]]
        first = self._folder.tensors[name]
        second = self._folder.tensors[embedding]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        step = 1 + (1 << 20) // max(1, first.shape[1])
        for row in range(0, first.shape[0], step):
            size = (min(step, first.shape[0] - row), first.shape[1])
            both = [torch.empty(size, dtype=DTYPES[first.dtype]) for _ in range(2)]
            for source, target in zip((name, embedding), both, strict=True):
                self._folder.read(source, row, 0, target)
            if not torch.equal(*both):
                reason = f"the model uses one tensor for both; remove {name}"
                if not self._family.is_in_layer(name):
                    reason = f"{CONFIG} ties them; set tie_word_embeddings to false"
                raise CheckpointError(
                    f"in {first.file}, {name} differs from {embedding}, but {reason}"
                )
        return True


def meet(tensor: CoreTensor, offset: Sequence[int], target: torch.Tensor) -> Iterator[RowRegion]:
    """Divides a region of a core tensor into parts, each from a single Hugging Face tensor.

    Rows of the region that are vocabulary padding are set to zero.

    Args:
        tensor: Description of the core tensor.
        offset: Index of the region's first element along each axis of the core tensor.
        target: Tensor with the shape of the region. The parts are views of this tensor.

    Yields:
        Parts of the region, each with a view of its memory in ``target``.
    """
    start = [*offset] if tensor.experts else [0, *offset]
    target = target.detach() if tensor.experts else target.detach()[None]
    if not tensor.columns:
        start, target = [*start, 0], target[..., None]
    begin = start[1]
    end = start[1] + target.shape[1]
    if end > tensor.height:
        target[:, max(0, tensor.height - begin) :].zero_()
    # Every expert has the same number of entries in tensor.rows, so the division is exact.
    each = len(tensor.rows) // (tensor.experts or 1)
    for run in tensor.rows[each * start[0] : each * (start[0] + target.shape[0])]:
        low = max(begin, run.row)
        high = min(end, run.row + run.count)
        if low < high:
            region = target[run.expert - start[0], low - begin : high - begin]
            yield RowRegion(run, run.first + low - run.row, start[2], region)


def check_folder(folder: Path, config: TrainerConfig) -> None:
    """Checks that ``folder`` contains the tensors of a model. Reads only the headers of the files.

    Raises:
        AdaptiveError: If :class:`HuggingFaceReader` rejects the folder, or the run's embedding has
            fewer rows than the embedding in the folder.
    """
    with HuggingFaceReader(folder, config) as reader:
        for name in reader.tensors:
            reader.dtype(name)
        multiple = config.model.make_vocab_size_divisible_by
        ranks = config.parallel.tensor_model_parallel_size
        # The vocab_size of NullTokenizer excludes the end-of-document token, so add one.
        ids = (config.data.vocab_size or 0) + (config.data.tokenizer_type == "NullTokenizer")
        rows = padded_vocab_size(ids, multiple, ranks)
        _require_rows(rows, reader, config, folder)


def _require_rows(
    rows_here: int, reader: HuggingFaceReader, config: TrainerConfig, folder: Path
) -> None:
    """Raises ConfigError if ``rows_here``, the row count of the run's embedding, is too small."""
    if rows_here < (rows := reader.tensors[EMBEDDING].height):
        raise ConfigError(
            f"--vocab-size {config.data.vocab_size} results in {rows_here} embedding rows, but "
            f"{folder} has {rows}; remove this flag"
        )


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, config: TrainerConfig) -> None:
    """Loads weights from the Hugging Face folder ``folder`` into this rank's model ``chunks``.

    Raises:
        AdaptiveError: If :class:`HuggingFaceReader` rejects the folder, or the run's embedding has
            fewer rows than the embedding in the folder.
    """
    weights = megatron_state.sharded_model(chunks, megatron_state.METADATA)
    apply_factories(weights)
    shards = [value for value in nested_values(weights) if isinstance(value, ShardedTensor)]
    with HuggingFaceReader(folder, config) as reader:
        _require_rows(megatron_state.padded_vocab_size(chunks), reader, config, folder)
        for shard in shards:
            if MARK in shard.key:
                continue
            lead = shard.prepend_axis_num
            reader.read(shard.key, shard.global_offset, shard.data.detach()[(None,) * lead])


def import_folder(folder: Path, output: Path, config: TrainerConfig) -> Path:
    """Converts a Hugging Face folder to a checkpoint of iteration 0, one tensor at a time.

    Args:
        folder: Folder of the Hugging Face model.
        output: Folder for the checkpoint, which must not contain any checkpoints yet.
        config: Settings of the model.

    Returns:
        Path of the checkpoint.

    Raises:
        AdaptiveError: If :class:`HuggingFaceReader` rejects the folder, or ``output`` contains
            checkpoints or cannot be written.
    """
    checkpoints = CheckpointFolder(output)
    if checkpoints.named():
        raise CheckpointError(f"{output} already contains checkpoints; choose another --output")
    with HuggingFaceReader(folder, config) as reader:
        multiple = config.model.make_vocab_size_divisible_by
        rows = padded_vocab_size(reader.tensors[EMBEDDING].height, multiple, 1)
        entries = _entries_of(reader, rows)

        def tensors() -> Iterator[torch.Tensor]:
            for entry in entries:
                target = torch.empty(entry["size"], dtype=getattr(torch, entry["type"]))
                reader.read(entry["name"], entry["offset"], target)
                yield target

        try:
            partial = checkpoints.begin(0)
            regions, total = write_file(partial / _SHARD, tensors(), {})
            for entry, region in zip(entries, regions, strict=True):
                entry.update(path=_SHARD, place=region)
            common = {
                "content_metadata": dict(megatron_state.METADATA),
                "iteration": 0,
                "opt_param_scheduler": {"num_steps": 0},
            }
            write_files(partial, {**indices_of(entries), **common_files(common)})
            manifest = {
                "progress": {},
                "config": config.to_dict(),
                "shape": {},
                "padded_vocab_size": rows,
                "has_optimizer": False,
                "has_rng": False,
                "save_id": "",
            }
            carry_description([folder], output)
            return checkpoints.commit(0, {**manifest, "blocks": {_SHARD: total[1]}})
        except OSError as error:
            raise CheckpointError(f"cannot write {output}: {error.strerror}") from None
        finally:
            checkpoints.abandon(0)


def _entries_of(reader: HuggingFaceReader, rows: int) -> list[Entry]:
    """Returns the index entries of the tensors, with a separate entry for each expert.

    Args:
        reader: Reader of the Hugging Face folder.
        rows: Number of rows of the embedding, including padding rows.
    """
    entries: list[Entry] = []
    for name, tensor in reader.tensors.items():
        whole = tensor.shape
        lead = 1 if tensor.experts else 0
        if name in (EMBEDDING, _HEAD):
            whole[0] = rows
        size = [1] * lead + whole[lead:]
        dtype = str(reader.dtype(name)).removeprefix("torch.")
        for expert in range(tensor.experts or 1):
            offset = [expert] * lead + [0] * (len(whole) - lead)
            entry = {"name": name, "offset": offset, "size": size, "whole": whole}
            entries.append({**entry, "type": dtype})
    return entries


def carry_description(sources: Sequence[Path], checkpoints: Path) -> None:
    """Copies a model's configuration and tokenizer to the folder ``checkpoints``.

    Existing copies of these files are not changed.

    Args:
        sources: Folders to search. Files are copied from the first folder that contains a
            configuration.
        checkpoints: Folder of checkpoints.

    Raises:
        OSError: If the folder cannot be written.
    """
    target = checkpoints / DESCRIPTION
    source = next((folder for folder in sources if (folder / CONFIG).is_file()), None)
    if source is None or target.exists():
        return
    with tempfile.TemporaryDirectory(dir=checkpoints) as work:
        partial = Path(work) / DESCRIPTION
        partial.mkdir()
        for name in (CONFIG, *COMPANION_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        partial.rename(target)


def carry_flags(config: TrainerConfig) -> None:
    """Writes the model's flags to the ``--save`` folder, so that ``evaluate`` can build the model.

    If the run trains adapters, its checkpoints do not contain the weights of the base model. The
    flags then also contain the folder of the base model. An existing file is not replaced.

    Raises:
        OSError: If the file cannot be written.
    """
    settings = config.checkpoint
    target = Path(str(settings.save)) / FLAGS_FILE
    if settings.save is None or target.exists():
        return
    if settings.load_hf is not None:
        model = dict(load_config(Path(settings.load_hf), settings.hf_family).settings)
        if config.lora.is_on:
            model |= {"load_hf": str(Path(settings.load_hf).absolute())}
            if settings.hf_family is not None:
                model["hf_family"] = settings.hf_family
            model |= {"lora_rank": config.lora.lora_rank, "lora_targets": config.lora.lora_targets}
            if config.lora.lora_alpha is not None:
                model["lora_alpha"] = config.lora.lora_alpha
        arguments = flag_words(model)
        content = f"{shlex.join(arguments)}\n".encode()
    elif settings.load is not None and (source := Path(settings.load) / FLAGS_FILE).is_file():
        content = source.read_bytes()
    else:
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        write_files(Path(work), {FLAGS_FILE: content})
        (Path(work) / FLAGS_FILE).rename(target)
