"""The scheduler's side of a KV connector that has tokens of some requests; its worker's side is in `fake_worker`.

What it has of a request stands in the request's kv_transfer_params, see `RemoteTokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass(frozen=True)
class RemoteTokens:
    """What the connector has of a request.

    Attributes:
        num_tokens: leading tokens that it has.
        is_async: the load takes `num_steps` steps, in which the request waits.
        num_unknown: how often it does not know yet when it is asked.
        fails_at: the part of the load, 0.0 to 1.0, at which its first attempt fails; None: it does not fail.
        sends_for_steps: how long the request's blocks are still read after it has ended.
    """

    num_tokens: int
    is_async: bool
    num_unknown: int
    fails_at: float | None
    num_steps: int
    sends_for_steps: int


@dataclass(frozen=True)
class Load:
    """Tokens `first_token` .. `end_token` - 1 of a request that its blocks get."""

    request_id: str
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    first_token: int
    end_token: int
    num_steps: int
    fails_at: float | None


@dataclass
class Orders(KVConnectorMetadata):
    """For the worker: loads to begin, and requests whose blocks are read for some more steps."""

    loads: list[Load] = field(default_factory=list)
    sends: dict[str, int] = field(default_factory=dict)


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers the scheduler from the requests' own parameters."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_tokens_per_block = vllm_config.cache_config.block_size
        self._num_asked: dict[str, int] = {}
        self._num_local_tokens: dict[str, int] = {}
        self._has_failed: set[str] = set()
        self._loading: set[str] = set()
        self._orders = Orders()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        remote = _remote(request)
        # One token that is all loaded leaves no token computed, and vLLM would ask for it again, for ever.
        if remote is None or request.request_id in self._has_failed or request.num_tokens == 1:
            return 0, False
        self._num_asked[request.request_id] = self._num_asked.get(request.request_id, 0) + 1
        if self._num_asked[request.request_id] <= remote.num_unknown:
            return None, False
        # Whole blocks, and within a step something must be left to compute; a load that the request waits for may
        # bring all of it (vLLM takes the blocks of such a load for full).
        end_token = remote.num_tokens
        if not remote.is_async or end_token < request.num_tokens:
            end_token = (
                min(end_token, request.num_tokens - 1) // self._num_tokens_per_block * self._num_tokens_per_block
            )
        num_tokens = max(0, end_token - num_computed_tokens)
        self._num_local_tokens[request.request_id] = num_computed_tokens
        return num_tokens, remote.is_async and num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        remote = _remote(request)
        if remote is None or not num_external_tokens:
            return
        first_token = self._num_local_tokens[request.request_id]
        end_token = first_token + num_external_tokens
        if remote.fails_at is not None:
            self._has_failed.add(request.request_id)
        if remote.is_async:
            self._loading.add(request.request_id)
        self._orders.loads.append(
            Load(
                request.request_id,
                list(request.all_token_ids[:end_token]),
                blocks.get_block_ids(),
                first_token,
                end_token,
                remote.num_steps if remote.is_async else 0,
                remote.fails_at,
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders, self._orders = self._orders, Orders()
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        self._loading -= connector_output.finished_recving or set()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def _finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        remote = _remote(request)
        # What is still loading is freed when its load ends; what has no blocks has nothing to send.
        has_blocks = request.num_computed_tokens > 0 and request.request_id not in self._loading
        if remote is None or not remote.sends_for_steps or not has_blocks:
            return False, None
        self._orders.sends[request.request_id] = remote.sends_for_steps
        return True, None

    # The worker's side is elsewhere.
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


def _remote(request: Request) -> RemoteTokens | None:
    return RemoteTokens(**request.kv_transfer_params) if request.kv_transfer_params else None
