"""A hash finds its first surviving run; a lookup is the leading stretch, run by run."""

from __future__ import annotations

import pytest

from vllm_kvplug.block_run import BlockRun, RunPart
from vllm_kvplug.prefix_index import PrefixIndex, offset_in

A, B, C, D, E, F = (bytes([letter]) * 32 for letter in b"abcdef")
OTHER = b"o" * 32


def run_of(index: PrefixIndex, block_hashes: list[bytes], first_id: int, first_position: int = 0) -> BlockRun:
    """A run in the index, its blocks numbered from `first_id`."""
    run = BlockRun(list(range(first_id, first_id + len(block_hashes))), 0, first_position, 1)
    run.block_hashes += block_hashes
    index.add(run)
    return run


def remove_end(index: PrefixIndex, run: BlockRun, num_blocks: int) -> None:
    """Take the last blocks of a run out of the index and out of the run, as the pool does when they are reused."""
    block_hashes = run.block_hashes[-num_blocks:]
    del run.block_hashes[-num_blocks:]
    index.remove_end(run, block_hashes)  # type: ignore[arg-type]


def match(index: PrefixIndex, block_hashes: list[bytes], max_num_blocks: int, first_position: int = 0) -> list[int]:
    return list(index.match(block_hashes, max_num_blocks, first_position).block_ids)


def test_match_is_the_leading_stretch_and_stops_at_the_limit() -> None:
    index = PrefixIndex()
    run_of(index, [A], 1)
    run_of(index, [C], 3, 2)
    assert match(index, [A, B, C], 3) == [1]
    run_of(index, [B], 2, 1)
    assert match(index, [A, B, C], 3) == [1, 2, 3]
    assert match(index, [A, B, C], 9) == [1, 2, 3]
    assert match(index, [A, B, C], 2) == [1, 2]
    assert match(index, [A, B, C], 0) == []
    assert match(index, [], 5) == []
    assert match(index, [A, B, C], 3, 1) == [2, 3]
    assert len(index) == 3


@pytest.mark.parametrize("num_agreeing", range(7))
def test_a_match_ends_inside_a_run_where_the_request_goes_on_otherwise(num_agreeing: int) -> None:
    index = PrefixIndex()
    run = run_of(index, [A, B, C, D, E, F], 11)
    hashes = [A, B, C, D, E, F][:num_agreeing] + [OTHER] * (6 - num_agreeing)
    hit = index.match(hashes, 6)
    assert list(hit.block_ids) == list(range(11, 11 + num_agreeing))
    assert list(hit.parts) == ([RunPart(0, run, 0, num_agreeing)] if num_agreeing else [])


def test_a_match_that_begins_inside_a_run() -> None:
    index = PrefixIndex()
    run = run_of(index, [A, B, C, D], 11)
    hit = index.match([A, B, C, D], 3, 1)
    assert (list(hit.block_ids), list(hit.parts)) == ([12, 13], [RunPart(1, run, 1, 2)])


def test_the_first_inserted_run_that_survives_answers() -> None:
    index = PrefixIndex()
    seven, three, nine = (run_of(index, [A], block_id) for block_id in (7, 3, 9))
    assert (seven.is_intact, three.is_intact, nine.is_intact) == (True, False, False)
    assert index.block_ids(A) == [7, 3, 9]
    assert index.remove_one(A, seven) is False
    assert index.get(A) == 3
    assert index.run(A) is three
    assert index.remove_one(A, nine) is False
    assert index.block_ids(A) == [3]
    index.add(seven)
    assert index.block_ids(A) == [3, 7]
    assert index.remove_one(A, three) is False
    assert index.remove_one(A, seven) is True
    assert index.get(A) is None
    assert len(index) == 0


def test_removing_a_later_duplicate_leaves_the_first() -> None:
    index = PrefixIndex()
    run_of(index, [A], 7)
    three = run_of(index, [A], 3)
    remove_end(index, three, 1)
    assert index.block_ids(A) == [7]
    assert list(index.items()) == [(A, [7])]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_whole_run_is_removed_though_others_have_some_of_its_hashes(is_first: bool) -> None:
    index = PrefixIndex()
    first = run_of(index, [A, B, C], 1)
    second = run_of(index, [B, C, D], 11, 1)
    gone, left = (first, second) if is_first else (second, first)
    remove_end(index, gone, len(gone.block_hashes))
    assert dict(index.items()) == {block_hash: index.block_ids(block_hash) for block_hash in left.block_hashes}
    assert all(index.run(block_hash) is left for block_hash in left.block_hashes)


def test_a_run_whose_blocks_others_answer_for_is_matched_block_by_block() -> None:
    index = PrefixIndex()
    middle = run_of(index, [B, C], 21, 1)
    whole = run_of(index, [A, B, C, D], 1)
    assert (middle.is_intact, whole.is_intact) == (True, False)
    assert index.block_ids(B) == [21, 2]
    hit = index.match([A, B, C, D], 4)
    assert list(hit.block_ids) == [1, 21, 22, 4]
    assert list(hit.parts) == [RunPart(0, whole, 0, 1), RunPart(1, middle, 0, 2), RunPart(3, whole, 3, 1)]
    remove_end(index, middle, 2)
    assert match(index, [A, B, C, D], 4) == [1, 2, 3, 4], "it answers again, though it counts as not intact"
    assert match(index, [A, B, OTHER, D], 4) == [1, 2]


def test_a_hole_in_a_run_ends_a_match_and_what_is_behind_it_can_be_found() -> None:
    index = PrefixIndex()
    run = run_of(index, [A, B, C, D], 1)
    assert index.remove_one(B, run) is True
    run.block_hashes[1], run.is_intact = None, False
    assert match(index, [A, B, C, D], 4) == [1]
    assert match(index, [A, B, C, D], 4, 2) == [3, 4]
    run_of(index, [B], 9, 1)
    assert match(index, [A, B, C, D], 4) == [1, 9, 3, 4]


def test_matching_back_goes_over_several_runs_down_to_the_first_gap() -> None:
    index = PrefixIndex()
    hashes = [A, B, C, D, E, F]
    first, second, third = run_of(index, [A, B], 1), run_of(index, [C, D, E], 11, 2), run_of(index, [F], 21, 5)
    assert index.match_back(hashes, 6, 1) == [
        RunPart(5, third, 0, 1),
        RunPart(2, second, 0, 3),
        RunPart(1, first, 1, 1),
    ]
    assert index.match_back(hashes, 4, 3) == [RunPart(3, second, 1, 1)]
    assert index.match_back(hashes, 4, 0) == [RunPart(2, second, 0, 2), RunPart(0, first, 0, 2)]
    remove_end(index, first, 2)
    assert index.match_back(hashes, 6, 0) == [RunPart(5, third, 0, 1), RunPart(2, second, 0, 3)]
    assert index.match_back(hashes, 2, 0) == []
    assert index.match_back(hashes, 2, 2) == []


def test_matching_back_in_a_run_with_a_hole_goes_block_by_block() -> None:
    index = PrefixIndex()
    run = run_of(index, [A, B, C, D], 1)
    index.remove_one(B, run)
    run.block_hashes[1], run.is_intact = None, False
    assert index.match_back([A, B, C, D], 4, 0) == [RunPart(3, run, 3, 1), RunPart(2, run, 2, 1)]


def test_moving_keeps_the_place_among_duplicates() -> None:
    index = PrefixIndex()
    seven, three, nine = (run_of(index, [A, B], block_id) for block_id in (7, 13, 19))
    to_runs = [BlockRun([block_id], 0, 1, 1) for block_id in (8, 14, 20)]
    for run, to_run in zip((seven, three, nine), to_runs, strict=True):
        to_run.block_hashes.append(B)
        index.move([None, B], run, to_run)
        del run.block_ids[1:], run.block_hashes[1:]
    assert index.block_ids(A) == [7, 13, 19]
    assert index.block_ids(B) == [8, 14, 20]


def test_an_offset_is_found_where_the_position_tells_and_where_it_does_not() -> None:
    run = run_of(PrefixIndex(), [A, B, C], 1, 5)
    assert [offset_in(run, C, position) for position in (7, 6, 0, 99)] == [2] * 4


def test_clear_forgets_duplicates_too() -> None:
    index = PrefixIndex()
    run_of(index, [A], 7)
    run_of(index, [A], 3)
    index.clear()
    run_of(index, [A], 5)
    assert index.block_ids(A) == [5]


def in_index(index: PrefixIndex) -> dict[bytes, BlockRun]:
    return dict(index.runs)


def test_by_head_only_a_runs_first_hash_is_in_the_index() -> None:
    index = PrefixIndex(by_head=True)
    run = run_of(index, [A, B, C], 1)
    index.add_more(run, [D])
    run.block_ids.append(4)
    run.block_hashes.append(D)
    assert in_index(index) == {A: run}
    assert match(index, [A, B, C, D, E], 5) == [1, 2, 3, 4]
    assert (len(index), index.run(C), index.get(D), index.block_ids(B)) == (4, run, 4, [2])
    assert dict(index.items()) == {A: [1], B: [2], C: [3], D: [4]}
    remove_end(index, run, 2)
    assert in_index(index) == {A: run}
    remove_end(index, run, 2)
    assert in_index(index) == {}


@pytest.mark.parametrize("grows", [True, False])
def test_by_head_two_runs_that_share_a_hash_are_indexed_in_full_from_then_on(grows: bool) -> None:
    index = PrefixIndex(by_head=True)
    tail = run_of(index, [C, D], 21, 2)
    apart = run_of(index, [E, F], 31)
    if grows:
        whole = run_of(index, [A, B], 1)
        index.add_more(whole, [C])
        whole.block_ids.append(3)
        whole.block_hashes.append(C)
        index.add_more(whole, [D])
        whole.block_ids.append(4)
        whole.block_hashes.append(D)
    else:
        whole = run_of(index, [A, B, C, D], 1)
    assert in_index(index) == {A: whole, B: whole, C: tail, D: tail, E: apart}
    assert [run.indexed_by_head for run in (tail, whole, apart)] == [False, False, True]
    assert match(index, [A, B, C, D], 4) == [1, 2, 21, 22]
    remove_end(index, tail, 2)
    assert match(index, [A, B, C, D], 4) == [1, 2, 3, 4]


def test_by_head_the_later_of_two_equal_runs_takes_over_block_by_block() -> None:
    index = PrefixIndex(by_head=True)
    first, second = run_of(index, [A, B, C], 1), run_of(index, [A, B, C], 11)
    assert match(index, [A, B, C], 3) == [1, 2, 3]
    remove_end(index, first, 1)
    assert match(index, [A, B, C], 3) == [1, 2, 13]
    remove_end(index, first, 2)
    assert match(index, [A, B, C], 3) == [11, 12, 13]
    remove_end(index, second, 3)
    assert (in_index(index), len(index)) == ({}, 0)


def test_by_head_a_part_that_was_split_off_has_its_own_head_in_the_index() -> None:
    index = PrefixIndex(by_head=True)
    run = run_of(index, [A, B, C, D], 1)
    rest = BlockRun([3, 4], 0, 2, 1)
    rest.block_hashes += [C, D]
    del run.block_ids[2:], run.block_hashes[2:]
    assert index.move(rest.block_hashes, run, rest) is True
    assert in_index(index) == {A: run, C: rest}
    assert rest.indexed_by_head
    head = BlockRun([3], 0, 2, 1)
    head.block_hashes += [C]
    del rest.block_ids[:1], rest.block_hashes[:1]
    assert index.move(head.block_hashes, rest, head) is True
    assert in_index(index) == {A: run, C: head, D: rest}


def test_an_index_is_by_each_hash_from_when_somebody_wants_all_of_them() -> None:
    index = PrefixIndex(by_head=True)
    run = run_of(index, [A, B], 1)
    index.index_all_in_full()
    other = run_of(index, [C, D], 11)
    assert in_index(index) == {A: run, B: run, C: other, D: other}
    assert not index.by_head
