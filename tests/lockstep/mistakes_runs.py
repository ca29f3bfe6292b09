"""Deliberate mistakes about runs of blocks, and about the short ways of requests without hits; see `mistakes.py`.

A list, and so longer than other files.
"""

from __future__ import annotations

from tests.lockstep.mistakes_groups import has, tried_in
from tests.lockstep.mutation import Edit, mistake
from tests.lockstep.trace import Setup


def _is_alone(setup: Setup) -> bool:
    return len(setup.groups) == 1 and setup.groups[0].is_full


# Splitting runs, and holding parts of them.
_SPLITS = tried_in(
    has(caching=True),
    mistake(
        "a split moves the tail's hashes to the new run",
        "block_pool.BlockPool.split",
        "self._move(rest.block_hashes, run, rest)",
        "self._changed()",
    ),
    mistake(
        "a hash that a split moves keeps its place among the duplicates",
        "prefix_index.PrefixIndex.move",
        "{to_run if other is run else other: None for other in others}",
        "{**{other: None for other in others if other is not run}, to_run: None}",
    ),
    mistake(
        "what a split run answers for, its rest answers for",
        "prefix_index.PrefixIndex.move",
        "elif runs[block_hash] is run:",
        "elif block_hash not in duplicates:",
    ),
    mistake(
        "a split run's rest is held as often",
        "block_pool.BlockPool.split",
        "run.first_position + num_blocks, run.num_holders)",
        "run.first_position + num_blocks, min(run.num_holders, 1))",
    ),
    mistake(
        "a split run's rest is held, if the run is",
        "block_pool.BlockPool.split",
        "self.held_runs[rest] = None",
        "pass",
    ),
    mistake(
        "a holder of a run that was split twice finds all its parts in order",
        "block_pool.BlockPool.split",
        "rest.rest, run.rest = run.rest, rest",
        "run.rest = rest",
    ),
    mistake(
        "the rest of a free run is reused before its head",
        "eviction.lru.LRUEviction.split",
        "place.insert(place.index(run), rest)",
        "place.append(rest)",
    ),
    mistake(
        "the rest of a free run keeps its place in the order",
        "eviction.lru.LRUEviction.split",
        "place.insert(place.index(run), rest)",
        "rest.place = [rest]; self._places.append(rest.place)",
    ),
    mistake(
        "a run that is hit leaves its place to the others there",
        "eviction.lru.LRUEviction.remove",
        "place.remove(run)",
        "place.clear()",
    ),
    mistake(
        "a hit that ends inside a run takes no more",
        "block_pool.BlockPool.acquire",
        "if num_blocks < len(run.block_ids):",
        "if False:",
    ),
    mistake(
        "a hit from inside a run takes nothing before it",
        "block_pool.BlockPool.acquire",
        "if offset:",
        "if False:",
    ),
    mistake(
        "a hit of two parts of a run finds the second behind the split",
        "block_pool.BlockPool.acquire",
        "run = run.rest\n",
        "pass\n",
    ),
    mistake(
        "a free run is held as of its first hit",
        "block_pool.BlockPool.acquire",
        "self.held_runs[run] = None",
        "pass",
    ),
    mistake(
        "a hit takes all its blocks from the free ones",
        "block_pool.BlockPool.acquire",
        "self.num_free_blocks -= num_blocks",
        "self.num_free_blocks -= 1",
    ),
    mistake(
        "a split run goes back last part first",
        "groups.holding.take_all",
        "hold.pieces()][::-1]",
        "hold.pieces()]",
    ),
    mistake(
        "of a cut hit the last part is cut",
        "block_run.Hit.up_to",
        "else part._replace(num_blocks=num_blocks - part.position)",
        "else part",
    ),
    mistake(
        "a cut hit has no parts behind its end",
        "block_run.Hit.up_to",
        "if part.position < num_blocks",
        "if part.position <= num_blocks",
    ),
)

# Growing runs.
_GROWTH = tried_in(
    has(caching=True),
    mistake(
        "a run that another holds does not grow",
        "groups.table.BlockTable.hold_to_grow",
        "run.num_holders != 1 or ",
        "",
    ),
    mistake(
        "a run that has grown is longer for its holder, too",
        "groups.base.AttentionGroup._publish_run",
        "hold.num_blocks += end - first",
        "pass",
    ),
    mistake(
        "of duplicates the first inserted answers, if a single one is cached",
        "block_pool.BlockPool.cache_one_more",
        "index.add_more(run, (block_hash,))",
        "other = index.runs.pop(block_hash, None); index.add_more(run, (block_hash,)); "
        "other and other is not run and index.set_aside(block_hash, other)",
    ),
    mistake(
        "loose blocks go back before the run that they follow",
        "groups.base.AttentionGroup.free",
        "self._pool.release(take_all(self.group_id, table))",
        "self._pool.release(sorted(take_all(self.group_id, table), key=lambda run: not run.block_hashes))",
        Edit("groups.holding.take_all", "if is_whole and run.num_holders == 1 and", "if False and"),
    ),
    mistake(
        "loose blocks join no run that others hold",
        "groups.holding.take_all",
        "run.num_holders == 1 and ",
        "",
    ),
    mistake(
        "loose blocks join no run that is not the last part",
        "groups.holding.take_all",
        "if is_whole and run.num_holders == 1 and",
        "if run.num_holders == 1 and",
    ),
)

# A run grows by the shortest way where it is full attention's, and nobody is told of what is cached.
_SHORTEST = tried_in(
    lambda setup: _is_alone(setup) and setup.enable_caching and not setup.enable_kv_cache_events,
    mistake(
        "a run that another holds does not grow by the shortest way",
        "block_pool.BlockPool.acquire",
        "run.grower = None",
        "pass",
    ),
    mistake(
        "a run that has grown by the shortest way is longer for its holder, too",
        "groups.base.AttentionGroup.grow_alone",
        "hold.num_blocks += 1",
        "pass",
    ),
    mistake(
        "the shortest way caches one block",
        "groups.base.AttentionGroup.grow_alone",
        "num_full_blocks == num_cached_blocks + 1:",
        "True:",
    ),
    mistake(
        "the shortest way counts what it has cached",
        "groups.base.AttentionGroup.grow_alone",
        "table.num_cached_blocks = num_full_blocks\n",
        "pass\n",
    ),
)

# Runs with holes, or for whose hashes another answers.
_NOT_INTACT = tried_in(
    has(caching=True),
    mistake(
        "a run with a hole is looked at block by block",
        "block_pool.BlockPool.uncache",
        "run.is_intact = False",
        "pass",
    ),
    mistake(
        "a run for a hash of which another answers is looked at block by block",
        "prefix_index.PrefixIndex.set_aside",
        "run.is_intact = False",
        "pass",
    ),
    mistake(
        "the rest of a run that is not intact is not, either",
        "block_pool.BlockPool._move",
        "to_run.is_intact = ",
        "",
    ),
    mistake(
        "in a run that is not intact another may answer for a block",
        "prefix_index.PrefixIndex._num_agreeing",
        " or get(block_hash) is not run",
        "",
    ),
    mistake(
        "a lookup inside a run ends where the prompts part",
        "prefix_index.PrefixIndex._num_agreeing",
        "if hashes[offset + num_blocks - 1] == block_hashes[position + num_blocks - 1]:",
        "if True:",
    ),
    mistake(
        "a lookup goes on behind a run's end",
        "prefix_index.PrefixIndex.match",
        "position += num_blocks",
        "break",
    ),
    mistake(
        "a lookup stays below its limit inside a run",
        "prefix_index.PrefixIndex.match",
        "min(len(run.block_hashes) - offset, end - position)",
        "len(run.block_hashes) - offset",
    ),
    mistake(
        "evicting from a run's end drops just these hashes",
        "block_pool.BlockPool._uncache_end",
        "if num_left:",
        "num_left = max(num_left - 1, 0)\n    if num_left:",
    ),
    mistake(
        "evicting from the end of a run with holes passes these over",
        "block_pool.BlockPool._uncache_end",
        "if block_hash is not None:",
        "if True:",
    ),
    mistake(
        "evicting from the end of a run that is not intact leaves the others' hashes",
        "prefix_index.PrefixIndex.remove_end",
        "run.is_intact and (",
        "(",
        Edit("block_pool.BlockPool._uncache_end", "(run.is_intact and not observers)", "not observers"),
    ),
    mistake(
        "evicting from a run's end leaves the duplicates' hashes",
        "prefix_index.PrefixIndex.remove_end",
        "self._duplicates.keys().isdisjoint(block_hashes)",
        "True",
    ),
    mistake(
        "events name the blocks of a run's end from the last on",
        "block_pool.BlockPool._uncache_end",
        "block_hashes.reverse()",
        "block_ids = block_ids[::-1]",
    ),
    mistake(
        "taking several blocks off a run's end names the last first",
        "block_pool.BlockPool._eat",
        "block_ids.reverse()",
        "pass",
    ),
    mistake(
        "a run is eaten only as far as blocks are needed",
        "block_pool.BlockPool._eat",
        "len(run.block_ids) - max_num_blocks",
        "len(run.block_ids) - max_num_blocks - 1",
    ),
    mistake(
        "only the hashes of the named blocks leave a run",
        "block_pool.BlockPool.uncache",
        "min(offset + num_blocks, len(run.block_hashes))",
        "len(run.block_hashes)",
    ),
)

# Runs that are in the index by their first hash alone.
_BY_HEAD = tried_in(
    lambda setup: setup.enable_caching and any(group.is_full for group in setup.groups),
    mistake(
        "a new run that has a hash of another is indexed in full",
        "prefix_index.PrefixIndex.add",
        "self.runs.keys().isdisjoint(block_hashes)",
        "block_hashes[0] not in self.runs",
    ),
    mistake(
        "a run that has a hash of a new one is indexed in full",
        "prefix_index.PrefixIndex._insert",
        "self.index_in_full(other)",
        "pass",
    ),
    mistake(
        "a run that comes to a hash of another is indexed in full",
        "block_pool.BlockPool.cache_one_more",
        " or block_hash in index.runs",
        "",
    ),
    mistake(
        "a run that has come to a hash of another has all its hashes in the index",
        "prefix_index.PrefixIndex.add_more",
        "self.index_in_full(run)",
        "run.indexed_by_head = False",
    ),
    mistake(
        "what is split off a run indexed by head is found by its own",
        "prefix_index.PrefixIndex.move",
        "for part in (run, to_run):",
        "for part in (run,):",
    ),
    mistake(
        "what is split off a run indexed by head is indexed so",
        "prefix_index.PrefixIndex.move",
        "to_run.indexed_by_head = True",
        "pass",
    ),
    mistake(
        "the head leaves the index with the run's last block",
        "prefix_index.PrefixIndex.remove_end",
        "if not run.block_hashes:",
        "if False:",
    ),
    mistake(
        "the head stays in the index as long as the run",
        "prefix_index.PrefixIndex.remove_end",
        "if not run.block_hashes:\n            del self.runs[block_hashes[0]]",
        "self.runs.pop((run.block_hashes or block_hashes)[0], None)",
    ),
    mistake(
        "a block is evicted from a run with all its hashes in the index",
        "block_pool.BlockPool.uncache",
        "index_of_run.index_in_full(run)",
        "pass",
    ),
    mistake(
        "where a window may begin anywhere every hash is in the index",
        "block_pool.BlockPool.__init__",
        "by_head=group_id in groups_by_head",
        "by_head=True",
    ),
)

# Windows, which leave parts of runs behind and are hit from inside of runs.
_WINDOWS = (
    *tried_in(
        has("sliding", "chunked", caching=True),
        mistake(
            "what a window leaves takes its hashes along",
            "block_pool.BlockPool.cut_head",
            "self._move(head.block_hashes, run, head)",
            "self._changed()",
        ),
        mistake(
            "what a window leaves of a run that is not intact is not, either",
            "block_pool.BlockPool._move",
            "to_run.is_intact = ",
            "",
        ),
        mistake(
            "a window leaves its part of a run that others hold, too",
            "groups.holding._take_part",
            "if run.num_holders == 1:",
            "if True:",
        ),
        mistake(
            "what a window has not left of a run stays",
            "groups.holding._take_part",
            "staying_behind.append(Hold(end, run, run_end - end))",
            "pass",
        ),
        mistake(
            "a run that a window leaves goes back last part first",
            "groups.holding._take_part",
            "runs += reversed(going)",
            "runs += going",
        ),
        mistake(
            "runs that a window leaves go back the last first",
            "groups.base.AttentionGroup._release_leading",
            "self._pool.release(released)",
            "self._pool.release(released[::-1])",
        ),
        mistake(
            "holds that a window has not reached keep their order",
            "groups.holding.take_out",
            "holds.extend(reversed(behind))",
            "holds.extend(behind)",
        ),
    ),
    *tried_in(
        lambda setup: has("sliding", "chunked", caching=True)(setup) and setup.has_connector,
        mistake(
            "a hit whose head a window has left begins inside a run",
            "block_run.Hit.parts_from",
            "part.offset + num_before",
            "part.offset",
        ),
        mistake(
            "a hit whose head a window has left has fewer blocks",
            "block_run.Hit.parts_from",
            "part.num_blocks - num_before)",
            "part.num_blocks)",
        ),
    ),
    *tried_in(
        has("sliding", caching=True),
        mistake(
            "after a missing first block the search for a window goes on right before it",
            "groups.sliding_window.SlidingWindowGroup.match",
            "missing = first\n",
            "missing = max(first - 1, 0)\n",
        ),
        mistake(
            "a window's hit may lie in several runs",
            "prefix_index.PrefixIndex.match_back",
            "end -= num_blocks",
            "break",
        ),
        mistake(
            "in runs that are not intact a window's blocks are looked at one by one",
            "prefix_index.PrefixIndex.match_back",
            "if not run.is_intact:",
            "if False:",
        ),
        mistake(
            "a window's hit begins with its first block",
            "prefix_index.PrefixIndex.match_back",
            "min(offset + 1, end - first_position)",
            "offset + 1",
        ),
        mistake(
            "a window's hit in several runs has them in order",
            "groups.sliding_window.SlidingWindowGroup.match",
            "parts[::-1]",
            "parts",
        ),
    ),
)

# Answers of lookups that are remembered, or come back late.
_REMEMBERED = tried_in(
    has(caching=True),
    mistake(
        "an answer that came before a change is looked at anew",
        "block.FoundBlocks.hits_in",
        "self._version == pool.version and ",
        "",
    ),
    mistake(
        "all blocks of an old answer are found again",
        "block_states.find_hit",
        "parts[-1] = last._replace(num_blocks=last.num_blocks + 1)",
        "pass",
    ),
    mistake(
        "a remembered lookup is of this pool's present version",
        "manager.CacheManager.get_computed_blocks",
        "(pool.version, num_tokens,",
        "(0, num_tokens,",
    ),
    mistake(
        "a remembered lookup is of as many tokens",
        "manager.CacheManager.get_computed_blocks",
        "(pool.version, num_tokens,",
        "(pool.version, 0,",
    ),
    mistake(
        "caching changes what lookups find",
        "block_pool.BlockPool.cache",
        "self._changed()",
        "self._places = None",
    ),
    mistake(
        "caching more of a run changes what lookups find",
        "block_pool.BlockPool.cache_more",
        "self._changed()",
        "self._places = None",
    ),
    mistake(
        "caching one more block of a run changes what lookups find",
        "block_pool.BlockPool.cache_one_more",
        "self.version += 1",
        "pass",
    ),
    mistake(
        "reusing cached blocks changes what lookups find",
        "block_pool.BlockPool._uncache_end",
        "self.version += 1",
        "pass",
    ),
    mistake(
        "evicting on request changes what lookups find",
        "block_pool.BlockPool.uncache",
        "self._changed()",
        "self._places = None",
    ),
    mistake(
        "a reset changes what lookups find",
        "block_pool.BlockPool.reset",
        "self._changed()",
        "self._places = None",
    ),
    mistake(
        "where a block is, is known anew after a change",
        "block_pool.BlockPool._changed",
        "self._places = None",
        "pass",
    ),
    mistake(
        "where a block is, is known anew after one was taken",
        "block_pool.BlockPool._take_cached",
        "self._places = None",
        "pass",
    ),
    mistake(
        "where a block is, is known anew after several were taken",
        "block_pool.BlockPool._eat",
        "self._places = None",
        "pass",
    ),
    mistake(
        "where a block is, is known anew after one was cached",
        "block_pool.BlockPool.cache_one_more",
        "self._places = None",
        "pass",
    ),
    mistake(
        "a request's loose blocks have no hash",
        "groups.table.BlockTable.unhashed_block_ids",
        "return unhashed + self.block_ids[position:]",
        "return unhashed",
    ),
)

# Where blocks are remembered whether caching is on or off.
_EVERYWHERE = (
    mistake(
        "where a block is, is known anew after loose ones were given back",
        "block_pool.BlockPool.release",
        "self._places = None",
        "pass",
    ),
    mistake(
        "new blocks that nobody asks for are not forgotten",
        "groups.base.AttentionGroup._take",
        "self._unreported_rows = [self.take_unreported_block_ids()]",
        "self._unreported_rows = []; self.take_unreported_block_ids()",
    ),
    mistake(
        "a request without others shares all its blocks",
        "groups.full_attention.FullAttentionGroup.num_common_prefix_blocks",
        "if num_requests == 1:",
        "if False:",
    ),
)

# The short way of a group that is alone and has no window.
_ALONE = tried_in(
    _is_alone,
    mistake(
        "the short way counts free blocks",
        "groups.base.AttentionGroup.grow_alone",
        "if num_missing > self._pool.num_free_blocks:",
        "if False:",
    ),
    mistake(
        "the short way caches no drafts",
        "groups.base.AttentionGroup.grow_alone",
        "(\n            num_tokens_after_step if num_tokens_after_step < num_tokens else num_tokens\n        )"
        " // num_tokens_per_block\n"
        "        if len(request.block_hashes) < num_full_blocks * self.num_hashes_per_block:\n"
        "            return None\n",
        "num_tokens_after_step // num_tokens_per_block\n",
    ),
    mistake(
        "the short way counts lookahead tokens",
        "manager.CacheManager.allocate_slots",
        "grow(request, num_tokens, num_tokens - num_lookahead_tokens)",
        "grow(request, num_tokens - num_lookahead_tokens, num_tokens - num_lookahead_tokens)",
    ),
    mistake(
        "the short way caches nothing for lookahead tokens",
        "manager.CacheManager.allocate_slots",
        "grow(request, num_tokens, num_tokens - num_lookahead_tokens)",
        "grow(request, num_tokens, num_tokens)",
    ),
    mistake(
        "the short way gives no slots beyond max_model_len",
        "manager.CacheManager.allocate_slots",
        "is_plain and num_tokens <= self.max_model_len",
        "is_plain",
    ),
    mistake(
        "the short way caches nothing while caching is off",
        "groups.base.AttentionGroup.grow_alone",
        " if self._caches else NO_LIMIT",
        "",
    ),
    mistake(
        "the short way caches what is full",
        "groups.base.AttentionGroup.grow_alone",
        "if self._caches else NO_LIMIT",
        "if False else NO_LIMIT",
    ),
    mistake(
        "the short way's limit stops where a block becomes full",
        "groups.base.AttentionGroup.grow_alone",
        "limit if limit < next_full else next_full - 1",
        "limit",
    ),
    mistake(
        "the short way's limit stops at the last slot",
        "groups.base.AttentionGroup.grow_alone",
        "limit += num_missing * num_tokens_per_block",
        "limit += num_missing * num_tokens_per_block + 1",
    ),
    mistake(
        "the short way's limit is noted",
        "manager.CacheManager.allocate_slots",
        "rows, self._quiet_limits_tokens[request.request_id] = grown",
        "rows, limit = grown; "
        "self._quiet_limits_tokens[request.request_id] = self._quiet_limits_tokens.get(request.request_id, 0) + limit",
    ),
    mistake(
        "the short way counts an admission (F10)",
        "manager.CacheManager.allocate_slots",
        "self._note_admission(request)",
        "pass",
    ),
    mistake(
        "the short way remembers a new request",
        "groups.base.AttentionGroup.grow_alone",
        "self.tables[request.request_id] = table",
        "pass",
    ),
    mistake(
        "'no blocks' is the shared answer of the short way",
        "manager.CacheManager.allocate_slots",
        " if rows else no_blocks",
        "",
    ),
)

# The short way of several groups, or of one with a window.
_SEVERAL = tried_in(
    has(several=True),
    mistake(
        "the short way counts free blocks for several groups",
        "coordinator.Coordinator.grow",
        "if sum(missing) > self._pool.num_free_blocks:",
        "if False:",
    ),
    mistake(
        "the short way counts the blocks of all groups",
        "coordinator.Coordinator.grow",
        "sum(missing)",
        "max(missing)",
    ),
    mistake(
        "all groups take before one caches",
        "coordinator.Coordinator.grow",
        "[group.take_more(request_id, number) for",
        "[(group.take_more(request_id, number), group.cache_full_blocks(request, num_cache_tokens))[0] for",
    ),
    mistake(
        "groups take in their order by the short way",
        "coordinator.Coordinator.grow",
        "zip(self.groups, missing, strict=True)]",
        "zip(self.groups[::-1], missing[::-1], strict=True)][::-1]",
    ),
    mistake(
        "the short way's limit is the least of all groups",
        "coordinator.Coordinator.grow",
        "self.quiet_limit_tokens(request_id)",
        "self.groups[-1].quiet_limit_tokens(request_id)",
    ),
    mistake(
        "the short way caches no drafts for several groups",
        "manager.CacheManager._grow_groups",
        "num_cache_tokens = min(num_tokens_after_step, request.num_tokens)\n"
        "        if len(request.block_hashes) < num_cache_tokens // self._num_tokens_per_hash:\n"
        "            return None\n",
        "num_cache_tokens = num_tokens_after_step\n",
    ),
    mistake(
        "only groups that take blocks at their tables' ends go the short way",
        "coordinator.Coordinator.__init__",
        "all(group.grows_plainly for group in self.groups)",
        "True",
    ),
    mistake(
        "the short way's limit counts what is to be cached",
        "coordinator.Coordinator.grow",
        "self.quiet_limit_tokens(request_id)",
        "min([group._capacity_tokens(group.tables[request_id]) for group in self.groups])",
    ),
)

_WINDOW_STEPS = tried_in(
    has("sliding", "chunked"),
    mistake(
        "by the short way, too, a window moves on",
        "manager.CacheManager._grow_groups",
        "coordinator.release_skipped(request.request_id, num_computed_tokens, num_confirmed_tokens)",
        "pass",
    ),
    mistake(
        "by the short way, too, a window stops at what is confirmed (F2)",
        "manager.CacheManager._grow_groups",
        "self._num_confirmed_tokens(request, num_computed_tokens)",
        "num_computed_tokens",
    ),
    mistake(
        "by the short way, too, drafts are noted (F2)",
        "manager.CacheManager._grow_groups",
        "self._note_drafts(request, num_tokens_after_step)",
        "pass",
    ),
    mistake(
        "a group with a window does not go the shortest way",
        "manager.CacheManager.__init__",
        " and not self._releases_skipped",
        "",
    ),
)

# F15: what evict_blocks does to who grows by the shortest way.
_FAILED_LOADS = tried_in(
    lambda setup: setup.evicts_held and setup.enable_caching,
    mistake(
        "loose blocks from a failed one on go back, too (F15)",
        "groups.holding.take_out",
        "_take_loose(group_id, table, hold_end, upper, runs)",
        "pass",
    ),
    mistake(
        "of a hold with the failed block the part before it stays (F15)",
        "groups.holding._take_part",
        "holds.append(Hold(position, run, first - position))",
        "pass",
    ),
)

_RARE = (
    *tried_in(
        lambda setup: setup.enable_caching and setup.num_blocks >= 20,  # else nearly each call evicts something
        mistake(
            "a split changes in which runs lookups find it",
            "block_pool.BlockPool._move",
            "self._changed()",
            "self._places = None",
        ),
    ),
    *tried_in(
        lambda setup: (
            _is_alone(setup) and setup.enable_caching and not setup.enable_kv_cache_events and setup.evicts_held
        ),
        mistake(
            "who holds a failed block grows no new run by the shortest way (F15)",
            "groups.base.AttentionGroup._publish_run",
            " and table.first_unpublished is None",
            "",
        ),
        mistake(
            "who holds a failed block grows by the shortest way no more (F15)",
            "groups.base.AttentionGroup.stop_publishing",
            "table.growing = None",
            "pass",
            Edit("block_pool.BlockPool.uncache", "run.grower = None", "pass"),
        ),
    ),
    *tried_in(
        lambda setup: (
            len(setup.groups) > 1
            and not setup.enable_caching
            and not any(group.kind in ("mamba", "cross") for group in setup.groups)
        ),
        mistake(
            "the short way caches nothing for several groups while caching is off",
            "manager.CacheManager._grow_groups",
            "num_cache_tokens = 0\n",
            "num_cache_tokens = 0 if self.enable_caching else num_tokens_after_step\n",
        ),
    ),
)

BY_RUN = (
    *_SPLITS,
    *_GROWTH,
    *_SHORTEST,
    *_NOT_INTACT,
    *_BY_HEAD,
    *_WINDOWS,
    *_REMEMBERED,
    *_EVERYWHERE,
    *_ALONE,
    *_SEVERAL,
    *_WINDOW_STEPS,
    *_FAILED_LOADS,
    *_RARE,
)
