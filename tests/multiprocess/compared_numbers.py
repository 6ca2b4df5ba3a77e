"""Compares the values that jobs report with those of a single process, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .equivalence_cases import Case, with_other_sums

# A value may differ by this multiple of the difference that another order of summation causes.
SPREADS = 8.0
# A relative difference up to this value, which is a few float32 roundings, is always allowed.
ROUNDING = 1e-6

Outcome = Callable[[Case], dict[str, Any]]
"""Type of a function that takes a case and returns the results of all ranks."""


def losses_of(case: Case, seen: dict[str, Any], key: str = "losses") -> list[float]:
    """Returns the losses that a job reports, and checks that all ranks of the last stage agree.

    ``seen`` contains the reports of all ranks of the job ``case``, and ``key`` is the name of the
    losses in a report.
    """
    reports = [values for values in seen[key] if values]
    assert len(reports) == case.tp * case.dp * case.cp
    assert all(report == reports[0] for report in reports)
    losses: list[float] = reports[0]
    return losses


def norms_of(seen: dict[str, Any], key: str = "grad_norms") -> list[float]:
    """Returns the norms that a job reports, and checks that all ranks agree.

    ``seen`` contains the reports of all ranks, and ``key`` is the name of the norms in a report.
    """
    first: list[float] = seen[key][0]
    assert all(norms == pytest.approx(first, rel=1e-6, abs=0) for norms in seen[key])
    return first


Numbers = dict[str, list[float]]
"""Maps names of values that a job reports to lists with a value per iteration."""


def steps_of(case: Case, outcome: Outcome, further: str = "") -> Numbers:
    """Returns the values of each training step that must equal those of a single process.

    Args:
        case: Job to compare.
        outcome: Function that returns the results of a job.
        further: Name of an additional loss, for example of multi-token prediction layers, or an
            empty string to compare no additional loss.
    """
    seen = outcome(case)
    numbers = {"loss": losses_of(case, seen), "gradient norm": norms_of(seen)}
    if further:
        numbers[further] = losses_of(case, seen, "further")
    per_step = seen["layer_norms"][0]
    for layer in per_step[0]:
        numbers[f"gradient norm of {layer}"] = [norms[layer] for norms in per_step]
    return numbers


def numbers_of(case: Case, outcome: Outcome, further: str = "") -> Numbers:
    """Returns the training and validation values that must equal those of a single process.

    The arguments are those of :func:`steps_of`.
    """
    seen = outcome(case)
    return {
        **steps_of(case, outcome, further),
        "parameter norm": norms_of(seen, "params_norm"),
        "validation loss": losses_of(case, seen, "evaluated"),
    }


def differences(numbers: Numbers, expected: Numbers) -> Numbers:
    """Returns the relative differences between ``numbers`` and ``expected``, keyed by name."""
    assert numbers.keys() == expected.keys()
    ratios: Numbers = {}
    for name, values in numbers.items():
        pairs = zip(values, expected[name], strict=False)
        ratios[name] = [abs(value - right) / abs(right) for value, right in pairs]
    return ratios


def tolerances(reference: Case, outcome: Outcome, further: str = "") -> Numbers:
    """Returns how much rounding may change each of the values that the job ``reference`` reports.

    The other arguments are those of :func:`steps_of`.
    """
    expected = numbers_of(reference, outcome, further)
    spreads = [
        differences(numbers_of(other, outcome, further), expected)
        for other in with_other_sums(reference)
    ]
    largest = {
        name: [max(values) for values in zip(*(spread[name] for spread in spreads), strict=True)]
        for name in spreads[0]
    }
    return {
        # Rounding errors of an iteration affect all later iterations, so the limit never decreases.
        name: [max(ROUNDING, SPREADS * max(values[: index + 1])) for index in range(len(values))]
        for name, values in largest.items()
    }


def too_far(numbers: Numbers, expected: Numbers, limits: Numbers) -> list[str]:
    """Returns a line for each of ``numbers`` that differs too much from ``expected``.

    ``limits`` contains the maximum difference of each value.
    """
    lines = []
    for name, values in differences(numbers, expected).items():
        for step, (value, limit) in enumerate(zip(values, limits[name], strict=False), 1):
            if not value <= limit:
                lines.append(
                    f"{name} of iteration {step}: relative difference {value:.2e}, limit "
                    f"{limit:.2e}"
                )
    return lines


def require_same_numbers(case: Case, outcome: Outcome, further: str = "") -> None:
    numbers = numbers_of(case, outcome, further)
    assert len(numbers["loss"]) == len(numbers["gradient norm"]) == case.steps
    expected = numbers_of(case.reference, outcome, further)
    wrong = too_far(numbers, expected, tolerances(case.reference, outcome, further))
    assert not wrong, "\n".join(wrong)


def require_same_steps(cases: tuple[Case, ...], outcome: Outcome, further: str = "") -> None:
    """Checks that a chain of resumed jobs takes the same steps as an uninterrupted job.

    The first of ``cases`` is the uninterrupted job.
    """
    whole, *parts = cases
    numbers: Numbers = {}
    for part in parts:
        for name, values in steps_of(part, outcome, further).items():
            numbers.setdefault(name, []).extend(values)
    limits = tolerances(whole.reference, outcome, further)
    wrong = too_far(numbers, steps_of(whole, outcome, further), limits)
    assert not wrong, "\n".join(wrong)


def require_close_numbers(case: Case, outcome: Outcome, rel: float) -> None:
    numbers, expected = numbers_of(case, outcome), numbers_of(case.reference, outcome)
    assert len(numbers["loss"]) == len(numbers["gradient norm"]) == case.steps
    limits = {name: [rel] * len(values) for name, values in numbers.items()}
    assert not (wrong := too_far(numbers, expected, limits)), "\n".join(wrong)
