"""Compares this project's planner with FASOP, on FASOP's six cases and its Pareto run.

The function ``neutral_s`` simulates the plans of both planners in the same way. The simulation
includes the order of the plan's schedule, messages between all stages, and the reductions of
gradients and embeddings.
"""

from __future__ import annotations

import time
from pathlib import Path

from harness.report import Row
from megatron.adaptive.planner.layer_costs import layer_table
from megatron.adaptive.planner.link_costs import boundary_s, embedding_s, reduce_s
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.propose import pareto
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import Link, StageTimes, draw
from studies.planning.published.fasop import Fasop, FasopRun
from studies.planning.published.files import read_csv

_SPACE = SearchOptions(
    tp=(1, 2, 4),
    recompute=("none",),
    distributed_optimizer=(False,),
    sequence_parallel=(False,),
    all_nodes=True,
    schedules=("1f1b", "interleaved"),
)
"""Options of FASOP's search, to which the interleaved schedule is added."""


def neutral_s(run: FasopRun, plan: Plan) -> float:
    """Simulates ``plan`` under this project's schedules, and returns the step time in seconds."""
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    begin, forward, backward = 0, [], []
    held = [0.0] * plan.pp
    for stage, count in enumerate(plan.partition):
        rank = placement.locate(stage)[0]
        place = plan.places[rank]
        tables = [
            layer_table(run, run.cluster.nodes[one.node], tp=one.tp, micro_batch=place.micro_batch)
            for one in place.replicas
        ]
        part = slice(begin, begin + count)
        forward.append(max(float(table.forward_s[part].sum()) for table in tables))
        backward.append(max(float(table.backward_s[part].sum()) for table in tables))
        held[rank] += float(tables[0].parameters[part].sum())
        begin += count
    result = simulate(
        placement,
        plan.num_microbatches,
        catalog.make_policies(plan.schedule, placement, plan.num_microbatches),
        draw(
            placement,
            plan.num_microbatches,
            StageTimes(forward_s=tuple(forward), backward_s=tuple(backward)),
            links=_links(run, plan),
        ),
        compiled=True,
    )
    ends = [
        float(result.ends_ps[rank][-1]) / 1e12 + reduce_s(plan.places, rank, run, held[rank])
        for rank in range(plan.pp)
    ]
    return max(ends) + embedding_s(plan.places, run, plan.tp)


def _links(run: FasopRun, plan: Plan) -> dict[tuple[int, int], Link]:
    """Returns the links between adjacent ranks, where the last rank is adjacent to the first."""
    size = run.model.layer(1).output_elements * run.model.precision.element_bytes
    links = {}
    for one in range(plan.pp):
        other = (one + 1) % plan.pp
        for pair in ((one, other), (other, one)):
            if pair[0] != pair[1]:
                latency, busy = boundary_s(plan.places[pair[0]], plan.places[pair[1]], run, size)
                links[pair] = Link(latency_s=latency, occupancy_s=busy)
    return links


def rows(folder: Path) -> list[Row]:
    """Returns the rows of the two comparisons with FASOP.

    Args:
        folder: Folder with FASOP's data set.
    """
    data = Fasop(folder)
    return [*neutral_rows(data), *_front(data, folder)]


def neutral_rows(data: Fasop) -> list[Row]:
    """Compares the best plans of both planners in the same simulation, for FASOP's six cases."""
    found, gains, slowest = [], [], 0.0
    for name in data.runs:
        run = data.run(name)
        # The first search loads compiled code, so run it before the measured search.
        run.searcher(_SPACE).search()
        began = time.process_time()
        ours = run.searcher(_SPACE).search().plans[0].plan
        taken = time.process_time() - began
        theirs = next(one for one in run.plans if not one.out_of_memory)
        mine, other = neutral_s(run, ours), neutral_s(run, run.plan(theirs))
        gains.append(1 - mine / other)
        slowest = max(slowest, taken)
        note = f"FASOP's {other:.4f} s, {taken:.2f} s CPU, {ours.schedule} x {ours.chunks}"
        found.append(
            Row(what=f"{name}: step of our best plan", value=mine, unit="s", goal=other, note=note)
        )
    mean = sum(gains) / len(gains)
    found.append(Row(what="six cases: less time on average", value=mean, goal=0.02, least=True))
    found.append(
        Row(what="six cases: most CPU time of a search", value=slowest, unit="s", goal=1.0)
    )
    return found


def _front(data: Fasop, folder: Path) -> list[Row]:
    run = data.run("gpt2XL-het-pareto", {"A": 8, "B": 8})
    options = SearchOptions(
        tp=(1, 2, 4),
        recompute=("none",),
        distributed_optimizer=(False,),
        sequence_parallel=(False,),
        most_leaves=200,
    )
    began = time.process_time()
    searcher = run.searcher(options)
    front, slack = pareto(searcher)
    taken = time.process_time() - began
    theirs = {row["run"]: row for row in read_csv(folder / "search_cost.csv")}[run.name]
    note = f"{len(front)} points, slack {slack:.1%}, FASOP's {theirs['cpu_user_s']} s"
    return [
        Row(what="front of 80 clusters: CPU time", value=taken, unit="s", goal=20.0, note=note),
        Row(
            what="front of 80 clusters: choices and orders of nodes",
            value=searcher.placements,
            goal=float(theirs["plans_evaluated"]),
            least=True,
        ),
    ]
