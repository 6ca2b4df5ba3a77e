"""What a search may choose, and the checks that need no search."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model import RECOMPUTE, Model

__all__ = ["SearchOptions", "check_options"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the search may choose.

    Attributes:
        tp: tensor-parallel widths; empty for all that fit into a node. Likewise ``dp``, ``pp`` and
            ``micro_batch``.
        dp: numbers of replicas.
        pp: numbers of pipeline ranks.
        micro_batch: samples of a microbatch.
        recompute: of ``model.RECOMPUTE``.
        distributed_optimizer: which of off and on.
        overlap_reduce: whether the run overlaps the gradient reduction.
        sequence_parallel: whether the run uses it.
        partition: layers of each stage, embedding and head included, if they are given.
        schedules: ``1f1b``, and ``interleaved`` to try that as well.
        all_nodes: whether every node has to be used.
        unequal: whether stages may have different widths; the trainer runs those of width 1.
        top: how many plans to return.
        most_leaves: pipelines to time for one shape and set of nodes.
        most_levels: see ``make_levels``.
        most_interleaved: interleaved pipelines to try.
        most_cpu_s: CPU seconds after which what was not looked at only counts in the gap.
    """

    tp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTE
    distributed_optimizer: tuple[bool, ...] = (False, True)
    overlap_reduce: bool = False
    sequence_parallel: bool = False
    partition: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b",)
    all_nodes: bool = False
    unequal: bool = False
    top: int = 1
    most_leaves: int = 3000
    most_levels: int = 20_000
    most_interleaved: int = 12
    most_cpu_s: float = 45.0


def check_options(options: SearchOptions, model: Model, global_batch: int) -> None:
    if global_batch < 1:
        raise ConfigError(f"global batch of {global_batch} samples: it must be at least 1")
    partition = options.partition
    if partition and (sum(partition) != model.num_layers or min(partition) < 1):
        raise ConfigError(
            f"partition {'-'.join(map(str, partition))} has {sum(partition)} layers, model"
            f" {model.name} has {model.num_layers} with embedding and head: give every layer one"
            " stage and every stage a layer"
        )
    if partition and options.pp and len(partition) not in options.pp:
        raise ConfigError(
            f"partition of {len(partition)} stages contradicts {options.pp} pipeline ranks:"
            " drop one of the two"
        )
    for recompute in options.recompute:
        if recompute not in RECOMPUTE:
            raise ConfigError(f"recompute is {recompute!r}: choose of {', '.join(RECOMPUTE)}")
    for name in ("tp", "dp", "pp", "micro_batch"):
        for value in getattr(options, name):
            if value < 1:
                raise ConfigError(f"{name} of {value}: it must be at least 1")
    if options.dp and all(global_batch % dp for dp in options.dp):
        raise ConfigError(
            f"global batch of {global_batch} samples contradicts dp"
            f" {', '.join(map(str, options.dp))}: no replica count divides it"
        )
