"""Deliberate mistakes about one kind of group, and about several groups together; see `mistakes.py`."""

from __future__ import annotations

from collections.abc import Callable

from tests.lockstep.mutation import FIRST_BLOCK_FIRST, Edit, Mistake, mistake
from tests.lockstep.trace import Setup


def has(*names: str, caching: bool = False, eagle: bool = False, several: bool = False) -> Callable[[Setup], bool]:
    """A condition on the setups in which a mistake can show: a group of one of these names, and more."""

    def needs(setup: Setup) -> bool:
        return (
            (not names or any(group.name in names for group in setup.groups))
            and (setup.enable_caching or not caching)
            and (setup.use_eagle or not eagle)
            and (len(setup.groups) > 1 or not several)
        )

    return needs


def tried_in(needs: Callable[[Setup], bool], *mistakes: Mistake) -> tuple[Mistake, ...]:
    """These mistakes, tried on such setups alone."""
    return tuple(one.tried_where(needs) for one in mistakes)


_SLIDING = tried_in(
    has("sliding"),
    mistake(
        "the next token is in its own window",
        "groups.sliding_window.SlidingWindowGroup.num_skipped_tokens",
        "self._window_tokens + 1",
        "self._window_tokens",
    ),
    mistake(
        "a window keeps what its next token looks at",
        "groups.sliding_window.SlidingWindowGroup.num_skipped_tokens",
        "self._window_tokens + 1",
        "self._window_tokens + 2",
    ),
    mistake(
        "the decode shortcut stops where a window leaves a block behind",
        "groups.sliding_window.SlidingWindowGroup.quiet_limit_of_window",
        "self._window_tokens - 2",
        "self._window_tokens + self.num_tokens_per_block",
    ),
    mistake(
        "a window's blocks are cut from the back",
        "groups.base.AttentionGroup._release_leading",
        "self._pool.release(released)",
        "runs = released\n        " + FIRST_BLOCK_FIRST.replace("\n", "\n        "),
    ),
    mistake(
        "blocks in part outside the window stay",
        "groups.base.AttentionGroup._release_leading",
        "num_skipped_tokens // self.num_tokens_per_block",
        "-(-num_skipped_tokens // self.num_tokens_per_block)",
    ),
    mistake(
        "what a window has left behind is free",
        "groups.base.AttentionGroup._release_leading",
        "self._pool.release(released)",
        "pass",
    ),
    mistake(
        "positions behind the window hold the null block",
        "groups.base.AttentionGroup._release_leading",
        "block_ids[position:num_skipped_blocks] = [NULL_BLOCK_ID] * (num_skipped_blocks - position)",
        "pass",
    ),
    mistake(
        "a window moves on even if the request is then refused",
        "manager.CacheManager._serve",
        "self._coordinator.release_skipped(request_id, num_present_tokens, num_confirmed_tokens)",
        "pass",
        Edit(
            "manager.CacheManager._note_admission",
            "lookup = self._lookups",
            "self._coordinator.release_skipped("
            "request.request_id, request.num_computed_tokens, request.num_computed_tokens); "
            "lookup = self._lookups",
        ),
        Edit(
            "manager.CacheManager._grow_groups",
            "    coordinator.release_skipped(request.request_id, num_computed_tokens, num_confirmed_tokens)\n"
            "    grown = coordinator.grow(request, num_slot_tokens, num_cache_tokens)\n"
            "    if grown is None:\n"
            "        return None\n",
            "    pass\n"
            "    grown = coordinator.grow(request, num_slot_tokens, num_cache_tokens)\n"
            "    if grown is None:\n"
            "        return None\n"
            "    if self._releases_skipped:\n"
            "        coordinator.release_skipped(request.request_id, num_computed_tokens, num_confirmed_tokens)\n",
        ),
    ),
    mistake(
        "with drafts under way a window stops at what is confirmed (F2)",
        "manager.CacheManager._num_confirmed_tokens",
        "if request_id in self._drafting:",
        "if False:",
    ),
    mistake(
        "without drafts a window moves up to what is computed (F2)",
        "manager.CacheManager._num_confirmed_tokens",
        "if request_id in self._drafting:",
        "if True:",
    ),
    mistake(
        "the token that is computed next is not confirmed (F2)",
        "manager.CacheManager._num_confirmed_tokens",
        "request.num_tokens - 1)",
        "request.num_tokens)",
    ),
    mistake(
        "drafts are under way until their outputs have arrived (F2)",
        "manager.CacheManager._num_confirmed_tokens",
        "if num_confirmed_tokens == num_present_tokens:",
        "if True:",
    ),
    mistake(
        "remove_skipped_blocks releases",
        "manager.CacheManager.remove_skipped_blocks",
        "self._coordinator.release_skipped(request_id, total_computed_tokens, total_computed_tokens)",
        "pass",
    ),
)

_SLIDING_HITS = tried_in(
    has("sliding", caching=True),
    mistake(
        "a hit needs the whole window",
        "groups.sliding_window.SlidingWindowGroup.match",
        "first = max(end - self._num_run_blocks, 0)",
        "first = max(end - max(self._num_run_blocks - 1, 1), 0)",
    ),
    mistake(
        "a hit needs no more than the window",
        "groups.sliding_window.SlidingWindowGroup.match",
        "first = max(end - self._num_run_blocks, 0)",
        "first = max(end - self._num_run_blocks - 1, 0)",
    ),
    mistake(
        "a window at the start may be shorter",
        "groups.sliding_window.SlidingWindowGroup.match",
        "while num_hit_blocks > 0:",
        "while num_hit_blocks >= self._num_run_blocks:",
    ),
    mistake(
        "a gap in the window shortens the hit",
        "prefix_index.PrefixIndex.match_back",
        "break",
        "end -= 1; continue",
    ),
    mistake(
        "after a gap the search goes on before it",
        "groups.sliding_window.SlidingWindowGroup.match",
        "missing = (parts[-1].position if parts else end) - 1",
        "missing = 0",
    ),
    mistake(
        "hits behind the window are not taken over",
        "groups.base.AttentionGroup._plan_prefix",
        "hit.parts_from(num_null_blocks)",
        "hit.parts",
    ),
    mistake(
        "positions behind the window are filled with the null block",
        "groups.base.AttentionGroup.admit",
        "[NULL_BLOCK_ID] * plan.num_null_blocks",
        "[]",
    ),
    mistake(
        "null blocks are not published",
        "groups.base.AttentionGroup._publish",
        "while first < end and row[first] == NULL_BLOCK_ID:",
        "while False:",
    ),
    mistake(
        "null blocks are not in BlockStored",
        "vllm_glue.observers.EventObserver.on_cache",
        " if block_ids[position]]",
        "]",
    ),
    mistake(
        "no common prefix where windows move",
        "groups.base.AttentionGroup.num_common_prefix_blocks",
        "return 0",
        "pieces = [piece for hold in self._table(request_id).holds for piece in hold.pieces()]; "
        "return sum(piece.num_blocks for piece in pieces if piece.run.num_holders == len(self.tables))",
    ),
)

_CHUNKED = tried_in(
    has("chunked"),
    mistake(
        "a chunk that is full is left behind",
        "groups.chunked_local.ChunkedLocalGroup.num_skipped_tokens",
        "num_computed_tokens // self.geometry.chunk_tokens",
        "max(num_computed_tokens - 1, 0) // self.geometry.chunk_tokens",
    ),
    mistake(
        "a chunk that has begun is needed from its start",
        "groups.chunked_local.ChunkedLocalGroup.num_skipped_tokens",
        "num_computed_tokens // self.geometry.chunk_tokens * self.geometry.chunk_tokens",
        "num_computed_tokens",
    ),
    mistake(
        "the decode shortcut stops where a chunk ends",
        "groups.chunked_local.ChunkedLocalGroup.quiet_limit_of_window",
        "return num_blocks_for(next_release, self.geometry.chunk_tokens) * self.geometry.chunk_tokens",
        "return num_blocks_for(next_release, self.geometry.chunk_tokens) * self.geometry.chunk_tokens + next_release",
    ),
)

_CHUNKED_HITS = tried_in(
    has("chunked", caching=True),
    mistake(
        "a hit needs the chunk's blocks",
        "groups.chunked_local.ChunkedLocalGroup.match",
        "if first + len(hit) == num_hit_blocks:\n"
        "            return Hit([NULL_BLOCK_ID] * first + list(hit.block_ids), hit.parts)",
        "return Hit("
        "[NULL_BLOCK_ID] * first + [*hit.block_ids, *[NULL_BLOCK_ID] * num_hit_blocks][: num_hit_blocks - first], "
        "hit.parts)",
    ),
    mistake(
        "blocks before the chunk need not be cached",
        "groups.chunked_local.ChunkedLocalGroup.match",
        "first = self.num_skipped_tokens(num_hit_blocks * self.num_tokens_per_block) // self.num_tokens_per_block",
        "first = 0",
    ),
    mistake(
        "a hit that ends in the chunk is one",
        "groups.chunked_local.ChunkedLocalGroup.match",
        "num_hit_blocks = first + len(hit)",
        "num_hit_blocks = first",
    ),
)

_MAMBA = tried_in(
    has("mamba none", "mamba all", "mamba align"),
    mistake(
        "the last state is kept",
        "groups.mamba.MambaGroup.num_skipped_tokens",
        "num_computed_tokens - 1",
        "num_computed_tokens",
    ),
    mistake(
        "a state is kept that drafts may fall back to",
        "groups.mamba.MambaGroup._num_safe_tokens",
        "num_computed_tokens - self._num_speculative_blocks",
        "num_computed_tokens",
    ),
    mistake(
        "speculative blocks are beside those for tokens",
        "groups.mamba.MambaGroup._num_slot_tokens",
        "self._num_speculative_blocks * self.num_tokens_per_block",
        "0",
    ),
    mistake(
        "the decode shortcut stops where a state is passed",
        "groups.mamba.MambaGroup.quiet_limit_of_window",
        "self._first_held_position(table) + 1",
        "self._first_held_position(table) + 2",
    ),
    mistake(
        "passed states are released before a step",
        "groups.mamba.MambaGroup.release_skipped",
        "if table is not None:",
        "if False:",
    ),
)

_MAMBA_HITS = tried_in(
    has("mamba all", "mamba align", caching=True),
    mistake(
        "a state hits by itself",
        "groups.mamba.MambaGroup.match",
        "[NULL_BLOCK_ID] * position + list(hit.block_ids)",
        "[index.get(block_hashes[i]) or NULL_BLOCK_ID for i in range(position)] + list(hit.block_ids)",
    ),
    mistake(
        "the last state that is cached hits",
        "groups.mamba.MambaGroup.match",
        "index.run(block_hashes[position]) is not None:",
        "[index.run(block_hash) is None for block_hash in block_hashes[:num_hit_blocks]] == "
        "[True] * position + [False]:",
    ),
    mistake(
        "a state that was cached in this step is deferred",
        "groups.mamba.MambaGroup.plan",
        "return GroupPlan(defers=True)",
        "pass",
    ),
    mistake(
        "only the state that is hit can defer",
        "groups.mamba.MambaGroup._was_cached_this_step",
        "last.run.block_hashes[last.offset + last.num_blocks - 1] in self._hashes_cached_this_step",
        "bool(self._hashes_cached_this_step)",
    ),
    mistake(
        "a step's deferrals end with it",
        "groups.mamba.MambaGroup.new_step_starts",
        "self._hashes_cached_this_step.clear()",
        "pass",
    ),
    mistake(
        "every group is told that a step starts",
        "coordinator.Coordinator.new_step_starts",
        "for group in self.groups:",
        "for group in self.groups[:1]:",
    ),
    mistake(
        "a plan that defers is not served",
        "manager.CacheManager._serve",
        "plan.defers or ",
        "",
    ),
    mistake(
        "one group that defers defers all",
        "coordinator.Coordinator.plan",
        "any([plan.defers for plan in plans])",
        "all([plan.defers for plan in plans])",
    ),
    mistake(
        "Mamba drops no block for a drafter",
        "coordinator._num_blocks_beyond_hit",
        "beyond[AttentionKind.SLIDING_WINDOW] = 1",
        "beyond[AttentionKind.SLIDING_WINDOW] = beyond[AttentionKind.MAMBA] = 1",
    ),
)

_ALIGNED = tried_in(
    has("mamba align"),
    mistake(
        "lookahead tokens have no state",
        "groups.mamba.AlignedMambaGroup.plan",
        "self._num_blocks(demand.num_tokens_after_step)",
        "self._num_blocks(demand.num_slot_tokens)",
    ),
    mistake(
        "speculative blocks come with the first state",
        "groups.mamba.AlignedMambaGroup.plan",
        "demand.num_tokens_after_step) + self._num_speculative_blocks",
        "demand.num_tokens_after_step)",
    ),
    mistake(
        "positions between states are null",
        "groups.mamba.AlignedMambaGroup.take_new",
        "[NULL_BLOCK_ID] * (first_running - num_positions)",
        "self._pool.take(max(first_running - num_positions, 0))",
    ),
    mistake(
        "speculative blocks that are passed move to the end",
        "groups.mamba.AlignedMambaGroup._passed_speculative",
        "min(num_positions, first_running)",
        "num_positions - self._num_speculative_blocks",
    ),
    mistake(
        "a moved block leaves a null behind",
        "groups.mamba.AlignedMambaGroup.take_new",
        "block_ids[position] = NULL_BLOCK_ID",
        "pass",
    ),
    mistake(
        "the state before the running one is released",
        "groups.mamba.AlignedMambaGroup.take_new",
        "table.previous_state_position = num_positions - 1 - self._num_speculative_blocks",
        "table.previous_state_position = None",
    ),
    mistake(
        "the state that was hit is released once it was copied",
        "groups.mamba.AlignedMambaGroup.take_new",
        "table.previous_state_position = num_positions - 1\n    block_ids",
        "pass\n    block_ids",
    ),
    mistake(
        "the state before the running one stays for a step",
        "groups.mamba.AlignedMambaGroup._release_passed",
        "position < self._num_blocks(num_safe_tokens) - 1",
        "position < self._num_blocks(num_safe_tokens)",
    ),
    mistake(
        "a request that has its states takes one block more at most",
        "groups.mamba.AlignedMambaGroup.take_new",
        "table.has_running_state = True",
        "pass",
    ),
    mistake(
        "the new positions are answered, nulls included",
        "groups.mamba.AlignedMambaGroup.take_new",
        "return list(block_ids[num_positions:])",
        "return [block_id for block_id in block_ids[num_positions:] if block_id]",
    ),
)

_ALIGNED_HITS = tried_in(
    has("mamba align", caching=True),
    mistake(
        "the null block is no evictable hit",
        "groups.mamba.AlignedMambaGroup.plan",
        "num_free_among(hit.parts)",
        "num_free_among(hit.parts) + list(hit.block_ids).count(NULL_BLOCK_ID)",
    ),
)

_FEWER_POSITIONS = tried_in(
    lambda setup: setup.num_draft_tokens > 0 and any(group.is_aligned for group in setup.groups),
    mistake(
        "a step may want fewer positions than there are (F3)",
        "groups.mamba.AlignedMambaGroup._num_new_blocks",
        "if num_wanted_positions <= num_positions:",
        "assert num_wanted_positions >= num_positions\n    if num_wanted_positions <= num_positions:",
    ),
)

_CROSS = tried_in(
    has("cross"),
    mistake(
        "the encoder's tokens decide on cross-attention's blocks",
        "groups.cross_attention.CrossAttentionGroup.plan",
        "demand.num_encoder_tokens",
        "demand.num_slot_tokens",
    ),
    mistake(
        "later steps take no more for the encoder",
        "groups.cross_attention.CrossAttentionGroup.plan",
        "demand.num_encoder_tokens) - num_held_blocks",
        "demand.num_encoder_tokens or 1) - (num_held_blocks if demand.num_encoder_tokens else 0)",
    ),
    mistake(
        "cross-attention has no external tokens and no hits",
        "groups.cross_attention.CrossAttentionGroup.check_admission",
        "if num_hit_blocks:",
        "if is_admission and self.block_ids(request_id):",
    ),
    mistake(
        "the encoder's tokens reach the groups",
        "manager.CacheManager.allocate_slots",
        "num_encoder_tokens=num_encoder_tokens,",
        "",
    ),
)

_SINK = tried_in(
    has("sink"),
    mistake(
        "sinks are reserved",
        "geometry.CacheGeometry.num_reserved_blocks",
        "1 + sum(group.num_sink_blocks for group in self.groups)",
        "1",
    ),
    mistake(
        "sinks are not in usage",
        "block_pool.BlockPool.__init__",
        "self.num_usable_blocks = self.num_free_blocks = num_blocks - num_reserved_blocks",
        "self.num_usable_blocks, self.num_free_blocks = num_blocks - 1, num_blocks - num_reserved_blocks",
    ),
    mistake(
        "a sink's tokens are spread over all ranks",
        "vllm_glue.geometry.group_geometry_of",
        "spec.block_size * context_parallel_size)",
        "spec.block_size)",
    ),
    mistake(
        "sink groups do not report new blocks",
        "vllm_glue.geometry.group_geometry_of",
        "reports_new_blocks=kind is AttentionKind.FULL",
        "reports_new_blocks=kind in FULL_KINDS",
    ),
)

_SEVERAL = tried_in(
    has(several=True),
    mistake(
        "a block's hash is of its group",
        "block.make_key",
        "group_id.to_bytes",
        "(0).to_bytes",
    ),
    mistake(
        "the capacity check adds up the groups",
        "coordinator.Coordinator.plan",
        "sum([plan.num_free_blocks_needed for plan in plans])",
        "max([plan.num_free_blocks_needed for plan in plans])",
    ),
    mistake(
        "groups are freed in their order",
        "coordinator.Coordinator.free",
        "for group in self.groups:",
        "for group in self.groups[::-1]:",
    ),
    mistake(
        "groups release in their order",
        "coordinator.Coordinator.release_skipped",
        "for group in self._releasing_groups:",
        "for group in self._releasing_groups[::-1]:",
    ),
    mistake(
        "groups take new blocks in their order",
        "coordinator.Coordinator.take_new",
        "group.take_new(request_id, group_plan) for group, group_plan in zip(self.groups, plan.groups, strict=True)",
        "reversed([g.take_new(request_id, p) for g, p in zip(self.groups[::-1], plan.groups[::-1], strict=True)])",
    ),
    mistake(
        "external blocks of all groups come before new ones",
        "coordinator.Coordinator.admit",
        "group.take_external(request_id, group_plan)",
        "group.take_external(request_id, group_plan) if group is not self.groups[-1] else None",
        Edit(
            "coordinator.Coordinator.take_new",
            "return tuple(",
            "zipped = list(zip(self.groups, plan.groups, strict=True))\n    new = "
            "[g.take_new(request_id, p) for g, p in zipped[:-1]]\n    "
            "[g.take_external(request_id, p) for g, p in zipped[-1:] if p.num_external_blocks and g.tables]\n    "
            "return (*new, *(g.take_new(request_id, p) for g, p in zipped[-1:]))\n    return tuple(",
        ),
    ),
    mistake(
        "the decode shortcut stops where any group has something to do",
        "coordinator.Coordinator.quiet_limit_tokens",
        "return min(",
        "return max(",
    ),
    mistake(
        "a failed block stops its holder in all groups (F15)",
        "coordinator.Coordinator.stop_publishing",
        "for group in self.groups:\n            group.stop_publishing",
        "for group in self.groups[:1]:\n            group.stop_publishing",
    ),
    mistake(
        "of several groups' failed blocks the first token counts (F15)",
        "coordinator.Coordinator.stop_publishing",
        "min(first_token, first_bad_tokens.get(request_id, first_token))",
        "first_token",
    ),
)

_SEVERAL_HITS = tried_in(
    has(several=True, caching=True),
    mistake(
        "a hit is what all groups serve",
        "coordinator.Coordinator.match",
        "agreed = False\n    return",
        "pass\n    return",
    ),
    mistake(
        "full attention's hit is cut to the others'",
        "coordinator.Coordinator.match",
        "hits[group.group_id] = hit.up_to(num_blocks)",
        "pass",
    ),
    mistake(
        "a hit is whole blocks of every group",
        "geometry.CacheGeometry.hit_alignment_tokens",
        "math.lcm(*(group.num_tokens_per_block for group in self.groups))",
        "self.groups[0].num_tokens_per_block if self.groups else 1",
    ),
    mistake(
        "larger blocks have joined hashes",
        "hash_row.HashRow.__getitem__",
        "* self._num_hashes_per_block",
        "",
    ),
    mistake(
        "a larger block needs all its hashes",
        "hash_row.HashRow.__getitem__",
        "[start : start + self._num_hashes_per_block]",
        "[start : start + 1]",
    ),
)

_EXTERNAL = tried_in(
    lambda setup: len(setup.groups) > 1 and setup.enable_caching and setup.has_connector,
    mistake(
        "the hits of all groups are held before anything is taken (F1)",
        "coordinator.Coordinator.admit",
        "\n    for group, group_plan in zip(self.groups, plan.groups, strict=True):\n        group.take_external",
        "\n        group.take_external",
    ),
)

_EAGLE = tried_in(
    has(caching=True, eagle=True),
    mistake(
        "with eagle the last hit block is computed again",
        "coordinator.Coordinator._max_hit_tokens",
        " - (group.num_blocks_beyond_hit > 0)",
        "",
    ),
    mistake(
        "with eagle a block after the hit is cached",
        "groups.full_attention.FullAttentionGroup.match",
        "max(len(hit) - self.num_blocks_beyond_hit, 0)",
        "len(hit)",
    ),
    mistake(
        "with eagle a window has a block after the hit cached",
        "groups.sliding_window.SlidingWindowGroup.match",
        "end = num_hit_blocks + self.num_blocks_beyond_hit",
        "end = num_hit_blocks",
    ),
    mistake(
        "beside a window full attention has two blocks more cached",
        "coordinator._num_blocks_beyond_hit",
        "2 if has_window else 1",
        "1",
    ),
)

BY_GROUP = (
    *_SLIDING,
    *_SLIDING_HITS,
    *_CHUNKED,
    *_CHUNKED_HITS,
    *_MAMBA,
    *_MAMBA_HITS,
    *_ALIGNED,
    *_ALIGNED_HITS,
    *_FEWER_POSITIONS,
    *_CROSS,
    *_SINK,
    *_SEVERAL,
    *_SEVERAL_HITS,
    *_EXTERNAL,
    *_EAGLE,
)
