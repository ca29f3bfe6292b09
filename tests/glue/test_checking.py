"""The setting `check_invariants` in vLLM's terms: what ends an engine, what its log and /metrics show."""

from __future__ import annotations

import asyncio
import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

import vllm_kvplug
from tests.core import pools
from tests.core.support import FakeRequest, run_prefill
from tests.glue.support import fake_engine_core, with_choice
from vllm_kvplug.errors import SettingsError
from vllm_kvplug.invariants import InvariantError
from vllm_kvplug.vllm_glue import contract, metrics, registry, report

GAUGE = "kvplug_invariant_findings"


@pytest.fixture
def make_manager(kv_cache_config: Any) -> Any:
    """Makes a manager that holds 40 tokens of request a, with these settings."""

    def make(**settings: Any) -> vllm_kvplug.KVCacheManager:
        manager = vllm_kvplug.KVCacheManager(kv_cache_config, 256, 16, settings=settings)
        run_prefill(manager, FakeRequest("a", list(range(40)), num_tokens_per_block=16))
        return manager

    return make


def damage(manager: Any, block_id: int = 2) -> None:
    pools.damage(manager, block_id)


def test_stop_raises_out_of_the_call(make_manager: Any) -> None:
    manager = make_manager(check_invariants="stop")
    contract.check_instance(manager, "kvplug")
    damage(manager)
    with pytest.raises(InvariantError) as caught:
        manager.get_block_ids("a")
    first_line, *story = str(caught.value).splitlines()
    assert first_line.endswith("get_block_ids of request 'a': block 2: references: expected 1, found 2")
    assert "    call 2, allocate_slots of request 'a': taken" in story


def test_our_own_reset_is_the_one_that_is_checked(make_manager: Any, kvplug_log: list[str]) -> None:
    manager = make_manager(check_invariants="stop")
    assert not manager.reset_prefix_cache()
    assert kvplug_log == ["Prefix cache not reset: 3 blocks are held by requests."]
    damage(manager)
    with pytest.raises(InvariantError, match="reset_prefix_cache: block 2"):
        manager.reset_prefix_cache()


def test_log_shows_in_vllms_log(make_manager: Any) -> None:
    """Through vLLM's own handler, with its prefix before each line."""
    manager = make_manager(check_invariants="log")
    (handler,) = [one for one in logging.getLogger("vllm").handlers if type(one) is logging.StreamHandler]
    written = io.StringIO()
    before = handler.setStream(written)
    try:
        damage(manager)
        assert manager.get_block_ids("a") == ([1, 2, 3],)
    finally:
        handler.setStream(before)
    lines = written.getvalue().splitlines()
    assert len(lines) > 4
    assert all(line.startswith("ERROR ") and "[checking.py:" in line for line in lines)
    assert "KV cache invariant broken, found after call 4, get_block_ids of request 'a': block 2: " in lines[0]
    assert manager.checks.num_findings == 1


def test_the_engine_tells_its_findings(make_manager: Any, kv_cache_config: Any, kvplug_log: list[str]) -> None:
    for action in ("log", "off"):
        manager = make_manager(check_invariants=action)
        damage(manager)
        manager.new_step_starts()
        engine_core = fake_engine_core(with_choice("kvplug"), manager, kv_cache_config)
        answer = report.of_engine_core(engine_core, "kvplug", "{}")
        assert answer["check_invariants"] == action
        assert answer.get(report.FINDINGS) == {"log": "1", "off": None}[action]
    assert len(kvplug_log) == 1


class FrontEnd:
    """As much of AsyncLLM as asks its engines: two of them, whose answers are prepared, then the second is dead."""

    def __init__(self, answers: list[list[dict[str, str]]]) -> None:
        self.engine_core = self
        self.core_engines = (0, 1)
        self.answers = answers
        self.asked: list[Any] = []

    async def _call_utility_async(self, *question: Any, engine: int) -> dict[str, str]:
        self.asked.append(question)
        if not self.answers[engine]:
            raise RuntimeError("dead")
        return self.answers[engine].pop(0)


def test_metrics_add_up_the_findings_of_all_engines(monkeypatch: pytest.MonkeyPatch, kvplug_log: list[str]) -> None:
    monkeypatch.setattr(metrics, "POLLING_PERIOD_S", 0.0)
    seen: list[float | None] = []
    front_end = FrontEnd([[{report.FINDINGS: "3"}, {report.FINDINGS: "4"}], [{report.FINDINGS: "2"}, {}]])

    async def serve() -> None:
        metrics.watch_counts(front_end, [{report.FINDINGS: "0"}, {report.FINDINGS: "0"}], ("kvplug_report", "x"))
        while not kvplug_log:
            value = REGISTRY.get_sample_value(GAUGE)
            if value not in seen:
                seen.append(value)
            await asyncio.sleep(0)
        front_end._kvplug_polling_task.cancel()  # type: ignore[attr-defined]

    asyncio.run(serve())
    assert seen == [0.0, 5.0, 4.0]
    assert set(front_end.asked) == {("kvplug_report", "x")}
    assert kvplug_log == ["kvplug_invariant_findings: not updated, asking again every 60 s: RuntimeError: dead"]


def test_nobody_asks_engines_that_do_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = SimpleNamespace(engine_core=None)
    metrics.watch_counts(front_end, [{"manager": "kvplug"}], ("kvplug_report",))
    assert not hasattr(front_end, "_kvplug_findings_task")


@pytest.mark.parametrize("value", ["yes", True, 1, None])
def test_a_bad_value_is_refused_before_anything_starts(kv_cache_config: Any, value: Any) -> None:
    for refuse in (
        lambda settings: registry.validate("kvplug", settings),
        lambda settings: vllm_kvplug.KVCacheManager(kv_cache_config, 256, 16, settings=settings),
    ):
        with pytest.raises(
            SettingsError, match=r"setting .check_invariants.: .*'off', 'log' or 'stop', found"
        ) as caught:
            refuse({"check-invariants": value})
        assert "\n" not in str(caught.value)
