"""Block hashes with vLLM's types: the hasher for its requests, and its functions of the same purpose by its names.

vLLM's values that a process may change (the parent of a first block is drawn anew by each engine that starts) are read
from `kv_cache_utils` when they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

from vllm_kvplug.errors import CallError
from vllm_kvplug.hashing import ExtraKeys, HashFunction, Key, block_hasher, needs_extra_keys
from vllm_kvplug.vllm_glue.version import is_since

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request


# From 0.19.0 on vLLM has every image's place in its key.
_PLACES_IMAGES = is_since("0.19.0")


def get_request_block_hasher(block_size: int, caching_hash_fn: HashFunction) -> Callable[[Request], list[BlockHash]]:
    """The hasher that an engine gives to its requests: called with one, it answers the hashes still missing.

    Args:
        block_size: tokens that each hash covers.
        caching_hash_fn: turns `(parent hash, tokens, extra keys)` into a hash.

    Raises:
        CallError: a block of no tokens.
    """
    if block_size < 1:
        raise CallError(f"block_size: expected at least 1 token, found {block_size}")
    return block_hasher(block_size, caching_hash_fn, _first_parent, _embeds_digest, places_images=_PLACES_IMAGES)


def extra_keys_of(request: Request, start_token: int, end_token: int) -> Key:
    """What is hashed besides the tokens `start_token` to `end_token` of one block; None: nothing."""
    if not needs_extra_keys(request):
        return None
    return _extra_keys(request).of_block(start_token, end_token)


def extra_keys_of_blocks(
    request: Request, positions: Iterable[int], num_tokens_per_block: int, num_tokens_per_hash: int | None = None
) -> list[Key]:
    """What was hashed besides the tokens, for each of a request's blocks at `positions`.

    Args:
        num_tokens_per_block: tokens of a block at these positions.
        num_tokens_per_hash: tokens of each of the request's hashes, where several of them make a block's.
    """
    if not needs_extra_keys(request):
        return [None for _ in positions]
    keys = _extra_keys(request)
    starts = (position * num_tokens_per_block for position in positions)
    if num_tokens_per_hash in (None, num_tokens_per_block):
        return [keys.of_block(start, start + num_tokens_per_block) for start in starts]
    return [keys.of_blocks_joined(start, start + num_tokens_per_block, num_tokens_per_hash) for start in starts]


def _extra_keys(request: Request) -> ExtraKeys:
    return ExtraKeys(request, _embeds_digest, places_images=_PLACES_IMAGES)


def _first_parent() -> bytes:
    return kv_cache_utils.NONE_HASH


def _embeds_digest(request: Request, start_token: int, end_token: int) -> bytes:
    """SHA-256 of these rows of the prompt embeddings; kept at the request, where vLLM keeps it."""
    digests = request._prompt_embeds_per_block_hashes
    digest = digests.get((start_token, end_token))
    if digest is None:
        assert request.prompt_embeds is not None
        rows = kv_cache_utils.tensor_data(request.prompt_embeds[start_token:end_token])
        digest = digests[start_token, end_token] = hashlib.sha256(rows).digest()
    return digest


# vLLM's own names and signatures, for code outside that calls them; nothing of ours does.


def need_extra_keys(request: Request) -> bool:
    """`needs_extra_keys` by vLLM's name."""
    return needs_extra_keys(request)


def generate_block_hash_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[Key, int]:
    """`extra_keys_of`, and how many images end by `end_token_idx`; the keys need no `start_mm_idx` to begin at."""
    ends = (feature.mm_position.offset + feature.mm_position.length for feature in request.mm_features)
    return extra_keys_of(request, start_token_idx, end_token_idx), sum(end <= end_token_idx for end in ends)


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: Key = None,
) -> Any:
    """The hash of one block whose parent has `parent_block_hash`; None: it is the first."""
    return hash_function((parent_block_hash or _first_parent(), tuple(curr_block_token_ids), extra_keys))
