"""Runs Megatron-LM's trainer, which has been part of megatron-core's wheel since version 0.17.

The wheel contains the trainer but not Megatron-LM's scripts. This module replaces such a script: it
builds a GPT model, reads the data and computes the loss. Flags, training steps, checkpoints and
logging are those of Megatron-LM, extended by this project's plug-in.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron.adaptive.errors import ConfigError, SetupError

_NOT_HERE = {
    "sft": "conversations of several turns in a sequence",
    "fim_data": "samples that fill in the middle of a text",
    "hybrid_context_parallel": "sequences of several lengths",
    "inter_document_masking": "attention within each document only",
    "use_legacy_models": "models from before megatron-core",
}
# Flags for training without GPUs. They turn off layers and fused functions that require CUDA.
_ON_CPU = (
    "--distributed-backend",
    "gloo",
    "--transformer-impl",
    "local",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
)


def main(argv: Sequence[str]) -> int:
    """Trains a GPT model with Megatron-LM's flags, as one of torchrun's processes."""
    is_missing = importlib.util.find_spec("megatron.training") is None
    if {"-h", "--help"} & set(argv):
        print(_USAGE, end="\n\n", flush=True)  # Megatron-LM, if it is installed, adds its own help.
        if is_missing:
            print(_lacking())
            return 0
    if is_missing:
        raise SetupError(_lacking())
    if not hasattr(typing, "override"):  # Python before 3.12 has no typing.override.
        vars(typing)["override"] = importlib.import_module("typing_extensions").override
    from megatron.adaptive import accelerator, plugin

    plugin.install()
    on_cpu = accelerator.install()
    sys.argv = [sys.argv[0], *(_ON_CPU if on_cpu else ()), *argv]
    _pretrain()
    return 0


_USAGE = """\
usage: python -m megatron.adaptive train megatron-lm FLAG ...

Megatron-LM's own trainer with its own flags and those of the plug-in."""


def _lacking() -> str:
    """Returns the error message for a missing trainer, which lists the requirements."""
    return (
        f"megatron-core {metadata.version('megatron-core')} does not contain Megatron-LM's "
        "trainer; train megatron-lm requires megatron-core 0.17 or newer (with Python 3.12), or "
        "a Megatron-LM checkout on PYTHONPATH; train rank supports any version"
    )


def _pretrain() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training

    from megatron.adaptive.plugin import add_arguments

    # Megatron-LM compiles a C++ helper with a makefile, and exits if this fails. The wheel contains
    # the compiled helper but no makefile, so skip the compilation.
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    if not Path(utils.__file__ or "").with_name("Makefile").exists():
        utils.compile_helpers = lambda: None
    pretrain_arguments: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    # megatron-core up to 0.17 does not have this function.
    if not hasattr(arguments, "parse_and_validate_args"):
        training.pretrain(
            **pretrain_arguments, model_provider=model, extra_args_provider=add_arguments
        )
        return
    utilities = importlib.import_module("megatron.training.argument_utils")
    args = arguments.parse_and_validate_args(extra_args_provider=add_arguments)
    make_model_config = getattr(utilities, "gpt_config_from_args", None)
    container = utilities.pretrain_cfg_container_from_args(
        args, make_model_config and make_model_config(args)
    )
    training.pretrain(container, **pretrain_arguments, model_provider=model)


def model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Builds a chunk of a GPT model.

    ``pre_process`` is true for a chunk with the embedding, and ``post_process`` is true for a chunk
    with the output layer. megatron-core 0.17 and 0.18 do not contain such a function.
    """
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training import get_args

    args = get_args()
    for name in ("heterogeneous_layers_config_path", "experimental_attention_variant"):
        if getattr(args, name, None) is not None:
            raise _needs_script(name, "special types of layers")
    if config is None:
        config = _transformer_config(args)
    uses_engine = args.transformer_impl == "transformer_engine"
    block = functools.partial(
        gpt_layer_specs.get_gpt_decoder_block_spec,
        config,
        use_transformer_engine=uses_engine,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    layers = block() if args.spec is None else import_module(args.spec)
    predictions = None
    if args.mtp_num_layers is not None:
        # Get the specifications of all layers, because multi-token prediction uses the
        # specification of the model's last layer, which may be on another rank.
        all_layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=uses_engine,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
        predictions = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, all_layers[-1], use_transformer_engine=uses_engine, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=predictions,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def _transformer_config(args: Any) -> Any:
    """Returns megatron-core's model configuration for the parsed flags ``args``.

    The module that defines the required function depends on the release of megatron-core.
    """
    for module in ("arguments", "argument_utils"):
        candidate = importlib.import_module(f"megatron.training.{module}")
        if hasattr(candidate, "core_transformer_config_from_args"):
            return candidate.core_transformer_config_from_args(args)
    raise SetupError(
        "megatron.training does not contain the function core_transformer_config_from_args; use "
        "megatron-core 0.17 to 0.20"
    )


def datasets(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Builds the training, validation and test datasets on ranks of the first and last stage.

    ``num_samples`` contains the number of samples of each dataset. All ranks of a tensor-parallel
    group read the data themselves. The files are memory-mapped, so that the ranks of a node share
    one copy in memory.
    """
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.training import get_args

    args = get_args()
    config = _data_config(args)
    kind: Any = gpt_dataset.GPTDataset
    if args.mock_data:
        kind = gpt_dataset.MockGPTDataset
    elif hasattr(config, "index_cache"):
        kind = _cached_datasets().CachedGPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, functools.partial(_reads_data, vp_stage), config
    ).build()


def _cached_datasets() -> Any:
    """Returns the module with datasets that verify cached indices and rebuild damaged ones."""
    return importlib.import_module("megatron.adaptive.data.datasets")


# Megatron-LM reads this attribute. It means that every rank calls the function.
datasets.is_distributed = True  # type: ignore[attr-defined]


def _data_config(args: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    for name, description in _NOT_HERE.items():
        if getattr(args, name, False):
            raise _needs_script(name, description)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    values = {
        **vars(args),
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
    }
    names = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    fields = {name: values[name] for name in names.intersection(values)}
    prefixes = [part[0][0] for part in (blend, *(blend_per_split or ())) if part and part[0]]
    # Two flags make Megatron-LM load its index files faster. If one of them is set, use
    # Megatron-LM's files instead of this project's cache.
    is_own = values["fast_cache_load"] or values["defer_npy_index_mmap"]
    if args.mock_data or is_own or not prefixes:
        return GPTDatasetConfig(**fields)
    cached = _cached_datasets()
    folder = args.data_cache_path or str(Path(prefixes[0]).parent / cached.INDEX_CACHE)
    return cached.CachedGPTDatasetConfig(**fields, index_cache=folder)


def _reads_data(vp_stage: int | None) -> bool:
    utilities = importlib.import_module("megatron.training.utils")
    return bool(utilities.is_first_or_last_pipeline_stage(vp_stage))


def forward_step(data_iterator: Iterator[Any], chunk: Any) -> tuple[Any, Callable[..., Any]]:
    """Runs the forward pass of a model chunk for one microbatch.

    Returns:
        The output of the chunk, and a function that computes the loss from this output.
    """
    from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
    from megatron.training import get_timers

    timers = get_timers()
    straggler = StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        reads = inner.pre_process or inner.post_process or getattr(inner, "mtp_process", False)
        batch = _read(data_iterator) if reads else SimpleNamespace(**dict.fromkeys(_COLUMNS))
    timers("batch-generator").stop()
    with straggler:
        output = chunk(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
        )
    return output, functools.partial(_loss, batch.loss_mask)


_COLUMNS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def _read(data_iterator: Iterator[Any]) -> SimpleNamespace:
    """Reads a microbatch, and returns this context-parallel rank's part of each sequence."""
    from megatron.adaptive.accelerator import current_device
    from megatron.adaptive.gpt.core_releases import part_of_context_rank

    sample = next(data_iterator)
    device = current_device()
    batch = {
        name: None if sample.get(name) is None else sample[name].to(device, non_blocking=True)
        for name in _COLUMNS
    }
    return SimpleNamespace(**part_of_context_rank(batch))


class _LossCheck(NamedTuple):
    """Check of the loss, made by megatron-core's rerun state machine.

    Attributes:
        rejects: Function that takes the loss, and returns whether the loss must be rejected.
        message: Reason to log if the loss is rejected.
        is_fatal: Whether a rejected loss aborts the run.
    """

    rejects: Callable[..., Any]
    message: str
    is_fatal: bool


def _loss(mask: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Computes the loss of a microbatch from the losses of its tokens.

    Args:
        mask: Weight of each token in the loss. It is 0 for tokens that do not count.
        output: Loss of each token, as computed by the model.

    Returns:
        Sum of the losses, number of tokens, and a dictionary with both values for the log.
    """
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    args = get_args()
    weights = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * weights)
    tokens = weights.sum().detach().to(torch.int)
    machine = get_rerun_state_machine()
    checks: list[_LossCheck] = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append(_LossCheck(torch.isnan, "the loss is not a number", is_fatal=True))
        checks.append(_LossCheck(torch.isinf, "the loss is infinite", is_fatal=True))
    if args.check_for_spiky_loss:
        jumps = functools.partial(machine.is_unexpectedly_large, threshold=10, context="loss")
        checks.append(_LossCheck(jumps, "the loss jumps", is_fatal=False))
    for check in checks:
        machine.validate_result(
            result=loss,
            rejection_func=check.rejects,
            message=check.message,
            tolerance=0.0,
            fatal=check.is_fatal,
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def _needs_script(name: str, description: str) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(
        f"train megatron-lm does not support {flag} ({description}); run Megatron-LM's own "
        "pretrain_gpt.py with megatron.adaptive.install() instead"
    )
