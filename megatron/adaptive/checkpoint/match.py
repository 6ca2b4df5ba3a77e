"""Whether a checkpoint fits a run: what differs is named, with both values and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.model import ModelConfig
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError, ConfigError

__all__ = ["require_same_model", "require_same_optimizer"]

# Settings that give the weights their shape, or say which weights there are.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "query_groups",
    "position_embedding_type",
    "max_position_embeddings",
    "normalization",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)
# Settings that say what is computed with them; a fine-tuning may change these.
_MEANINGS = (
    "squared_relu",
    "norm_epsilon",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
)
_FLAGS = {"query_groups": "--num-query-groups"}


def require_same_model(
    manifest: Manifest, config: TrainerConfig, padded_vocab_size: int, what: str
) -> None:
    """Check that a checkpoint is of the model that the run's settings describe.

    Args:
        manifest: of the checkpoint.
        config: the run's settings.
        padded_vocab_size: rows of the run's embedding.
        what: names the checkpoint in the error.

    Raises:
        CheckpointError: it is of another model; the text lists the settings that differ.
    """
    saved = _saved_config(manifest, what)
    names = _SHAPES if config.checkpoint.finetune else _SHAPES + _MEANINGS
    different = _differences(saved.model, config.model, names)
    if not _same_vocabulary(saved, manifest.padded_vocab_size, config, padded_vocab_size):
        different.append(
            f"padded vocabulary is {manifest.padded_vocab_size} in the checkpoint and "
            f"{padded_vocab_size} here, more than padding explains"
        )
    if different:
        raise CheckpointError(
            f"{what} is of another model: {'; '.join(different)}. Give the settings it was "
            "trained with, or name another folder with --load"
        )


def require_same_optimizer(manifest: Manifest, config: TrainerConfig, what: str) -> None:
    """Check that the optimizer state in a checkpoint fits the run's optimizer.

    Raises:
        CheckpointError: there is none, or it is of another kind.
    """
    remedy = "load the weights alone with --no-load-optim or --finetune"
    if not manifest.has_optimizer:
        raise CheckpointError(f"{what} holds no optimizer state (--no-save-optim): {remedy}")
    saved = _saved_config(manifest, what)
    for flag, before, now in (
        ("--optimizer", saved.optimizer.optimizer, config.optimizer.optimizer),
        ("type of parameters", saved.precision.dtype_name, config.precision.dtype_name),
        (
            "--use-distributed-optimizer",
            _given(saved.parallel.use_distributed_optimizer),
            _given(config.parallel.use_distributed_optimizer),
        ),
        ("--sgd-momentum", _momentum(saved), _momentum(config)),
        (
            "--decoupled-lr",
            _given(saved.optimizer.decoupled_lr is not None),
            _given(config.optimizer.decoupled_lr is not None),
        ),
    ):
        if before != now:
            raise CheckpointError(
                f"{what} holds the state of another optimizer: {flag} is {before} in the "
                f"checkpoint and {now} here. Give the same, or {remedy}"
            )


def _saved_config(manifest: Manifest, what: str) -> TrainerConfig:
    try:
        return TrainerConfig.from_dict(manifest.config)
    except ConfigError as error:
        raise CheckpointError(f"{what}: {error}") from None


def _momentum(config: TrainerConfig) -> str:
    settings = config.optimizer
    return _given(settings.optimizer == "sgd" and settings.sgd_momentum != 0)


def _given(value: bool) -> str:
    return "given" if value else "not given"


def _differences(saved: ModelConfig, own: ModelConfig, names: Sequence[str]) -> list[str]:
    specs = {spec.dest: spec for spec in fields_of(ModelConfig)}
    lines = []
    for name in names:
        if _is_without_effect(name, own) or _is_implied(name, saved, own):
            continue
        before, now = getattr(saved, name), getattr(own, name)
        if before == now:
            continue
        spec = specs.get(name)
        flag = _FLAGS[name] if spec is None else spec.name
        if spec is not None and spec.is_switch:
            before, now = _given(before != spec.default), _given(now != spec.default)
        lines.append(f"{flag} is {before} in the checkpoint and {now} here")
    return lines


def _is_without_effect(name: str, model: ModelConfig) -> bool:
    """Whether a setting changes nothing in ``model``; the kind of position is compared itself."""
    if name == "max_position_embeddings":
        return model.position_embedding_type != "learned_absolute"
    if name == "rope_scaling_factor":
        return not model.use_rope_scaling
    return name.startswith(("rotary_", "use_rope")) and model.position_embedding_type != "rope"


def _is_implied(name: str, saved: ModelConfig, own: ModelConfig) -> bool:
    """Whether another setting of the list tells the difference already."""
    return name == "add_qkv_bias" and (saved.add_bias_linear or own.add_bias_linear)


def _same_vocabulary(
    saved: TrainerConfig, saved_rows: int, own: TrainerConfig, own_rows: int
) -> bool:
    """Whether both numbers of rows can be one vocabulary, padded for each run's mesh.

    Rows that only pad may come and go with the tensor parallel size; others may not.
    """

    def smallest(config: TrainerConfig, rows: int) -> int:
        multiple = (
            config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        )
        return rows - multiple + 1

    largest = min(saved_rows, own_rows)
    return max(smallest(saved, saved_rows), smallest(own, own_rows)) <= largest
