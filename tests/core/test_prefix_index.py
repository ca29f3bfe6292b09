"""A hash finds its first surviving block; a lookup is the leading run."""

from __future__ import annotations

from vllm_kvplug.prefix_index import PrefixIndex

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_match_is_the_leading_run_and_stops_at_the_limit() -> None:
    index = PrefixIndex()
    index.insert(A, 1)
    index.insert(C, 3)
    assert index.match([A, B, C], 3) == [1]
    index.insert(B, 2)
    assert index.match([A, B, C], 3) == [1, 2, 3]
    assert index.match([A, B, C], 2) == [1, 2]
    assert index.match([A, B, C], 0) == []
    assert index.match([], 5) == []


def test_the_first_inserted_block_that_survives_answers() -> None:
    index = PrefixIndex()
    for block_id in (7, 3, 9):
        index.insert(A, block_id)
    assert index.block_ids(A) == [7, 3, 9]
    index.remove(A, 7)
    assert index.get(A) == 3
    index.remove(A, 9)
    assert index.block_ids(A) == [3]
    index.insert(A, 7)
    assert index.block_ids(A) == [3, 7]
    index.remove(A, 3)
    index.remove(A, 7)
    assert index.get(A) is None
    assert len(index) == 0


def test_removing_a_later_duplicate_leaves_the_first() -> None:
    index = PrefixIndex()
    index.insert(A, 7)
    index.insert(A, 3)
    index.remove(A, 3)
    assert index.block_ids(A) == [7]
    assert list(index.items()) == [(A, [7])]


def test_clear_forgets_duplicates_too() -> None:
    index = PrefixIndex()
    index.insert(A, 7)
    index.insert(A, 3)
    index.clear()
    index.insert(A, 5)
    assert index.block_ids(A) == [5]
