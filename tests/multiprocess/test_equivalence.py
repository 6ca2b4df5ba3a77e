"""Tests that all parallel sizes and schedules give the same results as a single process.

The reference is megatron-core's own training loop in a single process. Each case trains the same
model on the same samples. The loss, the gradient norm and the gradient norm of each layer must
agree in every iteration. The validation loss must agree too.

The difference that rounding causes depends on the processor, so the tests measure this difference.
One process trains each model again, with a different order of summation in all matrix
multiplications. A case may differ from the reference by a few times this difference. Errors that
are added on purpose to a process must exceed this limit, although they are far smaller than errors
that real faults cause.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.stage_placement import Placement

from .compared_numbers import (
    Outcome,
    losses_of,
    norms_of,
    require_close_numbers,
    require_same_numbers,
    require_same_steps,
    steps_of,
    tolerances,
    too_far,
)
from .equivalence_cases import (
    BY_KERNELS,
    COMPARED,
    DEALT,
    DIFFERENT_LENGTHS,
    FREE,
    HALF,
    MODERN_EXPERTS,
    OPTIONS,
    ORDERS,
    PLACED,
    PLAIN,
    RESUMED,
    SAME_LOSSES,
    SAME_SUMS,
    SHAPES,
    SHORT_STEPS,
    SLICED,
    SLICED_ANEW,
    SPREAD_ANEW,
    STEPS,
    TODAY,
    TRANSPORTED,
    WITH_EXPERTS,
    Case,
    every_cut,
    every_placement,
    with_other_sums,
)
from .free_orders import free_order, write_files
from .launch import CaseRuns
from .variants import MISSING_SHARE, PLANTED

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(1840)]

# The limit applies to all cases of a world size together. Two idle processors need a tenth of this
# time.
LIMIT_S = 1800.0
REL = 1e-5


def each(cases: Iterable[Any], most: int | None = None) -> list[Any]:
    """Returns test parameters for ``cases``.

    The long suite runs all cases. The short suite only runs cases with at most two ranks. If
    ``most`` is an integer, it runs only the first ``most`` of these cases.
    """

    def ranks(value: Any) -> int:
        return value.world_size if isinstance(value, Case) else max(map(ranks, value))

    cases = list(cases)
    small = [case for case in cases if ranks(case) <= 2][:most]
    return [pytest.param(case, marks=[] if case in small else [pytest.mark.long]) for case in cases]


def cases_of(item: pytest.Item) -> list[Case]:
    """Returns the cases that the test ``item`` uses, including those to compare with."""
    arguments = getattr(item, "callspec", None)
    if arguments is None or item.path != Path(__file__):
        return []
    cases: list[Case] = []
    for value in arguments.params.values():
        cases += value if isinstance(value, tuple) else [value]
    references = [case.reference for case in cases]
    others = (other for reference in references for other in with_other_sums(reference))
    return [*cases, *references, *others, PLAIN]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Returns a function that takes a case and returns the results of all ranks.

    All selected cases with the same world size run in one job.
    """
    cases = [case for item in request.session.items for case in cases_of(item)]

    def of_size(size: int) -> list[dict[str, Any]]:
        return [case.to_json() for case in dict.fromkeys(cases) if case.world_size == size]

    def new_folder(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        # Some flags contain paths relative to this folder, so write the files here.
        write_files(folder)
        return folder

    runs = CaseRuns(of_size, new_folder, LIMIT_S)
    return lambda case: runs(case.world_size, str(case))


def test_all_shapes_are_there() -> None:
    # Each entry contains the sizes (TP, PP, chunks, DP) of a shape with up to four processes.
    shapes = {(case.tp, case.pp, case.chunks, case.dp) for case in SHAPES}
    assert shapes == {
        *((1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2)),
        *((1, 2, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (2, 2, 2, 1), (1, 2, 1, 2), (1, 2, 2, 2)),
        *((1, 4, 1, 1), (1, 4, 2, 1)),
    }
    assert len(SHAPES) == 3 * len(shapes)


@pytest.mark.parametrize(
    "case",
    [
        *each((*ORDERS, *TRANSPORTED, *SHAPES)),
        *(*each(OPTIONS, 5), *each(PLACED, 2), *each(DEALT, 1), *each(SLICED, 4)),
    ],
    ids=str,
)
def test_every_case_equals_one_process(case: Case, outcome: Outcome) -> None:
    require_same_numbers(case, outcome)


@pytest.mark.parametrize("case", each(DIFFERENT_LENGTHS, 2), ids=str)
def test_documents_of_any_length_equal_one_process(case: Case, outcome: Outcome) -> None:
    require_same_numbers(case, outcome)


@pytest.mark.parametrize("case", each(TODAY, 2), ids=str)
def test_models_of_today_equal_one_process(case: Case, outcome: Outcome) -> None:
    predicts = "--mtp-num-layers" in case.model
    require_same_numbers(case, outcome, "predicted loss" if predicts and case.cp == 1 else "")
    if predicts and case.cp > 1:
        # This loss gives all parts of a sequence the same weight, although their numbers of tokens
        # differ. So the losses are only approximately equal.
        (expected,) = outcome(case.reference)["further"]
        predicted = losses_of(case, outcome(case), "further")
        assert predicted == pytest.approx(expected[: len(predicted)], rel=0.02, abs=0)


@pytest.mark.parametrize(
    "planted",
    each(
        (
            dataclasses.replace(reference, until=1, variant=error)
            for reference in dict.fromkeys((PLAIN, *(case.reference for case in COMPARED)))
            for error in PLANTED
        ),
        len(PLANTED),
    ),
    ids=str,
)
def test_planted_errors_are_found(planted: Case, outcome: Outcome) -> None:
    limits = tolerances(planted.reference, outcome)
    expected = steps_of(planted.reference, outcome)
    # The added error must exceed the limits in the first step.
    assert too_far(steps_of(planted, outcome), expected, limits)
    # The limits must also be small enough to detect an error in the gradients of a single layer.
    assert all(
        values[0] < MISSING_SHARE / 2 for name, values in limits.items() if "norm of" in name
    )


@pytest.mark.parametrize("case", each(BY_KERNELS, 1), ids=str)
def test_kernels_of_attention_equal_scores_written_out(case: Case, outcome: Outcome) -> None:
    require_same_numbers(case, outcome)


@pytest.mark.long
@pytest.mark.parametrize("cases", [RESUMED], ids=["v-1f1b-v"])
def test_predicting_layers_go_on_from_a_checkpoint(
    cases: tuple[Case, ...], outcome: Outcome
) -> None:
    require_same_steps(cases, outcome, "predicted loss")


@pytest.mark.long
@pytest.mark.parametrize("cases", [SLICED_ANEW], ids=["4-3-1"])
def test_a_checkpoint_goes_on_with_another_number_of_slices(
    cases: tuple[Case, ...], outcome: Outcome
) -> None:
    require_same_steps(cases, outcome)


@pytest.mark.parametrize("case", each(WITH_EXPERTS, 2), ids=str)
def test_experts_equal_one_process(case: Case, outcome: Outcome) -> None:
    require_same_numbers(case, outcome, "balancing loss")


@pytest.mark.parametrize("cases", each(SAME_SUMS), ids=lambda cases: str(cases[0]))
def test_experts_do_not_depend_on_the_order(cases: tuple[Case, ...], outcome: Outcome) -> None:
    first, *others = cases
    for other in others:
        for seen in ("losses", "evaluated"):
            expected = losses_of(first, outcome(first), seen)
            assert losses_of(other, outcome(other), seen) == expected, str(other)
        assert norms_of(outcome(other)) == norms_of(outcome(first)), str(other)


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [(Case("megatron", model=MODERN_EXPERTS, until=STEPS), *SPREAD_ANEW)],
    ids=["distributed-optimizer"],
)
def test_a_checkpoint_of_experts_goes_on_wherever_they_are(
    cases: tuple[Case, ...], outcome: Outcome
) -> None:
    require_same_steps(cases, outcome)


@pytest.mark.parametrize("case", each(FREE, 2), ids=str)
def test_a_free_order_is_followed_and_equals_one_process(case: Case, outcome: Outcome) -> None:
    require_same_numbers(case, outcome)
    schedule = free_order(case.extra.split()[-1])
    for rank, order in enumerate(outcome(case)["orders"]):
        assert order == [str(action) for action in schedule.orders[rank]]


@pytest.mark.parametrize("case", each(HALF, 2), ids=str)
def test_half_precision_is_close(case: Case, outcome: Outcome) -> None:
    # Values in bf16 have only 8 bits of precision, so this comparison only detects lost parts and
    # parts that are counted twice.
    assert all(math.isfinite(loss) for loss in losses_of(case, outcome(case)))
    require_close_numbers(case, outcome, 0.02)


@pytest.mark.parametrize("cases", each(SAME_LOSSES, 1), ids=lambda cases: str(cases[0]))
def test_dropout_depends_on_the_seed_alone(cases: tuple[Case, ...], outcome: Outcome) -> None:
    first, *others = cases
    losses = losses_of(first, outcome(first))
    for other in others:
        assert losses_of(other, outcome(other)) == losses, str(other)
        assert norms_of(outcome(other)) == norms_of(outcome(first)), str(other)
    # Losses with dropout must be close to the losses without dropout, but not equal.
    reference = losses_of(PLAIN, outcome(PLAIN))[:SHORT_STEPS]
    assert losses != pytest.approx(reference, rel=1e-4)
    assert losses == pytest.approx(reference, rel=0.1)


@pytest.mark.parametrize("cases", each(every_cut(), 2), ids=lambda cases: str(cases[1]))
def test_dropout_does_not_depend_on_the_cut(cases: tuple[Case, Case], outcome: Outcome) -> None:
    whole, cut = cases
    for seen in ("losses", "evaluated"):
        expected = losses_of(whole, outcome(whole), seen)
        assert losses_of(cut, outcome(cut), seen) == expected
    assert norms_of(outcome(cut)) == pytest.approx(norms_of(outcome(whole)), rel=REL, abs=0)


@pytest.mark.parametrize("cases", [every_placement()], ids=["loop-v"])
def test_stages_compute_the_same_wherever_they_are(
    cases: tuple[Case, ...], outcome: Outcome
) -> None:
    loop, vee, again, *parts = cases
    losses, sizes = losses_of(loop, outcome(loop)), norms_of(outcome(loop))
    assert losses_of(vee, outcome(vee)) == losses_of(again, outcome(again)) == losses
    assert norms_of(outcome(vee)) == norms_of(outcome(again))
    assert norms_of(outcome(vee)) == pytest.approx(sizes, rel=REL, abs=0)
    # The parts of the run have a V placement, then a loop placement with a different partition, and
    # then the V placement again.
    assert [loss for part in parts for loss in losses_of(part, outcome(part))] == losses


@pytest.mark.parametrize(
    "case", each(case for case in SHAPES if case.schedule in ("1f1b", "interleaved")), ids=str
)
def test_static_schedule_is_followed(case: Case, outcome: Outcome) -> None:
    placement = Placement(num_ranks=case.pp, num_chunks=case.chunks)
    schedule = make_schedule(case.schedule, placement, 8 // case.dp)
    # Ranks are numbered by tensor-parallel rank first, then by data-parallel rank, and then by
    # pipeline rank.
    for rank, order in enumerate(outcome(case)["orders"]):
        assert order == [str(action) for action in schedule.orders[rank // (case.tp * case.dp)]]


@pytest.mark.parametrize(
    "case", each(case for case in SHAPES if case.schedule == "adaptive" and case.tp > 1), ids=str
)
def test_tensor_parallel_ranks_take_one_order(case: Case, outcome: Outcome) -> None:
    orders = outcome(case)["orders"]
    for first in range(0, case.world_size, case.tp):
        assert all(order == orders[first] for order in orders[first : first + case.tp])
        kinds = 3 if case.pp > 1 else 2  # A single pipeline rank does not split backward passes.
        assert len(set(orders[first])) == kinds * case.chunks * 8 // case.dp
