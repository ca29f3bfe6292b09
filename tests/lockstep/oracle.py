"""What a lookup must answer, by trying every length: independent of both managers' ways of searching.

The rule: the longest hit that is whole blocks of every group and leaves a token to compute, such that each group has
cached what the next token looks at. With a drafter (eagle), each attention group has a block more cached, which is not
taken, and a full group beside a sliding window two; one block more, too, leaves a token to compute. Mamba has no
drafter layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.lockstep.trace import Setup

_Cached = Callable[[int], int | None]  # position in a group's table -> the block that answers there


@dataclass(frozen=True)
class Hit:
    """An answer.

    Attributes:
        block_ids: by group and position; 0 where no token looks.
        num_tokens: its length.
        is_shortened: a group alone could have answered more.
    """

    block_ids: tuple[list[int], ...]
    num_tokens: int
    is_shortened: bool


def longest_hit(
    setup: Setup, block_hashes: Sequence[bytes], num_tokens: int, cached_blocks: Mapping[bytes, Sequence[int]]
) -> Hit:
    """The answer for a request of `num_tokens` tokens.

    Args:
        setup: the groups.
        block_hashes: the request's, each of `setup.mix.hash_block_size` tokens.
        num_tokens: its tokens.
        cached_blocks: key (hash and group id) -> blocks, the oldest first.
    """
    step_tokens = setup.hit_alignment_tokens
    lookups = [_lookup(setup, group_id, block_hashes, cached_blocks) for group_id in range(len(setup.groups))]
    is_shortened = False
    for num_hit_tokens in range((num_tokens - 1) // step_tokens * step_tokens, 0, -step_tokens):
        served = [
            _serves(setup, group_id, num_hit_tokens, num_tokens - 1, lookup) for group_id, lookup in enumerate(lookups)
        ]
        if all(served):
            rows = [_row(setup, group_id, num_hit_tokens, lookup) for group_id, lookup in enumerate(lookups)]
            return Hit(tuple(rows), num_hit_tokens, is_shortened)
        is_shortened |= any(served)
    return Hit(tuple([] for _ in setup.groups), 0, is_shortened)


def _lookup(
    setup: Setup, group_id: int, block_hashes: Sequence[bytes], cached_blocks: Mapping[bytes, Sequence[int]]
) -> _Cached:
    num_hashes = setup.block_tokens[group_id] // setup.mix.hash_block_size
    suffix = group_id.to_bytes(4, "big")

    def cached(position: int) -> int | None:
        hashes = block_hashes[position * num_hashes : (position + 1) * num_hashes]
        block_ids = cached_blocks.get(b"".join(hashes) + suffix)
        return block_ids[0] if block_ids else None

    return cached


def needed_positions(setup: Setup, group_id: int, num_hit_tokens: int) -> range:
    """Positions of the blocks in a group's table that the token after so many tokens looks at."""
    group, size = setup.groups[group_id], setup.block_tokens[group_id]
    end = num_hit_tokens // size
    if group.kind == "sliding":
        if group.window == 1 and not setup.use_eagle:
            return range(end - 1, end)  # 0.17.1 wants a block even where a token sees itself alone
        return range(min(max(num_hit_tokens - group.window + 1, 0) // size, end), end)
    if group.kind == "chunked":
        return range(num_hit_tokens // group.chunk * group.chunk // size, end)
    if group.kind == "mamba":
        return range(end - 1, end)
    return range(end)


def _num_blocks_beyond(setup: Setup, group_id: int) -> int:
    """Blocks after the hit that must be cached, too."""
    group = setup.groups[group_id]
    if not setup.use_eagle or group.kind == "mamba":
        return 0
    return 2 if group.is_full and any(other.kind == "sliding" for other in setup.groups) else 1


def _serves(setup: Setup, group_id: int, num_hit_tokens: int, most_tokens: int, cached: _Cached) -> bool:
    needed = needed_positions(setup, group_id, num_hit_tokens)
    num_blocks_beyond = _num_blocks_beyond(setup, group_id)
    if num_blocks_beyond:
        if num_hit_tokens + setup.block_tokens[group_id] > most_tokens:
            return False
        needed = range(needed.start, needed.stop + num_blocks_beyond)
    return all(cached(position) is not None for position in needed)


def _row(setup: Setup, group_id: int, num_hit_tokens: int, cached: _Cached) -> list[int]:
    needed = needed_positions(setup, group_id, num_hit_tokens)
    return [0] * needed.start + [cached(position) or 0 for position in needed]
