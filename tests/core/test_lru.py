"""The exact order of `lru`: runs in the order of freeing, each eaten from its end."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.eviction import lru
from vllm_kvplug.eviction.lru import LRUEviction


def make_runs(*sizes: int) -> list[BlockRun]:
    ids = iter(range(1, sum(sizes) + 1))
    return [BlockRun([next(ids) for _ in range(size)], 0, 0, 0) for size in sizes]


def order(policy: LRUEviction) -> list[int]:
    return [block_id for run in policy for block_id in reversed(run.block_ids)]


def test_runs_are_reused_in_the_order_of_their_freeing() -> None:
    policy, (a, b, c) = LRUEviction(), make_runs(1, 1, 1)
    policy.push([c, a])
    policy.push([b])
    assert list(policy) == [c, a, b]
    assert policy.next_run() is c
    assert policy.next_run() is c, "it is still there"
    policy.remove(c)
    assert policy.next_run() is a


def test_a_removed_run_goes_to_the_end_when_it_is_freed_again() -> None:
    policy, (a, b, c) = LRUEviction(), make_runs(1, 1, 1)
    policy.push([a, b, c])
    policy.remove(b)
    assert list(policy) == [a, c]
    policy.push([b])
    assert list(policy) == [a, c, b]


def test_a_rest_is_reused_just_before_the_run_that_it_was_split_off() -> None:
    policy, (a, b, c) = LRUEviction(), make_runs(1, 4, 1)
    policy.push([a, b, c])
    before = order(policy)
    for size in (3, 1):  # b is cut twice: 2 | 3 4 | 5 once it is done
        rest = BlockRun(b.block_ids[size:], 0, 0, 0)
        del b.block_ids[size:]
        policy.split(b, rest)
    assert order(policy) == before == [1, 5, 4, 3, 2, 6]
    first, last = list(policy)[1], list(policy)[2]
    policy.remove(last)
    assert order(policy) == [1, 5, 2, 6]
    policy.remove(first)
    policy.remove(b)
    assert order(policy) == [1, 6]
    policy.remove(a)
    assert policy.next_run() is c
    assert list(policy.find_contradictions()) == []


def test_empty_places_are_passed_over_and_swept_out() -> None:
    policy, runs = LRUEviction(), make_runs(*[1] * 100)
    policy.push(runs)
    for _ in range(100):
        for run in runs:
            policy.remove(run)
        policy.push(runs)
        assert list(policy.find_contradictions()) == []
    assert len(policy._places) < 1500, "hits without any reuse do not grow the order"
    assert list(policy) == runs
    assert policy.next_run() is runs[0]
    assert policy._places[0] == [runs[0]], "the empty places before it are gone"


@pytest.mark.parametrize("min_empty_places", [0, 1024])
@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_list(seed: int, min_empty_places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(lru, "_MIN_EMPTY_PLACES", min_empty_places)
    random_source = random.Random(seed)
    policy, expected, held = LRUEviction(), [], make_runs(1, 2, 3, 4, 5, 1, 8)
    num_splits = 0
    for _ in range(600):
        action = random_source.choice(["next", "push", "push", "remove", "split"])
        if action == "next" and expected:
            assert policy.next_run() is expected[0], f"seed {seed}"
        elif action == "push" and held:
            random_source.shuffle(held)
            num_runs = random_source.randint(1, len(held))
            freed, held = held[:num_runs], held[num_runs:]
            policy.push(freed)
            expected += freed
        elif action == "remove" and expected:
            run = random_source.choice(expected)
            policy.remove(run)
            expected.remove(run)
            held.append(run)
        elif action == "split" and expected:
            run = random_source.choice(expected)
            if len(run.block_ids) > 1:
                rest = BlockRun([run.block_ids.pop()], 0, 0, 0)
                policy.split(run, rest)
                expected.insert(expected.index(run), rest)
                num_splits += 1
        assert list(policy) == expected, f"seed {seed}"
        assert list(policy.find_contradictions()) == [], f"seed {seed}"
    assert num_splits > 5
    assert sorted(chain.from_iterable(run.block_ids for run in (*expected, *held))) == list(range(1, 25))
