"""Requests with all that goes into block hashes, without vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


def image(identifier: str, offset: int, num_tokens: int) -> Any:
    """A multi-modal feature whose placeholder is `num_tokens` from `offset` on."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=num_tokens))


def adapter(name: str, path: str, lora_id: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=lora_id)


@dataclass
class HashedRequest:
    """The attributes of vLLM's Request that a hasher reads."""

    tokens: Iterable[int]
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @classmethod
    def random(cls, rng: random.Random, num_tokens: int) -> HashedRequest:
        """Images one after another, few identifiers; each other input every second time."""
        features, offset = [], rng.randint(0, 20)
        while offset < num_tokens and rng.random() < 0.9:
            num_image_tokens = rng.choice([1, 4, 8, 16, rng.randint(1, 40)])
            features.append(image(f"image {rng.randint(0, 8)}", offset, num_image_tokens))
            offset += num_image_tokens + rng.choice([0, 0, 1, rng.randint(0, 30)])
        return cls(
            [rng.randint(0, 9) for _ in range(num_tokens)],
            mm_features=features if rng.random() < 0.7 else [],
            lora_request=adapter(rng.choice("ab"), rng.choice(["/a", "/b"])) if rng.random() < 0.5 else None,
            cache_salt=rng.choice(["", "a", "salt"]) if rng.random() < 0.5 else None,
            prompt_embeds=str(rng.random()) * 3 if rng.random() < 0.3 else None,
        )
