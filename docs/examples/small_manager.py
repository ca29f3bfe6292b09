"""A small KV cache manager for vLLM, complete: one group of full attention, prefix caching, least recently used first.

`PYTHONPATH=docs/examples vllm serve MODEL --kv-cache-manager small_manager:SmallManager`. It is written to be read and
changed; docs/write_a_manager.md goes through it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A block as others see it: `block_hash` is None unless the block is in the prefix cache."""

    block_id: int
    block_hash: bytes | None


class Blocks:
    """What a call answers: `blocks[group][i]`. There is one group here."""

    def __init__(self, row: list[Block]) -> None:
        self.blocks = (row,)

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids by group; with `allow_none`, None where there is no block."""
        row = [block.block_id for block in self.blocks[0]]
        return None if allow_none and not row else (row,)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not in the prefix cache."""
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The same by group (from vLLM 0.18 on)."""
        return [self.get_unhashed_block_ids()]

    def new_empty(self) -> Blocks:
        """No blocks."""
        return Blocks([])


class SmallManager:
    """Hands out the blocks of one pool. Block 0 is never given to a request: vLLM pads its tables with it."""

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool,
        use_eagle: bool,
        log_stats: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: int,
        pcp_world_size: int,
        metrics_collector: Any,
        settings: dict[str, Any],
    ) -> None:
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if [type(spec).__name__ for spec in groups] != ["FullAttentionSpec"]:
            raise ValueError(f"expected one group of full attention, found {groups}")
        if use_eagle or enable_kv_cache_events or dcp_world_size * pcp_world_size != 1:
            raise ValueError("expected no EAGLE drafter, no KV events and no context parallelism")
        self.validate_settings(settings)
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.num_tokens_per_block = groups[0].block_size
        self.num_usable_blocks = kv_cache_config.num_blocks - 1
        self.reuse = settings.get("reuse", "oldest")
        self.empty_kv_cache_blocks = Blocks([])
        # Free blocks in the order in which they became free.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, kv_cache_config.num_blocks))
        self._num_holders = [0] * kv_cache_config.num_blocks
        # The prefix cache, in both directions.
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # By request: its blocks, and how many of them have been looked at for the prefix cache.
        self._tables: dict[str, list[int]] = {}
        self._num_published: dict[str, int] = {}
        self._stats: Any = None
        if log_stats:
            from vllm.v1.metrics.stats import PrefixCacheStats

            self._stats = PrefixCacheStats()

    @staticmethod
    def validate_settings(settings: dict[str, Any]) -> None:
        """Called before anything is started, so that a wrong setting ends the command with one line."""
        if set(settings) - {"reuse"} or settings.get("reuse", "oldest") not in ("oldest", "newest"):
            raise ValueError('expected at most {"reuse": "oldest" or "newest"}')

    def describe(self) -> dict[str, str]:
        """For the line at start and for kvplug_info on /metrics."""
        return {"version": "1", "eviction": self.reuse}

    @property
    def usage(self) -> float:
        """Part of the blocks that requests hold."""
        return 1 - len(self._free) / self.num_usable_blocks

    def get_computed_blocks(self, request: Any) -> tuple[Blocks, int]:
        """The longest cached prefix. Takes nothing: the request may still be refused."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        row: list[int] = []
        # One token at least is left to compute: its logits are needed.
        max_hit_blocks = (request.num_tokens - 1) // self.num_tokens_per_block
        for block_hash in request.block_hashes[:max_hit_blocks]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            row.append(block_id)
        num_hit_tokens = len(row) * self.num_tokens_per_block
        if self._stats is not None:
            self._stats.record(request.num_tokens, num_hit_tokens, preempted=request.num_preemptions > 0)
        return self._answer(row), num_hit_tokens

    def can_fit_full_sequence(
        self,
        request: Any,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Whether there is room for all tokens of a waiting request (vLLM asks from 0.19 on). Takes nothing."""
        hits = [block.block_id for block in new_computed_blocks.blocks[0]] if new_computed_blocks is not None else []
        num_held = len(self._tables.get(request.request_id, ())) + len(hits)
        num_new_blocks = -(-min(request.num_tokens, self.max_model_len) // self.num_tokens_per_block) - num_held
        # Alone it is to come as far as it can: nobody's end makes more room.
        is_alone = len(self._free) == self.num_usable_blocks
        return is_alone or num_new_blocks + sum(block_id in self._free for block_id in hits) <= len(self._free)

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> Blocks | None:
        """Blocks for the next step's tokens, or None where there are not enough: then nothing has changed."""
        hits = [block.block_id for block in new_computed_blocks.blocks[0]] if new_computed_blocks is not None else []
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        num_tokens += num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        num_held = len(self._tables.get(request.request_id, ())) + len(hits)
        num_new_blocks = max(-(-num_slots // self.num_tokens_per_block) - num_held, 0)
        # A hit that nobody holds comes out of the free blocks as well.
        if num_new_blocks + sum(block_id in self._free for block_id in hits) > len(self._free):
            return None
        table = self._tables.setdefault(request.request_id, [])
        for block_id in hits:  # all hits first: what is taken after them must be none of them
            self._free.pop(block_id, None)
            self._num_holders[block_id] += 1
        new = [self._take() for _ in range(num_new_blocks)]
        table += hits + new
        if not delay_cache_blocks:
            # Drafts may be rejected: only tokens that the request has for certain are cached.
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return self._answer(new)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Put the blocks that are full with the request's first tokens into the prefix cache."""
        if not self.enable_caching:
            return
        table = self._tables[request.request_id]
        num_full = num_computed_tokens // self.num_tokens_per_block
        for position in range(self._num_published.get(request.request_id, 0), num_full):
            block_id, block_hash = table[position], request.block_hashes[position]
            if block_hash not in self._block_of:  # a second copy is not cached
                self._block_of[block_hash], self._hash_of[block_id] = block_id, block_hash
            self._num_published[request.request_id] = position + 1

    def free(self, request: Any) -> None:
        """A request ended or is preempted: its last block first, so that the head of a prefix lives longest."""
        self._num_published.pop(request.request_id, None)
        for block_id in reversed(self._tables.pop(request.request_id, [])):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                self._free[block_id] = None

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Take blocks out of the prefix cache; who holds them keeps them."""
        for block_id in block_ids:
            if (block_hash := self._hash_of.pop(block_id, None)) is not None:
                del self._block_of[block_hash]

    def reset_prefix_cache(self) -> bool:
        """Forget the whole prefix cache; False while a request holds a block."""
        if self._tables and len(self._free) < self.num_usable_blocks:
            return False
        self._block_of.clear(), self._hash_of.clear()
        if self._stats is not None:
            self._stats.reset = True
        return True

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """By group, the leading blocks that every request with blocks holds."""
        table = self._tables.get(running_request_id, [])
        held_by_all = [self._num_holders[block_id] == len(self._tables) for block_id in table]
        return [(held_by_all + [False]).index(False)]

    def get_blocks(self, request_id: str) -> Blocks:
        """The blocks of a request."""
        return self._answer(self._tables.get(request_id, []))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Their ids, by group."""
        return (list(self._tables.get(request_id, [])),)

    def make_prefix_cache_stats(self) -> Any:
        """Lookups and hits since the last call; None without statistics."""
        taken = self._stats
        if taken is not None:
            self._stats = type(taken)()
        return taken

    def new_step_starts(self) -> None:
        """Nothing here goes by steps."""

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Full attention leaves no token behind."""

    def take_events(self) -> list[Any]:
        """KV events are refused at start."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """For models whose new blocks must be zeroed: none with full attention alone."""
        return []

    def _answer(self, row: list[int]) -> Blocks:
        return Blocks([Block(block_id, self._hash_of.get(block_id)) for block_id in row])

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=self.reuse == "newest")
        self.evict_blocks({block_id})
        self._num_holders[block_id] = 1
        return block_id
