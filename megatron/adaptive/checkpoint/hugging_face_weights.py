"""Weights of Hugging Face models: read into a model or a checkpoint of ours, and written back.

One table per family (``config.hugging_face.NAMES``) names our modules and theirs; each of our
tensors is put together from rows of theirs, and the same list of :class:`RowRun` serves both ways::

    ours, [rows, columns]                                   theirs
    linear_qkv    q q k v | q q k v | ...  by query group    q_proj, k_proj, v_proj, or all in one
    linear_fc1    gate | up                                  gate_proj, up_proj, or all in one
    others        the same rows; GPT-2's matrices turned over

Sizes follow from the run's settings, so that a tensor of another size is found before it is read,
and none is left over. Rows of the embedding that only pad it are zero here and absent there.
How ranks hold parts of our tensors is megatron-core's to say: a rank asks for the parts that its
shards are, in any mesh, partition and placement.
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
from megatron.adaptive.config.hugging_face import CONFIG, FLAGS_FILE, LOAD_FLAG, load_config
from megatron.adaptive.config.hugging_face_names import NAMES, PREDICTION, FamilyNames
from megatron.adaptive.config.megatron_core_flags import LATENT_SETTINGS
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import padded_vocab_size
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.gpt.lora import MARK

# Buffers that older versions of transformers saved, and later ones compute.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
BESIDE = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json", "tekken.json"),
)
DESCRIPTION = "hugging_face"
"""Folder among checkpoints that has the model's configuration and tokenizer."""
_SHARD = "__0_0.distcp"
# Settings of megatron-core that say what is computed with the weights.
CORE_MEANINGS = (
    *("multi_latent_attention", "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
    *("moe_router_group_topk", "window_size", "window_attn_skip_freq", "softmax_scale"),
    *(*LATENT_SETTINGS,),
)
EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class ModuleSize(NamedTuple):
    """Size of a module of ours.

    Attributes:
        blocks: rows of each of the matrices that it is made of.
        columns: of its matrix, 0 where it is a vector.
        has_bias: whether it has one beside its weight.
        groups: parts that each block is cut into, which alternate; 1 where blocks follow.
        experts: of which each has such a module, 0 for none.
    """

    blocks: tuple[int, ...]
    columns: int = 0
    has_bias: bool = False
    groups: int = 1
    experts: int = 0


class RowRun(NamedTuple):
    """Says where some rows of a tensor of ours are among theirs.

    Attributes:
        at, count: the rows of ours.
        expert: place in our first axis, 0 where there is none.
        name: of their tensor.
        first: row there.
        turned: whether it is stored with its axes exchanged.
    """

    at: int
    count: int  # type: ignore[assignment]  # tuple has a method of that name
    expert: int
    name: str
    first: int
    turned: bool


class OurTensor(NamedTuple):
    """A tensor of ours.

    Attributes:
        experts: length of its first axis, 0 where it has none.
        height: rows, without those that pad it.
        columns: 0 of a vector.
        rows: that it is made of.
    """

    experts: int
    height: int
    columns: int
    rows: Sequence[RowRun]

    @property
    def shape(self) -> list[int]:
        """Shape of the whole."""
        lead = [self.experts] if self.experts else []
        return [*lead, self.height, *([self.columns] if self.columns else [])]


def _sizes(config: TrainerConfig, layer: int | None) -> dict[str, ModuleSize]:
    """Returns the modules of a layer, or of what is outside of layers, with their sizes."""
    model, core = config.model, config.core
    hidden, heads, biased = model.hidden_size, model.num_attention_heads, model.add_bias_linear
    norm = ModuleSize((hidden,), has_bias=model.normalization == "LayerNorm")
    if layer is None:
        matrix = ModuleSize((config.data.vocab_size or 0,), hidden)
        found = {"embedding.word_embeddings": matrix, "decoder.final_layernorm": norm}
        if model.position_embedding_type == "learned_absolute":
            positions = ModuleSize((model.max_position_embeddings,), hidden)
            found["embedding.position_embeddings"] = positions
        if model.untie_embeddings_and_output_weights:
            found["output_layer"] = matrix
        return found
    found = {"input_layernorm": norm, "pre_mlp_layernorm": norm}
    if model.norm_block_outputs:
        found["post_attention_layernorm"] = found["post_mlp_layernorm"] = norm
    attention: dict[str, ModuleSize] = {}
    if core.multi_latent_attention:
        rotated, down, rank = core.qk_pos_emb_head_dim, core.kv_lora_rank, core.q_lora_rank
        queries, value = heads * (core.qk_head_dim + rotated), core.v_head_dim
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
        value, groups = model.kv_channels, model.query_groups
        blocks = (heads * value, groups * value, groups * value)
        attention["linear_qkv"] = ModuleSize(blocks, hidden, model.add_qkv_bias, groups)
        if model.qk_layernorm:
            attention["q_layernorm"] = attention["k_layernorm"] = norm._replace(blocks=(value,))
    attention["linear_proj"] = ModuleSize((hidden,), heads * value, biased)
    found |= {f"self_attention.{name}": size for name, size in attention.items()}

    def feed_forward(name: str, width: int, experts: int = 0) -> None:
        blocks = (width,) * (2 if model.is_gated else 1)
        found[f"{name}.linear_fc1"] = ModuleSize(blocks, hidden, biased, experts=experts)
        found[f"{name}.linear_fc2"] = ModuleSize((hidden,), width, biased, experts=experts)

    if not _has_experts(config, layer):
        feed_forward("mlp", model.ffn_hidden_size)
        return found
    experts = core.num_moe_experts
    feed_forward("mlp.experts.experts", core.moe_ffn_hidden_size or model.ffn_hidden_size, experts)
    found["mlp.router"] = ModuleSize((experts,), hidden)
    if core.moe_router_enable_expert_bias:
        found["mlp.router.expert_bias"] = ModuleSize((experts,))
    if core.moe_shared_expert_intermediate_size:
        feed_forward("mlp.shared_experts", core.moe_shared_expert_intermediate_size)
    return found


def _has_experts(config: TrainerConfig, layer: int) -> bool:
    return config.expert_layers[min(layer, config.model.num_layers - 1)]  # later ones predict


def our_tensors(config: TrainerConfig, family: str) -> dict[str, OurTensor]:
    """Returns the tensors of a model by their names in a checkpoint, in the order of the model.

    Args:
        config: settings; ``vocab_size`` counts the rows of theirs.
        family: ``model_type`` of theirs.
    """
    names, found = NAMES[family], dict[str, OurTensor]()
    outside = _sizes(config, None)

    def add(*modules: str) -> None:
        for ours in modules:
            if ours in outside:
                _add(found, ours, outside[ours], names.outside[ours], names, ours)

    add("embedding.word_embeddings", "embedding.position_embeddings")
    norm, hidden = outside["decoder.final_layernorm"], config.model.hidden_size
    beside = {**dict.fromkeys(PREDICTION, norm), "eh_proj": ModuleSize((hidden,), 2 * hidden)}
    for layer in range(config.model.num_layers + _predictions(config, names)):
        sizes, prefix = _sizes(config, layer), names.layer.format(layer)
        saved = f"decoder.layers.{layer}."
        if (predicted := layer - config.model.num_layers) >= 0:
            saved = f"mtp.layers.{predicted}."
            for ours, theirs in PREDICTION.items():
                _add(found, ours, beside[ours], [prefix + theirs[0]], names, saved + ours)
            saved += "transformer_layer."
        for ours, theirs in names.inside.items():
            if ours in sizes:
                full = [prefix + one for one in theirs]
                place = saved + _saved_module(ours, config, layer)
                _add(found, ours, sizes[ours], full, names, place)
    add("decoder.final_layernorm", "output_layer")
    return found


def _predictions(config: TrainerConfig, names: FamilyNames) -> int:
    return (config.model.mtp_num_layers or 0) if names.predicts else 0


def copies_of(config: TrainerConfig, family: str) -> dict[str, str]:
    """Returns their tensors that repeat another: of layers that predict, embedding and head."""
    names, (embedding,) = NAMES[family], NAMES[family].outside["embedding.word_embeddings"]
    is_tied = not config.model.untie_embeddings_and_output_weights
    head = embedding if is_tied else names.outside["output_layer"][0]
    found = {}
    for number in range(_predictions(config, names)):
        layer = names.layer.format(config.model.num_layers + number)
        found[f"{layer}embed_tokens.weight"] = f"{embedding}.weight"
        found[f"{layer}shared_head.head.weight"] = f"{head}.weight"
    if is_tied:
        found[f"{names.outside['output_layer'][0]}.weight"] = f"{embedding}.weight"
    return found


def _saved_module(ours: str, config: TrainerConfig, layer: int) -> str:
    """Returns the name of a norm in a checkpoint, where megatron-core counts it to a product."""
    engine, latent = config.model.transformer_impl != "local", config.core.multi_latent_attention
    into = {
        "input_layernorm": "" if latent else "self_attention.linear_qkv",
        "pre_mlp_layernorm": "mlp.linear_fc1" if engine or not latent else "",
    }
    if engine and latent:
        into["self_attention.q_layernorm"] = "self_attention.linear_q_up_proj"
        into["self_attention.kv_layernorm"] = "self_attention.linear_kv_up_proj"
    if engine and ours == "pre_mlp_layernorm" and _has_experts(config, layer):
        return ours
    return f"{into[ours]}.layer_norm_" if into.get(ours) else ours


def _add(
    found: dict[str, OurTensor],
    ours: str,
    size: ModuleSize,
    theirs: Sequence[str],
    names: FamilyNames,
    saved: str,
) -> None:
    """Adds weight and bias of a module of ours that is saved under a name."""
    is_whole = ours.endswith("expert_bias")
    is_grouped = names.grouped and ours.endswith("linear_qkv")
    for part, columns in (("weight", size.columns), ("bias", 0)):
        if part == "bias" and not size.has_bias:
            continue
        rows: list[RowRun] = []
        for expert in range(size.experts or 1):
            for at, count, block, first in _runs(size, is_one=is_grouped):
                module, before = theirs[min(block, len(theirs) - 1)], 0
                if len(theirs) == 1:
                    before = sum(size.blocks[:block])
                name = (module if is_whole else f"{module}.{part}").format(expert)
                turned = names.turned and bool(columns) and "linear" in ours
                one = RowRun(at, count, expert, name, before + first, turned)
                rows.append(one)
        separator = "" if is_whole or saved.endswith("_") else "."
        name = f"{saved}{separator}{'' if is_whole else part}"
        found[name] = OurTensor(size.experts, sum(size.blocks), columns, rows)


def _runs(size: ModuleSize, *, is_one: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yields runs of rows: where they are in ours, how many, and in which block from which row."""
    if is_one:
        yield 0, sum(size.blocks), 0, 0
        return
    at = 0
    for group in range(size.groups):
        for block, height in enumerate(size.blocks):
            count = height // size.groups
            yield at, count, block, group * count
            at += count


def their_shapes(tensors: Mapping[str, OurTensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of their tensors by name, in the order of the model."""
    heights: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    order: dict[str, int] = {}
    for our in tensors.values():
        for one in our.rows:
            height = heights[one.name] = max(heights.get(one.name, 0), one.first + one.count)
            shape = (height, our.columns) if our.columns else (height,)
            shapes[one.name] = shape[::-1] if one.turned else shape
            order.setdefault(one.name.rpartition(".")[0], len(order))
    # A module's bias follows its weight.
    names = sorted(shapes, key=lambda name: (order[name.rpartition(".")[0]], name[-4:] == "bias"))
    return {name: shapes[name] for name in names}


class HuggingFaceReader:
    """Reads tensors of a checkpoint of ours from a folder of theirs; use it in ``with``.

    Args:
        folder: of the model.
        config: settings of the model that is built.

    Attributes:
        tensors: of ours, by name.

    Raises:
        ConfigError: the trainer cannot build the model.
        CheckpointError: the folder holds other tensors than the model has.
    """

    def __init__(self, folder: Path, config: TrainerConfig) -> None:
        self._folder = TensorFolder(folder)
        document, words = load_config(folder)
        data = dataclasses.replace(config.data, vocab_size=rows_of(words))
        family = str(document["model_type"])
        self.tensors = our_tensors(dataclasses.replace(config, data=data), family)
        self._copies = copies_of(config, family)
        self._names = self._match(their_shapes(self.tensors), folder)

    def __enter__(self) -> HuggingFaceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type of a tensor of ours.

        Raises:
            CheckpointError: those that it is made of have several.
        """
        found = {
            one.name: self._folder.tensors[self._names[one.name]].dtype
            for one in self.tensors[name].rows
        }
        if len({*found.values()}) > 1:
            kinds = ", ".join(f"{key} is {value}" for key, value in list(found.items())[:3])
            raise CheckpointError(
                f"{self._folder.folder}: {kinds}: they become one tensor here; save them alike"
            )
        return DTYPES[next(iter(found.values())).replace(FP8, "BF16")]

    def read(self, name: str, offset: Sequence[int], target: torch.Tensor) -> None:
        """Fills a part of a tensor; rows that pad a vocabulary become zero.

        Args:
            name: of the tensor.
            offset: of the part in it.
            target: the part.
        """
        with torch.no_grad():
            for rows, row, column, region in meet(self.tensors[name], offset, target):
                theirs = self._names[rows.name]
                if rows.turned:
                    self._folder.read(theirs, column, row, region.t())
                else:
                    self._folder.read(theirs, row, column, region)

    @property
    def about(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of their tensors by name, in the order of the model."""
        there = {name: self._folder.tensors[given] for name, given in self._names.items()}
        return {name: (DTYPES[one.dtype], one.shape) for name, one in there.items()}

    def read_theirs(self, name: str) -> torch.Tensor:
        """Returns a tensor of theirs."""
        dtype, shape = self.about[name]
        target = torch.empty(shape, dtype=dtype)
        columns = target if len(shape) > 1 else target[:, None]
        self._folder.read(self._names[name], 0, 0, columns)
        return target

    def _match(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> dict[str, str]:
        """Returns the names in the folder by those of transformers; all must be as expected."""
        there = self._folder.tensors
        base = next(iter(shapes)).partition(".")[0] + "."
        # The model without its head, as some folders have it.
        is_bare = not any(name.startswith(base) for name in there)
        names = {name: name.removeprefix(base) if is_bare else name for name in shapes}
        missing = [name for name, given in names.items() if given not in there]
        if missing:
            tied = (
                f" ({CONFIG} says that embedding and head are not tied)"
                if _HEAD in self.tensors and missing == [self.tensors[_HEAD].rows[0].name]
                else ""
            )
            raise CheckpointError(
                f"{folder} has no {missing[0]}{tied}, and {len(missing)} of {len(names)} tensors"
                f" are missing: it is not whole, or of another model than its {CONFIG} says"
            )
        for name, shape in shapes.items():
            if there[names[name]].shape != shape:
                raise CheckpointError(
                    f"{there[names[name]].file} has {name} with shape"
                    f" {list(there[names[name]].shape)}, and the model of {CONFIG} and flags has"
                    f" {list(shape)}: it is of another model"
                )
        known = {*names.values()}
        for name in there:
            if name not in known and not _COMPUTED.search(name) and not self._is_copy(name, names):
                raise CheckpointError(
                    f"{there[name].file} has {name}, which the model of {CONFIG} has no place for:"
                    " take it out, or load another model"
                )
        return names

    def _is_copy(self, name: str, names: Mapping[str, str]) -> bool:
        """Returns whether a tensor repeats another, as its name says."""
        if name not in self._copies:
            return False
        embedding = names[self._copies[name]]
        first, second = self._folder.tensors[name], self._folder.tensors[embedding]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        step = 1 + (1 << 20) // max(1, first.shape[1])
        for at in range(0, first.shape[0], step):
            size = (min(step, first.shape[0] - at), first.shape[1])
            both = [torch.empty(size, dtype=DTYPES[first.dtype]) for _ in range(2)]
            for one, target in zip((name, embedding), both, strict=True):
                self._folder.read(one, at, 0, target)
            if not torch.equal(*both):
                why = "the model has one for both; take it out"
                if "layers" not in name:
                    why = f"{CONFIG} says that they are tied (tie_word_embeddings): set it to false"
                raise CheckpointError(
                    f"{first.file} has {name} with other values than {embedding}, and {why}"
                )
        return True


def rows_of(words: Sequence[str]) -> int:
    return int(words[words.index("--vocab-size") + 1])


def meet(
    our: OurTensor, offset: Sequence[int], target: torch.Tensor
) -> Iterator[tuple[RowRun, int, int, torch.Tensor]]:
    """Yields the runs of rows that a part has: row and column of ours in theirs, and the region.

    Rows of the part that only pad a vocabulary become zero.

    Args:
        our: the tensor.
        offset: of the part in it.
        target: the part.
    """
    place = [*offset] if our.experts else [0, *offset]
    target = target.detach() if our.experts else target.detach()[None]
    if not our.columns:
        place, target = [*place, 0], target[..., None]
    begin, end = place[1], place[1] + target.shape[1]
    if end > our.height:
        target[:, max(0, our.height - begin) :].zero_()
    each = len(our.rows) // (our.experts or 1)  # in the order of experts
    for one in our.rows[each * place[0] : each * (place[0] + target.shape[0])]:
        low, high = max(begin, one.at), min(end, one.at + one.count)
        if low < high:
            region = target[one.expert - place[0], low - begin : high - begin]
            yield one, one.first + low - one.at, place[2], region


def check_folder(folder: Path, config: TrainerConfig) -> None:
    """Checks that a folder has the tensors of a model. Reads only the headers of its files.

    Raises:
        AdaptiveError: see :class:`HuggingFaceReader`; or the embedding has too few rows.
    """
    with HuggingFaceReader(folder, config) as reader:
        for name in reader.tensors:
            reader.dtype(name)
        multiple = config.model.make_vocab_size_divisible_by
        ranks = config.parallel.tensor_model_parallel_size
        # NullTokenizer adds one id, the end of document, to --vocab-size.
        ids = (config.data.vocab_size or 0) + (config.data.tokenizer_type == "NullTokenizer")
        rows = padded_vocab_size(ids, multiple, ranks)
        _require_rows(rows, reader, config, folder)


def _require_rows(
    given: int, reader: HuggingFaceReader, config: TrainerConfig, folder: Path
) -> None:
    """Raises ConfigError if the model's embedding has fewer rows than the folder's."""
    if given < (rows := reader.tensors[EMBEDDING].height):
        raise ConfigError(
            f"--vocab-size {config.data.vocab_size} makes {given} rows of the embedding, and"
            f" {folder} has {rows}: leave it out"
        )


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, config: TrainerConfig) -> None:
    """Fills the parameters of this rank's chunks in place.

    Raises:
        AdaptiveError: see :class:`HuggingFaceReader`.
    """
    weights = megatron_state.sharded_model(chunks, megatron_state.METADATA)
    apply_factories(weights)
    shards = [one for one in nested_values(weights) if isinstance(one, ShardedTensor)]
    with HuggingFaceReader(folder, config) as reader:
        _require_rows(megatron_state.padded_vocab_size(chunks), reader, config, folder)
        for shard in shards:
            if MARK in shard.key:
                continue
            lead = shard.prepend_axis_num
            reader.read(shard.key, shard.global_offset, shard.data.detach()[(None,) * lead])


def import_folder(folder: Path, output: Path, config: TrainerConfig) -> Path:
    """Writes a checkpoint of iteration 0 from a folder of theirs, tensor by tensor.

    Args:
        folder: of the model.
        output: folder of checkpoints, which must have none.
        config: settings of the model.

    Returns:
        The folder of the checkpoint.

    Raises:
        AdaptiveError: see :class:`HuggingFaceReader`; or the output holds checkpoints, or cannot be
            written.
    """
    checkpoints = CheckpointFolder(output)
    if checkpoints.named():
        raise CheckpointError(f"{output} holds checkpoints already: name another --output")
    with HuggingFaceReader(folder, config) as reader:
        multiple = config.model.make_vocab_size_divisible_by
        rows = padded_vocab_size(reader.tensors[EMBEDDING].height, multiple, 1)
        entries: list[Entry] = []
        for name, our in reader.tensors.items():
            whole, lead = our.shape, 1 if our.experts else 0
            if name in (EMBEDDING, _HEAD):
                whole[0] = rows
            size = [1] * lead + whole[lead:]
            dtype = str(reader.dtype(name)).removeprefix("torch.")
            for expert in range(our.experts or 1):
                offset = [expert] * lead + [0] * (len(whole) - lead)
                entry = {"name": name, "offset": offset, "size": size, "whole": whole}
                entries.append({**entry, "type": dtype})

        def tensors() -> Iterator[torch.Tensor]:
            for entry in entries:
                target = torch.empty(entry["size"], dtype=getattr(torch, entry["type"]))
                reader.read(entry["name"], entry["offset"], target)
                yield target

        try:
            partial = checkpoints.begin(0)
            places, total = write_file(partial / _SHARD, tensors(), {})
            for entry, place in zip(entries, places, strict=True):
                entry.update(path=_SHARD, place=place)
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
            raise CheckpointError(f"{output} cannot be written: {error.strerror}") from None
        finally:
            checkpoints.abandon(0)


def carry_description(sources: Sequence[Path], checkpoints: Path) -> None:
    """Copies what describes a model, beside its weights, into a folder of checkpoints.

    A folder that has it already is left as it is.

    Args:
        sources: folders that may have it; the first that does counts.
        checkpoints: the folder.

    Raises:
        OSError: it cannot be written.
    """
    target = checkpoints / DESCRIPTION
    source = next((one for one in sources if (one / CONFIG).is_file()), None)
    if source is None or target.exists():
        return
    with tempfile.TemporaryDirectory(dir=checkpoints) as work:
        partial = Path(work) / DESCRIPTION
        partial.mkdir()
        for name in (CONFIG, *BESIDE):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        partial.rename(target)


def carry_flags(config: TrainerConfig) -> None:
    """Writes the model's flags into the ``--save`` folder, so that ``evaluate`` can rebuild it.

    If the run trains adapters, their checkpoints lack the model, so the flags name its folder. An
    existing file is not replaced.

    Raises:
        OSError: it cannot be written.
    """
    given = config.checkpoint
    target = Path(str(given.save)) / FLAGS_FILE
    if given.save is None or target.exists():
        return
    if given.load_hf is not None:
        words = load_config(Path(given.load_hf))[1]
        lora = config.lora
        if lora.is_on:
            words += [LOAD_FLAG, str(Path(given.load_hf).absolute())]
            words += ["--lora-rank", str(lora.lora_rank), "--lora-targets", lora.lora_targets]
            words += ["--lora-alpha", str(lora.lora_alpha)] if lora.lora_alpha is not None else []
        content = f"{shlex.join(words)}\n".encode()
    elif given.load is not None and (source := Path(given.load) / FLAGS_FILE).is_file():
        content = source.read_bytes()
    else:
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        write_files(Path(work), {FLAGS_FILE: content})
        (Path(work) / FLAGS_FILE).rename(target)
