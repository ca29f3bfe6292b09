"""Where kvplug is right and 0.17.1 is not: for each, how a call that triggers it is recognised.

`mends.py` and `mended_reports.py` ask these predicates before each step that a deviation is about, and put upstream's
side of that step right. So such a call is still compared in every answer and all state, and the run goes on; the
summary counts the calls in which upstream alone would have differed. Nothing here looks at our side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from tests.lockstep.mixes import WINDOW_KINDS
from tests.lockstep.trace import Setup
from vllm_kvplug.vllm_glue.version import is_since

# Whether this version's scheduler asks if all of a request fits before it is admitted; and for blocks to zero.
HAS_GATE = hasattr(KVCacheManager, "can_fit_full_sequence")
NAMES_NEW_BLOCKS = hasattr(KVCacheManager, "take_new_block_ids")
# Whether it has every image's place in its key, and keys a block right.
PLACES_IMAGES = is_since("0.19.0")
# Whether a window's hit that a drafter's drop left between two block ends of the other groups is cut to such an end.
CUTS_AGAIN = is_since("0.19.1")

# Id (of faults.md; U: found by lockstep) -> what triggers it.
TRIGGERS = {
    "F1": "external tokens, a block popped for one group that a later group has hit",
    "F2": "a window or chunk passes blocks while drafts are in flight",
    "F3": "Mamba align: a step that wants fewer positions than the table has",
    "F4": "BlockStored of the block behind an image",
    "F5": "BlockStored of a LoRA request: its adapter's key",
    "F7": "eagle with several groups: upstream drops blocks repeatedly, from what a lookup may take",
    "F8": "all groups of equal specs, prefix caching on: upstream cannot be constructed",
    "F9": "a group with sinks: usage and reset",
    "F10": "statistics taken after lookups without admission",
    "F13": "BlockRemoved while a copy remains",
    "F14": "take_new_block_ids names a block more than once",
    "F15": "evict_blocks names a block that a request holds; what that request does afterwards",
    "D1": "full groups of two specs beside another: upstream leaves the second's hit longer than the answer",
}
if HAS_GATE:
    TRIGGERS["F18"] = "can_fit_full_sequence refuses a request for which nobody's end makes room"
if CUTS_AGAIN:
    TRIGGERS["D4"] = "eagle and a window of smaller blocks: upstream's hit lacks blocks that the next token looks at"
if PLACES_IMAGES:
    del TRIGGERS["F4"]  # mended there, as far as events of this traffic go
if not NAMES_NEW_BLOCKS:
    del TRIGGERS["F14"]


def defers(group: Any, hits: Sequence[Any]) -> bool:
    """Whether a Mamba group waits for the next step, since its hit was cached in this one: no deviation."""
    return bool(hits) and hits[-1].block_hash in group.cached_blocks_this_step


def waits_alone(tables: Sequence[dict[str, Sequence[int]]], request_id: str) -> bool:
    """F18: no other request holds a block. `tables[group][request id]`: block ids, 0 is the null block."""
    return not any(any(row) for group in tables for holder, row in group.items() if holder != request_id)


def pops_a_later_groups_hit(
    free_ids: Iterable[int], hit_ids: Sequence[frozenset[int]], num_popped_blocks: Sequence[int]
) -> bool:
    """F1: external tokens with several groups. Group by group, each takes its hits out of the free blocks and then pops
    blocks for its external tokens: does one pop what a later one has hit?

    Args:
        free_ids: the free blocks, the next to go first.
        hit_ids: by group, the hits that it takes over.
        num_popped_blocks: by group, what it pops.
    """
    free = list(free_ids)
    for group_id, num_blocks in enumerate(num_popped_blocks):
        free = [block_id for block_id in free if block_id not in hit_ids[group_id]]
        popped, free = set(free[:num_blocks]), free[num_blocks:]
        if any(popped & later for later in hit_ids[group_id + 1 :]):
            return True
    return False


def has_drafts(request: Any, num_present_tokens: int, num_new_tokens: int) -> bool:
    """F2: whether a step computes more tokens than the request has and awaits. Its drafts are under way until all
    computed tokens but the last are the request's (`is_confirmed`).
    """
    return bool(num_present_tokens + num_new_tokens > request.num_tokens + request.num_output_placeholders)


def is_confirmed(request: Any, num_present_tokens: int) -> bool:
    """F2: whether no draft that is rejected could take back one of the computed tokens."""
    return bool(num_present_tokens <= request.num_tokens - 1)


def frees_too_early(kind: str, num_skipped_if_safe: int, num_skipped_blocks: int, row: Sequence[Any]) -> bool:
    """F2: a window or chunk, with drafts under way, leaves a block behind that it keeps if they are rejected."""
    return kind in WINDOW_KINDS and any(not block.is_null for block in row[num_skipped_if_safe:num_skipped_blocks])


def wants_fewer_positions(group: Any, request_id: str, num_tokens_after_step: int) -> bool:
    """F3: Mamba in align mode. A step wants fewer positions than the request's table has: after a rejection with
    speculative blocks, or after computed tokens were taken back. Upstream counts fewer than no blocks, then asserts.
    """
    num_wanted = -(-num_tokens_after_step // group.block_size) + group.num_speculative_blocks
    return group.mamba_cache_mode == "align" and num_wanted < len(group.req_to_blocks.get(request_id, ()))


def has_wrong_keys(extra_keys: Any, right_keys: Any) -> bool:
    """F4, F5: BlockStored's extra keys are not what should have been hashed: an adapter's key lacks its path, or an
    image is named for the block after it, too.
    """
    return bool(extra_keys != right_keys)


def drops_blocks_repeatedly(setup: Setup) -> bool:
    """F7: eagle and several specs, of which upstream may ask an attention group twice, or of which two each drop a
    block from the length that is left (or assert, where a window's block is smaller than the hit step). Not so for one
    full group that comes before Mamba: upstream asks it once.
    """
    num_attention_specs = len({group for group in setup.groups if group.kind != "mamba"})
    kinds = {group.kind for group in setup.groups}
    has_one_full = num_attention_specs == 1 and any(group.is_full for group in setup.groups)
    is_asked_once = has_one_full and len(set(setup.groups)) <= 2 and not has_equal_specs(setup)
    return setup.use_eagle and len(setup.groups) > 1 and kinds != {"mamba"} and not is_asked_once


def lacks_a_windows_blocks(setup: Setup, rows: Sequence[Sequence[int]], needed: Sequence[range]) -> bool:
    """D4: eagle, and a sliding window whose hit was cut again, behind the blocks that were found for it.

    Args:
        rows: by group, the block ids of upstream's hit.
        needed: by group, where the token after the hit looks.
    """
    return (
        CUTS_AGAIN
        and setup.use_eagle
        and any(
            group.kind == "sliding" and not all(row[position] for position in positions)
            for group, row, positions in zip(setup.groups, rows, needed, strict=True)
        )
    )


def has_equal_specs(setup: Setup) -> bool:
    """F8: several groups, all of one spec, with prefix caching."""
    return setup.enable_caching and len(setup.groups) > 1 and len(set(setup.groups)) == 1


def has_sinks(setup: Setup) -> bool:
    """F9: a group with sinks. Upstream counts their blocks as in use."""
    return any(group.num_sink_blocks for group in setup.groups)


def counts_refused_lookups(stats: Any, right_stats: Any) -> bool:
    """F10: upstream counted lookups that no admission followed before this taking, or had counted one before the last
    taking whose admission came now.
    """
    return bool(stats != right_stats)


def is_copy_left(pool: Any, key: Any) -> bool:
    """F13: another block answers for the hash of a block that has just left the index, in the same group."""
    return pool.cached_block_hash_to_block.get_one_block(key) is not None


def is_named_again(block_ids: list[int]) -> bool:
    """F14: a block was handed out more than once between two takings."""
    return len(set(block_ids)) < len(block_ids)


def first_failed_position(block_ids: Iterable[int], row: Sequence[Any]) -> int | None:
    """F15: where a table has the first of the blocks that evict_blocks names; None: it holds none of them."""
    return next((i for i, block in enumerate(row) if not block.is_null and block.block_id in block_ids), None)


def leaves_hits_uncut(setup: Setup) -> bool:
    """D1: full groups of two specs and a third spec. Upstream cuts only the first full spec's hit to the answer.

    (So, too, where equal groups get unequal specs for upstream's sake, F8.)
    """
    specs = setup.groups if has_equal_specs(setup) else set(setup.groups)
    return sum(group.is_full for group in specs) >= 2 and len(specs) >= 3
