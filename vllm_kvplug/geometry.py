"""The shape of a KV cache: how many blocks, how many tokens a block holds, which groups of layers share a block table.

A leaf module: it knows no pool, no request and no vLLM. The glue derives a `CacheGeometry` from vLLM's `KVCacheConfig`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from vllm_kvplug.errors import CallError, UnsupportedError


class AttentionKind(enum.Enum):
    """What decides which blocks a group of layers needs and may share."""

    FULL = "full"
    MLA = "mla"
    SINK = "sink"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"
    CROSS = "cross"


# A token looks at all earlier ones.
FULL_KINDS = frozenset({AttentionKind.FULL, AttentionKind.MLA, AttentionKind.SINK})
# A token looks at some earlier ones; a request gives back blocks while it runs.
WINDOW_KINDS = frozenset({AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL})


class MambaMode(enum.Enum):
    """Which of a Mamba layer's states are kept in blocks (vLLM's mamba_cache_mode)."""

    NONE = "none"  # the running state only; no prefix caching
    ALL = "all"  # a state at the end of each block
    ALIGN = "align"  # a state where a step of the scheduler ends at a block's end


@dataclass(frozen=True)
class GroupGeometry:
    """One KV cache group: the layers that share a block table.

    Attributes:
        kind: the attention of these layers.
        num_tokens_per_block: tokens that one block of this group holds, context parallel ranks folded in.
        reports_new_blocks: whether `take_new_block_ids` names this group's new blocks (vLLM zeroes plain full attention
            only).
        window_tokens: sliding window only: tokens that a token looks at, itself included.
        chunk_tokens: chunked local attention only: tokens of a chunk, beyond whose start no token looks.
        mamba_mode: Mamba only.
        num_speculative_blocks: Mamba only: further blocks that a request keeps for the states of draft tokens.
        num_sink_blocks: sink attention only: blocks that hold the sinks, never a request's.
    """

    kind: AttentionKind
    num_tokens_per_block: int
    reports_new_blocks: bool = True
    window_tokens: int = 0
    chunk_tokens: int = 0
    mamba_mode: MambaMode = MambaMode.NONE
    num_speculative_blocks: int = 0
    num_sink_blocks: int = 0

    def __post_init__(self) -> None:
        needed = {
            AttentionKind.SLIDING_WINDOW: "window_tokens",
            AttentionKind.CHUNKED_LOCAL: "chunk_tokens",
            AttentionKind.SINK: "num_sink_blocks",
        }
        for name in ("num_tokens_per_block", *filter(None, [needed.get(self.kind)])):
            if (value := getattr(self, name)) < 1:
                raise CallError(f"{self.kind.value} group: {name}: expected at least 1, found {value}")
        if self.num_speculative_blocks < 0:
            raise CallError(f"num_speculative_blocks: expected at least 0, found {self.num_speculative_blocks}")


@dataclass(frozen=True)
class CacheGeometry:
    """The whole cache.

    Attributes:
        num_blocks: blocks in the pool, the null block (id 0) included.
        max_model_len: the most tokens a request can have.
        groups: the KV cache groups, in vLLM's order; none for a model without KV cache.
        num_tokens_per_hash: tokens that each of a request's block hashes covers; divides every group's block. None:
            nothing is cached.
    """

    num_blocks: int
    max_model_len: int
    groups: tuple[GroupGeometry, ...]
    num_tokens_per_hash: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise CallError(f"max_model_len: expected at least 1 token, found {self.max_model_len}")
        if self.num_blocks < self.num_reserved_blocks:
            raise CallError(
                f"num_blocks: expected at least {self.num_reserved_blocks} (the null block, and sink blocks if any), "
                f"found {self.num_blocks}"
            )
        if sum(group.kind is AttentionKind.SINK for group in self.groups) > 1:
            raise UnsupportedError(
                "several KV cache groups of sink attention: expected at most one, since each reads its sinks from the "
                "blocks 1, 2, ..."
            )
        if self.num_tokens_per_hash is not None:
            self._check_caching(self.num_tokens_per_hash)

    def _check_caching(self, num_tokens_per_hash: int) -> None:
        for group_id, group in enumerate(self.groups):
            if group.kind is AttentionKind.CROSS:
                raise UnsupportedError(
                    f"KV cache group {group_id} of cross-attention: expected prefix caching off, found it on"
                )
            if num_tokens_per_hash < 1 or group.num_tokens_per_block % num_tokens_per_hash:
                raise CallError(
                    f"num_tokens_per_hash: expected a divisor of KV cache group {group_id}'s block of "
                    f"{group.num_tokens_per_block} tokens, found {num_tokens_per_hash}"
                )

    @property
    def num_reserved_blocks(self) -> int:
        """Leading blocks that no request can have: the null block, then the sinks."""
        return 1 + sum(group.num_sink_blocks for group in self.groups)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - self.num_reserved_blocks

    @property
    def hit_alignment_tokens(self) -> int:
        """A prefix hit is a multiple of this many tokens: whole blocks of every group."""
        return math.lcm(*(group.num_tokens_per_block for group in self.groups))


def num_blocks_for(num_tokens: int, num_tokens_per_block: int) -> int:
    """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
    return -(-num_tokens // num_tokens_per_block)
