"""Block hashes: what names the content of a full block, so that equal prefixes of requests find each other.

A block's hash is `hash_function((parent hash, tokens, extra keys))`: it stands for the whole prefix up to the block's
end. Extra keys are what changes a block's content besides its tokens: adapter, images (any multi-modal input), the
client's salt and prompt embeddings, in this order. The bytes are vLLM 0.17.1's, except for what docs/deviations.md
lists:

- an adapter's key is `("lora", name, path)`, so that no salt can equal it, nor another adapter of the same name;
- a block has the keys of exactly those images whose placeholder overlaps it, in however many calls it is hashed;
- an image that is in a request twice has its place in its key: `(identifier, first token from the block's start)`;
  with `places_images` every image has.

Nothing is remembered between calls: a block's keys follow from the request's tokens and inputs up to the block's end
alone. So a prefix keeps its hashes when a conversation goes on, whatever is sent with the next turn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

HashFunction = Callable[[Any], bytes]
# Of a request, its prompt embeddings' rows from the second to before the third.
DigestEmbeds = Callable[[Any, int, int], bytes]
Key = tuple[Any, ...] | None


def needs_extra_keys(request: Any) -> bool:
    """Whether anything but tokens goes into the hashes of the request's blocks."""
    return (
        bool(request.mm_features)
        or request.lora_request is not None
        or bool(request.cache_salt)
        or request.prompt_embeds is not None
    )


class ExtraKeys:
    """The extra keys of one request's blocks, for as long as its inputs stay as they are.

    Args:
        request: vLLM's Request.
        digest_embeds: answers the digest of the rows `start_token` to `end_token` of a request's prompt embeddings.
        places_images: every image has its place in its key, not only one that is in the request twice.

    Attributes:
        adapter: the adapter's key alone, in a tuple; None without an adapter.
        adapter_alone_from: the token from which on `adapter` is all that a block has.
    """

    def __init__(self, request: Any, digest_embeds: DigestEmbeds, *, places_images: bool = False) -> None:
        self._request = request if request.prompt_embeds is not None else None
        self._digest_embeds = digest_embeds
        self._places_images = places_images
        self._salt = request.cache_salt
        self.adapter: Key = None
        if request.lora_request is not None:
            self.adapter, self._salt = _adapter_keys(request.lora_request, self._salt)
        self._images = _Images.of(request.mm_features, places_images) if request.mm_features else None
        self.adapter_alone_from: float = 1 if self._salt else 0
        if self._images is not None:
            self.adapter_alone_from = max(self.adapter_alone_from, self._images.furthest_ends[-1])
        if self._request is not None:
            self.adapter_alone_from = float("inf")

    def of_block(self, start_token: int, end_token: int) -> Key:
        """The keys of the block of these tokens; None where there are none."""
        if start_token >= self.adapter_alone_from:
            return self.adapter
        images = self._images.keys(start_token, end_token) if self._images is not None else ()
        return self._joined(images, start_token, ((start_token, end_token),))

    def of_blocks_joined(self, start_token: int, end_token: int, num_tokens_per_hash: int) -> Key:
        """The keys of several consecutive blocks whose hashes are one name: each key of theirs once. (With
        `places_images` an image has its place from the first block's start.)
        """
        ranges = [(start, start + num_tokens_per_hash) for start in range(start_token, end_token, num_tokens_per_hash)]
        images: tuple[Any, ...] = ()
        if self._images is not None and self._places_images:
            images = self._images.keys(start_token, end_token)
        elif self._images is not None:
            images = tuple(dict.fromkeys(key for start, end in ranges for key in self._images.keys(start, end)))
        return self._joined(images, start_token, ranges)

    def _joined(self, images: tuple[Any, ...], start_token: int, ranges: Iterable[tuple[int, int]]) -> Key:
        keys = images if self.adapter is None else self.adapter + images
        if start_token == 0 and self._salt:
            keys += (self._salt,)
        if self._request is not None:
            keys += tuple(self._digest_embeds(self._request, start, end) for start, end in ranges)
        return keys or None


class _Images(NamedTuple):
    """A request's images in the order of their placeholders; five lists of the same length."""

    identifiers: list[Any]
    starts: list[int]
    ends: list[int]
    # The furthest end up to each image: placeholders may lie within each other (a video's frames and its sound).
    furthest_ends: list[int]
    # The first token of the second image with this one's identifier: from there on it is in the request twice. (0 where
    # every image's place is in its key.)
    repeated_from: list[float]

    @classmethod
    def of(cls, features: Iterable[Any], places_images: bool) -> _Images:
        ordered = sorted(features, key=lambda feature: feature.mm_position.offset)
        # An empty placeholder belongs to the block at whose token it stands; with places to none, at a block's first.
        min_length = 0 if places_images else 1
        starts = [feature.mm_position.offset for feature in ordered]
        ends = [
            start + max(min_length, feature.mm_position.length) for start, feature in zip(starts, ordered, strict=True)
        ]
        first_of: dict[Any, Any] = {}
        second_start: dict[Any, float] = {}
        for start, feature in zip(starts, ordered, strict=True):
            identifier = feature.identifier
            if identifier in first_of:
                second_start.setdefault(identifier, start)
            else:
                first_of[identifier] = identifier
        # One object for equal identifiers: pickle writes an object's second occurrence as a reference, an equal
        # object in full, and the bytes would tell them apart.
        identifiers = [first_of[feature.identifier] for feature in ordered]
        placed_from = dict.fromkeys(first_of, 0.0) if places_images else second_start
        repeated_from = [placed_from.get(identifier, float("inf")) for identifier in identifiers]
        return cls(identifiers, starts, ends, list(accumulate(ends, max)), repeated_from)

    def keys(self, start_token: int, end_token: int) -> tuple[Any, ...]:
        first, end = bisect_right(self.furthest_ends, start_token), bisect_left(self.starts, end_token)
        if first == end:
            return ()
        return tuple(
            [
                self.identifiers[index]
                if self.repeated_from[index] >= end_token
                else (self.identifiers[index], self.starts[index] - start_token)
                for index in range(first, end)
                if self.ends[index] > start_token
            ]
        )


def _adapter_keys(adapter: Any, salt: str | None) -> tuple[tuple[Any, ...], str | None]:
    """The adapter's key, and the salt: equal texts among them as one object, for the same reason as identifiers."""
    texts: dict[str | None, Any] = {"lora": "lora"}
    name, path, salt = [texts.setdefault(text, text) for text in (adapter.lora_name, adapter.lora_path, salt)]
    return ((texts["lora"], name, path),), salt


def block_hasher(
    num_tokens_per_hash: int,
    hash_function: HashFunction,
    first_parent: Callable[[], Any],
    digest_embeds: DigestEmbeds,
    *,
    places_images: bool = False,
) -> Callable[[Any], list[Any]]:
    """Make the function that answers the hashes of the full blocks that a request has beyond its `block_hashes`.

    It changes nothing: vLLM's Request calls it whenever tokens were added, and keeps what it answers.

    Args:
        num_tokens_per_hash: tokens of each hashed block.
        hash_function: vLLM's, by `--prefix-caching-hash-algo`.
        first_parent: answers what stands for the parent of a request's first block.
        digest_embeds, places_images: see `ExtraKeys`.
    """

    def missing_hashes(request: Any) -> list[Any]:
        block_hashes = request.block_hashes
        start_token = len(block_hashes) * num_tokens_per_hash
        num_tokens = request.num_tokens
        if start_token + num_tokens_per_hash > num_tokens:
            return []
        num_new_blocks = (num_tokens - start_token) // num_tokens_per_hash
        parent = block_hashes[-1] if block_hashes else first_parent()
        # One iterator, taken from in turn for each token of a block: zip cuts the tuples without a slice for each.
        tokens = iter(request.all_token_ids[start_token : start_token + num_new_blocks * num_tokens_per_hash])
        blocks = zip(*[tokens] * num_tokens_per_hash, strict=True)
        hashes: list[Any] = []
        extra_keys: Key = None
        if needs_extra_keys(request):
            keys = ExtraKeys(request, digest_embeds, places_images=places_images)
            while start_token < keys.adapter_alone_from and len(hashes) < num_new_blocks:
                end_token = start_token + num_tokens_per_hash
                parent = hash_function((parent, next(blocks), keys.of_block(start_token, end_token)))
                hashes.append(parent)
                start_token = end_token
            extra_keys = keys.adapter
        for block in blocks:
            parent = hash_function((parent, block, extra_keys))
            hashes.append(parent)
        return hashes

    return missing_hashes
