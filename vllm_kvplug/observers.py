"""Where events, statistics, traces and metrics hang: callbacks on what happens to blocks.

An observer overrides the hooks that it wants. `ObserverSet` keeps, for each hook, only the observers that override it,
so a hook that nobody wants costs one loop over an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Observer:
    """Base class: every hook does nothing. Hooks are called after the change that they tell of and must not raise."""

    def on_lookup(self, request: Any, num_hit_tokens: int) -> None:
        """A request asked for its cached prefix and was told `num_hit_tokens`. Called for each asking, retries
        included.
        """

    def on_cache(
        self,
        request: Any,
        group_id: int,
        num_tokens_per_block: int,
        block_ids: Sequence[int],
        first_block: int,
        end_block: int,
    ) -> None:
        """Blocks `first_block` .. `end_block` - 1 of the request's table `block_ids` became full and can be hit now."""

    def on_evict(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """A block left the prefix index: it is being reused, or was evicted on request."""

    def on_reset(self) -> None:
        """The whole prefix cache was dropped."""


class ObserverSet:
    """The observers of one manager, sorted by hook. Iterate `on_evict` etc. and call each."""

    __slots__ = ("on_cache", "on_evict", "on_lookup", "on_reset")

    on_lookup: tuple[Callable[..., None], ...]
    on_cache: tuple[Callable[..., None], ...]
    on_evict: tuple[Callable[..., None], ...]
    on_reset: tuple[Callable[..., None], ...]

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        observers = tuple(observers)
        for hook in self.__slots__:
            base = getattr(Observer, hook)
            wanted = tuple(getattr(o, hook) for o in observers if getattr(type(o), hook) is not base)
            setattr(self, hook, wanted)
