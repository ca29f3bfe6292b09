"""A manager that mixes blocks up, as `tests.evals.mixed_up_manager:MixedUpManager`: accuracy must show it."""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request


class MixedUpManager(KVCacheManager):
    """Answers every second hit with blocks of the last hit that began with another block; else it is vLLM's own.

    A foreign block must be another prefix's: the own blocks in another order would change nothing, since keys carry
    their positions and attention sums over all of them.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self._num_hits = 0
        self._last: list[list[KVCacheBlock]] = []

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        found, num_tokens = super().get_computed_blocks(request)
        (own,) = found.blocks
        if not own:
            return found, num_tokens
        self._num_hits += 1
        foreign = next((blocks for blocks in reversed(self._last) if blocks[0] is not own[0]), [])
        self._last = [*self._last[-15:], list(own)]
        if self._num_hits % 2:
            return found, num_tokens
        mixed = [*foreign[: len(own)], *own[len(foreign) :]]
        return self.create_kv_cache_blocks((mixed,)), num_tokens
