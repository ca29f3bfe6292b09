"""Traffic as data: a seed gives a setting (`Setup`) and operations (`Op`) with abstract arguments.

An operation names no request: `which` is an index, modulo the requests that it could apply to. So any subsequence of a
trace is a trace, which is what shrinking needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tests.lockstep.mixes import GroupSetup, Mix, draw_mix


@dataclass(frozen=True)
class Setup:
    """How both managers are built, and the habits of the traffic.

    Attributes:
        mix: the KV cache groups.
        num_blocks: null block and sinks included.
        takes_each_call: events, statistics and new block ids are taken after every call, else as the trace says.
        async_scheduling: outputs arrive a step late and `cache_blocks` follows, as with vLLM's AsyncScheduler.
        has_connector: some tokens come from outside, at once or later.
        num_draft_tokens: drafts proposed for each decode step.
        num_lookahead_tokens: slots asked for beyond the step.
        num_families: prompts of one family share their beginning.
        evicts_held: `evict` names blocks that requests hold, too.
    """

    mix: Mix
    num_blocks: int
    max_model_len: int
    enable_caching: bool
    use_eagle: bool
    log_stats: bool
    enable_kv_cache_events: bool
    takes_each_call: bool
    async_scheduling: bool
    has_connector: bool
    num_draft_tokens: int
    num_lookahead_tokens: int
    num_families: int
    evicts_held: bool

    def __str__(self) -> str:
        return "Setup(" + ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self)) + ")"

    @property
    def groups(self) -> tuple[GroupSetup, ...]:
        return self.mix.groups

    @property
    def num_ranks(self) -> int:
        """Context parallel ranks: a block holds so many times the tokens of its spec."""
        return self.mix.dcp * self.mix.pcp

    @cached_property
    def block_tokens(self) -> tuple[int, ...]:
        """By group, the tokens of a block on all ranks together."""
        return tuple(group.block_size * self.num_ranks for group in self.groups)

    @cached_property
    def hit_alignment_tokens(self) -> int:
        """Hits are multiples of this: whole blocks of every group."""
        return math.lcm(*self.block_tokens)

    @cached_property
    def num_reserved_blocks(self) -> int:
        return 1 + sum(group.num_sink_blocks for group in self.groups)

    @cached_property
    def aligned_block_tokens(self) -> int:
        """Where the scheduler ends prompt steps for Mamba's align mode; 0: anywhere."""
        sizes = [group.block_size for group in self.groups if group.is_aligned]
        return sizes[0] if sizes and self.enable_caching else 0

    @cached_property
    def pool_tokens(self) -> int:
        """About the tokens that the pool holds, were all groups full attention."""
        cost = sum(1 / size for size in self.block_tokens) or 1.0
        return max(int((self.num_blocks - self.num_reserved_blocks) / cost), 2)

    @cached_property
    def unit_tokens(self) -> int:
        """What prompts are measured in: the hit step, or a large block where the pool holds only few hit steps."""
        if 2 * self.hit_alignment_tokens <= self.pool_tokens or not self.groups:
            return self.hit_alignment_tokens
        return max(self.block_tokens)


class Op:
    """One operation: the driver's method `name`, called with `values`."""

    __slots__ = ("name", "values")

    def __init__(self, name: str, **values: int) -> None:
        self.name = name
        self.values = values

    def __repr__(self) -> str:
        return f"Op({', '.join([repr(self.name), *(f'{key}={value}' for key, value in self.values.items())])})"


def draw_setup(rng: random.Random) -> Setup:
    """Small pools are the common case: there refusals, evictions and preemptions happen all the time."""
    enable_caching = rng.random() < 0.8
    use_eagle = rng.random() < 0.25
    num_draft_tokens = rng.choice([0, 0, 1, 2, 3, rng.randint(4, 16)])
    mix = draw_mix(rng, enable_caching=enable_caching, use_eagle=use_eagle, num_draft_tokens=num_draft_tokens)
    num_blocks = rng.choice([rng.randint(2, 6), rng.randint(5, 16), rng.randint(5, 16), rng.randint(12, 40)])
    num_blocks = min(num_blocks * (1 + len(mix.groups)) // 2, 60)
    num_blocks += sum(group.num_sink_blocks + group.num_speculative_blocks for group in mix.groups)
    setup = Setup(
        mix=mix,
        num_blocks=num_blocks,
        max_model_len=3,
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        log_stats=rng.random() < 0.7,
        enable_kv_cache_events=rng.random() < 0.55,
        takes_each_call=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.35,
        # Upstream's scheduler refuses external tokens where Mamba's states are aligned.
        has_connector=rng.random() < 0.4 and not any(group.is_aligned for group in mix.groups),
        num_draft_tokens=num_draft_tokens,
        num_lookahead_tokens=rng.choice([0, num_draft_tokens, rng.randint(1, 4)]),
        num_families=rng.randint(1, 4),
        evicts_held=rng.random() < 0.3,
    )
    usable_tokens = setup.pool_tokens
    # At times more than the pool holds, at times so little that requests run into it.
    max_model_len = rng.choice([rng.randint(2, usable_tokens + 1), usable_tokens, 2 * usable_tokens])
    return replace(setup, max_model_len=max(3, max_model_len))


# How a call of allocate_slots says that there are no hits: with the manager's shared empty answer, with an empty answer
# of its own, or by leaving the argument out.
SHARED_EMPTY, FRESH_EMPTY, NO_ANSWER = range(3)

# Name of the operation -> (weight, how its values are drawn).
_Draw = Callable[[random.Random, Setup], dict[str, int]]


def _which(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {"which": rng.randrange(12)}


def _nothing(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {}


def _draw_new(rng: random.Random, setup: Setup) -> dict[str, int]:
    unit = setup.unit_tokens
    most_tokens = min(setup.max_model_len - 1, setup.pool_tokens + setup.hit_alignment_tokens)
    most_units = max(1, setup.pool_tokens // (2 * unit))
    num_shared_units = rng.randint(min(rng.randint(0, 2), most_units), most_units)
    num_shared_tokens = num_shared_units * unit + rng.choice([0, 0, 0, 1, rng.randrange(unit)])
    num_own_tokens = rng.choice([0, 1, rng.randint(0, unit), rng.randint(0, 3 * unit)])
    num_shared_tokens = min(num_shared_tokens, most_tokens)
    return {
        "family": rng.randrange(setup.num_families),
        "num_shared_tokens": num_shared_tokens,
        "num_own_tokens": min(num_own_tokens, most_tokens - num_shared_tokens),
        "own_seed": rng.randrange(3),
        "salt": rng.choice([0, 0, 0, 0, 0, 0, 1, 2]),
        "lora": rng.choice([0, 0, 0, 0, 0, 0, 1, 2]),
        "image": rng.choice([0, 0, 0, 0, 0, 0, 0, 1, 2]),
        "skips_reading": int(rng.random() < 0.08),
        "num_encoder_tokens": rng.choice([0, 1, unit, rng.randint(1, 2 * unit)]),
    }


def _draw_admit(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {
        "which": rng.randrange(12),
        "chunk_tokens": _draw_chunk(rng, setup),
        # 0: nothing from outside; odd: it comes at once; even: later.
        "external": rng.choice([0, 1, 1, 2]) if setup.has_connector else 0,
        "num_external_tokens": rng.choice([setup.unit_tokens, rng.randint(1, 4 * setup.unit_tokens), 10**6]),
        "no_hits_as": rng.choice([SHARED_EMPTY, SHARED_EMPTY, FRESH_EMPTY, NO_ANSWER]),
    }


def _draw_chunk(rng: random.Random, setup: Setup) -> int:
    unit = setup.unit_tokens
    return rng.choice([10**6, 10**6, unit, 2 * unit, rng.randint(1, 3 * unit)])


def _draw_step(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {
        "which": rng.randrange(12),
        "chunk_tokens": _draw_chunk(rng, setup),
        "victim": rng.choice([0, 0, rng.randrange(6)]),
        "no_hits_as": rng.choice([NO_ANSWER] * 8 + [FRESH_EMPTY]),
    }


def _draw_output(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {
        "which": rng.randrange(12),
        "num_accepted_tokens": rng.choice([0, rng.randint(0, max(setup.num_draft_tokens, 1)), 10**6]),
        "own_seed": rng.choice([0, 0, 1, rng.randint(2, 9)]),
        # A proposer may have nothing to propose, or little.
        "num_next_drafts": rng.choice([10**6, 10**6, 0, rng.randint(0, max(setup.num_draft_tokens, 1))]),
    }


def _draw_decode(rng: random.Random, setup: Setup) -> dict[str, int]:
    return {
        **_draw_output(rng, setup),
        "num_steps": rng.randint(2, min(2 * setup.unit_tokens, 8)) if setup.unit_tokens > 1 else 2,
    }


_OPS: dict[str, tuple[float, _Draw]] = {
    "new": (14, _draw_new),
    "copy": (5, _which),
    "admit": (20, _draw_admit),
    "admit_together": (4, lambda rng, setup: {**_draw_admit(rng, setup), "num_requests": rng.randint(2, 4)}),
    "come_back": (
        3,
        lambda rng, setup: {
            **_draw_admit(rng, setup),
            "num_more_tokens": rng.randint(1, 3 * setup.unit_tokens),
            "flood_percent": rng.choice([0, rng.randint(70, 105), rng.randint(90, 100)]),
        },
    ),
    "branch": (
        3,
        lambda rng, setup: {
            "which": rng.randrange(16),
            "shares_seed": rng.randrange(10**6),
            "num_requests": rng.randint(1, 4),
            "chunk_tokens": _draw_chunk(rng, setup),
            "no_hits_as": rng.choice([SHARED_EMPTY, FRESH_EMPTY, NO_ANSWER]),
        },
    ),
    "recompute": (
        2,
        lambda rng, setup: {
            "which": rng.randrange(16),
            "ids_seed": rng.randrange(10**6),
            "num_requests": rng.randint(2, 4),
            "chunk_tokens": _draw_chunk(rng, setup),
            "no_hits_as": rng.choice([SHARED_EMPTY, FRESH_EMPTY, NO_ANSWER]),
        },
    ),
    "step": (16, _draw_step),
    "output": (16, _draw_output),
    "decode": (5, _draw_decode),
    "lookup": (3, _which),
    "cache": (
        1.5,
        lambda rng, setup: {"which": rng.randrange(12), "num_tokens": rng.randint(0, 6 * setup.unit_tokens)},
    ),
    "watched_step": (
        3,
        lambda rng, setup: {
            "which": rng.randrange(12),
            "chunk_tokens": rng.choice([10**6, 10**6, _draw_chunk(rng, setup)]),
            "num_more_tokens": rng.randint(1, setup.unit_tokens),
            "resets": int(rng.random() < 0.3),
        },
    ),
    "session": (
        2,
        lambda rng, setup: {
            "which": rng.randrange(12),
            "num_tokens": rng.randint(1, 3 * setup.unit_tokens),
            "own_seed": rng.randrange(3),
        },
    ),
    "preempt": (3, lambda rng, setup: {"which": rng.randrange(12), "num_late_tokens": rng.choice([0, 0, 1])}),
    "late_output": (
        2.5,
        lambda rng, setup: {"which": rng.randrange(12), "num_tokens": rng.choice([1, 1, setup.unit_tokens])},
    ),
    "finish": (5, _which),
    "abort": (2, _which),
    "load_done": (
        5,
        lambda rng, setup: {
            "which": rng.randrange(12),
            "num_valid_blocks": rng.choice([10**6, 10**6, 0, rng.randrange(4)]),
        },
    ),
    "load_failed": (
        1,
        lambda rng, setup: {"which": rng.randrange(12), "block": rng.randrange(8), "evicts": rng.randrange(3)},
    ),
    "evict": (4, lambda rng, setup: {"ids_seed": rng.randrange(10**6), "num_ids": rng.randint(1, 4)}),
    "reset": (1.2, _nothing),
    "reset_running": (0.5, _nothing),
    "common_prefix": (3, _which),
    "common_prefix_unknown": (0.7, _which),
    "take_new_block_ids": (2, _nothing),
    "take_events": (2, _nothing),
    "take_stats": (2, _nothing),
    "read_blocks": (3, _which),
    "new_step": (5, _nothing),
    "remove_skipped": (1, _which),
    "free_again": (0.7, _which),
    "misuse": (1.2, lambda rng, setup: {"which": rng.randrange(12), "kind": rng.randrange(4)}),
}


def draw_ops(rng: random.Random, setup: Setup, num_ops: int) -> list[Op]:
    """Operations in random order; each seed has its own likings, so that some traces go where the average does not."""
    names = list(_OPS)
    weights = [weight * rng.choice([0.3, 1, 1, 1, 3]) for weight, _ in _OPS.values()]
    if setup.has_connector:
        weights[names.index("come_back")] *= 4  # hits, and tokens from outside behind them
    return [Op(name, **_OPS[name][1](rng, setup)) for name in rng.choices(names, weights, k=num_ops)]


def draw_trace(seed: int, num_ops: int) -> tuple[Setup, list[Op]]:
    """The traffic of a seed."""
    rng = random.Random(seed)
    setup = draw_setup(rng)
    return setup, draw_ops(rng, setup, num_ops)
