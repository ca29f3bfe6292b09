"""On /metrics: `kvplug_info{...} 1`, which manager serves, as the running engine answers it. Where engines' managers
check themselves also `kvplug_invariant_findings`, and of shadows what has diverged (shadow_metrics.py).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm_kvplug.vllm_glue import prompt_limit, shadow_metrics
from vllm_kvplug.vllm_glue.choice import chosen
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.report import FINDINGS, LABELS, SHADOW, as_json

# How often the engines are asked for what they count.
POLLING_PERIOD_S = 10.0
# The same while they do not answer.
RETRYING_PERIOD_S = 60.0


@lru_cache(maxsize=1)
def _gauge() -> Any:
    # Imported late: prometheus_client decides between one process and several when it is imported.
    from prometheus_client import Gauge

    # vLLM unregisters every collector whose name contains "vllm"; with several API servers each reports the same 1.
    return Gauge("kvplug_info", "The KV cache manager in force.", labelnames=LABELS, multiprocess_mode="mostrecent")


def publish(answer: Mapping[str, str]) -> None:
    """Set the series of this answer to 1."""
    _gauge().labels(**{name: answer.get(name, "") for name in LABELS}).set(1)


@lru_cache(maxsize=1)
def _findings_gauge() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "kvplug_invariant_findings",
        "Contradictions that check_invariants has found in the KV cache managers of all engines since they started.",
        multiprocess_mode="mostrecent",
    )


def _publish_findings(answers: Sequence[Mapping[str, str]]) -> None:
    _findings_gauge().set(sum(int(answer.get(FINDINGS, 0)) for answer in answers))


# By the key of an engine's answer: what it goes to.
_PUBLISHERS: dict[str, Callable[[Sequence[Mapping[str, str]]], None]] = {
    FINDINGS: _publish_findings,
    SHADOW: shadow_metrics.publish,
}


def watch_counts(async_llm: Any, answers: Sequence[Mapping[str, str]], question: tuple[str, ...]) -> None:
    """If the engines that gave these answers count something, findings or divergences, keep it on /metrics: the front
    end asks again every `POLLING_PERIOD_S` seconds. Engines that do not answer are asked on, and meanwhile none is
    counted as one that compares.
    """
    publishers = {key: publish for key, publish in _PUBLISHERS.items() if any(key in answer for answer in answers)}
    if not publishers:
        return
    engine_core = weakref.ref(async_llm.engine_core)

    def publish_counts(answers: Sequence[Mapping[str, str]]) -> None:
        for publish in publishers.values():
            publish(answers)

    names = " and ".join(f"kvplug_{key}" for key in publishers)

    async def poll() -> None:
        has_failed = was_told = False
        while True:
            await asyncio.sleep(RETRYING_PERIOD_S if has_failed else POLLING_PERIOD_S)
            client = engine_core()
            if client is None:
                return
            try:
                publish_counts(await prompt_limit.ask_engines(client, *question))
                has_failed = False
            except Exception as error:
                has_failed = True
                if not was_told:
                    was_told = True
                    logger.warning(
                        "%s: not updated, asking again every %.0f s: %s: %s",
                        names,
                        RETRYING_PERIOD_S,
                        type(error).__name__,
                        error,
                    )
                if SHADOW in publishers:
                    shadow_metrics.publish_unknown()
            del client

    publish_counts(answers)
    # Kept: an event loop itself does not hold its tasks.
    async_llm._kvplug_polling_task = asyncio.get_running_loop().create_task(poll())


async def around_get_supported_tasks(original: Callable[..., Awaitable[Any]], async_llm: Any) -> Any:
    """The first question that a front end asks its engine, before any request: ask there for the manager as well.

    A server awaits this while it starts. So the series is on /metrics from the first answer on, and an engine that
    cannot say that the chosen manager serves ends the start-up.
    """
    choice = chosen(async_llm.vllm_config)
    if choice is not None and not hasattr(async_llm, "_kvplug_report"):
        try:
            # Every engine checks what is expected itself; the first one's answer is the one that is shown.
            expected = (choice["name"], as_json(choice["config"]))
            answers = await prompt_limit.ask_engines(async_llm.engine_core, "kvplug_report", *expected)
            publish(answers[0])
            prompt_limit.learn(async_llm, answers)
            watch_counts(async_llm, answers, ("kvplug_report", *expected))
        except Exception as error:
            logger.error("The engine does not confirm kv_cache_manager %r: %s", choice["name"], error)
            raise
        async_llm._kvplug_report = answers[0]
    return await original(async_llm)
