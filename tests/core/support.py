"""Requests and managers for core tests, without vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.observers import Observer
from vllm_kvplug.settings import Settings


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that a manager reads. `block_hashes` chain, as vLLM's do."""

    request_id: str
    tokens: list[int]
    num_tokens_per_block: int = 4
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    num_output_placeholders: int = 0
    num_hidden_hashes: int = field(default=0, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes: list[bytes] = []
        size = self.num_tokens_per_block
        for start in range(0, len(self.tokens) - size + 1, size):
            parent = hashes[-1] if hashes else b""
            hashes.append(hashlib.sha256(parent + repr(self.tokens[start : start + size]).encode()).digest())
        return hashes[: len(hashes) - self.num_hidden_hashes]


def make_manager(
    num_blocks: int = 11,
    *,
    num_tokens_per_block: int = 4,
    max_model_len: int = 1024,
    enable_caching: bool = True,
    use_eagle: bool = False,
    observers: Sequence[Observer] = (),
) -> CacheManager:
    """A manager over one group of full attention; eleven blocks are ten usable ones."""
    group = GroupGeometry(AttentionKind.FULL, num_tokens_per_block)
    geometry = CacheGeometry(num_blocks, max_model_len, (group,), num_tokens_per_block)
    return CacheManager(geometry, Settings(), enable_caching=enable_caching, use_eagle=use_eagle, observers=observers)


FULL_GROUP = GroupGeometry(AttentionKind.FULL, 4)


def make_hybrid_manager(
    num_blocks: int = 31,
    *,
    groups: Sequence[GroupGeometry] = (FULL_GROUP, GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=6)),
    max_model_len: int = 1024,
    num_tokens_per_hash: int | None = 4,
    enable_caching: bool = True,
    use_eagle: bool = False,
    observers: Sequence[Observer] = (),
    settings: Settings | None = None,
) -> CacheManager:
    """A manager over any groups, its requests hashed in pieces of `num_tokens_per_hash` tokens."""
    geometry = CacheGeometry(num_blocks, max_model_len, tuple(groups), num_tokens_per_hash if enable_caching else None)
    return CacheManager(
        geometry,
        settings if settings is not None else Settings(),
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        observers=observers,
    )


def run_prefill(manager: CacheManager, request: FakeRequest) -> tuple[int, list[int] | None]:
    """Look up and allocate all of a request's tokens: (hit tokens, all its block ids, or None where refused)."""
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    answer = manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, blocks)
    if answer is None:
        return num_hit_tokens, None
    request.num_computed_tokens = request.num_tokens
    return num_hit_tokens, manager.get_block_ids(request.request_id)[0]


def run_decode(manager: CacheManager, request: FakeRequest, token: int) -> Any:
    """Append a sampled token and allocate a slot for it."""
    request.tokens.append(token)
    answer = manager.allocate_slots(request, 1)
    if answer is not None:
        request.num_computed_tokens += 1
    return answer
