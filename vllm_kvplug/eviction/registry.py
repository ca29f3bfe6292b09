"""Names of eviction policies. A new policy: one module beside this file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvplug.eviction.base import EvictionPolicy
from vllm_kvplug.eviction.lru import LRUEviction

_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRUEviction}


def names() -> list[str]:
    """The names that the setting `eviction` takes."""
    return sorted(_POLICIES)


def create(name: str, num_blocks: int) -> EvictionPolicy:
    """The policy called `name` for a pool of `num_blocks` blocks, every block but the null block (id 0) free."""
    return _POLICIES[name](num_blocks)
