"""A front end refuses a prompt that no engine's pool could ever hold, before the prompt is queued: HTTP 400.

vLLM's own check is against max_model_len, which may be larger than the pool; the prompt would then wait for ever, and
with it every request behind it. A front end cannot know the pool's size by itself (its `num_gpu_blocks` is the sum over
data parallel engines), so it learns each engine's geometry from the answer to `kvplug_report`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from vllm_kvplug import sizing
from vllm_kvplug.geometry import CacheGeometry
from vllm_kvplug.vllm_glue import report
from vllm_kvplug.vllm_glue.choice import chosen

# On an InputProcessor, the one thing of a front end through which each prompt goes.
_LIMIT = "_kvplug_prompt_limit"


class PromptLimit:
    """What a front end's engines can hold.

    Args:
        engines: of each engine, in the order of their ranks, its cache and the most tokens that one step computes.
    """

    def __init__(self, engines: Sequence[tuple[CacheGeometry, int]]) -> None:
        self._engines = tuple(engines)

    def check(self, num_tokens: int, engine_rank: int | None = None) -> None:
        """See that a prompt of `num_tokens` tokens fits; without a rank any engine may get it, so the smallest counts.

        Raises:
            VLLMValidationError: it does not; names the blocks that it needs and those that there are.
        """
        engines = self._engines
        if engine_rank is not None and 0 <= engine_rank < len(engines):
            engines = (engines[engine_rank],)
        for geometry, max_step_tokens in engines:
            misfit = sizing.never_fits(geometry, num_tokens)
            if misfit is not None:
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(
                    f"The prompt of {num_tokens} tokens needs {misfit.num_needed_blocks} KV cache blocks, and the "
                    f"engine has {misfit.num_usable_blocks} for all requests together, so it could never run. Prompts "
                    f"that fit have at most {report.fitting_prompts(geometry, max_step_tokens)}. Send fewer, or serve "
                    f"with a larger cache: {report.LARGER_POOL}.",
                    parameter="input_tokens",
                    value=num_tokens,
                )


def learn(front_end: Any, answers: Sequence[dict[str, str]]) -> None:
    """From now on the front end (AsyncLLM, LLMEngine) refuses what the engines that gave these answers cannot hold.

    Engines whose manager has no geometry of kvplug's limit nothing.
    """
    engines = [
        (sizing.geometry_from_json(answer[report.GEOMETRY]), int(answer[report.STEP_TOKENS]))
        for answer in answers
        if report.GEOMETRY in answer
    ]
    if engines:
        setattr(front_end.input_processor, _LIMIT, PromptLimit(engines))


async def ask_engines(engine_client: Any, *question: Any) -> list[Any]:
    """The answer of each engine to a utility call, in the order of their ranks. vLLM's own call keeps the first only.

    Raises:
        Exception: what the first failing engine says.
    """
    engines = getattr(engine_client, "core_engines", ())
    if len(engines) < 2:
        return [await engine_client.call_utility_async(*question)]
    calls = [engine_client._call_utility_async(*question, engine=engine) for engine in engines]
    return list(await asyncio.gather(*calls))


def around_llm_engine_get_supported_tasks(original: Callable[..., Any], llm_engine: Any) -> Any:
    """LLM's first question, before any prompt: learn there what its engine can hold. AsyncLLM's is in metrics.py."""
    choice = chosen(llm_engine.vllm_config)
    if choice is not None and not hasattr(llm_engine, "_kvplug_report"):
        question = (choice["name"], report.as_json(choice["config"]))
        client = llm_engine.engine_core
        # In this process the client holds the engine itself and has no utility calls.
        in_process = getattr(client, "engine_core", None)
        if in_process is not None:
            answer = in_process.kvplug_report(*question)
        else:
            answer = client.call_utility("kvplug_report", *question)
        learn(llm_engine, [answer])
        llm_engine._kvplug_report = answer
    return original(llm_engine)


def around_process_inputs(original: Callable[..., Any], input_processor: Any, *args: Any, **kwargs: Any) -> Any:
    """The check of each prompt, of whatever kind and whoever sends it: where vLLM checks the prompt's length."""
    request = original(input_processor, *args, **kwargs)
    limit = getattr(input_processor, _LIMIT, None)
    if limit is not None:
        num_tokens = len(request.prompt_token_ids if request.prompt_embeds is None else request.prompt_embeds)
        limit.check(num_tokens, request.data_parallel_rank)
    return request


def around_generate(original: Callable[..., Any], async_llm: Any, *args: Any, **kwargs: Any) -> Any:
    """The same check when the generator is made, not when it first runs: a stream has its status 200 by then."""
    limit = getattr(async_llm.input_processor, _LIMIT, None)
    prompt = args[0] if args else kwargs.get("prompt")
    # As a server's handlers give it; any other kind is not tokenized yet.
    if limit is not None and isinstance(prompt, dict) and "type" in prompt:
        decoder_prompt: Any = prompt.get("decoder_prompt", prompt)
        tokens = decoder_prompt.get("prompt_token_ids", decoder_prompt.get("prompt_embeds"))
        if tokens is not None:
            limit.check(len(tokens), kwargs.get("data_parallel_rank"))
    return original(async_llm, *args, **kwargs)
