"""Tests how replicas determine which microbatches each replica gets."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.modules.batch import Signature  # noqa: E402
from megatron.adaptive.modules.batch_comparison import BatchComparison  # noqa: E402
from megatron.adaptive.modules.content import ContentBalance, DealtList  # noqa: E402
from megatron.adaptive.schedule.action import Action, ActionKind  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

REPLICAS = 3
RANKS = 2
PLACEMENT = Placement(num_ranks=RANKS, num_chunks=1, kind="loop")


def part(tokens: int, images: int = 0) -> dict[str, torch.Tensor]:
    """Returns a microbatch with ``tokens`` tokens and ``images`` images."""
    entries = {"ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return entries | ({"images": torch.zeros(images, 3, 4, 4)} if images else {})


def balance_of(
    replica: int, sample_work: Mapping[Signature, Any], **options: Any
) -> ContentBalance:
    """Creates the :class:`ContentBalance` of one replica, without starting other processes.

    ``sample_work`` maps each kind of microbatch to its operation counts, and ``options`` are
    further arguments.
    """
    mesh: Any = SimpleNamespace(
        rank=replica,
        dp_rank=replica,
        dp_size=REPLICAS,
        pp_rank=0,
        pipeline_size=RANKS,
        gather=lambda value: list(itertools.product(range(REPLICAS), range(RANKS))),
    )
    settings: dict[str, Any] = {"order": "given", "dealing": "work", "partition": (1, 1), **options}
    comparison = BatchComparison(mesh=mesh, is_on=True, is_by_cost=True)
    return ContentBalance(
        comparison=comparison, placement=PLACEMENT, sample_work=sample_work, **settings
    )


def dealt(
    batch: Sequence[Any], sample_work: Mapping[Signature, Sequence[float]], **options: Any
) -> list[DealtList]:
    """Returns the microbatches of ``batch`` that each replica gets.

    Also checks that all replicas compute the same result. See :func:`balance_of` for
    ``sample_work`` and ``options``.
    """
    shares = []
    for replica in range(REPLICAS):
        balance = balance_of(replica, sample_work, **options)
        share = balance.share(batch)
        assert share is not None
        assert [id(each) for each in share] == [id(batch[number]) for number in share.numbers]
        shares.append(share)
    assert len({share.digest for share in shares}) == 1
    assert sorted(sum((share.numbers for share in shares), ())) == list(range(len(batch)))
    return shares


WORK = {Signature.of(part(10)): (0.0, 10.0), Signature.of(part(10, 2)): (40.0, 10.0)}


def test_costly_microbatches_are_spread_and_cheap_ones_fill_up() -> None:
    batch = [part(10, 2), part(10), part(10), part(10, 2), part(10), part(10), part(10, 2)]
    shares = dealt(batch, WORK)
    assert [sum("images" in each for each in share) for share in shares] == [1, 1, 1]
    batch = [part(10, 8), *(part(10) for _ in range(8))]
    assert sorted(len(share) for share in dealt(batch, WORK)) == [1, 4, 4]


def test_a_sample_of_one_kind_does_not_make_other_kinds_free() -> None:
    """Checks that text has a cost even if the sample batch consists only of images."""
    images = {Signature.of({"images": torch.zeros(2, 3, 4, 4)}): (5.0, 5.0)}
    shares = dealt([part(10) for _ in range(9)], images)
    assert [len(share) for share in shares] == [3, 3, 3]
    unknown = {Signature.of(part(10, 2)): (0.0, 0.0)}
    assert [len(share) for share in dealt([part(10) for _ in range(6)], unknown)] == [2, 2, 2]


def test_numbers_that_do_not_divide_are_for_evaluations_only() -> None:
    """Checks that training rejects some numbers of microbatches that evaluations accept."""
    limits = {"group": 2, "least": 2}
    message = "microbatches .* at least 6, and a multiple of 2"
    for count in (4, 9):
        shares = dealt([part(10 + n) for n in range(count)], WORK, **limits)
        assert all(shares)
        balance = balance_of(0, WORK, **limits)
        with pytest.raises(ConfigError, match=f"{count} {message}"):
            balance.check_total(shares[0])
    grouped = dealt([part(10 + n) for n in range(10)], WORK, **limits)
    assert all(len(share) % 2 == 0 and share for share in grouped)
    balance.check_total(grouped[0])


def test_the_partition_does_not_change_what_is_dealt() -> None:
    """Checks that the distribution of microbatches does not depend on the partition."""
    parts = [part(tokens, images) for tokens, images in ((10, 0), (25, 1), (7, 3), (90, 2))]
    rng = random.Random(3)
    batch = [part(rng.randrange(5, 99), rng.randrange(5)) for _ in range(24)]
    numbers = []
    for cut in (0.1, 0.5, 1.0):
        work = {}
        for each in parts:
            total = float(each["ids"].numel() ** 2 + 300 * len(each.get("images", ())))
            first = float(round(cut * each["ids"].numel() * 7))
            work[Signature.of(each)] = (first, total - first)
        numbers.append([share.numbers for share in dealt(batch, work)])
    assert numbers[0] == numbers[1] == numbers[2]


def test_a_sample_of_one_kind_shows_costs_by_what_differs_in_the_batch() -> None:
    """Checks that costs depend only on batch entries whose sizes vary."""
    fixed = {f"entry{number}": torch.zeros(64) for number in range(20)}
    sample = {Signature.of({**fixed, **part(10)}): (10.0, 10.0)}
    batch = [{**fixed, **part(30)}, *({**fixed, **part(10)} for _ in range(9))]
    shares = dealt(batch, sample)
    assert [len(share) for share in shares if 0 in share.numbers] == [1]


def test_a_list_that_was_changed_in_place_is_refused() -> None:
    """Checks that a reordered list is rejected, because random numbers depend on its order."""
    batch = [part(10) for _ in range(6)]
    balance = balance_of(0, WORK)
    share = balance.share(batch)
    assert share is not None
    assert len(share) > 1
    assert balance.numbers_of(share, len(share), is_listed=True) == share.numbers
    same = copy.deepcopy(share)
    assert balance.numbers_of(same, len(same), is_listed=True) == share.numbers
    share.reverse()
    with pytest.raises(ConfigError, match="or was changed"):
        balance.numbers_of(share, len(share), is_listed=True)


def test_numbers_are_known_of_all_lists_of_microbatches() -> None:
    batch = [part(10) for _ in range(7)]
    in_turns = balance_of(1, WORK, dealing="turns").share(batch)
    assert in_turns is not None
    assert in_turns.numbers == (1, 4)
    assert [id(each) for each in in_turns] == [id(batch[1]), id(batch[4])]
    alone = balance_of(0, WORK)
    alone._mesh.dp_size = 1
    of_all = alone.share(batch)
    assert of_all is not None
    assert of_all.numbers == tuple(range(7))
    values: Any = [1.0] * 7
    assert balance_of(1, WORK, dealing="turns").share(values) is None


@pytest.mark.parametrize(("images", "better"), [(0, "5-1"), (1, "")])
def test_a_better_partition_for_what_is_trained_is_told_once(
    images: int, better: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a better partition, if there is one, is reported exactly once."""
    work = {Signature.of(part(10, count)): (*(5.0 * count,) * 4, 20.0, 20.0) for count in (0, 1, 2)}
    seconds = [sum(column) for column in ((10.0 * images,) * 4, (20.0, 20.0))]
    balance = balance_of(0, work, dealing="time", partition=(4, 2))
    costs = balance._times
    rows = [balance._content.numbers(part(10, images))] * 3
    assert len(rows[0]) == costs.count == 4
    sums = [
        costs.measured(
            rows, [(Action(ActionKind.F, 0, n), round(seconds[rank] * 1e6)) for n in range(3)]
        )
        for _, rank in balance._positions
    ]
    for _ in range(40):
        balance._steps += 1
        balance.add_sums(sums)
    assert sum(balance.segment_seconds) == pytest.approx(sum(seconds) / 1e3, rel=1e-3)
    assert balance.segment_seconds[4] == pytest.approx(0.02, rel=0.05)
    assert balance.segment_seconds[0] == pytest.approx(0.01 * images, abs=1e-3)
    lines = capsys.readouterr().out.splitlines()
    assert [f"partition {better} would take" in line for line in lines] == [True] * bool(better)
