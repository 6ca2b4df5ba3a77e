"""Divides layers among stages according to Megatron-LM's flags, and checks the result.

All layers for multi-token prediction (MTP) are on the same stage, after all transformer layers. By
default, this is the last stage. The stage with these layers needs the word embedding, as the first
stage does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.config.schedule import (
    default_placement,
    format_partition,
    nearly_even_split,
    parse_layout,
    uneven_split,
)
from megatron.adaptive.errors import ConfigError

if TYPE_CHECKING:
    from megatron.adaptive.config.trainer import TrainerConfig

_MAX_EXAMPLE = 64
_HINT = 'pass a JSON file with "block_configs" as --heterogeneous-layers-config-path'
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def lay_out(values: dict[str, Any], specs: Mapping[str, FieldSpec]) -> None:
    """Sets the number of chunks and the layers per stage if flags of Megatron-LM determine them.

    Args:
        values: Values of the flags that the user has set, keyed by setting name. The function
            modifies this dict.
        specs: Specifications of the settings, keyed by name.

    Raises:
        ConfigError: The flags are incompatible with the number of pipeline ranks or layers.
    """
    if path := values.get("heterogeneous_layers_config_path"):
        # The file may be deleted later, so its contents are stored in checkpoints.
        values.setdefault("heterogeneous_layers_config_encoded_json", read_text(Path(path), _HINT))
    pipeline = values.get("pipeline_model_parallel_size", 1)
    if "num_layers_per_virtual_pipeline_stage" in values:
        values["num_virtual_stages_per_pipeline_rank"] = _chunks_of(
            values["num_layers"], pipeline, values["num_layers_per_virtual_pipeline_stage"]
        )
    chunks = values.get("num_virtual_stages_per_pipeline_rank")
    if (layout := values.get("pipeline_model_parallel_layout")) is not None:
        stages = parse_layout(layout)
        if len(stages) % pipeline or chunks not in (None, len(stages) // pipeline):
            shape = f"pipeline {pipeline} x chunks" + f" {chunks}" * (chunks is not None)
            raise ConfigError(
                f"--pipeline-model-parallel-layout {layout} has {len(stages)} stages, which does "
                f"not match {shape}; change the number of stages, which are joined by '|'"
            )
        values["num_virtual_stages_per_pipeline_rank"] = len(stages) // pipeline
        values["partition"] = tuple(stage.count("t") for stage in stages)
        return
    uneven_flags = [specs[dest].text_of(values[dest]) for dest in _UNEVEN if dest in values]
    if not uneven_flags:
        return
    placement = values.get("pipeline_placement") or default_placement(
        values.get("pipeline_schedule", specs["pipeline_schedule"].default), chunks or 1
    )
    flags = " and ".join(uneven_flags)
    if placement == "v" and not any("account" in text for text in uneven_flags):
        raise ConfigError(
            f"{flags} cannot be used with V placement, which puts the first and the last stage "
            "on the same rank; use --partition or --pipeline-placement loop"
        )
    try:
        values["partition"] = uneven_split(
            values["num_layers"], pipeline, chunks or 1, *(values.get(dest) for dest in _UNEVEN)
        )
    except ValueError as error:
        raise ConfigError(
            f"{flags} cannot be used with --num-layers {values['num_layers']} on {pipeline} "
            f"pipeline ranks ({error}); change one of them or use --partition"
        ) from None


def _chunks_of(num_layers: int, pipeline: int, layers_per_chunk: int) -> int:
    """Returns the number of chunks per pipeline rank if each chunk has ``layers_per_chunk`` layers.

    Raises:
        ConfigError: The layers cannot be divided evenly into chunks of this size.
    """
    unit = pipeline * layers_per_chunk
    if num_layers % unit != 0:
        raise ConfigError(
            f"--num-layers {num_layers} is not a multiple of pipeline {pipeline} x "
            f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} = {unit}; change one of "
            "them, or use --model-chunks and --partition"
        )
    return num_layers // unit


class UnlikeLayer(NamedTuple):
    """A layer of a model whose layers have different sizes.

    Attributes:
        groups: Number of key and value heads, or 0 if the layer has no attention.
        width: Inner width of the feed-forward block, or 0 if the layer has none.
        linear: Number of the layer's two blocks (attention, feed-forward) that are replaced by a
            linear layer.
    """

    groups: int
    width: int
    linear: int


def unlike_layers(config: TrainerConfig) -> list[UnlikeLayer] | None:
    """Returns the sizes of all layers, or ``None`` if all layers have the same sizes.

    Source: The class ``HeterogeneousTransformerConfig`` of megatron-core, which defines the format.

    Raises:
        ConfigError: The JSON text in the settings does not have the expected format.
    """
    text = config.core.heterogeneous_layers_config_encoded_json
    model = config.model
    layers: list[UnlikeLayer] = []
    try:
        for block in json.loads(text)["block_configs"] if text else ():
            sizes = []
            linear = 0
            for part, name, usual in (
                (block["attention"], "num_query_groups", model.query_groups),
                (block.get("ffn") or block["mlp"], "ffn_hidden_size", model.ffn_hidden_size),
            ):
                size = part.get(name)
                if name not in part and name == "num_query_groups":
                    size = part["n_heads_in_group"] and (
                        model.num_attention_heads // part["n_heads_in_group"]
                    )
                elif name not in part and part["ffn_mult"] is not None:
                    size = -(-int(2 * part["ffn_mult"] * model.hidden_size / 3) // 256) * 256
                gone = part.get("no_op") or part.get("replace_with_linear")
                if size is not None and (gone or type(size) is not int or size < 1):
                    raise ValueError(f"{name} {size}" + " of a replaced block" * bool(gone))
                sizes.append(0 if gone else size or usual)
                linear += bool(gone and not part.get("no_op"))
            layers.append(UnlikeLayer(sizes[0], sizes[1], linear))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--heterogeneous-layers-config-path: layer {len(layers) + 1} does not have the "
            f"format of megatron-core ({type(error).__name__}: {error}); see the class "
            "HeterogeneousTransformerConfig of megatron-core"
        ) from None
    return layers if text else None


def _unlike(config: TrainerConfig, flags: Any) -> Iterator[tuple[object, str]]:
    """Yields the rules for models whose layers have different sizes."""
    model = config.model
    layers = unlike_layers(config)
    if layers is None:
        return
    flag = "--heterogeneous-layers-config-path"
    yield (
        len(layers) != model.num_layers,
        f"{flag} describes {len(layers)} layers, which does not match {flags.num_layers}; make "
        "them equal",
    )
    tensor = config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    for number, (groups, width, _) in enumerate(layers, 1):
        yield (
            groups % tensor != 0 or width % tensor != 0 or heads % (groups or heads) != 0,
            f"{flag}: layer {number} has {groups} key and value heads and width {width}, which do "
            f"not match {flags.num_attention_heads} and {flags.tensor_model_parallel_size}; use "
            "multiples of the tensor parallel size, and a divisor of the number of heads",
        )


def layer_rules(config: TrainerConfig, flags: Any) -> Iterator[tuple[object, str]]:
    """Yields the rules for layers and stages, as pairs of a condition and an error message.

    Args:
        config: Settings of the run.
        flags: Object with an attribute for each setting. The value of the attribute is the setting
            as typed on the command line, such as ``--num-layers 8``, for error messages.
    """
    model = config.model
    layers = model.num_layers
    stages = config.num_stages
    pipeline = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_chunks
    shape = f"pipeline {pipeline} x chunks {chunks}"
    partition = config.schedule.partition
    yield (
        partition is None and layers % stages != 0,
        f"{flags.num_layers} does not divide evenly into {stages} stages ({shape}); choose a "
        f"multiple of {stages} or use --partition"
        + f", for example {format_partition(nearly_even_split(layers, stages))}"
        * (stages <= _MAX_EXAMPLE),
    )
    layout = config.schedule.pipeline_model_parallel_layout
    yield (
        layout is not None and sum(partition or ()) != layers,
        f"{flags.pipeline_model_parallel_layout} has {sum(partition or ())} transformer layers "
        f"(t), which does not match {flags.num_layers}; make them equal",
    )
    yield (
        partition is not None and len(partition) != stages,
        f"{flags.partition} has {len(partition or ())} stages, but {shape} requires {stages}; "
        "use one number for each stage",
    )
    yield (
        partition is not None and sum(partition) != layers,
        f"{flags.partition} has {sum(partition or ())} layers, but --num-layers is {layers}; make "
        "them equal",
    )
    yield from _unlike(config, flags)
    if model.mtp_num_layers is not None or layout is not None:
        yield from _predictions(config, flags)


def _predictions(config: TrainerConfig, flags: Any) -> Iterator[tuple[object, str]]:
    """Yields the rules for multi-token prediction layers and their stage."""
    layers = config.model.mtp_num_layers
    layout = config.schedule.pipeline_model_parallel_layout
    letters = "" if layout is None else "".join(parse_layout(layout))
    yield (
        layout is not None and letters.count("m") != (layers or 0),
        f"{flags.pipeline_model_parallel_layout} has {letters.count('m')} layers of multi-token "
        f"prediction (m), which does not match {flags.mtp_num_layers}; make them equal",
    )
    if layers is None:
        return
    pipeline = config.parallel.pipeline_model_parallel_size
    stages = config.num_stages
    kind = config.placement_kind
    yield (
        config.mtp_stage != stages - 1
        and (kind == "v" or config.mtp_stage not in range(stages - pipeline + 1, stages)),
        f"{flags.pipeline_model_parallel_layout} has the layers of multi-token prediction (m) on "
        f"stage {config.mtp_stage}; with {kind} placement, move m to the last stage"
        + (", or to the last stage of any rank except the first" * (kind == "loop")),
    )
