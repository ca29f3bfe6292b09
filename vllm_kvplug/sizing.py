"""Whether a request can ever fit the pool: arithmetic on a `CacheGeometry`, with no pool, no request and no vLLM.

The engine's manager asks it, and so does a server's front end, which has of the engine only its geometry, as JSON.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from pydantic import TypeAdapter

from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.groups import group_class


@dataclass(frozen=True)
class NeverFits:
    """A request that an empty pool could not serve.

    Attributes:
        num_needed_blocks: the fewest blocks, of all groups together, that it must hold at one time.
        num_usable_blocks: blocks of the pool that requests can hold.
    """

    num_needed_blocks: int
    num_usable_blocks: int


def num_needed_blocks(geometry: CacheGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
    """The fewest blocks, of all groups together, that a request must hold in a step that computes the last
    `num_step_tokens` of its first `num_tokens` tokens.
    """
    return sum(group_class(group).min_num_blocks(group, num_tokens, num_step_tokens) for group in geometry.groups)


def never_fits(geometry: CacheGeometry, num_tokens: int) -> NeverFits | None:
    """The two numbers where `num_tokens` tokens do not fit even an empty pool; None where they do."""
    num_needed, num_usable = num_needed_blocks(geometry, num_tokens), geometry.num_usable_blocks
    return NeverFits(num_needed, num_usable) if num_needed > num_usable else None


def peak_blocks(geometry: CacheGeometry, num_tokens: int) -> int:
    """The fewest blocks that a request must hold at some time while it grows, token by token, to `num_tokens`."""
    return max((num_needed_blocks(geometry, length) for length in _peak_lengths(geometry, num_tokens)), default=0)


@functools.lru_cache(maxsize=8)
def max_fitting_prompt_tokens(geometry: CacheGeometry, max_step_tokens: int) -> int:
    """The most tokens, up to `max_model_len`, of a prompt that fits an empty pool in which nothing is cached, computed
    in steps of `max_step_tokens` tokens.
    """
    num_computed_tokens = 0
    while num_computed_tokens < geometry.max_model_len:
        num_step_tokens = min(max_step_tokens, geometry.max_model_len - num_computed_tokens)
        num_tokens = num_computed_tokens + num_step_tokens
        if num_needed_blocks(geometry, num_tokens, num_step_tokens) > geometry.num_usable_blocks:
            return num_computed_tokens + _num_fitting_step_tokens(geometry, num_computed_tokens, num_step_tokens)
        num_computed_tokens += num_step_tokens
    return num_computed_tokens


def _num_fitting_step_tokens(geometry: CacheGeometry, num_computed_tokens: int, num_step_tokens: int) -> int:
    """The most tokens, below `num_step_tokens`, of a step after `num_computed_tokens` that fit: by halving, since the
    need grows with them.
    """
    fitting, too_many = 0, num_step_tokens
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if num_needed_blocks(geometry, num_computed_tokens + middle, middle) > geometry.num_usable_blocks:
            too_many = middle
        else:
            fitting = middle
    return fitting


def _peak_lengths(geometry: CacheGeometry, num_tokens: int) -> range:
    """The lengths, in tokens, at which the need can be highest: blocks' first tokens in the last round.

    It rises with a block's first token. Windows and chunks let it fall in between and then repeat themselves; the rest
    only grows.
    """
    block_sizes = [group.num_tokens_per_block for group in geometry.groups]
    step_tokens = math.gcd(*block_sizes) or 1
    round_tokens = math.lcm(*block_sizes, *(max(group.chunk_tokens, 1) for group in geometry.groups))
    first = max(num_tokens - round_tokens, 0) // step_tokens * step_tokens + 1
    return range(first, num_tokens + 1, step_tokens)


_geometries = TypeAdapter(CacheGeometry)


def geometry_to_json(geometry: CacheGeometry) -> str:
    """The geometry as another process can read it."""
    return _geometries.dump_json(geometry).decode()


def geometry_from_json(text: str) -> CacheGeometry:
    """What `geometry_to_json` wrote.

    Raises:
        ValueError: a text that is no geometry.
    """
    return _geometries.validate_json(text)
