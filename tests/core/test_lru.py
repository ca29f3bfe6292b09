"""The exact order of `lru`: never-used blocks by id, then freed ones in the order of freeing."""

from __future__ import annotations

import random

import pytest

from vllm_kvplug.eviction import lru
from vllm_kvplug.eviction.lru import LRUEviction


def test_unused_blocks_come_first_by_id_then_freed_ones_in_their_order() -> None:
    policy = LRUEviction(6)
    assert policy.pop(3) == [1, 2, 3]
    policy.push([3, 1])
    assert list(policy) == [4, 5, 3, 1]
    assert policy.pop(3) == [4, 5, 3]
    assert list(policy) == [1]


def test_a_removed_block_goes_to_the_end_when_it_is_freed_again() -> None:
    policy = LRUEviction(5)
    policy.push(policy.pop(4))
    policy.remove(2)
    assert list(policy) == [1, 3, 4]
    policy.push([2])
    assert list(policy) == [1, 3, 4, 2]


def test_hits_without_any_reuse_do_not_grow_the_order() -> None:
    policy = LRUEviction(4000)
    policy.push(policy.pop(100))
    for _ in range(100):
        for block_id in range(1, 101):
            policy.remove(block_id)
        policy.push(range(1, 101))
    assert len(policy._freed) < 1500
    assert list(policy) == [*range(101, 4000), *range(1, 101)]
    assert policy.pop(3899 + 2)[-2:] == [1, 2]


@pytest.mark.parametrize("min_stale_entries", [0, 1024])
@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_list(seed: int, min_stale_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "_MIN_STALE_ENTRIES", min_stale_entries)
    random_source = random.Random(seed)
    policy, expected, held = LRUEviction(12), list(range(1, 12)), []
    for _ in range(600):
        action = random_source.choice(["pop", "push", "remove"])
        if action == "pop":
            num_blocks = random_source.randint(0, len(expected))
            popped = policy.pop(num_blocks)
            assert popped == expected[:num_blocks], f"seed {seed}"
            del expected[:num_blocks]
            held += popped
        elif action == "push" and held:
            random_source.shuffle(held)
            num_blocks = random_source.randint(1, len(held))
            freed, held = held[:num_blocks], held[num_blocks:]
            policy.push(freed)
            expected += freed
        elif action == "remove" and expected:
            block_id = random_source.choice(expected)
            policy.remove(block_id)
            expected.remove(block_id)
            held.append(block_id)
        assert list(policy) == expected, f"seed {seed}"
        assert len(policy) == len(expected), f"seed {seed}"
        assert all((block_id in policy) == (block_id in expected) for block_id in range(13)), f"seed {seed}"
