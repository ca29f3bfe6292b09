"""Random requests that share prefixes, and what the fake model says to each: a function of request and position."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tests.scheduler.cases import Case

NUM_FAMILIES = 4
MAX_PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Script:
    """One request, and its answer.

    Attributes:
        family, num_shared_tokens: the text that it begins with, which other requests have too.
        own_seed: what follows; 0: the family's text goes on, so that several requests also answer the same.
        arrives_at, aborted_at: steps; a request that never ends before its answer does has None.
        remote: what the connector has of it (see `fake_connector.RemoteTokens`).
    """

    request_id: str
    family: int
    num_shared_tokens: int
    own_seed: int
    num_prompt_tokens: int
    max_tokens: int
    arrives_at: int
    aborted_at: int | None = None
    priority: int = 0
    remote: dict[str, Any] = field(default_factory=dict)

    def token(self, position: int) -> int:
        """The token at a position of the request's whole text."""
        own_seed = 0 if position < self.num_shared_tokens else self.own_seed
        return (self.family + 1) * 1_000_000 + own_seed * 10_000_000 + position

    def drafts(self, position: int, num_drafts: int) -> list[int]:
        """Proposals for the tokens from `position` on: a few right ones, then wrong ones."""
        num_right = random.Random(f"{self.request_id}/{position}").randint(0, num_drafts)
        return [self.token(position + n) if n < num_right else -7 - n for n in range(num_drafts)]

    def request(self, num_tokens_per_hash: int) -> Request:
        """vLLM's request; each scheduler needs its own."""
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        if self.remote:
            params.extra_args = {"kv_transfer_params": self.remote}
        return Request(
            request_id=self.request_id,
            prompt_token_ids=[self.token(position) for position in range(self.num_prompt_tokens)],
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self.arrives_at),
            priority=self.priority,
            block_hasher=get_request_block_hasher(num_tokens_per_hash, sha256),
        )


def random_scripts(case: Case, seed: int, *, num_requests: int = 30, has_aborts: bool = True) -> list[Script]:
    """Requests in order of arrival."""
    rng = random.Random(seed)
    scripts, step = [], 0
    for number in range(num_requests):
        step += rng.choice((0, 0, 1, 1, 2, 5))
        num_prompt_tokens = rng.randint(1, MAX_PROMPT_TOKENS)
        # Prefixes that end on a block boundary, and such that do not.
        num_shared_tokens = rng.randint(0, num_prompt_tokens)
        if rng.random() < 0.5:
            num_shared_tokens -= num_shared_tokens % case.num_tokens_per_block
        max_tokens = min(rng.choice((1, 2, 5, 10, 20, 40)), case.max_model_len - num_prompt_tokens)
        is_aborted = has_aborts and rng.random() < 0.15
        scripts.append(
            Script(
                request_id=f"r{number}",
                family=rng.randrange(NUM_FAMILIES),
                num_shared_tokens=num_shared_tokens,
                own_seed=rng.choice((0, number + 1)),
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                arrives_at=step,
                aborted_at=step + rng.randint(0, 12) if is_aborted else None,
                priority=rng.randint(0, 3),
                remote=_random_remote(rng, num_prompt_tokens, case) if case.loads and rng.random() < 0.6 else {},
            )
        )
    return scripts


def _random_remote(rng: random.Random, num_prompt_tokens: int, case: Case) -> dict[str, Any]:
    return {
        "num_tokens": rng.randint(0, num_prompt_tokens),
        "is_async": case.loads == "any" and rng.random() < 0.5,
        "num_unknown": rng.choice((0, 0, 0, 2)),
        "fails_at": rng.choice((None, 0.0, 0.5, 0.99)) if case.loads_fail else None,
        "num_steps": rng.randint(1, 4),
        "sends_for_steps": rng.choice((0, 0, 1, 3)),
    }
