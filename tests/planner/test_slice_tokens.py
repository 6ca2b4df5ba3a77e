"""Tests plans with slices of a fixed number of tokens: document rows, time, memory and errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.plan_file import plan_flags, plan_variables, world_size_of
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.chunk_partition import with_row_cap
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import StageSums, predict, row_pipeline, simulated
from megatron.adaptive.planner.documents import RowSettings, RunDocuments, make_documents
from megatron.adaptive.planner.explain_plan import (
    explain,
    packed_advice,
    packed_predictions,
    why_not,
)
from megatron.adaptive.planner.layer_costs import OURS
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan, PlanRow, place_ranks, plan_document
from megatron.adaptive.planner.plan_text import table
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import (
    Proposal,
    Request,
    complete_profile,
    propose,
    write_page,
)
from megatron.adaptive.planner.row_times import held_slices
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.planner.trainer_rules import tokens_to_try
from megatron.adaptive.schedule.choose_slice_tokens import Timed, choose_tokens
from megatron.adaptive.schedule.document_rows import costliest_replica

from .test_slices import EXPERTS, TRIED

BATCH = 32
LONGEST = 32768
LENGTHS = (32768, 16384, 8192, 4096, 2048)
OPTIONS = replace(TRIED, schedules=("1f1b", "zb-v", "adaptive"), slice_tokens=LENGTHS)
ARGUMENTS = (
    f"--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length {LONGEST} "
    f"--max-position-embeddings {LONGEST} --vocab-size 2000 --position-embedding-type rope "
    "--swiglu --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights"
)


def long_tail() -> list[int]:
    """Returns document lengths with a long tail. The longest is about 32 times the median."""
    drawn = np.random.default_rng(5).lognormal(math.log(LONGEST / 32), 1.5, 4096)
    return np.clip(drawn, 1, LONGEST).astype(int).tolist()


def inputs_with(memory: float = 80e9, more: str = "", attention: str = "kernel") -> PlanInputs:
    """Returns inputs for a model with long sequences, on one node with 4 GPUs.

    ``memory`` is the memory of a GPU in bytes. ``more`` contains other arguments of the model.
    """
    model = arguments_model(f"{ARGUMENTS} {more}".split(), "long", "bf16", attention=attention)
    node = NodeType(
        name="n", gpu="a100-80", gpus=4, memory_bytes=memory, intra=LinkSpeed(bytes_per_s=230e9)
    )
    cluster = Cluster(groups=(NodePool(type=node, count=1),), network=LinkSpeed(bytes_per_s=5e10))
    return PlanInputs(model, cluster, complete_profile(None, model, cluster))


def plan_of(slices: int = 1, batch: int = BATCH, **changes: Any) -> Plan:
    plan = Plan(
        tp=1, dp=1, pp=4, micro_batch=1, global_batch=batch, partition=(5, 4, 4, 5),
        places=place_ranks(inputs_with().cluster, [0], tp=1, dp=1, pp=4, micro_batch=1),
        schedule="adaptive", slices=slices,
    )  # fmt: skip
    return replace(plan, **changes)


def inputs_of(
    lengths: list[int] | None = None, *, memory: float = 80e9, batch: int = BATCH, **more: Any
) -> PlanInputs:
    """Returns the inputs of :func:`inputs_with`, and adds documents of ``lengths`` tokens."""
    inputs = inputs_with(memory, **more)
    documents = make_documents(inputs.model, lengths or long_tail(), batch, longest=LONGEST)
    return replace(inputs, documents=documents)


@cache
def inputs_80() -> PlanInputs:
    return inputs_of()


@cache
def proposed(memory: float = 80e9) -> Proposal:
    inputs = inputs_80()
    cluster = inputs_with(memory).cluster
    request = Request(global_batch=BATCH, options=OPTIONS)
    return propose(replace(inputs, cluster=cluster), request)


def tokens_plan(tokens: int, cap: float | None = None, **changes: Any) -> Plan:
    return plan_of(slice_tokens=tokens, cap=cap, **changes)


IN_V: dict[str, Any] = {"chunks": 2, "partition": (3, 2, 2, 2, 2, 2, 2, 3)}
"""Settings of a plan in which each rank has two stages that are placed in a V."""


def documents_of(inputs: PlanInputs) -> RunDocuments:
    assert inputs.documents is not None
    return inputs.documents


def test_slices_of_tokens_beat_slices_and_whole_rows_if_lengths_have_a_long_tail() -> None:
    inputs = inputs_of(memory=24e9)
    row = proposed(24e9).rows[0]
    assert row.plan.slice_tokens in LENGTHS
    assert row.plan.schedule == "adaptive"
    assert row.prediction.fits
    assert sum(row.prediction.parts.values()) == pytest.approx(row.prediction.seconds)
    # For comparison, the same documents are packed into rows as long as the longest document.
    for slices, prediction in packed_predictions(row.plan, inputs).items():
        assert prediction.fits
        worse = {1: 2.0, 4: 1.05}.get(slices, 1.0)
        assert prediction.seconds > worse * row.prediction.seconds
        tokens = prediction.seconds * prediction.tokens_per_s
        assert tokens == pytest.approx(documents_of(inputs).mean_tokens)
    assert packed_advice(row, inputs) == ""
    # For another comparison, sequences have equal lengths. They need more attention, so compare the
    # number of tokens per second.
    sequences = round(documents_of(inputs).mean_tokens / LONGEST)
    options = replace(OPTIONS, slice_tokens=(), slices=(2, 4, 8, 16))
    cut = propose(inputs_with(24e9), Request(global_batch=sequences, options=options)).rows[0]
    assert cut.plan.slices > 1
    assert row.prediction.tokens_per_s > 1.5 * cut.prediction.tokens_per_s
    request = Request(global_batch=sequences, options=replace(options, slices=(1,)))
    with pytest.raises(ConfigError, match="does not fit"):
        propose(inputs_with(24e9), request)


def test_a_hint_names_packed_rows_that_are_faster() -> None:
    row = proposed().rows[0]
    fastest = min(
        prediction.seconds
        for prediction in packed_predictions(row.plan, inputs_80()).values()
        if prediction.fits
    )
    assert fastest < 0.98 * row.prediction.seconds
    pattern = rf"rows of up to {LONGEST} tokens, in 4 slices would take [\d.]+% less time .*; use "
    pattern += rf"--pack-to {LONGEST} --sequence-slices 4 instead of --slice-tokens"
    assert re.fullmatch(pattern, packed_advice(row, inputs_80()))


def test_the_best_length_is_found_among_all() -> None:
    inputs = inputs_80()
    best = proposed().rows[0]
    for tokens in LENGTHS:
        options = replace(OPTIONS, slice_tokens=(tokens,))
        alone = propose(inputs, Request(global_batch=BATCH, options=options)).rows[0]
        assert alone.plan.slice_tokens == tokens
        assert best.prediction.seconds <= alone.prediction.seconds * 1.01


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_prediction_is_the_simulation_that_the_trainer_chooses_by(
    tokens: int, chunks: int
) -> None:
    inputs = inputs_80()
    plan = tokens_plan(tokens, **({} if chunks == 1 else IN_V))
    stages = StageSums.of(plan, inputs, OURS)
    pipeline = row_pipeline(plan, stages)
    assert pipeline is not None
    documents = documents_of(inputs)
    # Compute the times that would be measured in a run with slices of two different lengths.
    lanes = {}
    for lane, parts in pipeline.costs.parts.items():
        works = [
            cut.work(index)
            for length in (tokens, 2 * tokens)
            for step in documents.cuts(plan.rows._replace(tokens=length))
            for cut in step
            for index in range(len(cut.ends))
        ]
        lanes[lane] = [
            Timed(n, pairs, parts.fixed_s + n * parts.token_s + pairs * parts.pair_s)
            for n, pairs in works
        ]
    room = 1.01 * held_slices(plan, pipeline.costs) * tokens
    chosen = choose_tokens(
        [tokens],
        lanes,
        lambda length: documents.cuts(plan.rows._replace(tokens=length)),
        pipeline.setting(room),
        math.inf,
    )
    assert chosen.candidate is not None
    seconds = [step.seconds(chosen.candidate, 1 << 40) for step in pipeline.steps()]
    step_ms = chosen.text.split("simulated step ")[1].split()[0].replace(",", "")
    step_s = float(step_ms) / 1e3
    assert np.mean(seconds) == pytest.approx(step_s, rel=2e-3)
    # The planner must choose the same limit on activations, or one that is as fast within the same
    # memory.
    cap = pipeline.best_cap(room)
    limited = replace(pipeline, plan=replace(plan, cap=cap))
    found_s = np.mean([result.makespan_s for result in limited.simulated()])
    assert found_s <= step_s * 1.01


def test_rows_are_those_of_the_trainer() -> None:
    documents = documents_of(inputs_80())
    model = inputs_80().model
    flags = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --variable-seq-lengths"
    flags += f" --slice-tokens 1024 --pipeline-model-parallel-size 4 --global-batch-size {BATCH}"
    config = parse(
        [*model.arguments, *flags.split(), "--transformer-impl", "local"],
        world_size=8,
        last_wins=True,
    )
    for lengths, cuts in zip(
        documents.steps, documents.cuts(RowSettings(1024, dp=2, pp=4)), strict=True
    ):
        assert cuts == costliest_replica(config, lengths)
    assert documents.longest == LONGEST
    assert documents.most_slices(1024) == 32
    assert documents.mean_items(1024) >= documents.mean_tokens / 1024


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("tokens", "cap"), [(1024, None), (2048, 1.0), (4096, 3.0), (32768, None)])
def test_memory_is_that_of_the_memory_rule(tokens: int, cap: float | None, chunks: int) -> None:
    inputs = inputs_80()
    plan = tokens_plan(tokens, cap, **({} if chunks == 1 else IN_V))
    stages = StageSums.of(plan, inputs, OURS)
    pipeline = row_pipeline(plan, stages)
    assert pipeline is not None
    held = held_slices(plan, pipeline.costs)
    limits = []
    for step, result in zip(pipeline.steps(), pipeline.simulated(), strict=True):
        limit = step.cap_of(pipeline.placement, cap) * step.row_tokens / tokens
        peak = max(result.peak_units) * step.row_tokens / tokens
        assert peak <= limit * (1 + 1e-6) <= held * (1 + 2e-6)
        limits.append(limit)
    # Each rank must have memory for the longest document, even if no simulated step contains it.
    items = max(sum(len(cut.ends) for cut in step) for step in pipeline.costs.cuts)
    assert held == pytest.approx(max(LONGEST / tokens, min(max(limits), items)))
    kept = StageSums.of(replace(plan, cap=1e6), inputs, OURS)
    assert kept.rows is not None
    most = held_slices(replace(plan, cap=1e6), kept.rows)
    for low, high in zip(stages.memory, kept.memory, strict=True):
        assert low.activation_bytes / held == pytest.approx(high.activation_bytes / most)


def test_a_token_keeps_as_much_memory_in_slices_of_any_length() -> None:
    inputs = inputs_80()
    sums = {n: StageSums.of(tokens_plan(n, 1.0), inputs, OURS) for n in (4096, LONGEST)}
    per_token = {}
    for tokens, stages in sums.items():
        assert stages.rows is not None
        held = held_slices(tokens_plan(tokens, 1.0), stages.rows)
        per_token[tokens] = stages.memory[1].activation_bytes / held / tokens
    # Slices need memory not only for activations, but also for the keys and values of their
    # document.
    assert 1 < per_token[4096] / per_token[LONGEST] < 1.2


def test_costs_have_a_part_per_token_and_per_pair() -> None:
    inputs = inputs_80()
    stages = StageSums.of(tokens_plan(1024), inputs, OURS)
    rows = stages.rows
    assert rows is not None
    for parts in rows.parts.values():
        assert min(parts) >= 0
    # All slices of a sequence together must take as long as the uncut sequence.
    whole = StageSums.of(plan_of(), inputs_with(), OURS)
    pairs = LONGEST**2
    for row, kind in enumerate(("F", "B", "W")):
        for stage in range(4):
            fixed, token, pair = next(
                parts for (k, s), parts in rows.parts.items() if (k, s) == (kind, stage)
            )
            seconds = fixed + LONGEST * token + pairs * pair
            assert seconds == pytest.approx(float(whole.durations_s[row, stage]), rel=1e-6)


def test_short_documents_have_less_attention() -> None:
    short = replace(inputs_80(), documents=documents_of(inputs_of([64] * 100)))
    long = replace(inputs_80(), documents=documents_of(inputs_of([LONGEST] * 100)))
    seconds = [
        float(StageSums.of(tokens_plan(1024), inputs, OURS).durations_s[0].sum())
        for inputs in (short, long)
    ]
    assert seconds[0] < 0.9 * seconds[1]
    assert short.step_flops(BATCH) / short.step_tokens(BATCH) < (
        long.step_flops(BATCH) / long.step_tokens(BATCH)
    )
    assert long.step_flops(BATCH) == pytest.approx(inputs_with().step_flops(BATCH))


def test_less_memory_gives_a_lower_limit_that_fits() -> None:
    plan = tokens_plan(8192)
    needed = [
        max(memory.total_bytes for memory in StageSums.of(changed, inputs_80(), OURS).memory)
        for changed in (replace(plan, cap=1.0), plan)
    ]
    # Even two thirds of the default limit need more memory than there is. Therefore, the planner
    # must choose the largest limit that fits.
    memory = needed[0] + 0.25 * (needed[1] - needed[0])
    tight = replace(inputs_80(), cluster=inputs_with(memory).cluster)
    assert not predict(plan, tight).fits
    limited = with_row_cap(plan, tight)
    assert limited.cap is not None
    assert limited.cap >= 1
    assert predict(limited, tight).fits
    # A slightly larger limit must not fit.
    assert not predict(replace(limited, cap=limited.cap + 0.1), tight).fits
    assert predict(limited, tight).seconds >= predict(plan, tight).seconds * 0.99
    # The best plan must not be slower if there is more memory.
    seconds = [proposed(memory).rows[0].prediction.seconds for memory in (18e9, 24e9, 80e9)]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trainer_takes_such_a_plan() -> None:
    inputs = inputs_80()
    row = proposed(18e9).rows[0]
    document = plan_document(row.plan, inputs, row.prediction)
    assert document["slice_tokens"] == row.plan.slice_tokens
    assert "sequence_slices" not in document
    flags = plan_flags(document, "plan")
    run = [*inputs.model.arguments, *"--train-iters 1 --lr 1e-4 --mock-data".split()]
    config = parse(
        [*run, *flags, "--transformer-impl", "local"],
        world_size=world_size_of(document) or 0,
        last_wins=True,
    )
    assert config.slice_tokens == row.plan.slice_tokens
    assert config.data.variable_seq_lengths
    assert config.schedule.activation_cap == row.plan.cap
    assert plan_variables(document, "plan")["SLICE_TOKENS"] == str(row.plan.slice_tokens)


def test_texts_name_the_length_of_slices(tmp_path: Any) -> None:
    inputs = inputs_80()
    row = proposed().rows[0]
    text = table([row], inputs)
    assert f"{row.plan.slice_tokens} tokens" in text
    assert f"{BATCH} docs" in text
    assert "held back by" in explain(row, inputs)
    request = Request(global_batch=BATCH, options=OPTIONS)
    lines = "\n".join(why_not(inputs, request, row))
    assert "tokens of a slice" in lines
    assert "rows of up to 32768 tokens, whole: +" in lines
    assert "rows of up to 32768 tokens, in 8 slices: " in lines
    page = tmp_path / "page.html"
    write_page([row], inputs, page)
    assert "in slices of" in page.read_text()
    assert len(simulated(row.plan, StageSums.of(row.plan, inputs, OURS)).orders) == row.plan.pp


def test_lengths_to_try_are_those_of_the_trainer_but_long_enough() -> None:
    assert tokens_to_try(documents_of(inputs_80()), 1) == (32768, 16384, 8192, 4096, 2048, 1024)
    short = replace(documents_of(inputs_80()), longest=512)
    assert tokens_to_try(short, 1) == (512, 256, 128, 64, 32, 16)
    assert tokens_to_try(replace(short, longest=500), 8)[0] == 504


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slice_tokens": (8,)}, "--slice-tokens 8: a slice must have at least 16 tokens"),
        ({"slice_tokens": (33000,)}, "33000 must not exceed the longest document, which has 32768"),
        ({"pp": (1,), "tp": (4,)}, "conflicts with --pp 1: .* only one stage"),
        ({"context_ranks": (2,)}, "conflicts with --context-parallel-size 2"),
        ({"micro_batch": (2, 4)}, "conflicts with --micro-batch-sizes 2,4: each microbatch is"),
        ({"unequal": True}, "conflicts with --unequal.*; remove one"),
        ({"schedules": ("1f1b", "zb-v")}, "got --schedules 1f1b,zb-v; add adaptive"),
        ({"schedules": ("hinted",)}, "got --schedules hinted"),
        (
            {"slice_tokens": (1022,), "tp": (4,), "pp": (), "sequence_parallel": (True,)},
            "--slice-tokens 1022 must be a multiple of --tp 4",
        ),
        ({"dp": (2,), "pp": (4,), "tp": (1,)}, "at least 8 GPUs are needed"),
        ({"dp": (4,), "pp": (), "tp": (1,)}, "slices require at least two stages"),
    ],
)
def test_bad_requests_are_named_in_one_line(changes: dict[str, Any], text: str) -> None:
    options: SearchOptions = replace(OPTIONS, **changes)
    with pytest.raises(ConfigError, match=text) as caught:
        propose(inputs_80(), Request(global_batch=BATCH, options=options))
    assert "\n" not in str(caught.value)


def test_steps_of_very_many_documents_are_refused_and_large_ones_drawn_once() -> None:
    options = replace(OPTIONS, slice_tokens=(4096,))
    many = inputs_of([100, 3000], batch=9000)
    with pytest.raises(ConfigError, match="about 9,000 documents or slices, .* at most 8,192; use"):
        propose(many, Request(global_batch=9000, options=options))
    assert [len(documents_of(inputs_of(batch=n)).steps) for n in (200, 9000)] == [2, 1]
    assert tokens_to_try(replace(documents_of(many), steps=((LONGEST,) * 9000,)), 1) == (32768,)


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_drawn_documents_are_as_long_as_all_documents(batch: int) -> None:
    """Checks that sums of a few random documents are not biased compared with all documents."""
    lengths = np.array(long_tail())
    documents = documents_of(inputs_of(batch=batch))
    assert len(documents.steps) <= 64
    assert all(len(step) == batch for step in documents.steps)
    assert documents.mean_tokens / batch == pytest.approx(lengths.mean(), rel=0.02)
    squares = np.square(lengths.astype(float)).mean()
    assert documents.mean_squares / batch == pytest.approx(squares, rel=0.05)


def test_without_lengths_of_documents_the_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="--slice-tokens 32768,.* requires the lengths of the d"):
        propose(inputs_with(), Request(global_batch=BATCH, options=OPTIONS))


def test_documents_that_fit_nowhere_are_named() -> None:
    inputs = replace(inputs_80(), cluster=inputs_with(6e9).cluster)
    with pytest.raises(
        ConfigError, match=r"fits into the memory .* of 32768 tokens, .* but has only .* GB; use"
    ):
        propose(inputs, Request(global_batch=BATCH, options=OPTIONS))


@pytest.mark.parametrize(
    ("more", "attention", "text"),
    [
        ("", "fused", "cannot be used for long: .*--transformer-impl"),
        (EXPERTS, "kernel", "cannot be used for long: .*balancing"),
        ("--mtp-num-layers 1", "kernel", "cannot be used for long: .*--mtp-num-layers"),
    ],
)
def test_models_whose_documents_cannot_be_cut_are_refused(
    more: str, attention: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        inputs_of(more=more, attention=attention)


@pytest.mark.parametrize("layers", [1, 5])
def test_models_with_an_odd_number_of_layers_are_planned(layers: int) -> None:
    inputs = inputs_of(more=f"--num-layers {layers}")
    assert documents_of(inputs).config.model.num_layers == layers


def test_a_model_without_the_trainers_arguments_is_refused() -> None:
    model = replace(inputs_with().model, arguments=())
    with pytest.raises(ConfigError, match="is not described by the trainer's settings"):
        make_documents(model, [100], 4)


def test_experts_without_balancing_losses_have_equal_rows() -> None:
    more = f"{EXPERTS} --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    inputs = inputs_of(more=more)
    plan = tokens_plan(1024, sequence_parallel=False)
    for step in documents_of(inputs).cuts(plan.rows):
        assert len({len(cut.ends) for cut in step}) == 1
    # Each row gets the same number of slices. This number is at most a quarter larger than what the
    # longest document needs.
    documents = documents_of(inputs)
    assert (documents.needed_slices(1024), documents.most_slices(1024)) == (32, 40)
    rows = StageSums.of(plan, inputs, OURS).rows
    assert rows is not None
    assert held_slices(replace(plan, cap=1.0), rows) >= 40
    assert PlanRow(plan=plan, prediction=predict(plan, inputs)).prediction.seconds > 0
