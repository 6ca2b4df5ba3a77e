"""Tests plans that cut sequences into slices: time, memory, and models that cannot be sliced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.plan_file import plan_flags, plan_variables, world_size_of
from megatron.adaptive.config.sequence_slices import cut_points, slice_ends
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import StageSums, predict, simulated
from megatron.adaptive.planner.explain_plan import why_not
from megatron.adaptive.planner.layer_costs import OURS, in_flight, layer_table
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan, place_ranks, plan_document
from megatron.adaptive.planner.plan_text import table
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import Proposal, Request, complete_profile, propose
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.planner.trainer_rules import usual_slices

ARGUMENTS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 32000 --position-embedding-type rope "
    "--swiglu --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2"
TRIED = SearchOptions(
    tp=(1,), dp=(1,), pp=(4,), recompute=("none",), schedules=("1f1b", "zb-v", "adaptive"),
    micro_batch=(1,), context_ranks=(1,), distributed_optimizer=(False,),
)  # fmt: skip


def inputs_with(memory: float = 80e9, more: str = "", attention: str = "kernel") -> PlanInputs:
    """Returns inputs for a small model with long sequences, on one node with 4 GPUs.

    ``memory`` is the memory of a GPU in bytes. ``more`` contains other arguments of the model.
    """
    model = arguments_model(f"{ARGUMENTS} {more}".split(), "long", "bf16", attention=attention)
    node = NodeType(
        name="n", gpu="a100-80", gpus=4, memory_bytes=memory, intra=LinkSpeed(bytes_per_s=230e9)
    )
    cluster = Cluster(groups=(NodePool(type=node, count=1),), network=LinkSpeed(bytes_per_s=5e10))
    return PlanInputs(model, cluster, complete_profile(None, model, cluster))


@cache
def proposed(memory: float, batch: int, slices: tuple[int, ...]) -> Proposal:
    options = replace(TRIED, slices=slices)
    return propose(inputs_with(memory), Request(global_batch=batch, options=options))


def plan_with(slices: int, cap: float | None = None, batch: int = 4) -> Plan:
    inputs = inputs_with()
    return Plan(
        tp=1, dp=1, pp=4, micro_batch=1, global_batch=batch, partition=(3, 2, 2, 3),
        places=place_ranks(inputs.cluster, [0], tp=1, dp=1, pp=4, micro_batch=1),
        schedule="adaptive", slices=slices, cap=cap,
    )  # fmt: skip


def test_slices_are_chosen_if_there_are_few_sequences() -> None:
    whole, cut = (proposed(80e9, 2, slices).rows[0] for slices in ((1,), (1, 2, 4, 8)))
    assert whole.plan.slices == 1
    assert cut.plan.slices > 1
    # There are half as many sequences as ranks, so ranks are often idle unless sequences are
    # sliced.
    assert cut.prediction.seconds < 0.85 * whole.prediction.seconds
    assert sum(cut.prediction.parts.values()) == pytest.approx(cut.prediction.seconds)
    inputs = inputs_with()
    assert predict(cut.plan, inputs).seconds == cut.prediction.seconds
    assert " slices " in table([cut], inputs)
    assert " slices " not in table([whole], inputs)


def test_whole_sequences_stay_the_best_if_there_are_many() -> None:
    whole, free = (proposed(80e9, 64, slices) for slices in ((1,), (1, 4)))
    assert free.rows[0] == whole.rows[0]


def test_slices_fit_into_memory_that_whole_sequences_exceed() -> None:
    with pytest.raises(ConfigError, match="long does not fit on this cluster"):
        proposed(7.5e9, 4, (1,))
    row = proposed(7.5e9, 4, (1, 8)).rows[0]
    assert row.plan.slices == 8
    assert row.prediction.fits
    # The default cap on activations needs more memory than there is. Therefore, the plan must have
    # a lower cap.
    assert row.plan.cap is not None
    assert not predict(replace(row.plan, cap=None), inputs_with(7.5e9)).fits


def test_memory_is_that_of_the_slices_in_flight() -> None:
    inputs = inputs_with()
    whole, cut = (StageSums.of(plan_with(n, 1.0), inputs, OURS).memory for n in (1, 8))
    share = inputs.model.attention_share
    longer = in_flight("adaptive", 4, 1, 4, 8, 1.0, share)[0] / 8
    assert 1.1 < longer < 1.3
    for before, after in zip(whole, cut, strict=True):
        # If the cap is one sequence, a rank stores as many slices as a sequence has. The estimate
        # assumes the longest slices of two sequences, and includes keys and values.
        assert 1 < after.activation_bytes / before.activation_bytes / longer < 1.2
        assert after.parameter_bytes == before.parameter_bytes
    assert in_flight("adaptive", 4, 1, 8, 8, 1.5) == (12.0,) * 4
    assert in_flight("adaptive", 4, 1, 8, 8)[0] < 8 * in_flight("adaptive", 4, 1, 8)[0]
    assert in_flight("1f1b", 4, 1, 8, 4) == (7.0, 6.0, 5.0, 4.0)
    # The simulated step must not need more memory than was estimated.
    plan = plan_with(8, batch=8)
    peak = max(simulated(plan, StageSums.of(plan, inputs, OURS)).peak_units)
    assert peak * 8 <= in_flight("adaptive", 4, 1, 8, 8)[0] + 1e-6


def test_the_workspace_is_that_of_the_longest_slice() -> None:
    """Checks that memory is planned for the logits of the first slice, which is the longest."""
    inputs = inputs_with()
    share = inputs.model.attention_share
    plan = plan_with(8)
    table = layer_table(inputs, inputs.cluster.groups[0].type, tp=1, micro_batch=1, settings=plan)
    first = slice_ends(8192, 8, 1, share)[0]
    assert first > 1.2 * 8192 / 8
    # A logit takes 4 bytes, and its gradient takes 2 bytes.
    assert table.workspace_bytes[-1] == pytest.approx(first * 32000 * 6)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_activations_are_those_of_the_longest_slices_in_flight(share: float) -> None:
    slices, microbatches, ranks = 4, 3, 4
    points = cut_points(slices, share)
    lengths = [end - start for start, end in pairwise(points)]
    orders = seq_1f1b(ranks, microbatches, slices)
    counted = in_flight("1f1b", ranks, 1, microbatches, slices, attention_share=share)
    for order, most in zip(orders, counted, strict=True):
        steps = (lengths[index] * slices * sign for index, sign in order)
        assert max(accumulate(steps)) == pytest.approx(most)


def seq_1f1b(ranks: int, microbatches: int, slices: int) -> list[list[tuple[int, int]]]:
    """Returns the 1F1B order of slices on each rank, as pairs of slice index and direction.

    The direction is 1 for forward passes and -1 for backward passes.
    """
    forward = [index for _ in range(microbatches) for index in range(slices)]
    backward = [index for _ in range(microbatches) for index in reversed(range(slices))]
    orders = []
    for rank in range(ranks):
        first = ranks - rank - 1 + slices
        order = [(index, 1) for index in forward[:first]]
        for number, index in enumerate(backward):
            order.append((index, -1))
            order += [(later, 1) for later in forward[first + number : first + number + 1]]
        orders.append(order)
    return orders


def test_a_slice_costs_more_than_its_part_of_a_sequence() -> None:
    inputs = inputs_with()
    sums = {n: StageSums.of(plan_with(n), inputs, OURS) for n in (1, 2, 16)}
    work = {n: float(costs.durations_s.sum()) * n for n, costs in sums.items()}
    assert work[1] < work[2] < work[16] < 2 * work[1]
    messages = [costs.message_bytes.sum() * n for n, costs in sums.items()]
    assert messages[1:] == [messages[0]] * 2
    assert 0 < sums[1].attention_share < 1


def test_the_trainer_takes_such_a_plan() -> None:
    row = proposed(7.5e9, 4, (1, 8)).rows[0]
    inputs = inputs_with()
    document = plan_document(row.plan, inputs, row.prediction)
    flags = plan_flags(document, "plan")
    run = [*inputs.model.arguments, *"--train-iters 1 --lr 1e-4 --mock-data".split()]
    config = parse(
        [*run, *flags, "--transformer-impl", "local"],
        world_size=world_size_of(document) or 0,
        last_wins=True,
    )
    assert config.schedule.sequence_slices == 8
    assert config.schedule.activation_cap == row.plan.cap
    assert plan_variables(document, "plan")["SEQUENCE_SLICES"] == "8"
    whole = plan_document(plan_with(1), inputs, predict(plan_with(1), inputs))
    assert not {"sequence_slices", "activation_cap"} & set(whole)


def test_neighbours_have_other_numbers_of_slices() -> None:
    inputs = inputs_with()
    row = proposed(80e9, 2, (1, 2, 4, 8)).rows[0]
    options = replace(TRIED, slices=(1, 2, 4, 8), schedules=("adaptive",))
    lines = why_not(inputs, Request(global_batch=2, options=options), row)
    number = row.plan.slices
    assert any(f"slices {2 * number}: +" in line for line in lines)
    assert any(f"slices {number // 2}: +" in line for line in lines)


def test_a_neighbour_that_is_refused_names_its_flag_once() -> None:
    inputs = inputs_with()
    row = proposed(80e9, 2, (1,)).rows[0]
    options = replace(TRIED, tp=(), dp=(), schedules=())
    lines = why_not(inputs, Request(global_batch=2, options=options), row)
    refused = [line for line in lines if "GPUs are needed" in line]
    assert "  pp 8: at least 8 GPUs are needed, but the cluster has 4; use smaller sizes" in refused
    assert not any("--pp 8: " in line for line in refused)


def test_models_whose_sequences_cannot_be_cut_stay_whole() -> None:
    assert usual_slices(inputs_with().model) == (1, 2, 4, 8)
    assert usual_slices(inputs_with(attention="fused").model) == (1,)
    assert usual_slices(inputs_with(more=EXPERTS).model) == (1,)
    balanced = f"{EXPERTS} --moe-router-load-balancing-type none"
    assert usual_slices(inputs_with(more=balanced).model) == (1, 2, 4, 8)
    assert usual_slices(inputs_with(more="--mtp-num-layers 1").model) == (1,)
    short = replace(inputs_with().model, sequence=1024)
    assert usual_slices(short) == (1,)


@pytest.mark.parametrize(
    ("more", "slices", "schedules", "text"),
    [
        (EXPERTS, (2,), ("adaptive",), "--sequence-slices 2 cannot be used for long: .*balancing"),
        (
            "",
            (1, 1024),
            ("adaptive",),
            "--sequence-slices 1024: .*8192 tokens.* use 512 slices or fewer",
        ),
        ("", (2,), ("1f1b",), "--sequence-slices 2 requires a run-time rule"),
        ("", (2,), ("1f1b", "adaptive"), "--sequence-slices 2 requires several stages"),
        ("", (2,), ("adaptive",), "--sequence-slices 2 requires several stages"),
    ],
)
def test_bad_numbers_of_slices(
    more: str, slices: tuple[int, ...], schedules: tuple[str, ...], text: str
) -> None:
    # Plans with a single stage cannot use slices.
    options = replace(TRIED, slices=slices, schedules=schedules, pp=(1,), tp=(4,))
    with pytest.raises(ConfigError, match=text):
        propose(inputs_with(more=more), Request(global_batch=2, options=options))
