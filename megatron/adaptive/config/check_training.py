"""Rules between settings of precision, optimizer, recompute, data and run.

Every message names the values, the rule and the remedy. Also tries whether the output folders can
be written, which is the one thing here that touches the disk; it leaves nothing behind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.adaptive.config.model import RecomputeConfig
from megatron.adaptive.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["check_output_folders", "check_training"]

_MAX_SPLITS = 3


def check_training(config: TrainerConfig) -> None:
    """Hold precision, optimizer, recompute, data and run against their rules.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _check_precision(config.precision)
    _check_learning_rate(config)
    _check_weight_decay(config.optimizer)
    _check_recompute(config.recompute, config)
    _check_data(config)
    _check_run(config)


def _check_precision(precision: PrecisionConfig) -> None:
    if precision.fp16 and precision.bf16:
        raise ConfigError("--fp16 and --bf16 exclude each other: parameters have one type")
    for flag, given, needed, fulfilled in (
        (
            "--fp16-lm-cross-entropy",
            precision.fp16_lm_cross_entropy,
            "--fp16",
            precision.fp16,
        ),
        ("--grad-reduce-in-bf16", precision.grad_reduce_in_bf16, "--bf16", precision.bf16),
        (
            "--fp32-residual-connection",
            precision.fp32_residual_connection,
            "--fp16 or --bf16",
            precision.fp16 or precision.bf16,
        ),
        (
            f"--loss-scale {precision.loss_scale}",
            precision.loss_scale is not None,
            "--fp16",
            precision.fp16,
        ),
    ):
        if given and not fulfilled:
            raise ConfigError(f"{flag} works only with {needed}: add it or drop the flag")
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: lower it or raise the other"
        )


def _check_learning_rate(config: TrainerConfig) -> None:
    optimizer = config.optimizer
    for name, value in (
        ("--min-lr", optimizer.min_lr),
        ("--lr-warmup-init", optimizer.lr_warmup_init),
    ):
        if value > optimizer.lr:
            raise ConfigError(
                f"{name} {value:g} is above --lr {optimizer.lr:g}: the rate never leaves this "
                "range; lower it"
            )
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        raise ConfigError("--decoupled-min-lr has no effect by itself: add --decoupled-lr")
    if (optimizer.decoupled_min_lr or 0) > (optimizer.decoupled_lr or 0):
        raise ConfigError(
            f"--decoupled-min-lr {optimizer.decoupled_min_lr:g} is above --decoupled-lr "
            f"{optimizer.decoupled_lr:g}: lower it"
        )
    unit, length, warmup, last_part = _learning_rate_steps(config)
    if warmup >= length:
        raise ConfigError(
            f"--lr-warmup-{unit} {warmup} does not end before the decay of {length} {unit} does: "
            f"lower it or raise --lr-decay-{unit}"
        )
    if optimizer.lr_decay_style == "WSD":
        if last_part is None:
            raise ConfigError(
                f"--lr-decay-style WSD needs the length of its last part: add --lr-wsd-decay-{unit}"
            )
        if last_part > length:
            raise ConfigError(
                f"--lr-wsd-decay-{unit} {last_part} is longer than the decay of {length} {unit}: "
                "lower it"
            )


def _learning_rate_steps(config: TrainerConfig) -> tuple[str, int, int, int | None]:
    """Unit, length of the decay, length of the warm-up, length of WSD's last part."""
    optimizer, run = config.optimizer, config.run
    if run.train_iters is not None:
        length = optimizer.lr_decay_iters or run.train_iters
        return "iters", length, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    length = optimizer.lr_decay_samples or run.train_samples or 0
    return "samples", length, optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples


def _check_weight_decay(optimizer: OptimizerConfig) -> None:
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    style = f"--weight-decay-incr-style {optimizer.weight_decay_incr_style}"
    if optimizer.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise ConfigError(
                f"--start-weight-decay and --end-weight-decay have no effect with {style}: use "
                "--weight-decay, or linear or cosine"
            )
        return
    if start is None or end is None:
        raise ConfigError(f"{style} needs --start-weight-decay and --end-weight-decay: add both")
    if start > end:
        raise ConfigError(
            f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}: the weight decay "
            "can only grow; swap them"
        )


def _check_recompute(recompute: RecomputeConfig, config: TrainerConfig) -> None:
    granularity = recompute.recompute_granularity
    if recompute.recompute_activations and granularity != "selective":
        raise ConfigError(
            f"--recompute-activations contradicts --recompute-granularity {granularity}: it means "
            "selective; keep one of them"
        )
    if granularity == "full":
        if recompute.recompute_method is None or recompute.recompute_num_layers is None:
            raise ConfigError(
                "--recompute-granularity full needs to know which layers: add --recompute-method "
                "and --recompute-num-layers, for example uniform and 1"
            )
        if recompute.recompute_modules is not None:
            raise ConfigError(
                "--recompute-modules has no effect with --recompute-granularity full: use "
                "selective or drop the modules"
            )
    elif recompute.recompute_method is not None or recompute.recompute_num_layers is not None:
        raise ConfigError(
            "--recompute-method and --recompute-num-layers have no effect with "
            f"--recompute-granularity {granularity or 'none'}: use full or drop them"
        )
    if granularity is None and recompute.recompute_modules is not None:
        raise ConfigError(
            "--recompute-modules has no effect by itself: add --recompute-granularity selective"
        )
    if recompute.distribute_saved_activations:
        _check_distributed_activations(granularity, config)


def _check_distributed_activations(granularity: str | None, config: TrainerConfig) -> None:
    given = "--distribute-saved-activations"
    if granularity != "full":
        raise ConfigError(
            f"{given} works only with --recompute-granularity full: add it or drop the flag"
        )
    if config.parallel.tensor_model_parallel_size == 1:
        raise ConfigError(
            f"{given} with --tensor-model-parallel-size 1 splits nothing: raise it or drop the flag"
        )
    if config.parallel.sequence_parallel:
        raise ConfigError(
            f"{given} does not work with --sequence-parallel, which splits them already: drop it"
        )


def _check_data(config: TrainerConfig) -> None:
    data = config.data
    if not (data.data_path or data.mock_data or data.has_path_per_split):
        raise ConfigError(
            "no data is given: add --data-path with a prefix of .bin and .idx files, or --mock-data"
        )
    if data.has_path_per_split and not data.train_data_path and not config.run.skip_train:
        raise ConfigError(
            "--valid-data-path and --test-data-path leave nothing to train on: add "
            "--train-data-path"
        )
    if data.reset_attention_mask and not data.create_attention_mask_in_dataloader:
        raise ConfigError(
            "--reset-attention-mask and --no-create-attention-mask-in-dataloader exclude each "
            "other: a mask that ends at documents comes with the data; keep one of them"
        )
    if data.split is not None:
        _check_split(data.split)
    if data.tokenizer_type == "NullTokenizer":
        if data.vocab_size is None:
            raise ConfigError(
                "--tokenizer-type NullTokenizer does not know the number of ids: add --vocab-size"
            )
        return
    missing = [
        flag
        for flag, value in (("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file))
        if value is None
    ]
    if missing:
        raise ConfigError(
            f"--tokenizer-type {data.tokenizer_type} needs --vocab-file and --merge-file: add "
            f"{' and '.join(missing)}, or use NullTokenizer with --vocab-size"
        )


def _check_split(split: str) -> None:
    parts = split.replace(",", " ").split()
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= _MAX_SPLITS or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split {split!r} is not a list of one to three shares of at least 0 and a sum above "
            "0: write training, validation and test as in 949,50,1"
        )


def _check_run(config: TrainerConfig) -> None:
    run = config.run
    if (run.train_iters is None) == (run.train_samples is None):
        raise ConfigError(
            "the length of the run must be given once: use --train-iters or --train-samples"
        )
    if config.checkpoint.save is not None and config.checkpoint.save_interval is None:
        raise ConfigError(
            f"--save {config.checkpoint.save} does not say how often: add --save-interval"
        )
    if config.checkpoint.save_local is not None and config.checkpoint.save is None:
        raise ConfigError(
            f"--save-local {config.checkpoint.save_local} is where checkpoints are on their way to "
            "--save, which is missing: add --save DIR on storage that all nodes share"
        )
    if run.train_samples is not None and run.train_samples < config.batch.global_batch_size:
        raise ConfigError(
            f"--train-samples {run.train_samples} is less than one batch of "
            f"{config.batch.global_batch_size}: raise it"
        )
    if run.profile_step_end <= run.profile_step_start:
        raise ConfigError(
            f"--profile-step-end {run.profile_step_end} is not after --profile-step-start "
            f"{run.profile_step_start}: raise it"
        )
    for rank in run.profile_ranks:
        if rank >= config.world_size:
            raise ConfigError(
                f"--profile-ranks {rank} does not exist among {config.world_size} ranks: give "
                f"ranks from 0 to {config.world_size - 1}"
            )


def check_output_folders(config: TrainerConfig) -> None:
    """Every folder the run writes to can be made or written; nothing is left behind.

    Raises:
        ConfigError: one cannot.
    """
    for flag, folder in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--trace-dir", config.schedule.trace_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if folder is not None:
            _require_writable(flag, Path(folder))
    record = config.schedule.record_schedule
    if record is not None:
        _require_writable("--record-schedule", Path(record).absolute().parent)


def _require_writable(flag: str, folder: Path) -> None:
    """Try to make a file in the nearest part of the path that exists."""
    try:
        nearest = folder.absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise NotADirectoryError(0, f"{nearest} is a file")
        with tempfile.TemporaryDirectory(prefix=".write-check-", dir=nearest):
            pass
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
        raise ConfigError(
            f"{flag} {folder} cannot be written ({why}): name a folder that this user may write"
        ) from None
