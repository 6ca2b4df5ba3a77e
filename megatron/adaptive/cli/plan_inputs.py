"""What ``plan`` and ``validate`` are given alike: model, cluster, and what was measured of both."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.plan_calibrate import add_calibrate_arguments, calibrated
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.cluster_file import read_cluster
from megatron.adaptive.planner.gpus import known_gpu
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.propose import complete_profile

__all__ = ["Inputs", "add_input_arguments", "read_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a prediction rests on.

    Attributes:
        model: its layers.
        cluster: nodes and links.
        measured: durations that were measured; None for none.
        profile: the same, with what is missing estimated from data sheets.
    """

    model: Model
    cluster: Cluster
    measured: Profile | None
    profile: Profile


def add_input_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that name them, those of calibration included."""
    add = parser.add_argument
    add(
        "--model", required=required, help="name (gpt2-xl, llama2-70b, t5-3b, ...), arguments, file"
    )
    add("--cluster", type=Path, required=required, metavar="FILE", help="nodes and links")
    add("--profile", type=Path, nargs="+", metavar="FILE", help="what was measured; else estimated")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="best that all GPUs have")
    add("--attention", choices=("fused", "unfused"), help="fused with Transformer Engine")
    add_calibrate_arguments(parser)


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Read them; says on stderr which measured links are of no use.

    Raises:
        ConfigError: a file is missing or wrong, or they do not belong together.
        TraceError: a trace of ``--calibrate`` is damaged.
    """
    told = None
    if options.profile:
        parts = [(str(path), profile_file.load(path)) for path in options.profile]
        told = profile_file.merge(parts) if len(parts) > 1 else parts[0][1]
    memories = {} if told is None else profile_file.measured_memory(told)
    cluster = read_cluster(options.cluster, memories)
    model = _model(options, cluster, told)
    measured = None
    if told is not None:
        profile_file.check_model(told, model, " ".join(map(str, options.profile)))
        told, strange = profile_file.renamed(told, {one.name: one.gpu for one in cluster.types})
        if strange:
            print(
                f"links measured between nodes of type {', '.join(strange)} are not used: the"
                " cluster has no such type",
                file=sys.stderr,
            )
        measured = profile_file.make_profile(told)
    measured = calibrated(options, model, cluster, measured)
    return Inputs(
        model=model,
        cluster=cluster,
        measured=measured,
        profile=complete_profile(measured, model, cluster),
    )


def _model(options: argparse.Namespace, cluster: Cluster, told: Any) -> Model:
    """Read the model, in the precision of the profile, or the best that all GPUs have."""
    fused = {"fused": True, "unfused": False, None: None}[options.attention]
    parts = [known_gpu(node.gpu) for node in cluster.types]
    default = "bf16"
    if any(part is not None and "bf16" not in part.flops for part in parts):
        default = "fp16"
    if told is not None:
        arguments = told["model"].get("arguments", ())
        half = next((name for name in ("fp16", "bf16") if f"--{name}" in arguments), "fp32")
        default = told["model"].get("precision", half)
    return read_model(options.model, options.precision, default=default, fused=fused)
