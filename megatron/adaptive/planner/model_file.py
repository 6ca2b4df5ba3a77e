"""Reads models from preset names, trainer arguments, model files and profiles.

GPT and Llama presets are defined in ``config.model`` and shared with the trainer. BERT and T5
presets exist only in the planner, for training with Megatron-LM's own scripts. The format of model
files is defined by the schema ``model`` in ``config.schema_files`` and described in
``docs/reference/planner.md``.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.config.adapters import adapted_parts
from megatron.adaptive.config.arguments import flag_words, only_groups, parse
from megatron.adaptive.config.attention import AttentionCase, Kernel, kernel_for
from megatron.adaptive.config.command_parser import flags_where, last_value
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.hugging_face import is_config, read_settings
from megatron.adaptive.config.input_files import parse_json, read_text, read_whole
from megatron.adaptive.config.megatron_core_flags import CoreConfig, parse_pattern
from megatron.adaptive.config.model import MODELS, ModelConfig
from megatron.adaptive.config.optimizer import LoraConfig, PrecisionConfig
from megatron.adaptive.config.schema_files import check_form, read_file
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision
from megatron.adaptive.planner.transformer_layers import TransformerShape, build_model

_VOCABULARY = {"gpt": 50257, "llama3": 128256, "qwen2.5": 152064, "qwen3": 151936}
_VOCABULARY |= {"deepseek": 129280} | dict.fromkeys(
    ("llama", "llama2", "mistral", "mixtral"), 32000
)
"""Vocabulary size of each model family."""
_SMALL_VOCABULARY = 50303
"""Vocabulary size of all presets whose family is not in ``_VOCABULARY``."""
ANY_RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
"""Arguments that the trainer requires but that do not change the model."""


def _only_planned(
    name: str, layers: int, hidden: int, heads: int, width: int = 64, ffn: int = 0
) -> TransformerShape:
    """Returns the sizes of the BERT or T5 model that Megatron-LM builds.

    Unlike the original T5, Megatron's T5 has learned positions, biases, and a single embedding that
    encoder and decoder share.
    """
    family = name.partition("-")[0]
    return TransformerShape(
        name=name,
        family=family,
        layers=layers,
        decoder_layers=layers if family == "t5" else 0,
        decoder_sequence=128 if family == "t5" else 0,
        hidden=hidden,
        heads=heads,
        head_width=width,
        query_groups=heads,
        ffn=ffn or 4 * hidden,
        sequence=512,
        positions=512,
        vocabulary=_padded(30522),
    )


def _padded(vocabulary: int, multiple: int = 128) -> int:
    """Returns ``vocabulary`` rounded up to a multiple of ``multiple``, as Megatron does."""
    return -(-vocabulary // multiple) * multiple


PRESETS: Mapping[str, TransformerShape] = {
    shape.name: shape
    for shape in (
        _only_planned("bert-base", 12, 768, 12),
        _only_planned("bert-large", 24, 1024, 16),
        _only_planned("t5-small", 6, 512, 8),
        _only_planned("t5-base", 12, 768, 12),
        _only_planned("t5-large", 24, 1024, 16),
        _only_planned("t5-3b", 24, 1024, 32, 128, 16384),
        _only_planned("t5-11b", 24, 1024, 128, 128, 65536),
    )
}
"""Sizes of the models that the planner supports but the trainer does not, keyed by name."""


def preset_names() -> tuple[str, ...]:
    """Returns the names of all presets, including those that the trainer does not support."""
    return (*MODELS, *PRESETS)


def preset(
    name: str,
    precision: str = "bf16",
    *,
    attention: str | None = None,
    imbalance: float = 1.0,
    sequence: int | None = None,
) -> Model:
    """Returns the model of the preset ``name``.

    Args:
        name: Name of the preset, one of :func:`preset_names`. Case and hyphens are ignored.
        precision: Data type of the training run: ``fp32``, ``fp16`` or ``bf16``.
        attention: Attention implementation, one of ``ATTENTIONS``, or ``None`` for the preset's
            default.
        imbalance: Number of tokens on the rank with the busiest experts, divided by the average
            over all ranks.
        sequence: Number of tokens per sample, or ``None`` for the preset's number. Presets that the
            trainer does not support ignore this argument.

    Raises:
        ConfigError: The preset does not exist. The message suggests the most similar name.
    """
    by_plain_name = {preset_name.replace("-", ""): preset_name for preset_name in preset_names()}
    name = by_plain_name.get(name.lower().replace("-", ""), name)
    if name in PRESETS:
        shape = replace(PRESETS[name], precision=Precision.named(precision))
        # Models in PRESETS are trained with Megatron-LM's own programs instead of the trainer's
        # layers. In these programs, only fused attention avoids storing scores.
        return build_model(replace(shape, fused_attention=attention == "fused"))
    if name not in MODELS:
        names = preset_names()
        nearest = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"the nearest is {nearest[0]}" if nearest else f"known names are {', '.join(names)}"
        raise ConfigError(f"unknown model {name!r}; {hint}")
    family = name.partition("-")[0]
    vocabulary = _VOCABULARY.get("gpt" if family.startswith("gpt") else family, _SMALL_VOCABULARY)
    flags = [*MODELS[name].split(), "--vocab-size", str(vocabulary)]
    return arguments_model(
        flags, name, precision, attention=attention, imbalance=imbalance, sequence=sequence
    )


def arguments_model(
    arguments: Sequence[str],
    name: str,
    precision: str | None = None,
    *,
    attention: str | None = None,
    imbalance: float = 1.0,
    sequence: int | None = None,
) -> Model:
    """Returns the model that a list of command-line arguments for the trainer describes.

    Only arguments about the model and its precision are used. Parallel sizes are ignored, because
    the plan determines them. Arguments about data, logs and checkpoints are also ignored. Without
    ``--vocab-size`` or a readable vocabulary file, GPT-2's vocabulary size is used.

    Args:
        arguments: Command-line arguments of ``pretrain_gpt.py``.
        name: Name by which profiles refer to the model.
        precision: Data type, which overrides ``--fp16`` and ``--bf16``. If neither this argument
            nor a flag sets the data type, it is fp32, as in a training run.
        attention: Attention implementation, one of ``ATTENTIONS``. It is used if the arguments do
            not choose an implementation. Defaults to the implementation that is used in training
            runs without GPUs. If it is ``kernel`` but no kernel supports the model's attention, the
            memory of attention scores is counted.
        imbalance: Number of tokens on the rank with the busiest experts, divided by the average
            over all ranks.
        sequence: Number of tokens per sample. It overrides ``--seq-length``, and raises
            ``--max-position-embeddings`` to at least this number.

    Raises:
        ConfigError: An argument is invalid, unknown or missing.
    """
    if sequence is not None:
        arguments = _of_length(arguments, sequence)
    adapters = only_groups(arguments, (LoraConfig,), ("load_hf", "hf_family"))
    adapters = adapters if "lora" in " ".join(adapters) else []
    model_arguments = _model_arguments(arguments, precision)
    return _built(
        _ModelSource(name, model_arguments, [*model_arguments, *adapters]), attention, imbalance
    )


def _of_length(arguments: Sequence[str], sequence: int) -> list[str]:
    """Returns the trainer's ``arguments``, changed so that samples have ``sequence`` tokens."""
    lengths = flags_where(arguments, lambda name: name not in _LENGTH_FLAGS)
    lengths += ["--seq-length", str(sequence)]
    positions = last_value(arguments, _POSITIONS_FLAG)
    if positions is None or (positions.isdecimal() and int(positions) < sequence):
        lengths = flags_where(lengths, lambda name: name != _POSITIONS_FLAG)
        lengths += [_POSITIONS_FLAG, str(sequence)]
    return lengths


_LENGTH_FLAGS = ("--seq-length", "--encoder-seq-length")
_POSITIONS_FLAG = "--max-position-embeddings"


def settings_model(
    settings: Mapping[str, Any],
    name: str,
    precision: str,
    *,
    attention: str | None = None,
    imbalance: float = 1.0,
) -> Model:
    """Returns the model that the given settings of the trainer describe.

    Args:
        settings: Values of the trainer's settings for the model, keyed by field name.
        name: Name by which profiles refer to the model.
        precision: Data type: ``fp32``, ``fp16`` or ``bf16``.
        attention: Attention implementation, one of ``ATTENTIONS``. It is used if the settings do
            not choose an implementation.
        imbalance: Number of tokens on the rank with the busiest experts, divided by the average
            over all ranks.

    Raises:
        ConfigError: A setting is invalid.
    """
    halves = [] if precision == "fp32" else [f"--{precision}"]
    source = _ModelSource(name, [*flag_words(settings), *halves], halves, settings)
    return _built(source, attention, imbalance)


class _ModelSource(NamedTuple):
    """Name, trainer arguments and trainer settings that together describe a model.

    Attributes:
        name: Name of the model.
        arguments: Command-line arguments that build the model in a training run.
        parsed: Command-line arguments that are parsed in addition to ``settings``.
        settings: Values of the trainer's settings, keyed by field name.
    """

    name: str
    arguments: Sequence[str]
    parsed: Sequence[str]
    settings: Mapping[str, Any] = {}


def _built(source: _ModelSource, attention: str | None, imbalance: float) -> Model:
    """Builds the model that ``source`` describes.

    ``attention`` and ``imbalance`` have the same meaning as in :func:`arguments_model`.
    """
    names = {argument.split("=")[0] for argument in source.arguments}
    all_arguments = [*source.parsed, *ANY_RUN]
    attention = attention or usual_attention(on_gpus=False)
    if not names & {"--transformer-impl", "--use-flash-attn", "--attention-backend"}:
        is_engine = attention == "fused"
        all_arguments += ["--transformer-impl", "transformer_engine" if is_engine else "local"]
    config = parse(
        all_arguments,
        world_size=1,
        last_wins=True,
        # The planner may run on a machine without the kernels of the training run, so assume that
        # the kernels are installed.
        installed=Installed(transformer_engine=True),
        settings=source.settings,
    )
    if config.core.heterogeneous_layers_config_encoded_json:
        raise ConfigError(
            f"{source.name}: the planner does not support --heterogeneous-layers-config-path;"
            " remove it, or start the run without a plan"
        )
    device = "cpu" if attention == "unfused" else "cuda"
    shape = trainer_shape(config, source.name, source.arguments, device=device)
    model = build_model(replace(shape, imbalance=imbalance))
    if not config.lora.is_on:
        return model
    share = _adapter_parameters(config) / model.parameters
    return replace(model, precision=model.precision.beside_frozen(share))


def _model_arguments(arguments: Sequence[str], precision: str | None) -> list[str]:
    """Returns the subset of ``arguments`` that describes the model and its precision.

    If ``arguments`` do not set the vocabulary size, ``--vocab-size`` is added to the result.
    """
    groups = (ModelConfig, PrecisionConfig, CoreConfig)
    kept = only_groups(arguments, groups, ("vocab_size",))
    has_vocabulary = any(argument.split("=")[0] == "--vocab-size" for argument in kept)
    if precision is not None:
        kept = [argument for argument in kept if argument not in ("--fp16", "--bf16")]
        kept += [] if precision == "fp32" else [f"--{precision}"]
    if not has_vocabulary:
        vocabulary = _vocabulary(only_groups(arguments, (), ("vocab_file",)))
        kept += ["--vocab-size", str(vocabulary)]
    return kept


def usual_attention(*, on_gpus: bool) -> str:
    """Returns the attention implementation that a run uses with the packages installed here.

    Args:
        on_gpus: Whether the training runs use GPUs.
    """
    if Installed.detect().transformer_engine:
        return "fused"
    return "kernel" if on_gpus else "unfused"


def _adapter_parameters(config: TrainerConfig) -> int:
    """Returns the number of adapter weights in all layers.

    For each adapted matrix, the adapter has rank x (inputs + outputs) weights.
    """
    model = config.model
    core = config.core
    rank = config.lora.lora_rank or 0
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads
    values = heads * (core.v_head_dim if core.multi_latent_attention else model.kv_channels)
    pairs = [model.query_groups * model.kv_channels] * 2
    down = core.q_lora_rank or 0
    queries = heads * (core.qk_head_dim + core.qk_pos_emb_head_dim)
    # Each entry describes a weight matrix. It contains the number of inputs, and the number of
    # outputs of each separately adapted part of the matrix.
    sizes = {
        "qkv": (hidden, [values, *pairs]),
        "proj": (values, [hidden]),
        "q_proj": (hidden, [queries]),
        "q_down_proj": (hidden, [down]),
        "q_up_proj": (down, [queries]),
        "kv_down_proj": (hidden, [core.kv_lora_rank + core.qk_pos_emb_head_dim]),
        "kv_up_proj": (core.kv_lora_rank, [values + heads * core.qk_head_dim]),
        "fc1": (hidden, [ffn] * (1 + model.is_gated)),
        "fc2": (ffn, [hidden]),
    }
    total = 0
    for name, marks in adapted_parts(config).items():
        inputs, outputs = sizes[name.partition("linear_")[2]]
        outputs = outputs if len(marks) == len(outputs) else [sum(outputs)]
        total += sum(
            (inputs + width) * is_adapted for width, is_adapted in zip(outputs, marks, strict=True)
        )
    return rank * total * model.num_layers


def _vocabulary(arguments: Sequence[str]) -> int:
    """Returns the number of entries in the vocabulary file that ``arguments`` specify.

    If the file cannot be read, the size of GPT-2's vocabulary is returned.

    Args:
        arguments: Flag ``--vocab-file`` and its value, or empty if the flag is not set.
    """
    try:
        return len(parse_json(read_whole(arguments[-1].partition("=")[2] or arguments[-1])))
    except (IndexError, OSError, ValueError, TypeError):
        return _VOCABULARY["gpt"]


def trainer_shape(
    config: TrainerConfig,
    name: str = "model",
    arguments: Sequence[str] = (),
    *,
    device: str = "cpu",
) -> TransformerShape:
    """Returns the sizes of the model that a run with the settings ``config`` builds.

    Args:
        config: Settings of the training run.
        name: Name of the model.
        arguments: Command-line arguments from which the settings were read.
        device: Type of the device that trains the model, ``cuda`` or ``cpu``. The available
            attention kernels depend on it.
    """
    model = config.model
    core = config.core
    experts = core.num_moe_experts or 0
    latent = core.multi_latent_attention
    learned = model.position_embedding_type == "learned_absolute"
    return TransformerShape(
        name=name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        head_width=core.qk_head_dim + core.qk_pos_emb_head_dim if latent else model.kv_channels,
        query_groups=model.query_groups,
        ffn=model.ffn_hidden_size,
        sequence=model.seq_length,
        positions=model.max_position_embeddings if learned else 0,
        vocabulary=_padded(
            config.data.vocab_size or _VOCABULARY["gpt"], model.make_vocab_size_divisible_by
        ),
        gated=model.is_gated,
        biases=model.add_bias_linear,
        norm_biases=model.normalization == "LayerNorm",
        tied=not model.untie_embeddings_and_output_weights,
        dropout=model.hidden_dropout > 0 or model.attention_dropout > 0,
        fused_attention=_has_kernel(config, device),
        own_attention=model.transformer_impl == "local",
        precision=_precision(config.precision),
        arguments=tuple(arguments),
        query_biases=model.add_qkv_bias,
        query_norms=model.qk_layernorm,
        latent_rank=core.kv_lora_rank if latent else 0,
        query_rank=(core.q_lora_rank or 0) if latent else 0,
        rotary_width=core.qk_pos_emb_head_dim if latent else 0,
        value_width=core.v_head_dim if latent else 0,
        window=max(core.window_size[0] + 1, 0) if core.window_size else 0,
        window_layers=_window_layers(core, model.num_layers, name),
        experts=experts,
        expert_layers=config.expert_layers if experts else (),
        top_k=core.moe_router_topk,
        expert_ffn=core.moe_ffn_hidden_size or model.ffn_hidden_size,
        shared_ffn=core.moe_shared_expert_intermediate_size or 0,
        capacity=core.moe_expert_capacity_factor or 0.0,
        padded=bool(core.moe_expert_capacity_factor and core.moe_pad_expert_input_to_capacity),
        predictions=model.mtp_num_layers or 0,
    )


def _window_layers(core: CoreConfig, num_layers: int, name: str) -> tuple[bool, ...]:
    """Returns, for each layer, whether it has an attention window, or () if all layers are equal.

    Raises:
        ConfigError: The window pattern does not have an entry for each layer.
    """
    if not core.window_size or core.window_attn_skip_freq is None:
        return ()
    skipped = parse_pattern(core.window_attn_skip_freq)
    if isinstance(skipped, int):
        return tuple(bool((layer + 1) % skipped) for layer in range(num_layers))
    if len(skipped) != num_layers:
        raise ConfigError(
            f"{name}: --window-attn-skip-freq has {len(skipped)} entries, but the model has"
            f" {num_layers} layers; the list must contain a 0 or a 1 for each layer"
        )
    return tuple(map(bool, skipped))


def _precision(config: PrecisionConfig) -> Precision:
    """Returns the sizes in bytes of the numbers in a run with the precision settings ``config``."""
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    sizes = Precision.named(names[config.dtype_name])
    if config.accumulate_allreduce_grads_in_fp32:
        return replace(sizes, gradient_bytes=4, reduce_bytes=4)
    if config.bf16:
        return replace(sizes, gradient_bytes=2, reduce_bytes=2)
    return sizes


def _has_kernel(config: TrainerConfig, device: str) -> bool:
    """Returns whether attention in a run with the settings ``config`` avoids storing scores."""
    model, core = config.model, config.core
    if model.transformer_impl == "transformer_engine":
        # Attention with bounded (soft-capped) scores is computed by the trainer's own layers, which
        # store the scores.
        keeps_scores = model.attention_backend == "unfused" or model.attention_softcap
        return not keeps_scores
    latent = core.multi_latent_attention
    width = core.qk_head_dim + core.qk_pos_emb_head_dim if latent else model.kv_channels
    case = AttentionCase(
        backend=model.attention_backend,
        device=device,
        dtype=config.precision.dtype_name,
        query_width=width,
        value_width=core.v_head_dim if latent else width,
        has_dropout=model.attention_dropout > 0,
        has_sinks=core.softmax_type != "vanilla",
        has_bound=model.attention_softcap is not None,
    )
    return kernel_for(case) is not Kernel.SCORES


def _read_arguments(text: str, folder: Path, where: str) -> list[str]:
    """Parses a list of arguments from a string or a file.

    Args:
        text: Arguments, or the name of a file with arguments. Text that begins with ``-`` is parsed
            as arguments. In a file, ``#`` starts a comment.
        folder: Base folder of relative file names.
        where: Source of the text, for error messages.

    Raises:
        ConfigError: The file cannot be read, a quote is not closed, or an argument is not
            supported.
    """
    try:
        if not text.lstrip().startswith("-"):
            text = read_text(folder / text, f"{where}: pass a file with arguments")
        arguments = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; close the quotes") from error
    except OSError as error:
        raise ConfigError(
            f"{where}: {text}: {error.strerror}; pass a file with arguments"
        ) from error
    context = only_groups(arguments, (), ("context_parallel_size",))
    if context and context[-1].rpartition("=")[2] != "1":
        raise ConfigError(
            f"{where}: the plan sets {' '.join(context)}; pass --context-parallel-size to the"
            ' "plan" command instead'
        )
    if tokens := only_groups(arguments, (), ("slice_tokens",)):
        raise ConfigError(
            f"{where}: the plan sets {' '.join(tokens)}; pass --slice-tokens and"
            ' --document-lengths to the "plan" command instead'
        )
    return arguments


_FILES = (".yaml", ".yml", ".toml", ".json")


def read_model(
    text: str,
    precision: str | None = None,
    *,
    default: str = "bf16",
    attention: str | None = None,
    sequence: int | None = None,
    imbalance: float = 1.0,
) -> Model:
    """Creates a model from the value of the flag ``--model``.

    Args:
        text: Preset name, list of the trainer's arguments, or path of a file or folder. A file is a
            model or profile file (``.yaml``, ``.toml``, ``.json``), a file with arguments, or a
            Hugging Face ``config.json``. A folder contains such a ``config.json``.
        precision: Data type of the training run. It overrides the data type that the model
            specifies.
        default: Data type for models that do not specify a data type.
        attention: Attention implementation, one of ``ATTENTIONS``. It is used if the model does not
            choose an implementation.
        sequence: Number of tokens per sample. It overrides the number that the model specifies, and
            is not allowed for a list of sizes or layers, a profile, BERT or T5.
        imbalance: Number of tokens on the rank with the busiest experts, divided by the average
            over all ranks.

    Raises:
        ConfigError: The text does not describe a model, or the model is invalid.
    """
    make = partial(
        arguments_model,
        precision=precision,
        attention=attention,
        imbalance=imbalance,
        sequence=sequence,
    )
    path = Path(text)
    is_arguments = text.lstrip().startswith("--")
    if not is_arguments and path.is_dir() and text not in preset_names():
        path = path / "config.json"
    is_document = not is_arguments and path.suffix.lower() in _FILES
    document: Any = read_file(path, "model") if is_document else None
    if is_document and is_config(document):
        settings, family = read_settings(document, str(path), sequence)
        name = path.absolute().parent.name if path.name == "config.json" else path.stem
        model = settings_model(
            settings, name, precision or default, attention=attention, imbalance=imbalance
        )
        # If the trainer lacks a feature of the model, the arguments are only an approximation that
        # is good enough for planning. The trainer would build a different model from these
        # arguments, so drop them.
        return replace(model, arguments=()) if family.missing_feature else model
    if is_document and isinstance(document, dict) and isinstance(document.get("model"), dict):
        return _with_length(_of_profile(document, str(path), precision, make), sequence, text)
    if is_document:
        model = _of_file(document, path, precision, default, attention, sequence)
        return _with_length(model, sequence, text)
    if text in preset_names() or not (is_arguments or path.is_file()):
        model = preset(
            text, precision or default, attention=attention, imbalance=imbalance, sequence=sequence
        )
        return _with_length(model, sequence, text)
    arguments = _read_arguments(text, Path(), "--model")
    return make(arguments, "model" if is_arguments else path.stem)


def _with_length(model: Model, sequence: int | None, text: str) -> Model:
    """Returns ``model`` if its samples have the length that the user requested.

    Args:
        model: Model that was read.
        sequence: Value of ``--seq-length``, or ``None`` if the flag is not set.
        text: Value of ``--model``.

    Raises:
        ConfigError: The length of the model's samples is fixed, and differs from ``sequence``.
    """
    is_fixed = not model.arguments
    if is_fixed and sequence not in (None, model.sequence, model.tokens_per_sample):
        raise ConfigError(
            f"--seq-length {sequence} cannot change the length of model {text}, whose samples "
            f"have {model.tokens_per_sample} tokens; remove the flag, or describe the model with "
            "the trainer's arguments"
        )
    return model


def _of_file(
    document: Any,
    path: Path,
    precision: str | None,
    default: str,
    attention: str | None,
    sequence: int | None,
) -> Model:
    """Creates a model from ``document``, the contents of the model file ``path``.

    The other arguments have the same meaning as in :func:`read_model`.
    """
    where = str(path)
    check_form(document, "model", where)
    name = document.get("name", path.stem)
    precision = precision or document.get("precision")
    if "preset" in document:
        name = document["preset"]
        return preset(name, precision or default, attention=attention, sequence=sequence)
    if "arguments" in document:
        arguments = _read_arguments(document["arguments"], path.parent, f"{where}: arguments")
        return arguments_model(arguments, name, precision, attention=attention, sequence=sequence)
    if "shape" in document:
        shape = {"query_groups": document["shape"]["heads"], **document["shape"]}
        hidden, heads = shape["hidden"], shape["heads"]
        if "head_width" not in shape and hidden % heads:
            raise ConfigError(
                f"model {name}: hidden {hidden} is not a multiple of {heads} heads; change one, or"
                " set head_width"
            )
        usual = {"head_width": hidden // heads, "ffn": 4 * hidden, "positions": shape["sequence"]}
        if attention is not None:
            usual |= {
                "fused_attention": attention != "unfused",
                "own_attention": attention == "kernel",
            }
        sizes = Precision.named(precision or default)
        return build_model(TransformerShape(name=name, precision=sizes, **{**usual, **shape}))
    return listed_model(document, name, Precision.named(precision or default))


def listed_model(document: Mapping[str, Any], name: str, precision: Precision) -> Model:
    """Creates a model from the list of layers in a model file or in a profile.

    Args:
        document: Dictionary with the list ``layers``, and optionally ``tokens_per_sample``,
            ``tied_parameters``, ``tied_layers`` and ``frozen_layers``.
        name: Name of the model.
        precision: Sizes in bytes of the numbers in a training run.

    Raises:
        ConfigError: Two layers of the same kind have different sizes, a layer has more frozen
            parameters than parameters, or all layers are frozen.
    """
    kinds: dict[str, LayerKind] = {}
    layers: list[str] = []
    for index, entry in enumerate(document["layers"]):
        sizes = {key: value for key, value in entry.items() if key not in ("kind", "count")}
        kind = LayerKind(name=entry["kind"], **sizes)
        whole = kind.parameters + kind.replicated_parameters
        if kind.frozen_parameters > whole:
            raise ConfigError(
                f"model {name}: layers[{index}].frozen_parameters must be at most the layer's "
                f"number of parameters, {whole:g}, got {kind.frozen_parameters:g}"
            )
        if kinds.setdefault(kind.name, kind) != kind and sizes:
            raise ConfigError(
                f"model {name}: the sizes of layers[{index}] differ from an earlier layer of "
                f"kind {kind.name!r}; give this layer a different kind"
            )
        layers += [kind.name] * entry.get("count", 1)
    frozen_layers = document.get("frozen_layers", 0)
    if frozen_layers >= len(layers):
        raise ConfigError(
            f"model {name}: frozen_layers must be less than the number of layers, {len(layers)}, "
            f"got {frozen_layers}; a gradient must flow through at least the last layer"
        )
    return Model(
        name=name,
        kinds=kinds,
        layers=tuple(layers),
        tokens_per_sample=document.get("tokens_per_sample", 1),
        tied_parameters=float(document.get("tied_parameters", 0.0)),
        tied_layers=tuple(document.get("tied_layers", ())),
        frozen_layers=frozen_layers,
        precision=precision,
    )


def _of_profile(
    document: Mapping[str, Any], where: str, precision: str | None, make: Callable[..., Model]
) -> Model:
    """Returns the model for which the profile ``document`` was measured."""
    check_form(document, "profile", where)
    model = document["model"]
    if model.get("layers"):
        return listed_model(
            model, model["name"], Precision.named(precision or model.get("precision", "fp32"))
        )
    arguments: Sequence[str] = model.get("arguments", ())
    if not arguments:
        raise ConfigError(
            f"{where}: the profile does not describe the model that was measured; pass the "
            "model's name as --model"
        )
    return make(arguments, model["name"])
