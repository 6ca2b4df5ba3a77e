"""Tests how the ranks of a replica compare their batches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.modules.batch_comparison import (  # noqa: E402
    BatchComparison,
    Declared,
    Digest,
    EntryDigest,
    entries_of,
)

from ..multiprocess.launch import torchrun  # noqa: E402

WORKER = Path(__file__).with_name("comparison_worker.py")
PROGRAMS = re.findall(r"^def (\w+)\(\) -> None:", WORKER.read_text(), re.MULTILINE)


@pytest.mark.multiprocess
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_several_processes(tmp_path: Path, program: str) -> None:
    world_size = 4 if program.startswith("replicas") else 2
    log = tmp_path / "output.txt"
    torchrun(WORKER, [str(tmp_path), program], world_size=world_size, log=log, limit_s=120.0)


def part(tokens: int, images: int = 0) -> dict[str, torch.Tensor]:
    """Returns a microbatch with ``tokens`` tokens and ``images`` images."""
    entries = {"ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return entries | ({"images": torch.zeros(images, 3, 4, 4)} if images else {})


def digest_of(*parts: Mapping[str, torch.Tensor], **options: bool) -> Digest:
    return Digest.of(entries_of(parts, **options))


def comparison_of(
    batches: Sequence[Mapping[str, EntryDigest]] = (), **options: Any
) -> BatchComparison:
    """Creates the :class:`BatchComparison` of a rank, without starting other processes.

    ``batches`` describes the batch of each rank, and ``options`` are further arguments.
    """
    mesh: Any = SimpleNamespace(pipeline_size=2, gather=lambda value: list(batches))
    settings: dict[str, Any] = {"is_on": True, "is_by_cost": False, **options}
    return BatchComparison(mesh=mesh, **settings)


def test_digests_see_shapes_types_and_whole_numbers() -> None:
    digests = [
        digest_of(each)
        for each in (
            part(4),
            part(5),
            part(4, 1),
            {"ids": torch.ones(1, 4, dtype=torch.int64)},
            {"ids": torch.zeros(1, 4, dtype=torch.int32)},
            {"words": torch.zeros(1, 4, dtype=torch.int64)},
            {"ids": torch.zeros(4, 1, dtype=torch.int64)},
            {"ids": torch.zeros(1, 4, dtype=torch.bool)},
            {"ids": torch.zeros((), dtype=torch.int64)},
            {"ids": torch.zeros(0, dtype=torch.int64)},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of(part(4)) == digests[0] != digest_of(part(4), part(4))
    strided = torch.zeros(4, 2, dtype=torch.int64)[:, 0]
    assert digest_of({"ids": strided[None]}) == digests[0]
    for first, second in itertools.combinations(digests, 2):
        assert not first.is_alike(second)
    assert digest_of(part(4), part(4, 1)) != digest_of(part(4, 1), part(4))


def test_values_that_cannot_be_compared_are_not_read() -> None:
    for entry in (
        torch.rand(3),
        torch.rand(3, dtype=torch.complex64),
        torch.eye(3, dtype=torch.int64).to_sparse(),
        torch.zeros(3, dtype=torch.int64, device="meta"),
    ):
        for with_device in (False, True):
            assert entries_of([{"x": entry}], with_device=with_device)["x"].values == b""


def test_entries_that_are_left_out_do_not_count() -> None:
    both = entries_of([part(4, 1)], unused=("images",))
    assert both == entries_of([part(4)])
    assert entries_of([part(4)], with_values=False)["ids"].values == b""


def test_digests_are_alike_wherever_labels_are() -> None:
    """Checks that digests of equal microbatches match if only one rank has its labels on a GPU."""
    host = {**part(4), "labels": torch.ones(4, dtype=torch.int64)}
    moved = {**host, "labels": host["labels"].to("meta")}
    wrong = {**host, "labels": torch.zeros(4, dtype=torch.int64)}
    assert digest_of(host).is_alike(digest_of(moved))
    assert not digest_of(host).is_alike(digest_of(wrong))
    described = [entries_of([each]) for each in (host, moved, wrong)]

    def declared(*kinds: int) -> list[Declared]:
        return [
            Declared(step=1, replica=rank // 2, content=Digest.of(described[kind]))
            for rank, kind in enumerate(kinds)
        ]

    comparison_of().require_equal(declared(0, 1, 0, 1, 1, 1), described[0])
    kinds = (0, 1, 0, 2, 0, 1)
    comparison = comparison_of([described[kind] for kind in kinds])
    with pytest.raises(ConfigError, match="ranks 2 and 3 of one replica .* values in labels; pass"):
        comparison.require_equal(declared(*kinds), described[0])
    for each in declared(*kinds):
        assert Declared(step=0).decoded([*each.encoded(), 0.5, 0.25]) == each


def test_another_order_on_a_rank_is_named() -> None:
    def declared(*orders: tuple[int, ...]) -> list[Declared]:
        return [
            Declared(step=1, replica=rank // 2, order=Digest.of({}, *order).kinds)
            for rank, order in enumerate(orders)
        ]

    comparison = comparison_of(is_by_cost=True)
    comparison.require_equal(declared(*[(0, 1)] * 4, *[(1, 0)] * 2), {})
    with pytest.raises(ConfigError, match="ranks 4 and 5 .*one replica in different orders"):
        comparison.require_equal(declared(*[(0, 1)] * 5, (1, 0)), {})


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({}, {0, 1, 2, 64, 128}),
        ({"is_on": False}, set()),
        ({"is_by_cost": True}, set(range(130))),
        ({"is_on": False, "is_by_cost": True}, set(range(130))),
    ],
)
def test_calls_in_which_batches_are_compared(options: dict[str, bool], due: set[int]) -> None:
    """Checks which calls compare batches. Steps and evaluations are counted separately."""
    comparison = comparison_of(**options)
    for _ in range(2):
        for is_training in (True, False):
            numbers = set()
            for number in range(130):
                comparison.begin_call(is_training=is_training)
                if comparison.is_due:
                    numbers.add(number)
            assert numbers == due
        comparison.restart()
