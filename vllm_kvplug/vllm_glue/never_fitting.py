"""The engine's part with requests that outgrow the whole pool: a warning at start, and an end with an error.

A request that is refused although no other holds a block is refused for ever, and all that wait behind it with it: at
its first step, or each time that it has come as far again (preempted, it begins anew with a first step that fits). Such
a request ends with vLLM's status for requests whose KV failed to load, and the client is told as of any other end.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_kvplug import sizing
from vllm_kvplug.allocation import Refusal
from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.sizing import NeverFits
from vllm_kvplug.vllm_glue import report
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.shadow import serving_manager


def watch(scheduler: Any) -> None:
    """Warn where the pool is smaller than the longest request, and end the requests that outgrow it.

    Two methods of this one scheduler are wrapped. Every kind of step (one at a time, asynchronous, batch queue, in the
    caller's process) goes through `update_from_output` after an empty `schedule`, and sends its answer to the clients.
    Another manager than kvplug's is left as it is; of a shadow the serving side counts.
    """
    manager = serving_manager(scheduler.kv_cache_manager)
    if not isinstance(manager, CacheManager):
        return
    _warn_if_pool_is_small(manager.geometry, report.max_step_tokens(scheduler))
    if hasattr(scheduler, "update_from_output"):
        watched = _Watched(scheduler)
        scheduler.schedule, scheduler.update_from_output = watched.schedule, watched.update_from_output


def _warn_if_pool_is_small(geometry: CacheGeometry, max_step_tokens: int) -> None:
    # A request's last token is never computed.
    num_needed_blocks = sizing.peak_blocks(geometry, geometry.max_model_len - 1)
    num_usable_blocks = geometry.num_usable_blocks
    if num_needed_blocks > num_usable_blocks:
        logger.warning(
            "max_model_len %d does not fit the KV cache: it needs %d blocks, and there are %d for all requests. "
            "Prompts that fit have at most %s, and a request that grows beyond the cache ends with an error. "
            "Serve with a smaller --max-model-len, or with a larger cache: %s",
            geometry.max_model_len,
            num_needed_blocks,
            num_usable_blocks,
            report.fitting_prompts(geometry, max_step_tokens),
            report.LARGER_POOL,
        )


@dataclass
class _Attempts:
    """What is known of a request that was refused alone, as long as no other request is scheduled.

    Attributes:
        states: where it was refused: its tokens, those of them that needed no computing, the blocks that it needed.
        has_fresh_cache: the prefix cache was dropped since, in case a hit is what makes it need too much.
    """

    states: set[tuple[int, int, int]] = field(default_factory=set)
    has_fresh_cache: bool = False


class _Watched:
    """A scheduler's two methods, and what was refused between them.

    A refusal of a request that is alone does not prove that it never fits: its next attempt may begin with a longer
    hit, or be cut into other steps. But alone, everything repeats itself: a request that is refused twice in the same
    state runs in a circle.
    """

    def __init__(self, scheduler: Any) -> None:
        # No cycle: vLLM takes the scheduler out of the garbage collector's sight.
        self._scheduler = weakref.ref(scheduler)
        self._schedule = type(scheduler).schedule
        self._update_from_output = type(scheduler).update_from_output
        self._attempts: dict[str, _Attempts] = {}
        self._hopeless: dict[str, Refusal | NeverFits] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule, and see who was refused although alone."""
        scheduler = self._scheduler()
        assert scheduler is not None
        output = self._schedule(scheduler, *args, **kwargs)
        if self._attempts and output.num_scheduled_tokens:
            self._forget_attempts(output.num_scheduled_tokens.keys())
        for request_id, refusal in scheduler.kv_cache_manager.take_refused_alone().items():
            request = scheduler.requests.get(request_id)
            # A token that is still on its way may be the last; the refusal comes again if it is not.
            if request is None or request.is_finished() or request.num_output_placeholders:
                continue
            misfit = scheduler.kv_cache_manager.never_fits(request)
            if misfit is not None or self._runs_in_a_circle(scheduler, request, refusal):
                self._hopeless[request_id] = misfit or refusal
        return output

    def _forget_attempts(self, scheduled_request_ids: Collection[str]) -> None:
        """What was seen of a request is void as soon as another one is scheduled: it changes where steps end."""
        kept = self._attempts.keys() & scheduled_request_ids if len(scheduled_request_ids) == 1 else ()
        self._attempts = {request_id: self._attempts[request_id] for request_id in kept}

    def _runs_in_a_circle(self, scheduler: Any, request: Any, refusal: Refusal) -> bool:
        attempts = self._attempts.setdefault(request.request_id, _Attempts())
        state = (request.num_tokens, refusal.num_present_tokens, refusal.num_needed_blocks)
        if state not in attempts.states:
            attempts.states.add(state)
            return False
        # Only a hit can make it need too much that a cold start would not.
        if attempts.has_fresh_cache or not refusal.num_present_tokens or scheduler.kv_cache_manager.usage:
            return True
        attempts.has_fresh_cache = scheduler.kv_cache_manager.reset_prefix_cache()
        attempts.states.clear()
        return False

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Update, and tell also of the requests that end here."""
        scheduler = self._scheduler()
        # First: what vLLM tells of finished requests in its answer includes these then.
        ended = self._end_hopeless(scheduler) if self._hopeless else []
        outputs = self._update_from_output(scheduler, scheduler_output, *args, **kwargs)
        if ended:
            _tell(outputs, ended)
        return outputs

    def _end_hopeless(self, scheduler: Any) -> list[tuple[Any, Refusal | NeverFits]]:
        hopeless, self._hopeless = self._hopeless, {}
        ended = []
        for request_id, misfit in hopeless.items():
            self._attempts.pop(request_id, None)
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                _end(scheduler, request, misfit)
                ended.append((request, misfit))
        return ended


def _end(scheduler: Any, request: Any, misfit: Refusal | NeverFits) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    logger.warning("Request %s ended with an error: %s", request.request_id, _reason(request, misfit))


def _reason(request: Any, misfit: Refusal | NeverFits) -> str:
    smaller_step = " or with smaller steps (--max-num-batched-tokens)" if isinstance(misfit, Refusal) else ""
    return (
        f"with {request.num_tokens} tokens it needs {misfit.num_needed_blocks} KV cache blocks at one time, and the "
        f"engine has {misfit.num_usable_blocks} for all requests together; shorten it, or serve with a larger cache: "
        f"{report.LARGER_POOL}{smaller_step}"
    )


def _tell(outputs: dict[int, Any], ended: list[tuple[Any, Refusal | NeverFits]]) -> None:
    """Add to the answer of a step, by client, the end of each of these requests."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request, misfit in ended:
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=_reason(request, misfit),
            events=request.take_events(),
            trace_headers=request.trace_headers,
            # Negative while it was never scheduled, which the front end's counters refuse.
            num_cached_tokens=max(request.num_cached_tokens, 0),
        )
        if request.client_index not in outputs:
            outputs[request.client_index] = EngineCoreOutputs()
        outputs[request.client_index].outputs.append(output)
