"""vLLM's own scheduler with one manager, its decoding requests, and model outputs made up for each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from time import perf_counter_ns
from typing import Any

from vllm_kvplug.evals.performance.measuring import elapsed_us
from vllm_kvplug.evals.performance.sides import NUM_TOKENS_PER_BLOCK, BenchedSide, Prompts
from vllm_kvplug.evals.sides import SideChoice

# Any model's configuration will do: nothing is computed.
MODEL = "tiny-qwen2"
NUM_PROMPT_TOKENS = 512
MAX_MODEL_LEN = 8_192
_SAMPLED_TOKEN_ID = 5


class BenchedScheduler:
    """A scheduler whose requests all run and decode; every step gives each of them a token.

    Prompts are 512 to 527 tokens, so that the requests are in all phases of their blocks, and share nothing.

    Args:
        choice: the manager.
        num_running: requests.
        num_steps: that will be made; the pool has room for them.

    Raises:
        SettingsError: an unknown manager, or wrong settings.
        ContractError: a manager that does not keep vLLM's contract.
    """

    def __init__(self, choice: SideChoice, num_running: int, num_steps: int) -> None:
        side = BenchedSide(choice)
        max_num_tokens = NUM_PROMPT_TOKENS + NUM_TOKENS_PER_BLOCK + num_steps + 2 * NUM_TOKENS_PER_BLOCK
        num_blocks = num_running * (max_num_tokens // NUM_TOKENS_PER_BLOCK + 1) + 1
        self.scheduler = _scheduler(choice, num_running, num_blocks)
        self._num_running = num_running
        prompts = Prompts()
        for number in range(num_running):
            self.scheduler.add_request(side.request_of(prompts.next(NUM_PROMPT_TOKENS + number % NUM_TOKENS_PER_BLOCK)))
        while len(self.scheduler.running) < num_running or any(
            request.num_computed_tokens < request.num_prompt_tokens for request in self.scheduler.running
        ):
            self.step()

    def step(self) -> tuple[float, float]:
        """One step of all requests: microseconds in schedule() and in update_from_output()."""
        started_ns = perf_counter_ns()
        output = self.scheduler.schedule()
        schedule_us = elapsed_us(started_ns)
        model_output = self._model_output(output)
        started_ns = perf_counter_ns()
        self.scheduler.update_from_output(output, model_output)
        return schedule_us, elapsed_us(started_ns)

    def _model_output(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        request_ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        # A prompt whose end is not in this step yet gives no token.
        sampled = [
            [_SAMPLED_TOKEN_ID] if requests[request_id].num_computed_tokens >= requests[request_id].num_tokens else []
            for request_id in request_ids
        ]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )


def _scheduler(choice: SideChoice, num_running: int, num_blocks: int) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_kvplug.evals.performance.sides import groups
    from vllm_kvplug.vllm_glue.choice import ManagerChoice
    from vllm_kvplug.vllm_glue.seams import SchedulerBuilder

    base = _vllm_config()
    vllm_config = copy.copy(base)
    for name in ("scheduler_config", "cache_config"):
        setattr(vllm_config, name, copy.copy(getattr(base, name)))
    vllm_config.scheduler_config.max_num_seqs = num_running
    # All prompts in one step, so that the requests stay in the phases that their lengths put them in.
    vllm_config.scheduler_config.max_num_batched_tokens = num_running * (NUM_PROMPT_TOKENS + NUM_TOKENS_PER_BLOCK)
    vllm_config.scheduler_config.max_num_scheduled_tokens = None
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    if choice.manager != "upstream" or choice.settings:
        manager = ManagerChoice(name=choice.manager, config=dict(choice.settings))
        vllm_config.additional_config = {"kv_cache_manager": manager}
    return SchedulerBuilder(Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups(num_windows=0)),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=NUM_TOKENS_PER_BLOCK,
        log_stats=True,
    )


@cache
def _vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplug.cli.model import ensure_model

    return EngineArgs(
        model=ensure_model(MODEL),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=NUM_TOKENS_PER_BLOCK,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
        async_scheduling=False,
    ).create_engine_config()


class TimedCalls:
    """Puts a timer around each method of a scheduler's manager that the scheduler calls.

    Attributes:
        total_us: in the manager since the last `reset`.
    """

    def __init__(self, manager: Any) -> None:
        self.total_us = 0.0
        for name in (name for name in dir(manager) if not name.startswith("_")):
            if not isinstance(getattr(type(manager), name, None), property) and callable(getattr(manager, name)):
                setattr(manager, name, self._timed(getattr(manager, name)))
        self._depth = 0

    def reset(self) -> None:
        """From zero again."""
        self.total_us = 0.0

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a call of the manager's own
                return method(*args, **kwargs)
            self._depth = 1
            started_ns = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.total_us += elapsed_us(started_ns)
                self._depth = 0

        return call
