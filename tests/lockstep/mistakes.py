"""Deliberate mistakes in our modules. Each must be found by lockstep, else lockstep proves nothing about that rule.

A list, and so longer than other files. `mutation.py` says how one is applied.
"""

from __future__ import annotations

from tests.lockstep.mutation import Edit, mistake

# "Keeping the exact order": the rules that one group of full attention has. (max_model_len as the cap of computed
# tokens shows in no answer there: slots and cached tokens have caps of their own.)
ORDER = (
    mistake(
        "free gives back the last block first",
        "groups.base.AttentionGroup.free",
        "table.block_ids[::-1]",
        "table.block_ids",
    ),
    mistake(
        "only blocks that nobody holds any more become free",
        "block_pool.BlockPool.release",
        "counts[block_id] = count\n",
        "counts[block_id] = count; freed.append(block_id)\n",
    ),
    mistake(
        "freed blocks are reused in the order in which they were freed",
        "eviction.lru.LRUEviction.pop",
        "popleft = self._freed.popleft",
        "popleft = self._freed.pop",
    ),
    mistake(
        "a block that was hit and freed again goes by its last freeing",
        "eviction.lru.LRUEviction.pop",
        "if block_id not in self._num_stale:",
        "if block_id in self._num_stale and self._freed.count(block_id) or block_id not in self._num_stale:",
    ),
    mistake(
        "blocks that were never used come before freed ones",
        "eviction.lru.LRUEviction.pop",
        "first + num_blocks",
        "first + max(num_blocks - self._num_freed, 0)",
    ),
    mistake(
        "the capacity check counts hit blocks that are free",
        "groups.base.AttentionGroup.plan",
        "num_free_hit_blocks=self._pool.num_free_among(hit_block_ids)",
        "num_free_hit_blocks=0",
    ),
    mistake(
        "the capacity check does not count hit blocks in use",
        "block_pool.BlockPool.num_free_among",
        "if not counts[block_id] and",
        "if",
    ),
    mistake(
        "the last free block may be taken",
        "manager.CacheManager._serve",
        "plan.num_free_blocks_needed > self.pool.num_free_blocks",
        "plan.num_free_blocks_needed >= self.pool.num_free_blocks",
    ),
    mistake(
        "hits are held before new blocks are taken",
        "groups.base.AttentionGroup.admit",
        "self._pool.acquire(plan.hit_block_ids)",
        "pass",
        Edit(
            "groups.base.AttentionGroup.extend",
            "self._table(request_id).block_ids += block_ids",
            "self._table(request_id).block_ids += block_ids; self._pool.acquire(plan.hit_block_ids)",
        ),
    ),
    mistake(
        "a hit takes a free block out of the order",
        "block_pool.BlockPool.acquire",
        "self.free_blocks.remove(block_id)",
        "pass",
    ),
    mistake(
        "of duplicates the first inserted answers",
        "prefix_index.PrefixIndex.insert",
        "[block_id] = None",
        "[self._first[block_hash]] = None; self._first[block_hash] = block_id",
    ),
    mistake(
        "when it goes, the next oldest takes its place",
        "prefix_index.PrefixIndex.remove",
        "next(iter(others))",
        "next(reversed(others))",
    ),
    mistake(
        "a block loses its hash when it is taken again",
        "block_pool.BlockPool.take",
        "if hashes[block_id] is not None:",
        "if False:",
    ),
    mistake(
        "a freed block keeps its hash",
        "block_pool.BlockPool.release",
        "freed.append(block_id)",
        "freed.append(block_id), self.block_hashes[block_id] is not None and self._drop_hash(block_id)",
    ),
    mistake(
        "a freed block without a hash takes its place in the order",
        "block_pool.BlockPool.release",
        "self.free_blocks.push(freed)",
        "self.free_blocks.push(sorted(freed, key=lambda block_id: self.block_hashes[block_id] is not None))",
    ),
    mistake(
        "running means that there is a cached count, not that it is above zero",
        "groups.base.AttentionGroup.admit",
        "if not table.is_admitted:",
        "if not table.num_cached_blocks:",
    ),
    mistake(
        "asking for the common prefix of an unknown request makes it count",
        "groups.full_attention.FullAttentionGroup.num_common_prefix_blocks",
        "self._table(request_id).block_ids",
        "self.block_ids(request_id)",
    ),
    mistake(
        "caching stops at request.num_tokens, drafts are not cached",
        "manager.CacheManager._serve",
        "min(demand.num_tokens_after_step, request.num_tokens)",
        "demand.num_tokens_after_step",
    ),
    mistake(
        "no slots beyond max_model_len",
        "allocation.SlotDemand.num_slot_tokens",
        "min(self.num_tokens_after_step + self.num_lookahead_tokens, self.max_model_len)",
        "self.num_tokens_after_step + self.num_lookahead_tokens",
    ),
    mistake(
        "the null block is never handed out",
        "eviction.lru.LRUEviction.__init__",
        "self._next_unused = 1",
        "self._next_unused = 0",
    ),
    mistake(
        "the null block does not count in usage",
        "block_pool.BlockPool.usage",
        "num_usable_blocks = self.num_blocks - 1",
        "num_usable_blocks = self.num_blocks",
    ),
    mistake(
        "events keep the order of what happened",
        "vllm_glue.observers.EventObserver.on_evict",
        "append(BlockRemoved",
        "insert(0, BlockRemoved",
    ),
)

# At least one in each module, beside those above.
BY_MODULE = (
    mistake(
        "get_block_ids answers None only where asked to",
        "block.KVCacheBlocks.get_block_ids",
        "if allow_none and not",
        "if not",
    ),
    mistake(
        "get_unhashed_block_ids names blocks without a hash",
        "block.KVCacheBlocks.get_unhashed_block_ids",
        "block_hash is None",
        "block_hash is not None",
    ),
    mistake(
        "a block's hash carries its group",
        "block.make_key",
        "return block_hash + ",
        "return block_hash; ",
    ),
    mistake(
        "evict_blocks reaches blocks in use",
        "block_pool.BlockPool.evict",
        "if self.block_hashes[block_id] is not None:",
        "if self.block_hashes[block_id] is not None and not self.reference_counts[block_id]:",
    ),
    mistake(
        "reset is refused while blocks are held",
        "block_pool.BlockPool.reset",
        "if self.num_held_blocks:",
        "if False:",
    ),
    mistake(
        "reset takes the hash of every block",
        "block_pool.BlockPool.reset",
        "self.block_hashes = [None] * self.num_blocks",
        "pass",
    ),
    mistake(
        "a lookup stays below its limit",
        "prefix_index.PrefixIndex.match",
        "islice(block_hashes, max_num_blocks)",
        "block_hashes",
    ),
    mistake(
        "the other duplicates stay when one goes",
        "prefix_index.PrefixIndex.remove",
        "if not others:",
        "if True:",
    ),
    mistake(
        "a block that is full in part is needed too",
        "geometry.num_blocks_for",
        "-(-num_tokens // num_tokens_per_block)",
        "num_tokens // num_tokens_per_block",
    ),
    mistake(
        "a full block needs no further one",
        "geometry.num_blocks_for",
        "-(-num_tokens // num_tokens_per_block)",
        "num_tokens // num_tokens_per_block + 1",
    ),
    mistake(
        "lookahead tokens need slots",
        "allocation.SlotDemand.num_slot_tokens",
        " + self.num_lookahead_tokens",
        "",
    ),
    mistake(
        "external tokens come before the new ones",
        "allocation.SlotDemand.num_present_tokens",
        " + self.num_external_tokens",
        "",
    ),
    mistake(
        "with eagle the last hit block is computed again",
        "coordinator.Coordinator.match",
        "if self._use_eagle and block_ids:",
        "if False:",
    ),
    mistake(
        "without caching there is no common prefix",
        "coordinator.Coordinator.num_common_prefix_blocks",
        "if not self._enable_caching:",
        "if False:",
    ),
    mistake(
        "the last token of a prompt is always computed",
        "manager.CacheManager.get_computed_blocks",
        "request.num_tokens - 1",
        "request.num_tokens",
    ),
    mistake(
        "a request may ask not to read the cache",
        "manager.CacheManager.get_computed_blocks",
        " or request.skip_reading_prefix_cache",
        "",
    ),
    mistake(
        "delayed caching is not done at once",
        "manager.CacheManager.allocate_slots",
        "self.enable_caching and not delay_cache_blocks",
        "self.enable_caching",
    ),
    mistake(
        "the decode shortcut counts lookahead tokens",
        "manager.CacheManager.allocate_slots",
        "num_new_tokens + num_lookahead_tokens\n",
        "num_new_tokens\n",
    ),
    mistake(
        "the decode shortcut's limit goes when a request is freed",
        "manager.CacheManager.free",
        "self._quiet_limits_tokens.pop(request.request_id, None)",
        "pass",
    ),
    mistake(
        "cache_blocks caches a block as soon as it is full",
        "manager.CacheManager.cache_blocks",
        "num_computed_tokens <= limit)",
        "num_computed_tokens <= limit + 1)",
    ),
    mistake(
        "'no blocks' is the shared answer",
        "manager.CacheManager._answer",
        " if any(block_ids) else self.empty_kv_cache_blocks",
        "",
    ),
    mistake(
        "the decode shortcut stops where a block becomes full",
        "groups.base.AttentionGroup.quiet_limit_tokens",
        "* num_tokens_per_block - 1",
        "* num_tokens_per_block",
    ),
    mistake(
        "the decode shortcut stops at the last slot",
        "groups.base.AttentionGroup.quiet_limit_tokens",
        "len(table.block_ids) * num_tokens_per_block",
        "len(table.block_ids) * num_tokens_per_block + 1",
    ),
    mistake(
        "blocks for external tokens are not answered as new",
        "groups.base.AttentionGroup.extend",
        "block_ids[plan.num_external_blocks :] if plan.num_external_blocks else block_ids",
        "block_ids",
    ),
    mistake(
        "hits are cached already",
        "groups.base.AttentionGroup.admit",
        "table.num_cached_blocks = len(table.block_ids)",
        "table.num_cached_blocks = 0",
    ),
    mistake(
        "a lookup's answer comes before the first block",
        "groups.base.AttentionGroup.plan",
        "if is_admission and num_held_blocks and not is_admitted:",
        "if False:",
    ),
    mistake(
        "only whole blocks hit",
        "groups.full_attention.FullAttentionGroup.match",
        "max_num_tokens // self.num_tokens_per_block",
        "-(-max_num_tokens // self.num_tokens_per_block)",
    ),
    mistake(
        "a block in the common prefix is held by all requests",
        "groups.full_attention.FullAttentionGroup.num_common_prefix_blocks",
        "!= num_requests",
        "< min(2, num_requests)",
    ),
    mistake(
        "every observer is told",
        "observers.ObserverSet.__init__",
        "for o in observers if",
        "for o in observers[:1] if",
    ),
    mistake(
        "MLA blocks are not reported for zeroing",
        "vllm_glue.manager.geometry_of",
        "reports_new_blocks=kind is AttentionKind.FULL",
        "reports_new_blocks=True",
    ),
    mistake(
        "statistics are answered once",
        "vllm_glue.manager.KVCacheManager.make_prefix_cache_stats",
        "self._stats.take()",
        "self._stats.stats",
    ),
    mistake(
        "events are answered once",
        "vllm_glue.manager.KVCacheManager.take_events",
        "self._events.take()",
        "list(self._events.events)",
    ),
    mistake(
        "BlockStored names the block before its first as the parent",
        "vllm_glue.observers.EventObserver.on_cache",
        "request.block_hashes[first_block - 1]",
        "request.block_hashes[first_block]",
    ),
    mistake(
        "BlockStored carries the tokens of its blocks alone",
        "vllm_glue.observers.EventObserver.on_cache",
        "first_block * num_tokens_per_block :",
        "0 :",
    ),
    mistake(
        "BlockStored carries the extra keys",
        "vllm_glue.observers.EventObserver.on_cache",
        "extra_keys=extra_keys or None",
        "extra_keys=None",
    ),
    mistake(
        "BlockStored carries the LoRA's id",
        "vllm_glue.observers.EventObserver.on_cache",
        "None if lora is None else lora.adapter_id",
        "None",
    ),
    mistake(
        "preempted requests have statistics of their own",
        "vllm_glue.observers.StatsObserver.on_lookup",
        "request.num_preemptions > 0",
        "False",
    ),
    mistake(
        "statistics tell of a reset",
        "vllm_glue.observers.StatsObserver.on_reset",
        ".reset = True",
        ".reset = False",
    ),
)

MISTAKES = ORDER + BY_MODULE
