"""Deliberate mistakes in our modules. Each must be found by lockstep, else lockstep proves nothing about that rule.

These are about what all groups share; `mistakes_groups.py` has those about one kind of group, and about several groups
together. A list, and so longer than other files. `mutation.py` says how one is applied.
"""

from __future__ import annotations

from tests.lockstep.mistakes_groups import BY_GROUP
from tests.lockstep.mistakes_runs import BY_RUN
from tests.lockstep.mutation import FIRST_BLOCK_FIRST, Edit, mistake

# "Keeping the exact order": the rules that one group of full attention has. (There max_model_len as the cap of computed
# tokens shows in no answer there: slots and cached tokens have caps of their own.)
ORDER = (
    mistake(
        "free gives back the last block first",
        "groups.base.AttentionGroup.free",
        "self._pool.release(take_all(self.group_id, table))",
        "runs = take_all(self.group_id, table)\n        " + FIRST_BLOCK_FIRST.replace("\n", "\n        "),
    ),
    mistake(
        "only blocks that nobody holds any more become free",
        "block_pool.BlockPool.release",
        "if run.num_holders <= 0:",
        "if True:",
    ),
    mistake(
        "freed blocks are reused in the order in which they were freed",
        "eviction.lru.LRUEviction.push",
        "self._places.append(run.place)",
        "self._places.appendleft(run.place)",
    ),
    mistake(
        "a block that was hit and freed again goes by its last freeing",
        "eviction.lru.LRUEviction.push",
        "run.place = [run]\n",
        "if any(run.place is place for place in self._places):\n"
        "            self._num_empty -= not run.place\n"
        "            run.place.append(run)\n"
        "            continue\n"
        "        run.place = [run]\n",
        Edit("eviction.lru.LRUEviction.remove", "place, run.place = run.place, None", "place = run.place"),
    ),
    mistake(
        "blocks that were never used come before freed ones",
        "block_pool.BlockPool._take_several",
        "if first < self.num_blocks:",
        "if first < self.num_blocks and num_blocks > sum(len(run.block_ids) for run in self.free_runs()):",
    ),
    mistake(
        "a block that was never used comes before a freed one, if a single one is taken",
        "block_pool.BlockPool.take",
        "if end <= self.num_blocks and",
        "if end <= self.num_blocks and not (num_blocks == 1 and any(run.block_ids for run in self.policy)) and",
    ),
    mistake(
        "the capacity check counts hit blocks that are free",
        "groups.base.AttentionGroup._plan_prefix",
        "num_free_hit_blocks=num_free_among(hit_parts)",
        "num_free_hit_blocks=0",
    ),
    mistake(
        "the capacity check does not count hit blocks in use",
        "groups.base.num_free_among",
        " if not part.run.num_holders",
        "",
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
        "table.holds.append(Hold(position, acquire(run, offset, num_blocks), num_blocks))",
        "pass",
        Edit(
            "groups.base.AttentionGroup.take_new",
            "return self._take(self._table(request_id), plan.num_new_blocks)",
            "new = self._take(self._table(request_id), plan.num_new_blocks)\n"
            "    self._table(request_id).holds += "
            "[Hold(part[0], self._pool.acquire(*part[1:]), part[3]) for part in plan.hit_parts]\n"
            "    return new",
        ),
    ).tried_where(lambda setup: not setup.aligned_block_tokens),
    mistake(
        "a hit takes a free block out of the order",
        "block_pool.BlockPool.acquire",
        "self.policy.remove(run)",
        "pass",
    ),
    mistake(
        "of duplicates the first inserted answers",
        "prefix_index.PrefixIndex._insert",
        "self.set_aside(block_hash, run)",
        "self.set_aside(block_hash, first[block_hash]); first[block_hash] = run",
    ),
    mistake(
        "when it goes, the next oldest takes its place",
        "prefix_index.PrefixIndex.remove_one",
        "next(iter(others))",
        "next(reversed(others))",
    ),
    mistake(
        "a block loses its hash when it is taken again",
        "block_pool.BlockPool._eat",
        "if num_left < len(run.block_hashes):",
        "if False:",
    ),
    mistake(
        "a block loses its hash when it alone is taken again",
        "block_pool.BlockPool._take_cached",
        "if len(run.block_hashes) > len(run.block_ids):",
        "if False:",
    ),
    mistake(
        "a freed block keeps its hash",
        "block_pool.BlockPool.release",
        "run.grower = run.rest = None",
        "run.grower = run.rest = None; self.uncache(run, 0, len(run.block_ids))",
    ),
    mistake(
        "a freed block without a hash takes its place in the order",
        "block_pool.BlockPool.release",
        "self.policy.push(freed)\n",
        "self.policy.push(freed)\n"
        "        for run in freed:\n"
        "            if len(run.block_hashes) < len(run.block_ids):\n"
        "                rest = self.split(run, len(run.block_hashes)) if run.block_hashes else run\n"
        "                self.policy.remove(rest)\n"
        "                self.policy.push([rest])\n",
    ),
    mistake(
        "running means that there is a cached count, not that it is above zero",
        "groups.base.AttentionGroup.check_admission",
        "not table.is_admitted:",
        "not table.num_cached_blocks:",
        Edit("groups.base.AttentionGroup._plan_prefix", "table.is_admitted:", "table.num_cached_blocks:"),
        Edit("groups.base.AttentionGroup.admit", "if table.is_admitted:", "if table.num_cached_blocks:"),
    ),
    mistake(
        "asking for the common prefix of an unknown request makes it count",
        "groups.full_attention.FullAttentionGroup.num_common_prefix_blocks",
        "table = self._table(request_id)",
        "table = self.tables.get(request_id) or self._table_class()",
    ),
    mistake(
        "caching stops at request.num_tokens, drafts are not cached",
        "manager.CacheManager.allocate_slots",
        "min(demand.num_tokens_after_step, request.num_tokens)",
        "demand.num_tokens_after_step",
    ),
    mistake(
        "no slots beyond max_model_len",
        "allocation.SlotDemand.__init__",
        "min(self.num_tokens_after_step + num_lookahead_tokens, max_model_len)",
        "self.num_tokens_after_step + num_lookahead_tokens",
    ),
    mistake(
        "the null block is never handed out",
        "block_pool.BlockPool.__init__",
        "self._next_unused = num_reserved_blocks",
        "self._next_unused = num_reserved_blocks - 1",
    ),
    mistake(
        "the null block does not count in usage",
        "block_pool.BlockPool.usage",
        "num_usable_blocks = self.num_usable_blocks",
        "num_usable_blocks = self.num_usable_blocks + 1",
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
        "block_pool.BlockPool.uncache",
        "if offset >= end:",
        "if offset >= end or run.num_holders:",
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
        "run.block_hashes.clear()",
        "pass",
    ),
    mistake(
        "a lookup stays below its limit",
        "prefix_index.PrefixIndex.match",
        "min(max_num_blocks, len(block_hashes))",
        "len(block_hashes)",
    ),
    mistake(
        "the other duplicates stay when one goes",
        "prefix_index.PrefixIndex.remove_one",
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
        "allocation.SlotDemand.__init__",
        " + num_lookahead_tokens",
        "",
    ),
    mistake(
        "external tokens come before the new ones",
        "allocation.SlotDemand.__init__",
        " + num_external_tokens",
        "",
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
        "num_tokens - 1)",
        "num_tokens)",
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
        "if not self.enable_caching or delay_cache_blocks:",
        "if not self.enable_caching:",
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
        "self._quiet_limits_tokens.pop(request_id, None)",
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
        "* self.num_tokens_per_block - 1",
        "* self.num_tokens_per_block",
    ),
    mistake(
        "the decode shortcut stops at the last slot",
        "groups.base.AttentionGroup._capacity_tokens",
        "len(table.block_ids) * self.num_tokens_per_block",
        "len(table.block_ids) * self.num_tokens_per_block + 1",
    ),
    mistake(
        "blocks for external tokens are not answered as new",
        "groups.base.AttentionGroup.take_new",
        "return self._take(self._table(request_id), plan.num_new_blocks)",
        "table = self._table(request_id); num_known_blocks = len(table.block_ids) - plan.num_external_blocks; "
        "self._take(table, plan.num_new_blocks); return table.block_ids[num_known_blocks:]",
    ),
    mistake(
        "hits are cached already",
        "groups.base.AttentionGroup.admit",
        "table.num_cached_blocks = plan.num_null_blocks + plan.num_hit_blocks",
        "table.num_cached_blocks = 0",
    ),
    mistake(
        "a lookup's answer comes before the first block",
        "groups.base.AttentionGroup.check_admission",
        "if is_admission and num_held_blocks and not table.is_admitted:",
        "if False:",
    ).tried_where(lambda setup: len(setup.groups) == 1 and setup.groups[0].is_full),
    mistake(
        "only whole blocks hit",
        "coordinator.Coordinator._max_hit_tokens",
        "max_num_tokens // group.num_tokens_per_block",
        "-(-max_num_tokens // group.num_tokens_per_block)",
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
        "vllm_glue.geometry.group_geometry_of",
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
        "block_hashes[first_block - 1]",
        "block_hashes[first_block]",
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
        "vllm_glue.observers.StatsObserver.on_admit",
        "request.num_preemptions > 0",
        "False",
    ),
    mistake(
        "statistics tell of a reset",
        "vllm_glue.observers.StatsObserver.on_reset",
        ".reset = True",
        ".reset = False",
    ),
    # Where 0.17.1 is wrong (faults.md)
    mistake(
        "statistics count a lookup when it is admitted (F10)",
        "manager.CacheManager.get_computed_blocks",
        "self._lookups[request.request_id] = _Lookup(asked, blocks, num_hit_tokens)",
        "[notify(request, num_hit_tokens) for notify in self._observers.on_admit]",
    ),
    mistake(
        "statistics forget a lookup whose request goes (F10)",
        "manager.CacheManager.free",
        "self._lookups.pop(request_id, None)",
        "self._note_admission(request)",
    ),
    mistake(
        "BlockRemoved is sent with the last copy only (F13)",
        "vllm_glue.observers.EventObserver.on_evict",
        "if is_last_copy:",
        "if True:",
    ),
    mistake(
        "BlockRemoved is sent with the last copy (F13)",
        "prefix_index.PrefixIndex.remove_one",
        "return False",
        "return True",
    ),
    mistake(
        "a new block is named once (F14)",
        "groups.base.AttentionGroup.take_unreported_block_ids",
        "self._unreported_rows, [], 0",
        "self._unreported_rows, self._unreported_rows, 0",
    ),
    mistake(
        "a new block is named once over all groups (F14)",
        "coordinator.Coordinator.take_unreported_block_ids",
        "list(dict.fromkeys(taken))",
        "list(taken)",
    ),
    mistake(
        "an adapter's key has its path (F5)",
        "hashing._adapter_keys",
        '((texts["lora"], name, path),)',
        "(name,)",
    ),
    mistake(
        "an image is in the keys of the blocks that it overlaps (F4)",
        "hashing._Images.of",
        "start + max(min_length, feature.mm_position.length)",
        "start + 1 + feature.mm_position.length",
    ),
)

# F15: what evict_blocks does to who holds a block that it names.
FAILED_LOADS = tuple(
    one.tried_where(lambda setup: setup.evicts_held and setup.enable_caching)
    for one in (
        mistake(
            "who holds a failed block publishes nothing more (F15)",
            "manager.CacheManager.evict_blocks",
            "self._coordinator.stop_publishing(block_ids)",
            "pass",
        ),
        mistake(
            "what was published after a failed block leaves the index (F15)",
            "groups.base.AttentionGroup.stop_publishing",
            "self._pool.uncache(run, max(first_bad - position, 0), num_blocks)",
            "pass",
        ),
        mistake(
            "nothing is published from the failed block on (F15)",
            "groups.base.AttentionGroup._cache_up_to",
            "if table.first_unpublished is not None:",
            "if False:",
        ),
        mistake(
            "the blocks before a failed one may be published (F15)",
            "groups.base.AttentionGroup._cache_up_to",
            "end_block = min(end_block, table.first_unpublished)",
            "end_block = first_block",
        ),
        mistake(
            "of two failed blocks the first counts (F15)",
            "groups.base.AttentionGroup.stop_publishing",
            "if table.first_unpublished is None or first_bad < table.first_unpublished:",
            "if table.first_unpublished is None:",
        ),
        mistake(
            "blocks that nobody can hit any more are reused first (F15)",
            "groups.base.AttentionGroup.free",
            ", is_worthless=True",
            "",
        ),
        mistake(
            "blocks before a failed one are not reused first (F15)",
            "groups.base.AttentionGroup.free",
            "table, 0, min(end, first_bad)))",
            "table, 0, min(end, first_bad)), is_worthless=True)",
        ),
        mistake(
            "worthless blocks are handed out before all others (F15)",
            "block_pool.BlockPool._take_several",
            "while worthless and len(block_ids) < num_blocks:",
            "while worthless and self.num_free_blocks - sum(len(run.block_ids) for run in worthless) < num_blocks:",
        ),
        mistake(
            "a worthless block is handed out before all others, if a single one is taken (F15)",
            "block_pool.BlockPool.take",
            "if num_blocks == 1 and not self._worthless:",
            "if num_blocks == 1 and self.num_free_blocks > sum(len(run.block_ids) for run in self._worthless):",
        ),
        mistake(
            "worthless blocks keep the order in which they were freed (F15)",
            "block_pool.BlockPool.release",
            "self._worthless.extendleft(reversed(freed))",
            "self._worthless.extendleft(freed)",
        ),
    )
)

MISTAKES = (*ORDER, *BY_MODULE, *FAILED_LOADS, *BY_GROUP, *BY_RUN)
