"""Tests that all methods in the long-tail benchmark train on the same documents."""

from __future__ import annotations

from benchmarks.long_tail import LONGEST, SLICE_TOKENS, SLICED, ways


def test_every_way_has_the_same_documents_and_slices_are_alike() -> None:
    tokens, by_name = ways(0)
    longest = {
        name: max(part.close - part.begin for cut in way.cuts for part in cut.pieces(0))
        for name, way in by_name.items()
    }
    assert set(longest.values()) == {LONGEST}
    positions = {name: sum(size for size, _ in way.items) for name, way in by_name.items()}
    assert all(tokens <= count <= 1.2 * tokens for count in list(positions.values())[1:])
    assert next(iter(positions.values())) == LONGEST * len(next(iter(by_name.values())).cuts)
    assert {size for size, _ in by_name[SLICED].items} == {SLICE_TOKENS}
