"""The shape of a KV cache: how many blocks, how many tokens a block holds, which groups of layers share a block table.

A leaf module: it knows no pool, no request and no vLLM. The glue derives a `CacheGeometry` from vLLM's `KVCacheConfig`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_kvplug.errors import CallError, UnsupportedError


class AttentionKind(enum.Enum):
    """What decides which blocks a group of layers needs and may share."""

    FULL = "full"
    MLA = "mla"


@dataclass(frozen=True)
class GroupGeometry:
    """One KV cache group: the layers that share a block table.

    Attributes:
        kind: the attention of these layers.
        num_tokens_per_block: tokens that one block of this group holds, context parallel ranks folded in.
        reports_new_blocks: whether `take_new_block_ids` names this group's new blocks (vLLM zeroes plain full attention
            only).
    """

    kind: AttentionKind
    num_tokens_per_block: int
    reports_new_blocks: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens_per_block < 1:
            raise CallError(f"num_tokens_per_block: expected at least 1, found {self.num_tokens_per_block}")


@dataclass(frozen=True)
class CacheGeometry:
    """The whole cache.

    Attributes:
        num_blocks: blocks in the pool, the null block (id 0) included.
        max_model_len: the most tokens a request can have.
        groups: the KV cache groups, in vLLM's order.
    """

    num_blocks: int
    max_model_len: int
    groups: tuple[GroupGeometry, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise CallError(f"num_blocks: expected at least 1 (the null block), found {self.num_blocks}")
        if self.max_model_len < 1:
            raise CallError(f"max_model_len: expected at least 1 token, found {self.max_model_len}")
        if len(self.groups) != 1:
            raise UnsupportedError(f"KV cache groups: expected one, found {len(self.groups)}")


def num_blocks_for(num_tokens: int, num_tokens_per_block: int) -> int:
    """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
    return -(-num_tokens // num_tokens_per_block)
