"""Measures a search for GPT-3 175B on 1,024 GPUs of four types (``large.yaml``)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from harness.report import Row
from megatron.adaptive.planner.cluster import read_cluster
from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import complete_profile
from megatron.adaptive.planner.search import Searcher
from megatron.adaptive.planner.search_options import SearchOptions

_CLUSTER = Path(__file__).with_name("large.yaml")


def rows(quick: bool = False) -> list[Row]:
    """Searches a plan, and returns a row with the CPU time of the search.

    If ``quick`` is true, the cluster has only a quarter of the nodes.
    """
    cluster = read_cluster(_CLUSTER)
    if quick:
        groups = tuple(replace(group, count=group.count // 4) for group in cluster.groups)
        cluster = replace(cluster, groups=groups)
    model = read_model("gpt3-175b", "fp16")
    profile = complete_profile(None, model, cluster)
    options = SearchOptions(micro_batch=(1, 2, 4))
    began = time.process_time()
    found = Searcher(
        PlanInputs(model, cluster, profile), global_batch=1536, options=options
    ).search()
    taken = time.process_time() - began
    best = found.plans[0]
    what = f"GPT-3 175B on {cluster.num_gpus} GPUs of {len(cluster.groups)} types"
    note = f"{best.seconds:.2f} s a step, gap {found.gap:.1%}"
    return [Row(what=f"{what}: CPU time of the search", value=taken, unit="s", goal=60, note=note)]
