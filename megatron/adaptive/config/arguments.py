"""Parses the trainer's command line, whose flags come from Megatron-LM and from this project.

Each flag is a field of a dataclass. This module contains the parser, the defaults that depend on
other flags, and the table of mutually exclusive flags. ``flag_checks.py`` contains checks that
involve several values. ``unsupported_flags.py`` contains the flags of Megatron-LM that the trainer
rejects.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.config import flag_checks
from megatron.adaptive.config.adapters import model_settings_of
from megatron.adaptive.config.command_parser import LOOKS_LIKE_FLAG, CommandParser, flags_where
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.families.registry import model_settings
from megatron.adaptive.config.flag_effects import add_note, effect_notes
from megatron.adaptive.config.flag_rules import GivenFlags
from megatron.adaptive.config.flags import FieldSpec, fields_of
from megatron.adaptive.config.input_files import natural, read_text
from megatron.adaptive.config.layer_partition import lay_out
from megatron.adaptive.config.plan_file import PLAN_FLAG, PLAN_HELP, expand_plan
from megatron.adaptive.config.trainer import TrainerConfig, flag_specs, groups
from megatron.adaptive.config.unsupported_flags import (
    NEWER,
    is_idle,
    reason_for,
    refused_flags,
    with_no,
)
from megatron.adaptive.errors import ConfigError

_DESCRIPTION = "Train a GPT model through an adaptive pipeline, with Megatron-LM's flags."
_HELP_FLAGS = ("-h", "--help")
_SECONDS_PER_MINUTE = 60

# Settings that cannot be combined, because they would be redundant or contradict each other. The
# text after ``|`` is the reason, which the error message contains.
_EXCLUSIVE = """\
fp16 excludes bf16 | parameters can have only one data type
train_iters excludes train_samples | the length of the run can have only one unit
train_iters excludes lr_decay_samples lr_warmup_samples lr_wsd_decay_samples rampup_batch_size
    | a run counted in iterations does not support settings counted in samples
train_samples excludes lr_decay_iters lr_warmup_iters lr_wsd_decay_iters
    | a run counted in samples does not support settings counted in iterations
lr_warmup_fraction excludes lr_warmup_iters lr_warmup_samples | the warm-up can have only one length
num_layers_per_virtual_pipeline_stage excludes num_virtual_stages_per_pipeline_rank
    | both set the number of chunks
num_layers_per_virtual_pipeline_stage excludes partition
    | a partition sets the layers of each stage; set the chunks with --model-chunks
pipeline_model_parallel_layout excludes partition num_layers_per_virtual_pipeline_stage
    | a layout sets the layers of each stage and the number of chunks
partition pipeline_model_parallel_layout excludes decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split | the first flag sets the layers of each stage
decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    excludes account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    | both set the layers of the first and last stage
mock_data excludes data_path data_args_path train_data_path valid_data_path test_data_path
    | samples are either generated or read from files
data_path excludes data_args_path | both select the data
data_path data_args_path split excludes train_data_path valid_data_path test_data_path
    | --split divides a single dataset, or each split has a separate dataset
override_opt_param_scheduler excludes use_checkpoint_opt_param_scheduler
    | they choose opposite sources
checkpoint_activations excludes recompute_activations recompute_granularity recompute_method
    | the first flag is the old name of the other flags
"""


class Recipe(NamedTuple):
    """Flags and size of a job, read from a recipe (a YAML file of settings)."""

    flags: list[str]
    nodes: int
    processes_per_node: int


def flag_table() -> dict[str, list[tuple[str, str, str]]]:
    """Returns the flags of each group of settings, keyed by the group's title.

    Each flag is a tuple of its spellings, its default and its help text. Groups and flags are in
    order of definition.
    """
    table = {"Plan": [(f"{PLAN_FLAG} FILE", "none", PLAN_HELP)]}
    notes = effect_notes(flag_specs())
    for kind in groups().values():
        rows = table[_title(kind)] = []
        for spec in _flagged(kind):
            metavar = "" if spec.is_switch else " " + spec.metavar
            default = "off" if spec.is_switch else spec.default_text
            text = f"{spec.help_text} {notes.get(spec.dest, '')}".strip()
            rows.append((", ".join(spec.names) + metavar, default, text))
    return table


def parse(
    argv: Sequence[str],
    *,
    world_size: int,
    last_wins: bool = False,
    needs_data: bool = True,
    installed: Installed | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainerConfig:
    """Parses the trainer's command line and checks the settings.

    Args:
        argv: Command-line arguments, without the name of the program.
        world_size: Number of processes of the job.
        last_wins: Whether the last value of a repeated flag is used. This is useful for scripts
            that append the user's flags. By default, a repeated flag is an error.
        needs_data: Whether the flags for data and for tokenizer files are required.
        installed: Optional packages that are installed, or ``None`` to detect them.
        settings: Values for settings whose flags are absent, keyed by field name, or ``None``.

    Returns:
        Settings of the run, which ``flag_checks.py`` has validated.

    Raises:
        ConfigError: A flag or a value is invalid. The message describes the problem and a remedy.
        SystemExit: The help text was requested with ``--help``, and has been printed.
    """
    specs = flag_specs()
    argv = flags_where(argv, _is_active)
    _scan(argv, {PLAN_FLAG: PLAN_FLAG} | _dests(specs), last_wins=last_wins)
    argv = expand_plan(argv, specs, world_size)
    values = _accepted(settings or {}, specs) | _read_values(argv)
    values = _accepted(model_settings_of(values, argv), specs) | values
    GivenFlags(values, specs).require(_EXCLUSIVE)
    _require_needed(values, specs)
    installed = installed or Installed.detect()
    _resolve(values, world_size=world_size, installed=installed)
    lay_out(values, specs)
    config = TrainerConfig(
        **{
            name: kind(**{s.dest: values[s.dest] for s in fields_of(kind) if s.dest in values})
            for name, kind in groups().items()
        }
    )
    flag_checks.check_config(config, installed, needs_data=needs_data)
    flag_checks.check_output_folders(config)
    return config


def read_recipe(content: Any, overrides: Sequence[str], where: str) -> Recipe:
    """Converts a recipe, and the arguments that override it, to flags of the trainer.

    A recipe is a YAML file with settings::

        num_layers: 16  # any setting, spelled like its flag
        variants:       # one option of each variant is used; the default is the first
          task: {pretrain: {lr: 3e-4}, finetune: {lr: 1e-5}}
          gpus: {1: {}, 2x4: {nodes: 2, processes_per_node: 4}}

    The argument ``task=finetune`` selects another option of the variant ``task``.

    Args:
        content: Contents of the recipe.
        overrides: Arguments ``key=value`` that override the recipe, or ``key=`` to remove a key.
            Within the recipe, variants override all other settings. With ``load_hf``, the Hugging
            Face folder describes the model, and the recipe's model settings are ignored.
        where: Path of the recipe, shown in error messages.

    Raises:
        ConfigError: A key or an option of a variant is unknown.
    """
    chosen: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key in chosen:
            rule = (
                "is given twice; remove one of them"
                if equals
                else "is not a setting; write key=value"
            )
            raise ConfigError(f"{override}: {key} {rule}")
        chosen[key] = value
    base = dict(_mapping(content, where))
    variants = _mapping(base.pop("variants", {}), f"{where}: variants")
    settings = _by_field(base, where)
    for axis, options in variants.items():
        path = f"{where}: variants.{axis}"
        parts = {
            str(name): _by_field(part or {}, f"{path}.{name}")
            for name, part in _mapping(options, path).items()
        }
        choice = chosen.pop(axis, next(iter(parts), ""))
        if choice not in parts:
            raise ConfigError(
                f"{axis}={choice} is not an option in {where}; choose one of {', '.join(parts)}"
            )
        settings |= parts[choice]
    overriding = _by_field(chosen, "the command line")
    if (overriding | settings).get("load_hf"):
        # The folder describes the model, so the recipe's model settings are dropped. Arguments that
        # contradict the folder are rejected later.
        of_model = model_settings((overriding | settings).get("hf_family"))
        settings = {field: settings[field] for field in settings.keys() - of_model}
    settings |= overriding
    counts = []
    for name in _PROCESSES:
        value = str(settings.pop(name, None) or 1)
        if not 1 <= (natural(value) or 0) <= _MOST_PROCESSES:
            raise ConfigError(f"{where}: {name} must be a positive integer, got {value}")
        counts.append(int(value))
    specs = flag_specs()
    flags = [
        argument
        for field, value in settings.items()
        if value not in ("", None)
        for argument in _arguments_of(specs[field], value, where)
    ]
    return Recipe(flags, *counts)


_PROCESSES = ("nodes", "processes_per_node")
_MOST_PROCESSES = 4096


def _mapping(content: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must contain keys with values, got {content!r}")
    return content


def _by_field(part: Any, where: str) -> dict[str, Any]:
    """Returns the settings in the recipe's section ``part``, keyed by field name."""
    fields = {name: (name, True) for name in _PROCESSES}
    for spec in flag_specs().values():
        # A flag such as --no-x turns a setting off, so "no_x: true" means that the setting is off.
        same = spec.default is not True
        fields |= {name.strip("-").replace("-", "_"): (spec.dest, same) for name in spec.names}
    fields |= {name: (name, True) for name in flag_specs()}
    settings: dict[str, Any] = {}
    for key, value in _mapping(part, where).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            reason = reason_for(f"--{name.replace('_', '-')}")
            (nearest,) = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
            hint = f"this trainer refuses it: {reason}" if reason else f"the nearest is {nearest}"
            raise ConfigError(f"{where}: {key} is not a setting; {hint}")
        field, same = fields[name]
        opposite = {"true": "false", "false": "true"}.get(str(value).lower(), value)
        settings[field] = value if same else opposite
    return settings


def _arguments_of(spec: FieldSpec, value: Any, where: str) -> list[str]:
    """Converts a setting to command-line arguments: its flag, followed by its values."""
    if spec.is_switch:
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{where}: {spec.dest} must be true or false, got {value!r}")
        return [] if (text == "true") == (spec.default is True) else [spec.name]
    if isinstance(value, dict):
        raise ConfigError(
            f"{where}: {spec.dest} must be a single value, but contains other keys; write all "
            "settings at the top level"
        )
    items = value if isinstance(value, list) else str(value).split()
    texts = [str(item) for item in items]
    if spec.many and not spec.reader:
        return [spec.name, *texts]
    return [spec.name, "-".join(texts) if isinstance(value, list) else str(value)]


def only_groups(argv: Sequence[str], kinds: Sequence[type], more: Sequence[str] = ()) -> list[str]:
    """Returns the flags in ``argv`` that belong to some groups of settings, with their values.

    Args:
        argv: Command line of the trainer.
        kinds: Dataclasses of the setting groups whose flags are returned.
        more: Names of additional fields whose flags are returned.

    Raises:
        ConfigError: A flag is unknown, or this trainer rejects it.
    """
    dests = _dests(flag_specs())
    argv = flags_where(argv, _is_active)
    _scan(argv, dests, last_wins=True)
    kept = {spec.dest for kind in kinds for spec in _flagged(kind)}.union(more)
    return flags_where(argv, lambda name: dests.get(name) in kept)


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Converts settings to command-line flags of the trainer, each followed by its values.

    Args:
        settings: Values of the settings, keyed by field name.
    """
    specs = flag_specs()
    return [word for name, value in settings.items() for word in specs[name].words_of(value)]


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser for the trainer's flags. The parser sets no values for absent flags."""
    parser = CommandParser(
        complain=_complaint,
        usage="%(prog)s FLAG ...",
        description=_DESCRIPTION,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(PLAN_FLAG, metavar="FILE", help=PLAN_HELP)
    notes = effect_notes(flag_specs())
    for kind in groups().values():
        group = parser.add_argument_group(_title(kind))
        for spec in _flagged(kind):
            group.add_argument(*spec.names, **add_note(spec, notes).options())
    return parser


def _complaint(message: str) -> str:
    text = " ".join(message.split()).removeprefix("argument ")
    return f"{text} (see --help)" if "expected" in text else text


def _flagged(kind: type) -> list[FieldSpec]:
    return [spec for spec in fields_of(kind) if spec.has_flag]


def _title(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")


def _is_active(name: str) -> bool:
    """Returns whether a flag has an effect. Some flags of Megatron-LM are accepted but ignored."""
    return not is_idle(name)


def _dests(specs: Mapping[str, FieldSpec]) -> dict[str, str]:
    """Maps every spelling of a flag to the name of its field."""
    return {name: spec.dest for spec in specs.values() for name in spec.names}


def _scan(argv: Sequence[str], dest_of: Mapping[str, str], *, last_wins: bool) -> None:
    """Checks that all flags in ``argv`` are known and supported, and that none is repeated."""
    seen: dict[str, str] = {}
    for argument in argv:
        if not LOOKS_LIKE_FLAG.match(argument):
            continue
        name = argument.split("=", 1)[0]
        if name in _HELP_FLAGS:
            continue
        if name not in dest_of:
            raise ConfigError(_why_not_taken(name, list(dest_of)))
        dest = dest_of[name]
        if dest in seen and not last_wins:
            first = seen[dest]
            text = f"{first} is given twice" if first == name else f"{first} and {name} are given"
            raise ConfigError(
                f"{text}, but each setting may be given only once; remove one of them"
            )
        seen[dest] = name


def _why_not_taken(name: str, accepted: list[str]) -> str:
    reason = reason_for(name)
    if reason is not None:
        return f"{name} is a flag of Megatron-LM that this trainer refuses: {reason}"
    if name in NEWER:
        return (
            f"{name} requires a newer megatron-core than the installed version; install a newer "
            "release or remove the flag"
        )
    if (other := with_no(name)) in accepted and other != name:
        return f"{name} is another spelling of {other} in Megatron-LM; use {other}"
    (nearest,) = difflib.get_close_matches(name, [*accepted, *refused_flags()], n=1, cutoff=0.0)
    note = "" if nearest in accepted else ", which is refused"
    return f"{name} is not a flag of this trainer; the nearest is {nearest}{note} (see --help)"


def _read_values(argv: Sequence[str]) -> dict[str, Any]:
    namespace, extra = make_parser().parse_known_args(list(argv))
    if extra:
        raise ConfigError(
            f"{extra[0]!r} does not belong to a flag; each value must follow its flag"
        )
    return {
        dest: tuple(value) if isinstance(value, list) else value
        for dest, value in vars(namespace).items()
    }


def _accepted(settings: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> dict[str, Any]:
    """Converts values of settings to the types of their fields.

    Raises:
        ConfigError: A value is invalid. The message names the flag.
    """
    values = {}
    for name, value in settings.items():
        try:
            values[name] = specs[name].accept(value)
        except ValueError as error:
            raise ConfigError(f"{'/'.join(specs[name].names)}: {error}") from None
    return values


def _require_needed(values: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> None:
    missing = [s.name for s in specs.values() if s.is_required and s.dest not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{', '.join(missing)} {verb} required but missing")
    if "train_iters" not in values and "train_samples" not in values:
        raise ConfigError("the length of the run is missing; add --train-iters or --train-samples")


def _resolve(values: dict[str, Any], *, world_size: int, installed: Installed) -> None:
    """Adds defaults that depend on other flags, the world size or the installed packages."""
    replicas = flag_checks.replicas_of(world_size, values)
    values["world_size"] = world_size
    values.setdefault("global_batch_size", values["micro_batch_size"] * replicas)
    values.setdefault(
        "transformer_impl", "transformer_engine" if installed.transformer_engine else "local"
    )
    if "distributed_timeout_minutes" in values:
        values.setdefault(
            "pipeline_timeout_s", float(values["distributed_timeout_minutes"] * _SECONDS_PER_MINUTE)
        )
    has_files = "vocab_file" in values or "merge_file" in values
    if "mock_data" in values and "vocab_size" in values and not has_files:
        values.setdefault("tokenizer_type", "NullTokenizer")
    if "data_args_path" in values:
        values["data_path"] = _read_data_args(values["data_args_path"])


def _read_data_args(path: str) -> tuple[str, ...]:
    hint = "pass a text file that contains the value of --data-path as --data-args-path"
    items = tuple(read_text(Path(path), hint).split())
    if not items:
        raise ConfigError(
            f"--data-args-path {path} is empty; it must contain the value of --data-path"
        )
    return items
