"""Which replica gets which microbatches, as each replica computes it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.modules.batch import Signature  # noqa: E402
from megatron.adaptive.modules.content import ContentBalance, DealtList, digest_of  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

REPLICAS = 3
RANKS = 2
PLACEMENT = Placement(num_ranks=RANKS, num_chunks=1, kind="loop")


def part(tokens: int, images: int = 0) -> dict[str, torch.Tensor]:
    """A microbatch of this content."""
    entries = {"ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return entries | ({"images": torch.zeros(images, 3, 4, 4)} if images else {})


def dealt(
    batch: Sequence[Any], sample_work: Mapping[Signature, Sequence[float]], **options: Any
) -> list[DealtList]:
    """What each replica takes of a batch."""
    shares = []
    for replica in range(REPLICAS):
        mesh: Any = SimpleNamespace(
            dp_rank=replica,
            dp_size=REPLICAS,
            pp_rank=0,
            pipeline_size=RANKS,
            gather=lambda value: [value] * REPLICAS * RANKS,
        )
        balance = ContentBalance(
            order="given",
            dealing="work",
            mesh=mesh,
            placement=PLACEMENT,
            sample_work=sample_work,
            **options,
        )
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
    """Without images, nothing of what the sample with images shows might cost anything."""
    images = {Signature.of({"images": torch.zeros(2, 3, 4, 4)}): (5.0, 5.0)}
    shares = dealt([part(10) for _ in range(9)], images)
    assert [len(share) for share in shares] == [3, 3, 3]
    unknown = {Signature.of(part(10, 2)): (0.0, 0.0)}
    with pytest.raises(ConfigError, match="at least 6"):
        dealt([part(10) for _ in range(4)], unknown, group=2, least=2)
    grouped = dealt([part(10 + n) for n in range(10)], WORK, group=2, least=2)
    assert all(len(share) % 2 == 0 and share for share in grouped)


def test_digests_see_shapes_types_and_whole_numbers() -> None:
    digests = [
        digest_of([each])
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
        )
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of([part(4)]) == digests[0] != digest_of([part(4), part(4)])
    strided = torch.zeros(4, 2, dtype=torch.int64)[:, 0]
    assert digest_of([{"ids": strided[None]}]) == digests[0]
