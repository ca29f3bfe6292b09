"""The engine's part with requests that outgrow the whole pool: a warning at start, and an end with an error.

A request whose next token needs more blocks than the pool has is refused for ever, and all that wait behind it with it.
The manager tells which requests it refused while none held a block. A long request does so only in part: preempted, it
begins again with its first chunk, which fits, and so on; that shows in the scheduler's output. Both kinds end with
vLLM's status for requests whose KV failed to load, and the client is told as of any other end.
"""

from __future__ import annotations

import weakref
from typing import Any

from vllm_kvplug import sizing
from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.sizing import NeverFits
from vllm_kvplug.vllm_glue import report
from vllm_kvplug.vllm_glue.log import logger


def watch(scheduler: Any) -> None:
    """Warn where the pool is smaller than the longest request, and end the requests that outgrow it.

    Two methods of this one scheduler are wrapped. Every kind of step (one at a time, asynchronous, batch queue, in the
    caller's process) goes through `update_from_output` after an empty `schedule`, and sends its answer to the clients.
    A manager that does not tell of refusals is left as it is.
    """
    manager = scheduler.kv_cache_manager
    if not callable(getattr(manager, "take_never_fitting", None)):
        return
    _warn_if_pool_is_small(manager.geometry)
    if hasattr(scheduler, "update_from_output"):
        watched = _Watched(scheduler)
        scheduler.schedule, scheduler.update_from_output = watched.schedule, watched.update_from_output


def _warn_if_pool_is_small(geometry: CacheGeometry) -> None:
    # A request's last token is never computed.
    num_needed_blocks = sizing.peak_blocks(geometry, geometry.max_model_len - 1)
    num_usable_blocks = geometry.num_usable_blocks
    if num_needed_blocks > num_usable_blocks:
        logger.warning(
            "max_model_len %d does not fit the KV cache: it needs %d blocks, and there are %d for all requests. "
            "Prompts of more than %d tokens are refused, and a request that grows beyond ends with an error. "
            "Serve with a smaller --max-model-len, or with a larger cache: %s",
            geometry.max_model_len,
            num_needed_blocks,
            num_usable_blocks,
            sizing.max_fitting_tokens(geometry),
            report.LARGER_POOL,
        )


class _Watched:
    """A scheduler's two methods, and what was refused between them."""

    def __init__(self, scheduler: Any) -> None:
        # No cycle: vLLM takes the scheduler out of the garbage collector's sight.
        self._scheduler = weakref.ref(scheduler)
        self._schedule = type(scheduler).schedule
        self._update_from_output = type(scheduler).update_from_output
        self._refused: dict[str, NeverFits] = {}
        # By request id, its number of tokens when it was refused last.
        self._refused_at_tokens: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule, and see whether the step consisted of a request that preempted itself for lack of anybody else."""
        scheduler: Any = self._scheduler()
        output = self._schedule(scheduler, *args, **kwargs)
        if output.preempted_req_ids and not output.num_scheduled_tokens and not scheduler.kv_cache_manager.usage:
            self._note_refusal(scheduler, output.preempted_req_ids)
        return output

    def _note_refusal(self, scheduler: Any, preempted_request_ids: set[str]) -> None:
        manager = scheduler.kv_cache_manager
        preempted = [request for request in scheduler.waiting if request.request_id in preempted_request_ids]
        misfits = {request.request_id: manager.never_fits(request) for request in preempted}
        hopeless = {request_id: misfit for request_id, misfit in misfits.items() if misfit is not None}
        if not hopeless and preempted:
            # The one that was refused is the last preempted: all others went for its sake.
            num_usable_blocks = manager.geometry.num_usable_blocks
            hopeless = {preempted[0].request_id: NeverFits(num_usable_blocks + 1, num_usable_blocks)}
        self._refused |= hopeless

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Update, and tell also of the requests that end here."""
        scheduler: Any = self._scheduler()
        # First: what vLLM tells of finished requests in its answer includes these then.
        ended = self._end_hopeless(scheduler)
        outputs = self._update_from_output(scheduler, scheduler_output, *args, **kwargs)
        if ended:
            _tell(outputs, ended)
        return outputs

    def _end_hopeless(self, scheduler: Any) -> list[tuple[Any, NeverFits]]:
        manager = scheduler.kv_cache_manager
        refused = self._refused | manager.take_never_fitting()
        if not refused:
            return []
        self._refused = {}
        known = self._refused_at_tokens.items()
        self._refused_at_tokens = {one: num_tokens for one, num_tokens in known if one in scheduler.requests}

        ended = []
        for request_id, misfit in refused.items():
            request = scheduler.requests.get(request_id)
            # A token that is still on its way may be the last; the refusal comes again if it is not.
            if request is None or request.is_finished() or request.num_output_placeholders:
                continue
            # Where its tokens alone would fit (but not with slots for drafts, or not in chunks of this size), a second
            # refusal decides, without a token gained since the first.
            if manager.never_fits(request) is None and self._refused_at_tokens.get(request_id) != request.num_tokens:
                self._refused_at_tokens[request_id] = request.num_tokens
                continue
            _end(scheduler, request, misfit)
            ended.append((request, misfit))
        return ended


def _end(scheduler: Any, request: Any, misfit: NeverFits) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    logger.warning("Request %s ended with an error: %s", request.request_id, _reason(request, misfit))


def _reason(request: Any, misfit: NeverFits) -> str:
    return (
        f"with {request.num_tokens} tokens it needs at least {misfit.num_needed_blocks} KV cache blocks, and the "
        f"engine has {misfit.num_usable_blocks} for all requests together; shorten it, or serve with a larger cache: "
        f"{report.LARGER_POOL}"
    )


def _tell(outputs: dict[int, Any], ended: list[tuple[Any, NeverFits]]) -> None:
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
