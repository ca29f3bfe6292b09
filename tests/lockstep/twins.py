"""Requests in pairs: vLLM's own `Request`, once for each side, always given the same tokens and the same progress."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from typing import Any
from unittest import mock

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.lockstep.compare import Both

_SAMPLING = {skips: SamplingParams(max_tokens=10**6, skip_reading_prefix_cache=skips) for skips in (False, True)}


def prepare_hashing() -> None:
    """Set vLLM's first parent hash, the same in every process, so that a failure repeats byte for byte."""
    with mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
        init_none_hash(sha256)


class Phase(enum.Enum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Twin(Both):
    """One request, as each side's own object.

    Attributes:
        family, prompt, options: what it was made from.
        in_flight: for each step whose output has not arrived, how many drafts it verifies; oldest first.
        num_external_tokens: tokens that came or come from outside.
        num_loading_tokens: with those on their way, so many tokens will be there.
        num_encoder_tokens: of its encoder.
        has_encoder: its encoder's tokens were allocated.
        num_refusals: how often it was refused slots since it last had some.
    """

    def __init__(
        self,
        request_id: str,
        family: int,
        prompt: list[int],
        num_tokens_per_hash: int,
        num_encoder_tokens: int,
        options: dict[str, int],
    ) -> None:
        hasher = get_request_block_hasher(num_tokens_per_hash, sha256)
        super().__init__(
            *(
                Request(
                    request_id=request_id,
                    prompt_token_ids=list(prompt),
                    pooling_params=None,
                    block_hasher=hasher,
                    arrival_time=0.0,
                    **_request_options(len(prompt), **options),
                )
                for _ in ("upstream", "ours")
            )
        )
        self.request_id = request_id
        self.family = family
        self.prompt = prompt
        self.options = options
        self.phase = Phase.WAITING
        self.in_flight: list[int] = []
        self.num_external_tokens = 0
        self.num_loading_tokens = 0
        self.num_encoder_tokens = num_encoder_tokens
        self.has_encoder = False
        self.num_refusals = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, drafts excluded."""
        return self.upstream.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """As the scheduler counts: tokens of steps under way are included."""
        return self.upstream.num_computed_tokens

    @property
    def num_placeholders(self) -> int:
        """Output tokens that an asynchronous step will bring."""
        return self.upstream.num_output_placeholders

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that a step could compute now, drafts included."""
        return self.upstream.num_tokens_with_spec + self.num_placeholders - self.num_computed_tokens

    def set(self, **values: Any) -> None:
        """Set attributes of both requests."""
        for request in (self.upstream, self.ours):
            for name, value in values.items():
                setattr(request, name, value)

    def append(self, tokens: Iterable[int]) -> None:
        """Append output tokens to both requests."""
        tokens = list(tokens)
        for request in (self.upstream, self.ours):
            request.append_output_token_ids(list(tokens))

    def forget_progress(self) -> None:
        """What preemption does to a request."""
        self.phase = Phase.WAITING
        self.in_flight = []
        self.has_encoder = False
        self.set(
            num_computed_tokens=0,
            spec_token_ids=[],
            num_output_placeholders=0,
            num_preemptions=self.upstream.num_preemptions + 1,
        )

    def continue_session(self, num_tokens: int, own_seed: int) -> None:
        """What a streaming session's next input does. Block hashes stay, even one that the dropped token is in."""
        first = self.num_computed_tokens
        tokens = text(self.family, own_seed, first, first + num_tokens)
        for request in (self.upstream, self.ours):
            del request._all_token_ids[first:]
            request._output_token_ids.clear()
            request._all_token_ids.extend(tokens)
            request.update_block_hashes()
        self.phase = Phase.WAITING
        self.set(spec_token_ids=[])

    def next_tokens(self, num_tokens: int, own_seed: int) -> list[int]:
        """Output tokens: seed 0 continues the prompt family, so that several requests generate the same."""
        first = self.num_tokens
        return text(self.family, own_seed, first, first + num_tokens)


def text(family: int, own_seed: int, first: int, end: int) -> list[int]:
    """Token ids of the positions `first` .. `end` - 1: the family's text, or another for each seed above 0."""
    start = (family + 1) * 100_000 + own_seed * 10_000_000
    return [start + position for position in range(first, end)]


def _request_options(num_tokens: int, salt: int, lora: int, image: int, skips_reading: int) -> dict[str, Any]:
    options: dict[str, Any] = {"sampling_params": _SAMPLING[bool(skips_reading)]}
    if salt:
        options["cache_salt"] = f"salt-{salt}"
    if lora:
        options["lora_request"] = LoRARequest(
            lora_name=f"adapter-{lora}", lora_int_id=lora, lora_path=f"adapters/{lora}"
        )
    if image:
        place = PlaceholderRange(offset=num_tokens // 3, length=num_tokens // 2 or 1)
        options["mm_features"] = [MultiModalFeatureSpec(None, "image", f"image-{image}", place)]
    return options
