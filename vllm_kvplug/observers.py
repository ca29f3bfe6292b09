"""Where events, statistics, traces and metrics hang: callbacks on what happens to blocks.

An observer overrides the hooks that it wants. `ObserverSet` keeps, for each hook, only the observers that override it,
so a hook that nobody wants costs one loop over an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any


class Observer:
    """Base class: every hook does nothing. Hooks are called after the change that they tell of (`on_withdraw` before
    it) and must not raise.
    """

    def on_admit(self, request: Any, num_hit_tokens: int) -> None:
        """A request was given its first slots after a lookup that had found `num_hit_tokens`. Lookups whose request was
        then refused are not told.
        """

    def on_take(self, block_ids: Sequence[int]) -> None:
        """Free blocks were handed out; those of them that were cached have left the prefix index (`on_evict`)."""

    def on_acquire(self, block_ids: Sequence[int]) -> None:
        """A request holds blocks that its lookup found, which lie in one run."""

    def on_release(self, block_ids: Sequence[int]) -> None:
        """A request gave up blocks, the last first, which lie in one run."""

    def on_cache(
        self,
        request: Any,
        group_id: int,
        num_tokens_per_block: int,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        first_block: int,
        end_block: int,
    ) -> None:
        """Blocks `first_block` .. `end_block` - 1 of the request's table `block_ids` became full and can be hit now.

        `block_hashes[i]` is the hash for position i of that table.
        """

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes, is_last_copy: bool) -> None:
        """A block left the prefix index: it is being reused, or was evicted on request. With the last copy, nothing of
        this group answers for the hash any more.
        """

    def on_withdraw(self, block_ids: Collection[int]) -> None:
        """Eviction of these blocks was asked for, cached or not; `on_evict` follows for those that are."""

    def on_reset(self) -> None:
        """The whole prefix cache was dropped."""


class ObserverSet:
    """The observers of one manager, sorted by hook. Iterate `on_evict` etc. and call each."""

    __slots__ = (
        "on_acquire",
        "on_admit",
        "on_cache",
        "on_evict",
        "on_release",
        "on_reset",
        "on_take",
        "on_withdraw",
    )

    on_acquire: tuple[Callable[..., None], ...]
    on_admit: tuple[Callable[..., None], ...]
    on_cache: tuple[Callable[..., None], ...]
    on_evict: tuple[Callable[..., None], ...]
    on_release: tuple[Callable[..., None], ...]
    on_reset: tuple[Callable[..., None], ...]
    on_take: tuple[Callable[..., None], ...]
    on_withdraw: tuple[Callable[..., None], ...]

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        observers = tuple(observers)
        for hook in self.__slots__:
            base = getattr(Observer, hook)
            wanted = tuple(getattr(o, hook) for o in observers if getattr(type(o), hook) is not base)
            setattr(self, hook, wanted)
