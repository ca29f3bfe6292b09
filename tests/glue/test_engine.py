"""Real engines: the choice is in force in the engine's process, and without it every class there is vLLM's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.glue.support import IS_PATCHED, run_python

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OURS = "vllm_kvplug.vllm_glue.manager.KVCacheManager"
UPSTREAM = "vllm.v1.core.kv_cache_manager.KVCacheManager"
# What `install()` puts in place in a process that imports all of it; nothing else of vLLM may be ours without a choice.
ENTRY_HOOKS = {
    "vllm.engine.arg_utils.AsyncEngineArgs.__init__",
    "vllm.engine.arg_utils.EngineArgs.__init__",
    "vllm.engine.arg_utils.EngineArgs.add_cli_args",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    "vllm.engine.arg_utils.EngineArgs.from_cli_args",
    "vllm.utils.argparse_utils.FlexibleArgumentParser.parse_args",
}
if IS_PATCHED:  # the two options and fields are vLLM's own
    ENTRY_HOOKS = {name for name in ENTRY_HOOKS if name.endswith((".create_engine_config", ".parse_args"))}


def probe(scenario: str, model: str, expected_status: int = 0) -> Any:
    """The scenario's answer; for a failure, its output."""
    process = run_python("-m", "tests.glue.engine_probe", scenario, model)
    output = process.stdout + process.stderr
    assert (process.returncode == 0) == (expected_status == 0), output[-6000:]
    if expected_status != 0:
        return output
    (answer,) = [line for line in process.stdout.splitlines() if line.startswith("ANSWER ")]
    return json.loads(answer.removeprefix("ANSWER "))


def test_in_process_engines_one_after_another(tiny_model: str) -> None:
    answers = probe("one_after_another", tiny_model)
    assert [answer["manager"] for answer in answers] == [OURS, UPSTREAM, "tests.glue.managers.Plain", UPSTREAM]
    assert [answer["report"]["manager"] for answer in answers[::2]] == ["kvplug", "tests.glue.managers:Plain"]
    for answer in answers:
        assert answer["scheduler"] == "vllm.v1.core.sched.scheduler.Scheduler"
        assert answer["num_cached_tokens"] == [48, 48]
        assert answer["token_ids"] == answers[0]["token_ids"]


@pytest.mark.parametrize("scenario", ["omitted", "upstream"])
def test_not_chosen_every_class_is_vllms_own(scenario: str, tiny_model: str) -> None:
    answer = probe(scenario, tiny_model)
    core = answer["engine_core"]
    assert core["pid"] != answer["front_end"]["pid"]
    assert core["scheduler"] == "vllm.v1.core.sched.scheduler.Scheduler"
    assert core["manager"] == UPSTREAM
    assert core["block_pool"] == "vllm.v1.core.block_pool.BlockPool"
    assert core["hasher"].startswith("vllm.v1.core.kv_cache_utils.get_request_block_hasher.")
    assert core["stats_class_is_vllms"]
    assert core["log_stats"] == (scenario == "upstream")
    assert core["stats"] == ("vllm.v1.metrics.stats.SchedulerStats" if scenario == "upstream" else None)
    assert core["report"] is None
    assert set(core["foreign"]) <= ENTRY_HOOKS
    assert set(answer["front_end"]["foreign"]) == ENTRY_HOOKS


def test_not_chosen_a_servers_front_end_is_vllms_own(tiny_model: str) -> None:
    answer = probe("async_not_chosen", tiny_model)
    assert set(answer["foreign"]) == ENTRY_HOOKS
    assert answer["stat_loggers"]
    assert all(name.startswith("vllm.v1.metrics.loggers.") for name in answer["stat_loggers"])


def test_engine_core_process_with_a_users_own_scheduler_class(tiny_model: str) -> None:
    answer = probe("kvplug", tiny_model)
    core = answer["engine_core"]
    assert core["pid"] != answer["front_end"]["pid"]
    assert (core["scheduler"], core["manager"]) == ("tests.glue.schedulers.Inherited", OURS)
    assert core["report"]["manager"] == "kvplug"
    assert core["report"]["num_blocks"] == "64"
    assert answer["num_cached_tokens"] == [48, 48]


def test_a_scheduler_that_ignores_the_choice_stops_the_start(tiny_model: str) -> None:
    output = probe("ignoring_scheduler", tiny_model, expected_status=1)
    assert (
        "ContractError: scheduler tests.glue.schedulers.Ignoring: expected kv_cache_manager 'kvplug' in force" in output
    )


def test_info_metric_without_statistics(tiny_model: str) -> None:
    (line,) = probe("async_front_end", tiny_model)
    assert 'manager="kvplug"' in line
    assert 'num_blocks="64"' in line
    assert line.endswith(" 1.0")
