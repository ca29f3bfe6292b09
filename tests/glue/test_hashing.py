"""Block hashes beside vLLM's own: the same bytes but for the listed deviations; events tell what was hashed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.utils import hashing as vllm_hashing
from vllm.v1.core import kv_cache_utils

import vllm_kvplug
from tests.glue.hashed_requests import image, make_request, random_embeds, random_options
from vllm_kvplug.errors import CallError
from vllm_kvplug.vllm_glue import hashing
from vllm_kvplug.vllm_glue.version import is_since

# vLLM's choices for --prefix-caching-hash-algo; two need a package that is not always there.
ALGORITHMS = ["sha256", "sha256_cbor"] + (["xxhash", "xxhash_cbor"] if importlib.util.find_spec("xxhash") else [])
hash_function = vllm_hashing.get_hash_fn_by_name


@pytest.fixture(autouse=True)
def first_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    kv_cache_utils.init_none_hash(vllm_hashing.sha256)


def both_hashers(num_tokens_per_hash: int, function: Callable[[Any], bytes] = vllm_hashing.sha256) -> tuple[Any, Any]:
    """Upstream's, ours."""
    return (
        kv_cache_utils.get_request_block_hasher(num_tokens_per_hash, function),
        vllm_kvplug.get_request_block_hasher(num_tokens_per_hash, function),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(40))
def test_a_prompt_has_vllms_hashes(algorithm: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    upstream, ours = both_hashers(rng.choice([1, 2, 8, 16, 32, 64, 128]), hash_function(algorithm))
    num_tokens = rng.randint(1, 400)
    tokens: list[int] | None = [rng.choice([5, rng.randint(0, 200_000)]) for _ in range(num_tokens)]
    options = random_options(rng, num_tokens)
    if rng.random() < 0.3:
        tokens, options["prompt_embeds"] = None, random_embeds(rng, num_tokens)
    expected = make_request(tokens, upstream, **options)
    found = make_request(tokens, ours, **options)
    assert found.block_hashes == expected.block_hashes
    assert all(type(block_hash) is bytes for block_hash in found.block_hashes)


@pytest.mark.parametrize("seed", range(100))
def test_generated_tokens_have_vllms_hashes(seed: int) -> None:
    """Blocks that output completes, for a prompt whose images all end before its last token's block."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_tokens_per_hash, num_tokens = rng.choice([1, 8, 16, 64]), rng.randint(1, 300)
    upstream, ours = both_hashers(num_tokens_per_hash)
    options = random_options(rng, num_tokens)
    first_open_token = num_tokens // num_tokens_per_hash * num_tokens_per_hash
    features = options["mm_features"] or []
    options["mm_features"] = [
        feature for feature in features if feature.mm_position.offset + feature.mm_position.length < first_open_token
    ]
    tokens: list[int] | None = [rng.randint(0, 9) for _ in range(num_tokens)]
    if rng.random() < 0.3:
        tokens, options["prompt_embeds"] = None, random_embeds(rng, num_tokens)
    requests = [make_request(tokens, hasher, **options) for hasher in (upstream, ours)]
    while requests[0].num_tokens < num_tokens + 3 * num_tokens_per_hash:
        output = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
        for request in requests:
            request.append_output_token_ids(output[0] if len(output) == 1 else output)
    expected, found = requests
    assert len(found.block_hashes) == found.num_tokens // num_tokens_per_hash
    assert found.block_hashes == expected.block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_adapters_key_differs(algorithm: str) -> None:
    function = hash_function(algorithm)
    upstream, ours = both_hashers(16, function)
    options = random_options(random.Random(3), 64, with_lora=True) | {"cache_salt": "salt"}
    tokens = list(range(64))
    request = make_request(tokens, ours, **options)
    assert set(request.block_hashes).isdisjoint(make_request(tokens, upstream, **options).block_hashes)
    parent, rebuilt = kv_cache_utils.NONE_HASH, []
    for start in range(0, 64, 16):
        theirs, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + 16, 0)
        keys = tuple(("lora", "adapter", "/adapter") if key == "adapter" else key for key in theirs)
        parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[start : start + 16], keys)
        rebuilt.append(parent)
    assert request.block_hashes == rebuilt


def test_the_first_parent_is_the_one_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine that starts draws another, after hashers may have been made."""
    upstream, ours = both_hashers(16)
    before = make_request(list(range(16)), ours).block_hashes
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.BlockHash(b"another"))
    after = make_request(list(range(16)), ours).block_hashes
    assert after == make_request(list(range(16)), upstream).block_hashes
    assert after != before


def test_rows_of_embeddings_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    tensor_data = kv_cache_utils.tensor_data
    monkeypatch.setattr(kv_cache_utils, "tensor_data", lambda rows: calls.append(len(rows)) or tensor_data(rows))
    upstream, ours = both_hashers(16)
    request = make_request(None, ours, prompt_embeds=random_embeds(random.Random(1), 40))
    assert calls == [16, 16]
    assert upstream(make_request(None, None, prompt_embeds=request.prompt_embeds)) == request.block_hashes
    del calls[:]
    first, second = hashing.extra_keys_of_blocks(request, [0, 1], 16)
    assert (first, second) == (hashing.extra_keys_of(request, 0, 16), hashing.extra_keys_of(request, 16, 32))
    assert calls == []


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(CallError, match="block_size: expected at least 1 token, found 0"):
        vllm_kvplug.get_request_block_hasher(0, vllm_hashing.sha256)


def test_keys_of_blocks_at_any_positions() -> None:
    options = {"mm_features": [image("X", 20, 20)], "lora_request": LoRARequest("a", 1, "/p"), "cache_salt": "s"}
    request = make_request(list(range(96)), None, **options)
    lora = ("lora", "a", "/p")
    in_block_2, in_both_first = (("X", -12), ("X", 20)) if is_since("0.19.0") else ("X", "X")
    assert hashing.extra_keys_of_blocks(request, [0, 2, 5], 16) == [(lora, "s"), (lora, in_block_2), (lora,)]
    assert hashing.extra_keys_of_blocks(request, iter([0, 2]), 32, 16) == [(lora, in_both_first, "s"), (lora,)]
    assert hashing.extra_keys_of_blocks(make_request(list(range(96)), None), iter([0, 2]), 16) == [None, None]


def test_vllms_own_names() -> None:
    """Where neither F4 nor an adapter is concerned, the answers are those of vLLM's functions of these names."""
    request = make_request(list(range(64)), None, mm_features=[image("X", 3, 20), image("Y", 30, 7)], cache_salt="s")
    for start, end in ((0, 5), (0, 16), (16, 32), (24, 30), (32, 48), (0, 64)):
        expected = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        assert hashing.generate_block_hash_extra_keys(request, start, end, 0) == expected
        assert hashing.extra_keys_of(request, start, end) == expected[0]
    for options, expected_need in (
        ({}, False),
        ({"cache_salt": "s"}, True),
        ({"mm_features": [image("X", 0, 1)]}, True),
    ):
        assert hashing.need_extra_keys(make_request([1], None, **options)) is expected_need
        assert kv_cache_utils.need_extra_keys(make_request([1], None, **options)) is expected_need
    for parent in (None, b"parent"):
        arguments = (vllm_hashing.sha256, parent, [1, 2, 3], ("key",))
        assert hashing.hash_block_tokens(*arguments) == kv_cache_utils.hash_block_tokens(*arguments)


@pytest.mark.parametrize("seed", range(60))
def test_events_tell_what_was_hashed(seed: int, kv_cache_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber computes each block's hash from the event alone: parent, tokens and extra keys."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    print(f"seed {seed}")
    rng = random.Random(seed)
    _, ours = both_hashers(16)
    manager = vllm_kvplug.KVCacheManager(kv_cache_config, 1024, hash_block_size=16, enable_kv_cache_events=True)
    num_tokens = rng.randint(20, 300)
    options = random_options(rng, num_tokens, with_lora=rng.random() < 0.5)
    tokens: list[int] | None = [rng.randint(0, 9) for _ in range(num_tokens)]
    if rng.random() < 0.2:
        tokens, options["prompt_embeds"] = None, random_embeds(rng, num_tokens)
    if options["mm_features"] and rng.random() < 0.5:
        options["mm_features"] += [image("image 0", num_tokens - 10, 5)]
    request = make_request(tokens, ours, **options)
    told: dict[bytes, None] = {}
    while request.num_computed_tokens < num_tokens + 40:
        num_new_tokens = min(rng.randint(1, 60), request.num_tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, num_new_tokens) is not None
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(rng.randint(0, 9))
        for event in manager.take_events():
            parent = event.parent_block_hash or kv_cache_utils.NONE_HASH
            for position, block_hash in enumerate(event.block_hashes):
                block_tokens = tuple(event.token_ids[position * 16 : (position + 1) * 16])
                assert block_hash == vllm_hashing.sha256((parent, block_tokens, event.extra_keys[position]))
                told[block_hash] = None
                parent = block_hash
    assert list(told) == request.block_hashes[: request.num_computed_tokens // 16]
