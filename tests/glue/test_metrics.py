"""`kvplug_info`: what the engine answered, once, and loud when it does not confirm."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

import vllm_kvplug
from tests.glue import managers
from tests.glue.support import fake_engine_core, with_choice
from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue import metrics, report
from vllm_kvplug.vllm_glue.choice import ManagerChoice


class FakeEngine:
    """A front end whose engine gives a prepared answer."""

    def __init__(self, answer: Any, choice: ManagerChoice | None) -> None:
        self.vllm_config = SimpleNamespace(additional_config={} if choice is None else {"kv_cache_manager": choice})
        self.engine_core = self
        self.answer, self.asked = answer, []

    async def call_utility_async(self, *call: Any) -> Any:
        self.asked.append(call)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ask(front_end: Any) -> Any:
    async def tasks(_: Any) -> tuple[str]:
        return ("generate",)

    return asyncio.run(metrics.around_get_supported_tasks(tasks, front_end))


CHOICE = ManagerChoice(name="kvplug", config={})
ANSWER = {
    "manager": "kvplug",
    "version": "1",
    "eviction": "lru",
    "groups": "full",
    "num_blocks": "9",
    "block_size": "16",
}


def info_lines() -> list[str]:
    return [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("kvplug_info{")]


def test_the_answer_is_published_once() -> None:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    front_end = FakeEngine({**ANSWER, "further": "ignored"}, CHOICE)
    assert ask(front_end) == ask(front_end) == ("generate",)
    assert front_end.asked == [("kvplug_report", "kvplug", "{}")]
    line = 'kvplug_info{block_size="16",eviction="lru",groups="full",manager="kvplug",num_blocks="9",version="1"} 1.0'
    assert info_lines() == [line]
    unregister_vllm_metrics()
    assert info_lines() == [line]


def test_without_a_choice_nothing_is_asked() -> None:
    front_end = FakeEngine(ANSWER, None)
    assert ask(front_end) == ("generate",)
    assert front_end.asked == []


@pytest.mark.parametrize("answer", [RuntimeError("no such method"), None])
def test_an_engine_that_does_not_confirm_ends_the_start(answer: Any, kvplug_log: list[str]) -> None:
    with pytest.raises((RuntimeError, AttributeError)):
        ask(FakeEngine(answer, CHOICE))
    (line,) = kvplug_log
    assert line.startswith("The engine does not confirm kv_cache_manager 'kvplug': ")


@pytest.mark.parametrize("second", [managers.Plain, vllm_kvplug.KVCacheManager])
def test_every_engine_of_several_confirms(second: type, kv_cache_config: Any, kvplug_log: list[str]) -> None:
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    sizes = {"kv_cache_config": kv_cache_config, "max_model_len": 256, "hash_block_size": 16}
    vllm_config = with_choice("kvplug")

    class Client:
        """vLLM's client of several engines, which hands on the first one's answer; the engines are near."""

        core_engines = tuple(
            fake_engine_core(vllm_config, manager_cls(**sizes), kv_cache_config)
            for manager_cls in (vllm_kvplug.KVCacheManager, second)
        )
        call_utility_async = DPLBAsyncMPClient.call_utility_async

        async def _call_utility_async(self, method: str, *args: Any, engine: Any) -> Any:
            assert method == "kvplug_report"
            return report.of_engine_core(engine, *args)

    front_end = SimpleNamespace(vllm_config=vllm_config, engine_core=Client(), input_processor=SimpleNamespace())
    if second is vllm_kvplug.KVCacheManager:
        assert ask(front_end) == ("generate",)
        return
    with pytest.raises(ContractError, match="expected kv_cache_manager 'kvplug' in force"):
        ask(front_end)
    (line,) = kvplug_log
    assert "found tests.glue.managers.Plain" in line
