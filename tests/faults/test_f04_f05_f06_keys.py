"""F4 (#36708), F5 (#44701), F6 (#30931): what a block's hash says of images, salts and adapters.

Each case is a conversation of two requests with both managers and their hashers: how many tokens the second one hits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

import vllm_kvplug
from tests.glue.hashed_requests import image, make_request
from vllm_kvplug.vllm_glue.hashing import extra_keys_of
from vllm_kvplug.vllm_glue.version import is_since

SIDES = {
    "upstream": (UpstreamManager, kv_cache_utils.get_request_block_hasher),
    "kvplug": (vllm_kvplug.KVCacheManager, vllm_kvplug.get_request_block_hasher),
}
# The ids of images' placeholders are the same for every image.
PLACEHOLDER = 7
# From 0.19 on vLLM has an image's place in its key, in no block after its end: the first half of F4 is mended.
PLACES_IMAGES = is_since("0.19.0")


@pytest.fixture(autouse=True)
def first_parent() -> None:
    kv_cache_utils.init_none_hash(sha256)


def at(identifier: str, offset: int) -> Any:
    """An image's key in a block, from whose start it is so many tokens away."""
    return (identifier, offset) if PLACES_IMAGES else identifier


class Cache:
    """One manager, and requests that are run to their end one after another."""

    def __init__(self, side: str) -> None:
        manager_cls, get_request_block_hasher = SIDES[side]
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.manager = manager_cls(config, 1024, hash_block_size=16, enable_kv_cache_events=True)
        self.hasher = get_request_block_hasher(16, sha256)
        self.num_requests = 0

    def run(self, tokens: list[int], output: list[int] | None = None, **options: Any) -> tuple[int, Request]:
        """Prefill, append the output token by token, free: tokens hit, and the request."""
        self.num_requests += 1
        request = make_request(tokens, self.hasher, request_id=str(self.num_requests), **options)
        blocks, num_hit_tokens = self.manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        assert self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, blocks) is not None
        request.num_computed_tokens = request.num_tokens
        for token in output or []:
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        self.manager.free(request)
        return num_hit_tokens, request


def num_tokens_hit(side: str, first: dict[str, Any], second: dict[str, Any]) -> int:
    cache = Cache(side)
    cache.run(**first)
    return cache.run(**second)[0]


def check(first: dict[str, Any], second: dict[str, Any], *, upstream: int, kvplug: int) -> None:
    assert num_tokens_hit("upstream", first, second) == upstream
    assert num_tokens_hit("kvplug", first, second) == kvplug


TOKENS = list(range(100, 148))
# 48 tokens, and one more because the last token of a prompt is always computed.
PROMPT = [*TOKENS, 99]


def lora(name: str, lora_id: int, path: str) -> LoRARequest:
    return LoRARequest(name, lora_id, path)


# F4: the key of an image is in the blocks that hold its tokens, and in no other.


def test_f4_36708_an_image_that_ends_with_its_block_is_in_no_key_after() -> None:
    """The block of output after it was hashed with the image's key, that of the same tokens in a prompt without."""
    picture, text = [PLACEHOLDER] * 16, list(range(100, 116))
    first = {"tokens": picture + text[:8], "output": text[8:] + [1], "mm_features": [image("X", 0, 16)]}
    second = {"tokens": [*picture, *text, 2], "mm_features": [image("X", 0, 16)]}
    check(first, second, upstream=32 if PLACES_IMAGES else 16, kvplug=32)
    request = make_request(second["tokens"], None, mm_features=second["mm_features"])
    assert [extra_keys_of(request, 0, 16), extra_keys_of(request, 16, 32)] == [(at("X", 0),), None]
    # The answer of 0.17 and 0.18 for the block after the image depends on where they are told to begin.
    assert kv_cache_utils.generate_block_hash_extra_keys(request, 16, 32, 0)[0] == (None if PLACES_IMAGES else ("X",))
    assert kv_cache_utils.generate_block_hash_extra_keys(request, 16, 32, 1)[0] is None


@pytest.mark.parametrize("num_image_tokens", [15, 17, 31, 32, 33])
def test_f4_images_of_other_lengths_are_hit_after_output_too(num_image_tokens: int) -> None:
    tokens = [PLACEHOLDER] * num_image_tokens + list(range(100, 164 - num_image_tokens))
    options = {"mm_features": [image("X", 0, num_image_tokens)]}
    cache = Cache("kvplug")
    cache.run(tokens[:40], output=tokens[40:], **options)
    assert cache.run([*tokens, 2], **options)[0] == 64
    assert cache.run([*tokens, 2], mm_features=[image("Y", 0, num_image_tokens)])[0] == 0


def test_f4_an_image_that_shares_the_prompts_last_block_with_another_is_in_its_key() -> None:
    """Upstream looks at the last image alone when output completes a block: another picture has the same hash."""
    tokens, text = [*range(100, 116), *[PLACEHOLDER] * 8, 50], list(range(200, 208))

    def pictures(identifier: str) -> dict[str, Any]:
        return {"mm_features": [image(identifier, 16, 4), image("a tree", 20, 4)]}

    next_turn = {"tokens": [*tokens, *text, 51], **pictures("a cat")}
    check({"tokens": tokens, "output": text, **pictures("a cat")}, next_turn, upstream=16, kvplug=32)
    for side, num_equal in (("upstream", 2), ("kvplug", 1)):
        _, cat = Cache(side).run(tokens, text, **pictures("a cat"))
        _, dog = Cache(side).run(tokens, text, **pictures("a dog"))
        assert sum(ours == theirs for ours, theirs in zip(cat.block_hashes, dog.block_hashes, strict=True)) == num_equal


def test_f4_images_that_a_session_adds_are_all_in_its_keys() -> None:
    """Several at once, in a streaming session's update: upstream looks at the last one alone."""
    tokens = [*range(100, 120), *[PLACEHOLDER] * 28]
    features = [image("a cat", 20, 14), image("a tree", 34, 14)]
    for side, is_equal in (("upstream", False), ("kvplug", True)):
        hasher = Cache(side).hasher
        session = make_request(tokens[:20], hasher)
        session.mm_features.extend(features)
        session.append_output_token_ids(tokens[20:])
        assert (session.block_hashes == make_request(tokens, hasher, mm_features=features).block_hashes) is is_equal


def test_f4_an_image_within_another_is_in_the_key_of_each_of_its_blocks() -> None:
    """A film's sound: upstream has the first of two inputs alone until it ends."""
    tokens = [*[PLACEHOLDER] * 48, 99]

    def film(sound: str) -> dict[str, Any]:
        return {"tokens": tokens, "mm_features": [image("film", 0, 48), image(sound, 0, 48)]}

    check(film("music"), film("speech"), upstream=32, kvplug=0)
    check(film("music"), film("music"), upstream=48, kvplug=48)


def test_f4_events_tell_the_keys_of_the_hashes() -> None:
    """A prompt computed in two chunks: the second event's first block is the one after the image."""
    right = [(at("X", 0),), None, None]
    for side, expected in (("upstream", right if PLACES_IMAGES else [("X",), ("X",), None]), ("kvplug", right)):
        cache = Cache(side)
        request = make_request(list(range(48)), cache.hasher, mm_features=[image("X", 0, 16)])
        for num_new_tokens in (16, 32):
            cache.manager.allocate_slots(request, num_new_tokens)
            request.num_computed_tokens += num_new_tokens
        assert [keys for event in cache.manager.take_events() for keys in event.extra_keys] == expected


def test_f4_two_places_of_one_image_are_told_apart() -> None:
    """Only the places differ: equal tokens, equal images, and the second one further on."""
    tokens = [*[PLACEHOLDER] * 32, 99]

    def twice(second_offset: int) -> dict[str, Any]:
        return {"tokens": tokens, "mm_features": [image("X", 0, 4), image("X", second_offset, 4)]}

    check(twice(4), twice(8), upstream=0 if PLACES_IMAGES else 32, kvplug=0)
    check(twice(4), twice(4), upstream=32, kvplug=32)


def test_f4_an_image_sent_again_later_leaves_the_earlier_turns_hashes_alone() -> None:
    picture = [PLACEHOLDER] * 16
    first = {"tokens": [*picture, *TOKENS], "mm_features": [image("X", 0, 16)]}
    second = {"tokens": [*picture, *TOKENS, *picture, 99], "mm_features": [image("X", 0, 16), image("X", 64, 16)]}
    check(first, second, upstream=64, kvplug=64)


# F5: nothing that a client sends as a salt equals an adapter.


def test_f5_44701_a_salt_that_is_an_adapters_name() -> None:
    with_adapter = {"tokens": PROMPT, "lora_request": lora("S", 1, "/one")}
    with_salt = {"tokens": PROMPT, "cache_salt": "S"}
    check(with_adapter, with_salt, upstream=16, kvplug=0)
    check(with_salt, with_adapter, upstream=16, kvplug=0)
    check(with_adapter, with_adapter, upstream=48, kvplug=48)
    check(with_salt, with_salt, upstream=48, kvplug=48)


@pytest.mark.parametrize("salt", ["lora", "/one", "('lora', 'S', '/one')", "lora:S", "S"])
def test_f5_no_salt_reaches_an_adapters_blocks(salt: str) -> None:
    adapter = lora("S", 1, "/one")
    without, with_adapter = {"tokens": PROMPT, "cache_salt": salt}, {"tokens": PROMPT, "lora_request": adapter}
    both = {"tokens": PROMPT, "lora_request": adapter, "cache_salt": salt}
    for first, second in ((with_adapter, without), (with_adapter, both), (both, without)):
        assert num_tokens_hit("kvplug", first, second) == 0
        assert num_tokens_hit("kvplug", second, first) == 0
    assert num_tokens_hit("kvplug", both, both) == 48


def test_f5_an_image_whose_identifier_is_an_adapters_name() -> None:
    """An identifier can be the client's own (a uuid with the picture)."""
    tokens = [*[PLACEHOLDER] * 48, 99]
    with_image = {"tokens": tokens, "mm_features": [image("S", 0, 48)]}
    with_adapter = {"tokens": tokens, "lora_request": lora("S", 1, "/one")}
    check(with_image, with_adapter, upstream=0 if PLACES_IMAGES else 48, kvplug=0)


# F6: an adapter is its name and its path.


def test_f6_30931_two_adapters_of_one_name() -> None:
    one, two = lora("S", 1, "/one"), lora("S", 2, "/two")
    check({"tokens": PROMPT, "lora_request": one}, {"tokens": PROMPT, "lora_request": two}, upstream=48, kvplug=0)
    check({"tokens": PROMPT, "lora_request": one}, {"tokens": PROMPT, "lora_request": one}, upstream=48, kvplug=48)


def test_f6_one_adapter_under_another_id_is_the_same() -> None:
    """Ids are a server's own count: the adapter loaded again keeps its cache."""
    one, again = lora("S", 1, "/one"), lora("S", 7, "/one")
    check({"tokens": PROMPT, "lora_request": one}, {"tokens": PROMPT, "lora_request": again}, upstream=48, kvplug=48)


def test_f6_name_and_path_are_not_mixed_up() -> None:
    one, crossed = {"lora_request": lora("a", 1, "b")}, {"lora_request": lora("b", 2, "a")}
    for other in (crossed, {}):
        assert num_tokens_hit("kvplug", {"tokens": PROMPT, **one}, {"tokens": PROMPT, **other}) == 0
