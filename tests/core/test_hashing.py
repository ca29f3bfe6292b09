"""Block hashes: the chain, its extra keys, and that they follow from a request's content alone."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import pytest

from tests.core.hashed_requests import HashedRequest, adapter, image
from vllm_kvplug.hashing import ExtraKeys, block_hasher

FIRST_PARENT = b"nothing before"


def hash_function(parts: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(parts)).digest()


def digest_embeds(request: Any, start_token: int, end_token: int) -> bytes:
    return repr(request.prompt_embeds[start_token:end_token]).encode()


def hashes_of(request: HashedRequest, num_tokens_per_hash: int = 4) -> list[bytes]:
    """All hashes, at once."""
    return block_hasher(num_tokens_per_hash, hash_function, lambda: FIRST_PARENT, digest_embeds)(request)


def keys_of(request: HashedRequest, *ranges: tuple[int, int]) -> list[Any]:
    keys = ExtraKeys(request, digest_embeds)
    return [keys.of_block(start, end) for start, end in ranges]


def test_a_hash_stands_for_parent_tokens_and_keys() -> None:
    first, second = hashes_of(HashedRequest(range(10)))
    assert first == hash_function((FIRST_PARENT, (0, 1, 2, 3), None))
    assert second == hash_function((first, (4, 5, 6, 7), None))


def test_only_what_is_missing_is_answered_and_nothing_is_changed() -> None:
    request = HashedRequest(range(7))
    hasher = block_hasher(4, hash_function, lambda: FIRST_PARENT, digest_embeds)
    request.block_hashes += hasher(request)
    assert len(request.block_hashes) == 1
    assert hasher(request) == []
    request.all_token_ids.append(7)
    before = list(request.block_hashes)
    assert hasher(request) == hasher(request) == [hash_function((before[0], (4, 5, 6, 7), None))]
    assert request.block_hashes == before
    del request.all_token_ids[2:]  # a session's tokens may shrink below what was hashed
    assert hasher(request) == []


def test_the_first_parent_is_asked_for_at_each_first_block() -> None:
    parents = iter([b"one", b"two"])
    hasher = block_hasher(4, hash_function, lambda: next(parents), digest_embeds)
    assert hasher(HashedRequest(range(4))) == [hash_function((b"one", (0, 1, 2, 3), None))]
    assert hasher(HashedRequest(range(4))) == [hash_function((b"two", (0, 1, 2, 3), None))]


def test_the_order_of_keys_and_where_each_is() -> None:
    request = HashedRequest(
        range(12),
        mm_features=[image("X", 2, 4)],
        lora_request=adapter("a", "/p"),
        cache_salt="s",
        prompt_embeds="abcdef",
    )
    lora = ("lora", "a", "/p")
    assert keys_of(request, (0, 4), (4, 8), (8, 12)) == [
        (lora, "X", "s", b"'abcd'"),
        (lora, "X", b"'ef'"),
        (lora, b"''"),
    ]
    assert keys_of(HashedRequest(range(12), cache_salt="s"), (0, 4), (4, 8)) == [("s",), None]
    assert keys_of(HashedRequest(range(12), cache_salt=""), (0, 4)) == [None]


def test_adapters_differ_by_name_or_path_and_no_salt_equals_one() -> None:
    requests = [
        HashedRequest(range(8)),
        HashedRequest(range(8), cache_salt="S"),
        HashedRequest(range(8), lora_request=adapter("S", "/one")),
        HashedRequest(range(8), lora_request=adapter("S", "/two")),
        HashedRequest(range(8), lora_request=adapter("T", "/one")),
        HashedRequest(range(8), lora_request=adapter("S", "/one"), cache_salt="S"),
        HashedRequest(range(8), lora_request=adapter("S", "/one"), cache_salt="/one"),
    ]
    all_hashes = [block_hash for request in requests for block_hash in hashes_of(request)]
    assert len(set(all_hashes)) == 2 * len(requests)
    # The id is a number that another process gives the adapter: it is no part of what the adapter does.
    assert hashes_of(HashedRequest(range(8), lora_request=adapter("S", "/one", 9))) == hashes_of(requests[2])


@pytest.mark.parametrize(
    ("offset", "num_image_tokens", "expected"),
    [
        (0, 4, [True, False, False]),  # ends with its block: the next has none of it
        (0, 5, [True, True, False]),
        (3, 1, [True, False, False]),
        (4, 4, [False, True, False]),
        (2, 10, [True, True, True]),
        (4, 0, [False, True, False]),  # an empty placeholder stands at its offset
        (8, 4, [False, False, True]),
    ],
)
def test_a_block_has_the_keys_of_the_images_that_overlap_it(
    offset: int, num_image_tokens: int, expected: list[bool]
) -> None:
    request = HashedRequest(range(12), mm_features=[image("X", offset, num_image_tokens)])
    assert keys_of(request, (0, 4), (4, 8), (8, 12)) == [("X",) if has_key else None for has_key in expected]


def test_several_images_in_a_block_and_within_each_other() -> None:
    request = HashedRequest(range(12), mm_features=[image("X", 0, 2), image("Y", 2, 1), image("Z", 3, 6)])
    assert keys_of(request, (0, 4), (4, 8), (8, 12)) == [("X", "Y", "Z"), ("Z",), ("Z",)]
    # A film's sound lies within its frames, and ends first.
    request = HashedRequest(range(16), mm_features=[image("film", 0, 12), image("sound", 1, 2), image("Z", 12, 2)])
    assert keys_of(request, (0, 4), (4, 8), (8, 12), (12, 16)) == [("film", "sound"), ("film",), ("film",), ("Z",)]
    # The order of their places counts, not that of the list.
    assert keys_of(HashedRequest(range(4), mm_features=[image("Y", 2, 1), image("X", 0, 1)]), (0, 4)) == [("X", "Y")]


def test_an_image_that_is_there_twice_has_its_place() -> None:
    request = HashedRequest(range(12), mm_features=[image("X", 0, 2), image("Y", 2, 2), image("X", 6, 4)])
    # Before its second occurrence it is an image like others: a later turn does not change the hashes of earlier ones.
    assert keys_of(request, (0, 4), (4, 8), (8, 12)) == [("X", "Y"), (("X", 2),), (("X", -2),)]
    request = HashedRequest(range(8), mm_features=[image("X", 1, 1), image("X", 2, 1)])
    assert keys_of(request, (0, 8)) == [(("X", 1), ("X", 2))]
    moved = HashedRequest(range(8), mm_features=[image("X", 1, 1), image("X", 3, 1)])
    assert hashes_of(request, 8) != hashes_of(moved, 8)


def test_every_image_can_have_its_place() -> None:
    request = HashedRequest(range(12), mm_features=[image("X", 1, 2), image("Y", 6, 4)])
    keys = ExtraKeys(request, digest_embeds, places_images=True)
    ranges = [(0, 4), (4, 8), (8, 12)]
    assert [keys.of_block(*tokens) for tokens in ranges] == [(("X", 1),), (("Y", 2),), (("Y", -2),)]
    # Of joined blocks the first one's start counts.
    assert keys.of_blocks_joined(4, 12, 4) == (("Y", 2),)
    placed, plain = (
        block_hasher(4, hash_function, lambda: FIRST_PARENT, digest_embeds, places_images=places)(request)
        for places in (True, False)
    )
    assert not set(placed) & set(plain)
    moved = HashedRequest(range(12), mm_features=[image("X", 0, 2), image("Y", 6, 4)])
    assert block_hasher(4, hash_function, lambda: FIRST_PARENT, digest_embeds, places_images=True)(moved) != placed


@pytest.mark.parametrize(("offset", "placed"), [(3, [(("X", 3),), None]), (4, [None, None]), (5, [None, (("X", 1),)])])
def test_an_image_without_tokens(offset: int, placed: list[Any]) -> None:
    """With places it is in no key where a block begins, as in 0.19. (Without: in that of the block that begins.)"""
    request = HashedRequest(range(8), mm_features=[image("X", offset, 0)])
    keys = ExtraKeys(request, digest_embeds, places_images=True)
    assert [keys.of_block(0, 4), keys.of_block(4, 8)] == placed


def test_blocks_whose_hashes_are_joined() -> None:
    request = HashedRequest(
        range(16),
        mm_features=[image("X", 2, 4), image("Y", 8, 1), image("X", 10, 3)],
        lora_request=adapter("a", "/p"),
        cache_salt="s",
        prompt_embeds="abcdefghijklmnop",
    )
    keys = ExtraKeys(request, digest_embeds)
    lora = ("lora", "a", "/p")
    assert keys.of_blocks_joined(0, 8, 4) == (lora, "X", "s", b"'abcd'", b"'efgh'")
    assert keys.of_blocks_joined(8, 16, 4) == (lora, "Y", ("X", 2), ("X", -2), b"'ijkl'", b"'mnop'")
    assert ExtraKeys(HashedRequest(range(8)), digest_embeds).of_blocks_joined(0, 8, 4) is None
    assert ExtraKeys(HashedRequest(range(8), cache_salt="s"), digest_embeds).of_blocks_joined(4, 8, 4) is None


def test_equal_texts_give_equal_hashes_whichever_objects_they_are() -> None:
    def copy(text: str) -> str:
        return "".join(list(text)[:1]) + text[1:]  # an equal string that is another object

    def request(same: bool) -> HashedRequest:
        text = "lora-and-more"
        name, path, salt = (text, text, text) if same else (copy(text), copy(text), copy(text))
        images = [image("an image" if same else copy("an image"), start, 1) for start in (0, 2)]
        return HashedRequest(range(4), mm_features=images, lora_request=adapter(name, path), cache_salt=salt)

    assert request(same=False).cache_salt is not request(same=True).cache_salt
    assert hashes_of(request(same=False)) == hashes_of(request(same=True))
    named_lora = [HashedRequest(range(4), lora_request=adapter(copy("lora") if n else "lora", "/p")) for n in (0, 1)]
    assert hashes_of(named_lora[0]) == hashes_of(named_lora[1])


@pytest.mark.parametrize("seed", range(200))
def test_hashes_do_not_depend_on_when_they_are_computed(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_tokens_per_hash = rng.choice([1, 2, 4, 16])
    request = HashedRequest.random(rng, num_tokens=rng.randint(1, 100))
    hasher = block_hasher(num_tokens_per_hash, hash_function, lambda: FIRST_PARENT, digest_embeds)
    at_once = hasher(request)
    assert len(at_once) == request.num_tokens // num_tokens_per_hash

    all_tokens, all_images = request.all_token_ids, request.mm_features
    stop = 0
    while stop < len(all_tokens):
        stop += rng.randint(1, 20)
        request.all_token_ids = all_tokens[:stop]
        # As a streaming session has them: those that begin in what was sent so far.
        request.mm_features = [feature for feature in all_images if feature.mm_position.offset < stop]
        request.block_hashes += hasher(request)
    assert request.block_hashes == at_once


@pytest.mark.parametrize("seed", range(200))
def test_the_keys_are_those_of_the_tokens(seed: int) -> None:
    """Against a definition that looks at each token by itself."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_tokens_per_hash = rng.choice([1, 2, 4, 16])
    request = HashedRequest.random(rng, num_tokens=100)
    keys = ExtraKeys(request, digest_embeds)
    for start in range(0, 100 - num_tokens_per_hash + 1, num_tokens_per_hash):
        tokens = range(start, start + num_tokens_per_hash)
        begun = [feature for feature in request.mm_features if feature.mm_position.offset < tokens.stop]
        names = [feature.identifier for feature in begun]
        expected: list[Any] = []
        if request.lora_request is not None:
            expected.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
        for feature in begun:
            offset = feature.mm_position.offset
            if any(offset <= token < offset + feature.mm_position.length for token in tokens):
                place = (feature.identifier, offset - start)
                expected.append(place if names.count(feature.identifier) > 1 else feature.identifier)
        if start == 0 and request.cache_salt:
            expected.append(request.cache_salt)
        if request.prompt_embeds is not None:
            expected.append(digest_embeds(request, start, tokens.stop))
        assert keys.of_block(start, tokens.stop) == (tuple(expected) or None)
