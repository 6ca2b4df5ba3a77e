"""Creates command-line flags from the settings of the installed megatron-core.

Importing megatron-core's configuration classes would import torch, so this module parses their
source. A setting becomes a flag, except in four cases: another dataclass of this package has the
setting, the trainer sets it (``_OWN``), ``unsupported_flags.py`` rejects the flag, or the command
line cannot represent its type. Flags have the same names as in Megatron-LM. megatron-core checks
that these settings are compatible with each other.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.adaptive.config.data import BatchConfig, DataConfig
from megatron.adaptive.config.flags import Count, fields_of, flag
from megatron.adaptive.config.model import ModelConfig, RecomputeConfig
from megatron.adaptive.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.adaptive.config.parallel import ParallelConfig, TransportConfig
from megatron.adaptive.config.run import CheckpointConfig, LoggingConfig, RunConfig
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.unsupported_flags import is_idle, reason_for

# This pattern matches sentences in megatron-core's docstrings about a default of None or False.
# Help texts omit these sentences, because flags with such a default are simply absent.
_IDLE_DEFAULT = re.compile(r" ?(?:Defaults to|The default is) (?:None|False)\.")
OTHERS = (
    ModelConfig,
    ParallelConfig,
    BatchConfig,
    PrecisionConfig,
    OptimizerConfig,
    RecomputeConfig,
    DataConfig,
    CheckpointConfig,
    LoggingConfig,
    ScheduleConfig,
    TransportConfig,
    RunConfig,
)
_LATENT = "MLATransformerConfig"
_CLASSES = (
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("transformer/transformer_config.py", _LATENT),
    ("transformer/heterogeneous/heterogeneous_config.py", "HeterogeneousTransformerConfig"),
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
# The trainer computes these settings from other settings, or sets them to fixed values.
_OWN = frozenset(
    """
    virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout layernorm_epsilon
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    layernorm_zero_centered_gamma gated_linear_unit bias_activation_fusion persist_layer_norm
    heterogeneous_block_specs hetereogenous_dist_checkpoint enable_autocast
    use_inference_optimized_layers is_hybrid_model variable_seq_lengths batch_p2p_comm
    batch_p2p_sync deallocate_pipeline_outputs use_te_rng_tracker cpu_offloading params_dtype
    pipeline_dtype autocast_dtype num_microbatches_with_partial_activation_checkpoints
    max_seqlen_per_dp_cp_rank moe_extended_tp grad_reduce_in_fp32 check_for_nan_in_grad bucket_size
    average_in_collective preserve_fp32_weights use_kitchen use_kitchen_attention mtp_standalone
    """.split()
)
_NAMES = {
    "num_moe_experts": "--num-experts",
    "fp8_wgrad": "--no-fp8-wgrad",
    "fp8_param": "--fp8-param-gather",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "num_buckets": "--ddp-num-buckets",
    "param_name_patterns_for_fp32_local_accumulation": (
        "--ddp-param-name-patterns-for-fp32-local-accumulation"
    ),
}
# For these settings, Megatron-LM's command line and megatron-core's classes have different defaults
# and choices.
_DEFAULTS: Mapping[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
}
_CHOICES = {"rope_type": ("rope", "yarn")}
_BOUNDED = {"num_moe_experts": Count, "moe_router_topk": Count}
_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_TYPES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "int": (int, {}),
    "float": (float, {}),
    "str": (str, {}),
    "bool": (bool, {}),
    "torch.dtype": (str, {"choices": _DTYPES}),
    "list[int]": (tuple[int, ...], {}),
    "list[str]": (tuple[str, ...], {}),
    "Tuple[str, ...]": (tuple[str, ...], {}),
}


def parse_pattern(text: str) -> int | list[int]:
    """Parses a layer pattern: a number n (every n-th layer), or a list like ``([1]*3+[0])*2``.

    Returns:
        The number n, or a list with a number for each layer.

    Raises:
        ValueError: The text is neither a number nor such a list.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 1 << 16:
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left = value(node.left)
            right = value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError

    try:
        pattern: int | list[int] = value(ast.parse(text, mode="eval").body)
        if isinstance(pattern, int) or all(type(item) is int for item in pattern):
            return pattern
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError(f"{text!r} is neither a number nor a list such as ([1]*3+[0]*1)*2")


def _pattern(text: str) -> str:
    parse_pattern(text)
    return text


def _window(text: str) -> tuple[int, ...]:
    try:
        left, right = map(int, text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of numbers such as 128,0") from None
    if left < 0:
        raise ValueError(
            f"{text!r} begins with {left}, but the number of earlier tokens that a token attends "
            "to must not be negative; remove the flag to attend to all of them"
        )
    if right != 0:
        raise ValueError(
            f"{text!r} ends with {right}, but tokens of a causal model cannot attend to later "
            f"tokens; give {left},0"
        )
    return left, right


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
    """A field of one of megatron-core's configuration classes, parsed from the class's source.

    Attributes:
        name: Name of the field.
        of: Name of the class that contains the field.
        annotation: Source text of the type annotation, such as ``Optional[int]``.
        default: Default value, or ``None`` if the source does not contain it as a literal.
        is_literal: Whether the source contains the default as a literal, which may be ``None``.
        names: Spellings of the flag in the field's metadata, or empty if the metadata contains
            none.
        text: Docstring after the field, or empty if there is none.
    """

    name: str
    of: str
    annotation: str
    default: Any
    is_literal: bool
    names: tuple[str, ...]
    text: str


def _settings() -> Iterator[_Setting]:
    """Yields all fields of the configuration classes of the installed megatron-core."""
    # Search the paths of the package megatron, because find_spec("megatron.core.x") would import
    # megatron.core.
    folders = (Path(part, "core") for part in sys.modules["megatron"].__path__)
    folder = next((candidate for candidate in folders if candidate.is_dir()), Path())
    trees: dict[str, ast.Module] = {}
    for file, name in _CLASSES:
        if file not in trees:
            path = folder / file
            trees[file] = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
        for node in trees[file].body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from _settings_of(node)


def _settings_of(node: ast.ClassDef) -> Iterator[_Setting]:
    for item, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        default = item.value
        names = ()
        # The default may be a call such as dataclasses.field(default=..., metadata=...).
        if isinstance(default, ast.Call):
            arguments = {keyword.arg: keyword.value for keyword in default.keywords}
            default = arguments.get("default")
            # Evaluate only the entry with the flag's names, because other entries of the metadata
            # may not be literals.
            for part in ast.walk(arguments.get("metadata", ast.Pass())):
                if isinstance(part, ast.Dict):
                    for key, spellings in zip(part.keys, part.values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "arg_names":
                            names = tuple(ast.literal_eval(spellings))
        is_literal = default is not None
        try:
            value = ast.literal_eval(default) if default is not None else None
        except ValueError:
            value = None
            is_literal = False
        yield _Setting(
            name=item.target.id,
            of=node.name,
            annotation=ast.unparse(item.annotation),
            default=value,
            is_literal=is_literal,
            names=names,
            text=_IDLE_DEFAULT.sub("", " ".join(text.split())),
        )


def _field_of(setting: _Setting) -> tuple[str, Any, Any] | None:
    """Converts ``setting`` to a dataclass field, and returns its name, type and description.

    The result is ``None`` if the command line cannot represent the type of the setting.
    """
    kind = setting.annotation.replace("List[", "list[")
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
    options: dict[str, Any] = {}
    base: Any
    if kind.startswith("Literal["):
        choices = tuple(ast.literal_eval(f"({kind[8:-1]},)"))
        base = type(choices[0])
        options = {"choices": choices}
    elif kind == "Union[int, list[int]]":
        base = str
        options = {"reader": _pattern, "unit": "N|LIST"}
    elif kind.startswith("Union[") and kind.endswith(("list[str]]", "list[float]]")):
        base = tuple[float, ...] if "float" in kind else tuple[str, ...]
    elif kind == "Tuple[int, int]":
        base = tuple[int, ...]
        options = {"reader": _window, "unit": "LEFT,RIGHT"}
    elif kind in _TYPES:
        base, options = _TYPES[kind]
    else:
        return None
    default = _DEFAULTS.get(setting.name, setting.default)
    if setting.name in _CHOICES:
        options = {"choices": _CHOICES[setting.name]}
    if base is str and isinstance(default, int | float):
        default = str(default)
    if "tuple" in str(base) and default is not None and not isinstance(default, tuple):
        default = (default,)
    if base is float and isinstance(default, int):
        default = float(default)
    spelling = setting.name.replace("_", "-")
    spelling = f"--no-{spelling}" if default is True else f"--{spelling}"
    names = (_NAMES[setting.name],) if setting.name in _NAMES else setting.names or (spelling,)
    described = flag(
        f"Setting `{setting.name}` of megatron-core.",
        default,
        names=names,
        detail=setting.text,
        **options,
    )
    base = _BOUNDED.get(setting.name, base)
    return setting.name, base if default is not None else base | None, described


_SETTINGS = tuple(_settings())


def _fields() -> tuple[tuple[str, Any, Any], ...]:
    names_of_fields = {spec.dest for kind in OTHERS for spec in fields_of(kind)} | _OWN
    used = {name for kind in OTHERS for spec in fields_of(kind) for name in spec.names}
    fields = []
    for setting in _SETTINGS:
        field = None if setting.name in names_of_fields else _field_of(setting)
        if field is None or setting.name.startswith("_"):
            continue
        names = field[2].metadata["flag"]["names"]
        if used.isdisjoint(names) and not any(reason_for(name) or is_idle(name) for name in names):
            names_of_fields.add(setting.name)
            fields.append(field)
    return tuple(fields)


if TYPE_CHECKING:

    class CoreConfig:
        """Declares megatron-core's settings for type checkers."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    CoreConfig = dataclasses.make_dataclass(
        "CoreConfig",
        _fields(),
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__, "__doc__": "megatron-core."},
    )

UNKNOWN_DEFAULTS = frozenset(setting.name for setting in _SETTINGS if not setting.is_literal)
"""Names of the settings whose default in megatron-core is not a literal, such as float("inf")."""

LATENT_SETTINGS = tuple(
    setting.name
    for setting in _SETTINGS
    if setting.of == _LATENT and setting.name in vars(CoreConfig())
)
"""Names of the settings that only affect models with multi-latent attention."""

EXPERT_SETTINGS = tuple(name for name in vars(CoreConfig()) if name.startswith("moe_"))
"""Names of the settings that only affect models with experts."""
