"""Compares the settings of a checkpoint with those of the run that loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.checkpoint.megatron_lm import MEANINGS, SHAPES
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.datasets import has_other_epochs
from megatron.adaptive.errors import CheckpointError, ConfigError

# These settings of megatron-core determine which weights a model has.
_PARTS = (
    "multi_latent_attention",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
_OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets")
_FLAGS = {"query_groups": "--num-query-groups"}
# These settings determine the order of the training samples.
_OF_DATA = ("data_path", "split", "train_data_path", "mock_data", "variable_seq_lengths", "sft")


def require_same_model(
    manifest: Manifest, config: TrainerConfig, padded_vocab_size: int, name: str
) -> None:
    """Checks that a checkpoint contains the model that the settings of the run describe.

    Args:
        manifest: Manifest of the checkpoint.
        config: Settings of the run.
        padded_vocab_size: Number of rows of the run's embedding.
        name: Name of the checkpoint, for the error message.

    Raises:
        CheckpointError: If the checkpoint contains a different model. The message lists the
            settings that differ.
    """
    saved = _saved_config(manifest, name)
    names = SHAPES if config.checkpoint.finetune else SHAPES + MEANINGS
    different = _differences(saved.model, config.model, names)
    different += _differences(saved.core, config.core, _PARTS)
    if saved.lora.is_on and config.lora.is_on:
        different += _differences(saved.lora, config.lora, _OF_ADAPTERS)
    elif saved.lora.is_on:
        different.append(
            "it contains adapters, but --lora-rank is not set; set --lora-rank to continue "
            "their training, or use hf export --merge-lora to merge the adapters into the model"
        )
    elif config.lora.is_on and not config.checkpoint.finetune:
        different.append(
            "it contains no adapters, but --lora-rank is set; use --finetune to start with new "
            "adapters"
        )
    if not _same_vocabulary(saved, manifest["padded_vocab_size"], config, padded_vocab_size):
        different.append(
            f"padded vocabulary has {manifest['padded_vocab_size']} rows in the checkpoint and "
            f"{padded_vocab_size} rows here, and the difference is not only padding"
        )
    if different:
        raise CheckpointError(
            f"{name} belongs to a different model: {'; '.join(different)}. Use the settings with "
            "which it was trained, or choose another folder with --load"
        )


def require_same_optimizer(manifest: Manifest, config: TrainerConfig, name: str) -> None:
    """Checks that the optimizer state in the checkpoint ``name`` matches the optimizer of the run.

    ``manifest`` describes the checkpoint, and ``config`` contains the settings of the run.

    Raises:
        CheckpointError: If there is no optimizer state, or it belongs to a different type of
            optimizer.
    """
    remedy = "load only the weights with --no-load-optim or --finetune"
    if not manifest["has_optimizer"]:
        raise CheckpointError(f"{name} contains no optimizer state; {remedy}")
    before = _optimizer_of(_saved_config(manifest, name))
    for flag, now in _optimizer_of(config).items():
        if before[flag] != now:
            raise CheckpointError(
                f"{name} contains the state of a different optimizer ({flag} is {before[flag]} "
                f"in the checkpoint, but {now} here); use the same setting, or {remedy}"
            )


def data_changes(manifest: Manifest, config: TrainerConfig, dataset: Any, name: str) -> list[str]:
    """Returns a line of text for each setting that changes the order of the training samples.

    Args:
        manifest: Manifest of the checkpoint.
        config: Settings of the run.
        dataset: Training dataset of the run, or ``None`` if the run has none.
        name: Name of the checkpoint, for error messages.

    Raises:
        CheckpointError: If the settings in the manifest are invalid.
    """
    saved = _saved_config(manifest, name)
    changes = _differences(saved.data, config.data, _OF_DATA)
    changes += _differences(saved.run, config.run, ("seed",))
    if not config.data.variable_seq_lengths:
        # Samples are sections of concatenated documents, so their content depends on seq_length.
        changes += _differences(saved.model, config.model, ("seq_length",))
    before, now = _train_samples(saved), _train_samples(config)
    if not changes and before != now and now and has_other_epochs(dataset, before, now):
        changes.append(
            f"the run needs {now} training samples instead of {before}, which changes how the "
            "epochs of its data are shuffled"
        )
    return changes


def _train_samples(config: TrainerConfig) -> int:
    """Returns the total number of training samples of a run."""
    if config.run.train_iters is None:
        return config.run.train_samples or 0
    return config.run.train_iters * config.batch.global_batch_size


def _optimizer_of(config: TrainerConfig) -> dict[str, str]:
    """Returns the settings that determine the optimizer's tensors, keyed by flag."""
    settings = config.optimizer
    return {
        "--optimizer": settings.optimizer,
        "type of parameters": config.precision.dtype_name,
        "--use-distributed-optimizer": _given(config.parallel.use_distributed_optimizer),
        "--sgd-momentum": _given(settings.optimizer == "sgd" and settings.sgd_momentum != 0),
        "--decoupled-lr": _given(settings.decoupled_lr is not None),
    }


def _saved_config(manifest: Manifest, name: str) -> TrainerConfig:
    try:
        return TrainerConfig.from_dict(manifest["config"])
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _given(value: bool) -> str:
    return "given" if value else "not given"


def _differences(saved: Any, settings: Any, names: Sequence[str]) -> list[str]:
    """Returns a line for each setting in ``names`` that differs between ``saved`` and ``settings``.

    ``saved`` contains the settings in the checkpoint, and ``settings`` those of the run.
    """
    specs = {spec.dest: spec for spec in fields_of(settings.__class__)}
    lines = []
    for name in names:
        if _is_without_effect(name, saved, settings):
            continue
        before = getattr(saved, name)
        now = getattr(settings, name)
        if before == now:
            continue
        spec = specs.get(name)
        flag = _FLAGS[name] if spec is None else spec.name
        if spec is not None and spec.is_switch:
            before, now = _given(before != spec.default), _given(now != spec.default)
        lines.append(f"{flag} is {_shown(before)} in the checkpoint, but {_shown(now)} here")
    return lines


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _is_without_effect(name: str, saved: Any, model: Any) -> bool:
    """Returns whether to ignore the setting ``name`` when comparing ``saved`` with ``model``.

    A setting is ignored if it has no effect on these models, or if its value follows from another
    setting, which is compared separately.
    """
    if name == "add_qkv_bias":
        return bool(saved.add_bias_linear or model.add_bias_linear)
    if name == "max_position_embeddings":
        return bool(model.position_embedding_type != "learned_absolute")
    if name == "rope_scaling_factor":
        return not model.use_rope_scaling
    return name.startswith(("rotary_", "use_rope")) and model.position_embedding_type != "rope"


def _same_vocabulary(
    saved: TrainerConfig, saved_rows: int, config: TrainerConfig, rows: int
) -> bool:
    """Returns whether two embeddings may have the same vocabulary and differ only in padding.

    ``saved_rows`` and ``rows`` count the rows including padding. The number of padding rows depends
    on the tensor parallel size.
    """

    def fewest(config: TrainerConfig, rows: int) -> int:
        multiple = (
            config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        )
        return rows - multiple + 1

    largest = min(saved_rows, rows)
    return max(fewest(saved, saved_rows), fewest(config, rows)) <= largest
