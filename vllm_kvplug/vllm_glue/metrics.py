"""`kvplug_info{...} 1` on /metrics: which manager serves, as the running engine answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

from vllm_kvplug.vllm_glue.choice import chosen
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.report import LABELS, as_json


@lru_cache(maxsize=1)
def _gauge() -> Any:
    # Imported late: prometheus_client decides between one process and several when it is imported.
    from prometheus_client import Gauge

    # vLLM unregisters every collector whose name contains "vllm"; with several API servers each reports the same 1.
    return Gauge("kvplug_info", "The KV cache manager in force.", labelnames=LABELS, multiprocess_mode="mostrecent")


def publish(answer: Mapping[str, str]) -> None:
    """Set the series of this answer to 1."""
    _gauge().labels(**{name: answer.get(name, "") for name in LABELS}).set(1)


async def around_get_supported_tasks(original: Callable[..., Awaitable[Any]], async_llm: Any) -> Any:
    """The first question that a front end asks its engine, before any request: ask there for the manager as well.

    A server awaits this while it starts. So the series is on /metrics from the first answer on, and an engine that
    cannot say that the chosen manager serves ends the start-up.
    """
    choice = chosen(async_llm.vllm_config)
    if choice is not None and not hasattr(async_llm, "_kvplug_report"):
        try:
            # Every engine is asked and only the first one's answer comes back: so each checks what is expected itself.
            expected = (choice["name"], as_json(choice["config"]))
            answer = await async_llm.engine_core.call_utility_async("kvplug_report", *expected)
            publish(answer)
        except Exception as error:
            logger.error("The engine does not confirm kv_cache_manager %r: %s", choice["name"], error)
            raise
        async_llm._kvplug_report = answer
    return await original(async_llm)
