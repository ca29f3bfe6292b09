"""What the engine tells of itself: the line at start, the answer behind `kvplug_info`, and what neither may hide."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_kvplug
from tests.glue import managers
from tests.glue.own_scheduler import Forgetful, Small
from tests.glue.support import fake_engine_core, with_choice
from vllm_kvplug.errors import ContractError
from vllm_kvplug.settings import Settings
from vllm_kvplug.vllm_glue import report, seams

THEIRS = "tests.glue.managers:WithSettings"


@pytest.fixture
def sizes(kv_cache_config: Any) -> dict[str, Any]:
    return {"kv_cache_config": kv_cache_config, "max_model_len": 256, "hash_block_size": 16}


@pytest.fixture
def start_line(kv_cache_config: Any, kvplug_log: list[str]) -> Callable[..., str]:
    """The one line that an engine with this choice logs."""

    def start(name: str, config: dict[str, Any] | None = None) -> str:
        kvplug_log.clear()
        seams.SchedulerBuilder(Small)(vllm_config=with_choice(name, config), kv_cache_config=kv_cache_config)
        (line,) = [line for line in kvplug_log if "in force" in line]
        return line

    return start


@pytest.mark.parametrize("config", [{}, {"eviction": "lru"}])
def test_the_line_at_start_shows_the_settings_in_force(start_line: Callable[..., str], config: dict[str, Any]) -> None:
    line = start_line("kvplug", config)
    expected = (
        f'KV cache manager in force: kvplug {vllm_kvplug.__version__}, settings {{"check_invariants": "off", '
        f'"check_invariants_every": "1", "eviction": "lru"}}, groups full, '
    )
    assert line.startswith(expected + "64 blocks of 16 tokens")


def test_the_line_at_start_believes_the_manager_before_the_choice(start_line: Callable[..., str]) -> None:
    assert 'settings {"depth": 3, "eviction": "deep"}, ' in start_line(THEIRS, {"depth": 3})
    assert "settings {}, " in start_line("tests.glue.managers:Plain")


def test_kvplug_describes_every_setting(sizes: dict[str, Any]) -> None:
    assert set(Settings.model_fields) <= set(vllm_kvplug.KVCacheManager(**sizes).describe())


def test_the_answer_is_the_running_managers(sizes: dict[str, Any], kv_cache_config: Any) -> None:
    ours = fake_engine_core(with_choice("kvplug"), vllm_kvplug.KVCacheManager(**sizes), kv_cache_config)
    answer = report.of_engine_core(ours, "kvplug", "{}")
    assert answer["manager"] == "kvplug"
    assert answer["version"] == vllm_kvplug.__version__
    assert (answer["eviction"], answer["num_blocks"], answer["block_size"]) == ("lru", "64", "16")

    choice = with_choice(THEIRS, {"depth": 3})
    theirs = fake_engine_core(choice, managers.WithSettings(settings={"depth": 3}, **sizes), kv_cache_config)
    assert report.of_engine_core(theirs, THEIRS, '{"depth": 3}') == {
        "manager": THEIRS,
        "class": THEIRS,
        "version": "7",
        "eviction": "deep",
        "depth": "3",
        "groups": "FullAttentionSpec",
        "num_blocks": "64",
        "block_size": "16",
    }


@pytest.mark.parametrize(
    ("expected", "chosen", "manager", "message"),
    [
        (
            ("kvplug", "{}"),
            with_choice(None),
            None,
            "expected kv_cache_manager 'kvplug' with settings {} chosen in this",
        ),
        (("kvplug", "{}"), with_choice(THEIRS), None, f"found {THEIRS!r} with {{}}"),
        ((THEIRS, '{"depth": 3}'), with_choice(THEIRS, {"depth": 4}), None, 'with {"depth": 4}'),
        (("kvplug", "{}"), with_choice("kvplug"), managers.Plain, "in force .*, found tests.glue.managers.Plain"),
    ],
)
def test_an_engine_that_is_not_as_expected_says_so(
    expected: tuple[str, str], chosen: Any, manager: type | None, message: str, sizes: Any, kv_cache_config: Any
) -> None:
    engine_core = fake_engine_core(chosen, manager and manager(**sizes), kv_cache_config)
    with pytest.raises(ContractError, match=message):
        report.of_engine_core(engine_core, *expected)


@pytest.mark.parametrize(
    ("scheduler_cls", "name", "message"),
    [
        (Forgetful, "kvplug", "scheduler tests.glue.own_scheduler.Forgetful: expected an attribute kv_cache_config"),
        (
            Small,
            "tests.glue.managers:Mute",
            "(tests.glue.managers.Mute): expected describe() to return names and values, found OSError: no voice today",
        ),
        (Small, "tests.glue.managers:Laconic", "(tests.glue.managers.Laconic): expected describe() to return names"),
    ],
)
def test_what_cannot_be_told_stops_the_start_with_one_line(
    scheduler_cls: type, name: str, message: str, kv_cache_config: Any
) -> None:
    with pytest.raises(ContractError) as refusal:
        seams.SchedulerBuilder(scheduler_cls)(vllm_config=with_choice(name), kv_cache_config=kv_cache_config)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("scheduled", "batched", "long_prefill", "expected"),
    [(None, 2048, 0, 2048), (100, 2048, 0, 100), (100, 2048, 30, 30), (None, 64, 128, 64)],
)
def test_a_step_computes_what_the_scheduler_allows(
    scheduled: int | None, batched: int, long_prefill: int, expected: int
) -> None:
    """vLLM lowers the first for some drafters, below --max-num-batched-tokens."""
    config = SimpleNamespace(max_num_batched_tokens=batched, long_prefill_token_threshold=long_prefill)
    scheduler = SimpleNamespace(scheduler_config=config, max_num_scheduled_tokens=scheduled)
    assert report.max_step_tokens(scheduler) == expected
