"""Managers for a shadow's sides, with planted faults. Subclasses of vLLM's are fine here: the shadow is on trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager


class Faulty(KVCacheManager):
    """vLLM's manager with a fault.

    Settings: `fault`, one of the methods below that begin with it; `method`, what it is about; `after`, the number of
    calls of that method that are right; `times`, how many are wrong then.
    """

    def __init__(self, *, settings: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_calls = 0
        method = settings["method"]
        wrong = range(settings.get("after", 0), settings.get("after", 0) + settings.get("times", 1_000_000))
        right: Callable[..., Any] = getattr(self, method)
        fault: Callable[..., Any] = getattr(self, f"_{settings['fault']}")

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls - 1 in wrong:
                return fault(right, *args, **kwargs)
            return right(*args, **kwargs)

        setattr(self, method, call)

    def _raises(self, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    def _hits_less(self, right: Callable[..., Any], request: Any) -> Any:
        """A hit without its last block."""
        blocks, num_hit_tokens = right(request)
        if not num_hit_tokens:
            return blocks, num_hit_tokens
        block_size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        row = list(blocks.blocks[0])[:-1]
        return (KVCacheBlocks((row,)) if row else self.empty_kv_cache_blocks), num_hit_tokens - block_size

    def _refuses_waiting(self, right: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if "new_computed_blocks" in kwargs else right(request, *args, **kwargs)

    def _refuses_running(self, right: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        return right(request, *args, **kwargs) if kwargs.get("new_computed_blocks") is not None else None

    def _takes_more(self, right: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        """Slots for a block more than were asked for."""
        kwargs["num_lookahead_tokens"] = kwargs.get("num_lookahead_tokens", 0) + 4
        return right(request, *args, **kwargs)

    def _keeps(self, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Does nothing."""
        return False

    def _leaks(self, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block less is free afterwards."""
        answer = right(*args, **kwargs)
        self.block_pool.get_new_blocks(1)
        return answer

    def _turns(self, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The free blocks in another order: equal decisions with other ids."""
        blocks = [self.block_pool.free_block_queue.popleft() for _ in range(4)]
        self.block_pool.free_block_queue.append_n(blocks)
        return right(*args, **kwargs)


class Vandal(KVCacheManager):
    """Changes everything that it is given, after it has done its work."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_damaged = 0
        kwargs["kv_cache_config"].num_blocks = 3
        kwargs["kv_cache_config"].kv_cache_groups.clear()

    def _damage(self, request: Any) -> None:
        self.num_damaged += 1
        request.block_hashes.clear()
        request.num_computed_tokens = 7_777
        request.num_output_placeholders = 7
        request.skip_reading_prefix_cache = True
        request.mark = "mine"

    def get_computed_blocks(self, request: Any) -> Any:
        answer = super().get_computed_blocks(request)
        self._damage(request)
        return answer

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().allocate_slots(request, *args, **kwargs)
        self._damage(request)
        return answer

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)
        block_ids.clear()

    def free(self, request: Any) -> None:
        super().free(request)
        self._damage(request)


class Unbuildable(KVCacheManager):
    """Fails in its constructor."""

    def __init__(self, **kwargs: Any) -> None:
        raise OSError("no disk\ntoday")
