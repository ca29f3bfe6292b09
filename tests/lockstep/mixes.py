"""Mixes of KV cache groups: how they are drawn, and vLLM's specs for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FULL_KINDS = ("full", "mla", "sink")
WINDOW_KINDS = ("sliding", "chunked")
KINDS = (*FULL_KINDS, *WINDOW_KINDS, "mamba", "cross")

MAX_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class GroupSetup:
    """One KV cache group.

    Attributes:
        kind: one of `KINDS`.
        block_size: tokens of a block on one rank.
        window: sliding window, in tokens.
        chunk: chunk of local attention, in tokens.
        mode: Mamba's mode: "none", "all" or "align".
        num_speculative_blocks: Mamba's.
        num_sink_blocks: blocks that hold sinks.
    """

    kind: str
    block_size: int
    window: int = 0
    chunk: int = 0
    mode: str = "none"
    num_speculative_blocks: int = 0
    num_sink_blocks: int = 0

    @property
    def is_full(self) -> bool:
        return self.kind in FULL_KINDS

    @property
    def is_aligned(self) -> bool:
        """Mamba whose states are kept where a step ends."""
        return self.kind == "mamba" and self.mode == "align"

    @property
    def name(self) -> str:
        """For the summary."""
        return f"mamba {self.mode}" if self.kind == "mamba" else self.kind

    def spec(self, num_ranks: int, num_heads: int) -> Any:
        """vLLM's spec for it. `num_heads` changes nothing that a manager looks at."""
        import torch
        from vllm.v1 import kv_cache_interface as interface

        if self.kind == "mamba":
            return interface.MambaSpec(
                block_size=self.block_size,
                shapes=((num_heads,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=self.mode,
                num_speculative_blocks=self.num_speculative_blocks,
            )
        shape = {"block_size": self.block_size, "num_kv_heads": num_heads, "head_size": 1, "dtype": torch.float32}
        if self.kind == "sliding":
            return interface.SlidingWindowSpec(**shape, sliding_window=self.window)
        if self.kind == "chunked":
            return interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.chunk)
        if self.kind == "sink":
            num_sink_tokens = self.num_sink_blocks * self.block_size * num_ranks
            return interface.SinkFullAttentionSpec(**shape, sink_len=num_sink_tokens)
        plain = {
            "full": interface.FullAttentionSpec,
            "mla": interface.MLAAttentionSpec,
            "cross": interface.CrossAttentionSpec,
        }
        return plain[self.kind](**shape)


def kv_cache_config(num_blocks: int, groups: Sequence[GroupSetup], num_ranks: int, *, unequal: bool) -> Any:
    """vLLM's configuration of these groups. `unequal`: no two specs are equal, not even those of equal groups."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = [group.spec(num_ranks, group_id + 1 if unequal else 1) for group_id, group in enumerate(groups)]
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


@dataclass(frozen=True)
class Mix:
    """Groups, and what goes with them: context parallel ranks and the tokens that a block hash covers."""

    groups: tuple[GroupSetup, ...]
    dcp: int
    pcp: int
    hash_block_size: int


def draw_mix(rng: random.Random, *, enable_caching: bool, use_eagle: bool, num_draft_tokens: int) -> Mix:
    """Groups that both managers take: what upstream refuses (or asserts against) is not drawn."""
    base = rng.choice([1, 2, 2, 3, 4, 4, 4, 5, 8, 16, 16, 32, 64, rng.randint(1, MAX_BLOCK_TOKENS)])
    num_groups = rng.choices([0, 1, 2, 3, 4], [0 if enable_caching else 1, 18, 20, 10, 6])[0]
    kinds = _draw_kinds(rng, num_groups, enable_caching=enable_caching, use_eagle=use_eagle)
    sizes = _draw_sizes(rng, base, kinds, enable_caching=enable_caching)
    # vLLM gives Mamba as many speculative blocks as there are drafts.
    num_speculative_blocks = rng.choice([min(num_draft_tokens, 4), min(num_draft_tokens, 4), 0, rng.randint(0, 2)])
    groups = [
        _draw_group(rng, kind, size, num_speculative_blocks, enable_caching=enable_caching)
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    if len(groups) > 1 and groups[0].kind not in ("sink", "cross") and rng.random() < 0.12:
        groups = [groups[0]] * len(groups)  # equal specs (F8)
    dcp, pcp = _draw_ranks(rng, groups, enable_caching=enable_caching)
    hash_block_size = math.gcd(*(group.block_size for group in groups)) * dcp * pcp or base
    if len(groups) > 1 and rng.random() < 0.25:
        hash_block_size = rng.choice([size for size in range(1, hash_block_size + 1) if hash_block_size % size == 0])
    return Mix(tuple(groups), dcp, pcp, hash_block_size)


def _draw_kinds(rng: random.Random, num_groups: int, *, enable_caching: bool, use_eagle: bool) -> list[str]:
    weights = {"full": 8, "mla": 2, "sink": 1.5, "sliding": 8, "chunked": 5, "mamba": 8, "cross": 14}
    if enable_caching:
        weights["cross"] = 0
        if use_eagle:
            weights["chunked"] = 0
    kinds: list[str] = []
    for _ in range(num_groups):
        kinds += rng.choices(list(weights), list(weights.values()))
        if kinds[-1] == "sink":
            weights["sink"] = 0  # a second one is refused
    if num_groups > 1 and not set(kinds) & set(FULL_KINDS) and rng.random() < 0.5:
        kinds[rng.randrange(num_groups)] = "full"  # as most hybrid models have it
    return kinds


def _draw_sizes(rng: random.Random, base: int, kinds: list[str], *, enable_caching: bool) -> list[int]:
    factors = [1] if rng.random() < 0.4 else [1, 1, 1, 2, 2, 3, 4]
    sizes = [size if (size := base * rng.choice(factors)) <= MAX_BLOCK_TOKENS else base for _ in kinds]
    if enable_caching and "chunked" in kinds and len(kinds) > 1:
        # Upstream looks chunks up only where their block is a multiple of all other blocks.
        common = math.lcm(*sizes)
        if common > MAX_BLOCK_TOKENS:
            return [base] * len(kinds)
        return [common if kind == "chunked" else size for kind, size in zip(kinds, sizes, strict=True)]
    return sizes


def _draw_group(
    rng: random.Random, kind: str, size: int, num_speculative_blocks: int, *, enable_caching: bool
) -> GroupSetup:
    if kind == "sliding":
        windows = [1, 2, size, size + 1, 2 * size, 2 * size + 1, rng.randint(1, 4 * size), rng.randint(1, 8 * size)]
        return GroupSetup(kind, size, window=rng.choice(windows))
    if kind == "chunked":
        divisors = [tokens for tokens in range(1, size + 1) if size % tokens == 0]
        chunks = [size, 2 * size, 2 * size, 3 * size, 4 * size, rng.choice(divisors)]
        return GroupSetup(kind, size, chunk=rng.choice(chunks))
    if kind == "mamba":
        mode = rng.choice(["all", "align", "align"] if enable_caching else ["none", "none", "none", "all", "align"])
        return GroupSetup(kind, size, mode=mode, num_speculative_blocks=num_speculative_blocks)
    if kind == "sink":
        return GroupSetup(kind, size, num_sink_blocks=rng.randint(1, 3))
    return GroupSetup(kind, size)


def _draw_ranks(rng: random.Random, groups: Sequence[GroupSetup], *, enable_caching: bool) -> tuple[int, int]:
    """Context parallel ranks: for one full group with caching, else for groups whose arithmetic upstream has right."""
    is_one_full = len(groups) == 1 and groups[0].is_full
    is_plain = all(not group.num_speculative_blocks for group in groups)
    if not (is_one_full if enable_caching else is_plain) or rng.random() < 0.75:
        return 1, 1
    dcp, pcp = rng.choice([(2, 1), (1, 2), (2, 2)])
    if any(group.block_size * dcp * pcp > MAX_BLOCK_TOKENS for group in groups):
        return 1, 1
    return dcp, pcp
