"""A request for a manager that is driven from operations: it has the attributes that managers read, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_kvplug.trace.operations import RequestState


class UnknownTokens(Sequence[int]):
    """Token ids that nobody recorded: zeros, of the right number, made when they are read."""

    __slots__ = ("_num_tokens",)

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [0] * len(range(*index.indices(self._num_tokens)))
        if not -self._num_tokens <= index < self._num_tokens:
            raise IndexError(f"expected a token of {self._num_tokens}, found index {index}")
        return 0


class StandIn:
    """Stands for the request of a number. What changes between calls is set by `follow`."""

    # What goes into block hashes besides tokens: the hashes are there already.
    lora_request = None
    mm_features: Sequence[Any] = ()
    cache_salt = None
    prompt_embeds = None
    sampling_params = None
    pooling_params = None
    kv_transfer_params = None
    spec_token_ids: Sequence[int] = ()
    priority = 0
    status = None
    num_cached_tokens = -1
    max_tokens = 1
    client_index = 0
    arrival_time = 0.0

    def __init__(self, number: int, num_prompt_tokens: int) -> None:
        self.request_id = f"request-{number}"
        self.num_prompt_tokens = num_prompt_tokens
        self.num_external_computed_tokens = 0
        self.has_ended = False
        self._prompt_embeds_per_block_hashes: dict[Any, bytes] = {}

    def follow(self, state: RequestState, num_own_preemptions: int) -> None:
        """Take over the state. `num_own_preemptions` come on top of the recorded ones."""
        self.num_tokens = state.num_tokens
        self.num_computed_tokens = state.num_computed_tokens
        self.num_output_placeholders = state.num_output_placeholders
        self.num_preemptions = state.num_preemptions + num_own_preemptions
        self.skip_reading_prefix_cache = state.skip_reading_prefix_cache
        self.block_hashes = state.block_hashes
        self._token_ids = state.token_ids

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Real token ids where the trace has them."""
        return UnknownTokens(self.num_tokens) if self._token_ids is None else self._token_ids

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def is_finished(self) -> bool:
        """Whether this is the request's last call: a `free` that is not of a preemption."""
        return self.has_ended
