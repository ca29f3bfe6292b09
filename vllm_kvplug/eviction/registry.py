"""Names of eviction policies. A new policy: one module beside this file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvplug.eviction.base import EvictionPolicy
from vllm_kvplug.eviction.lru import LRUEviction

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRUEviction}


def names() -> list[str]:
    """The names that the setting `eviction` takes."""
    return sorted(_POLICIES)


def create(name: str) -> EvictionPolicy:
    """The policy called `name`, with nothing free yet."""
    return _POLICIES[name]()
