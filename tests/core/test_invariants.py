"""The check finds each kind of contradiction and names the block."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.support import FakeRequest, make_manager, run_prefill
from vllm_kvplug.invariants import InvariantError, check_invariants
from vllm_kvplug.manager import CacheManager


@pytest.fixture
def manager() -> CacheManager:
    manager = make_manager()
    run_prefill(manager, FakeRequest("a", list(range(9))))
    freed = FakeRequest("b", list(range(50, 59)))
    run_prefill(manager, freed)
    manager.free(freed)
    check_invariants(manager)
    return manager


def lose_reference(manager: CacheManager) -> None:
    manager.pool.reference_counts[2] = 2


def free_a_held_block(manager: CacheManager) -> None:
    manager.pool.free_blocks.push([2])


def lose_a_free_block(manager: CacheManager) -> None:
    manager.pool.free_blocks.remove(5)


def forget_a_hash(manager: CacheManager) -> None:
    manager.pool.block_hashes[1] = None


def index_a_block_twice(manager: CacheManager) -> None:
    manager.pool.indexes[0].insert(b"z" * 32, 1)


def count_too_many_cached(manager: CacheManager) -> None:
    manager.groups[0].tables["a"].num_cached_blocks = 7


def widen_the_shortcut(manager: CacheManager) -> None:
    manager._quiet_limits_tokens["a"] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_reference, "block 2: references: expected 1, found 2"),
        (free_a_held_block, r"free blocks that are held.*found \{2\}"),
        (lose_a_free_block, r"nobody holds and that are not free.*found \{5\}"),
        (forget_a_hash, "block 1: group and hash in the prefix index"),
        (index_a_block_twice, "block 1: places in the prefix index"),
        (count_too_many_cached, "request 'a': cached blocks: expected at most 3, found 7"),
        (widen_the_shortcut, "request 'a': decode shortcut's limit in tokens: expected 11, found 12"),
    ],
)
def test_damage_is_found(manager: CacheManager, damage: Callable[[CacheManager], None], message: str) -> None:
    damage(manager)
    with pytest.raises(InvariantError, match=message):
        check_invariants(manager)
