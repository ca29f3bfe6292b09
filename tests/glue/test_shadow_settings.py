"""What `--kv-cache-manager shadow` refuses, what of kvplug's goes with its serving side, and what it tells."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.core import pools
from tests.glue.shadow_runs import construct, run
from tests.glue.support import fake_engine_core, with_choice
from tests.scheduler.cases import HAS_FULL_PROMPT_RESERVATION, Case
from vllm_kvplug.errors import SettingsError, UnsupportedError
from vllm_kvplug.vllm_glue import contract, metrics, registry, report, seams
from vllm_kvplug.vllm_glue.shadow import ShadowManager
from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

PLAIN = "tests.glue.managers:Plain"
SHADOW = "vllm_kvplug.vllm_glue.shadow:ShadowManager"
TIGHT = Case("preempting", num_blocks=44)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"folower": "kvplug"}, "unknown setting 'folower'; known settings: .*follower, .*serving.*"),
        ({"level": "strict"}, "setting 'level': .*'exact' or 'decision', found 'strict'"),
        ({"log_first": -1}, "setting 'log_first': .* greater than or equal to 0, found -1"),
        ({"bundle": ""}, "setting 'bundle': .*found ''"),
        ({"serving": 3}, "setting 'serving': .*found 3"),
        (
            {"serving": "shadow"},
            "setting 'serving' of 'shadow': .*expected a manager that serves by itself, found 'shadow'",
        ),
        (
            {"follower": "vllm_kvplug.vllm_glue.shadow:ShadowManager"},
            "setting 'follower' of 'shadow': .*serves by itself",
        ),
        ({"follower": "kvplg"}, "setting 'follower' of 'shadow': .*unknown manager 'kvplg' .did you mean 'kvplug'"),
        ({"follower_config": {"evict": "lru"}}, "setting 'follower' of 'shadow': .*unknown setting 'evict'"),
        ({"serving_config": {"eviction": "lru"}}, "setting 'serving' of 'shadow': .*'upstream' takes no settings"),
        ({"follower": PLAIN, "follower_config": {"a": 1}}, "setting 'follower' of 'shadow': .*takes no settings"),
        (
            {"serving_config": {"trace": "t.gz"}},
            "setting 'serving' of 'shadow': expected the setting 'trace' beside 'serving', not in 'serving_config'$",
        ),
        (
            {"follower_config": {"trace-tokens": True}},
            "expected the setting 'trace-tokens' beside 'follower', not in 'follower_config'$",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        registry.validate("shadow", config)
    assert "\n" not in str(caught.value)


def test_the_level_by_default() -> None:
    for config, level in (
        ({}, "exact"),
        ({"serving": "kvplug", "follower": "upstream"}, "exact"),
        ({"follower_config": {"eviction": "lru"}}, "exact"),
        ({"follower": PLAIN}, "decision"),
        ({"serving": PLAIN}, "decision"),
        ({"level": "decision"}, "decision"),
        ({"follower": PLAIN, "level": "exact"}, "exact"),
    ):
        settings = ShadowSettings.parse(config)
        settings.check()
        assert settings.level_in_force == level, config


def test_exact_is_refused_for_two_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvplug.settings import eviction_policies

    monkeypatch.setattr(eviction_policies, "names", lambda: ["lru", "other"])
    settings = {"follower_config": {"eviction": "other"}}
    assert ShadowSettings.parse(settings).level_in_force == "decision"
    with pytest.raises(SettingsError, match=r"setting 'level': expected decision .*\(lru and other\).*, found 'exact'"):
        registry.validate("shadow", settings | {"level": "exact"})


def test_the_engine_hashes_as_the_serving_side_does() -> None:
    from vllm_kvplug import get_request_block_hasher

    assert registry.hasher_factory("shadow", {}) is None
    assert registry.hasher_factory("shadow", {"serving": "kvplug", "follower": "upstream"}) is get_request_block_hasher
    assert registry.hasher_factory("kvplug", {}) is get_request_block_hasher
    assert contract.hasher_factory(ShadowManager) is None


def test_kvplugs_refusals_count_on_either_side() -> None:
    assert registry.involves_kvplug("shadow", {})
    assert registry.involves_kvplug("shadow", {"serving": "kvplug", "follower": PLAIN})
    assert not registry.involves_kvplug("shadow", {"follower": PLAIN})
    assert registry.involves_kvplug("kvplug", {})
    assert not registry.involves_kvplug(PLAIN, {})


def test_what_kvplug_does_not_serve_is_refused_as_a_follower_too(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kvplug.vllm_glue import features

    def refuse(vllm_config: Any) -> None:
        raise UnsupportedError("kvplug does not support it")

    monkeypatch.setattr(features, "refuse_unsupported", refuse)
    with pytest.raises(UnsupportedError):
        make_config(kv_cache_manager="shadow")
    make_config(kv_cache_manager="shadow", kv_cache_manager_config={"follower": PLAIN})


@pytest.mark.parametrize("serving", ["upstream", "kvplug"])
def test_the_glues_care_for_kvplug_goes_with_the_serving_side(serving: str, base_config: Any) -> None:
    """Requests that outgrow the pool, the front end's limit on prompts, and the hashes of sessions."""
    follower = {"upstream": "kvplug", "kvplug": "upstream"}[serving]
    config = {"serving": serving, "follower": follower}
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    is_ours = serving == "kvplug"
    scheduler = done.side.scheduler
    assert ("schedule" in vars(scheduler)) is is_ours
    core = fake_engine_core(with_choice("shadow", config), done.manager, scheduler.kv_cache_config)
    answer = report.of_engine_core(core, "shadow", report.as_json(config))
    assert (report.GEOMETRY in answer) is is_ours

    session = SimpleNamespace(num_computed_tokens=9, block_hashes=[b"1", b"2", b"3"])
    seams._around_update_request_as_session(lambda *args: None, scheduler, session)
    assert len(session.block_hashes) == (2 if is_ours else 3)


def test_a_request_that_outgrows_the_pool_ends_and_the_follower_keeps_up(base_config: Any) -> None:
    """never_fitting.py resets the prefix cache by itself: the follower must hear of it."""
    case = Case("tiny", num_blocks=20)
    config = {"serving": "kvplug", "follower": "upstream"}
    done = run(case, base_config, "shadow", config, seed=5)
    assert done.side.counts.failed_requests > 0
    alone = run(case, base_config, "kvplug", {}, seed=5)
    assert done.answers == alone.answers
    assert done.report["num_requests_diverged"] == 0


@pytest.mark.skipif(not HAS_FULL_PROMPT_RESERVATION, reason="from vLLM 0.19 on")
def test_a_request_that_vllm_would_not_admit_alone_is_the_only_difference(base_config: Any) -> None:
    """F18 with full prompts reserved: kvplug lets in what is alone, and ends it when it outgrows the pool."""
    case = Case("tiny", num_blocks=20, reserves_full_prompts=True)
    done = run(case, base_config, "shadow", {"serving": "kvplug", "follower": "upstream"}, seed=5)
    assert done.side.counts.failed_requests > 0
    assert {row[0] for row in done.report["diverged_requests"]} == {"can_fit_full_sequence"}


def test_the_engine_tells_both_sides(base_config: Any, kvplug_log: list[str]) -> None:
    config = {"follower_config": {"check_invariants": "log"}}
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    (line,) = [line for line in kvplug_log if "in force" in line]
    assert '"follower": "kvplug"' in line
    assert '"serving": "upstream"' in line
    pools.damage(done.manager.managers[1], 2)
    done.manager.new_step_starts()
    core = fake_engine_core(with_choice("shadow", config), done.manager, done.side.scheduler.kv_cache_config)
    answer = report.of_engine_core(core, "shadow", report.as_json(config))
    assert (answer["manager"], answer["serving"], answer["follower"], answer["level"]) == (
        "shadow",
        "upstream",
        "kvplug",
        "exact",
    )
    assert answer[report.FINDINGS] == str(done.manager.managers[1].checks.num_findings) != "0"
    assert json.loads(answer[report.SHADOW]) == done.report


ENGINE: dict[str, Any] = {
    "serving": "upstream",
    "follower": "small",
    "level": "decision",
    "compares": "decision",
    "overhead_s": 0.25,
    "num_calls_compared": 100,
    "num_calls_skipped": 3,
    "num_requests_followed": 10,
    "num_requests_diverged": 2,
    "diverged_requests": [["get_computed_blocks", "hit_tokens", "same", 2]],
    "diverged_calls": [["reset_prefix_cache", "done", "differ", 1]],
}


class FrontEnd:
    """As much of AsyncLLM as is polled. Its engine gives these answers in turn, the last one again and again."""

    _kvplug_polling_task: Any

    def __init__(self, *answers: Any) -> None:
        self.engine_core = self
        self.answers = list(answers)

    async def call_utility_async(self, *question: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_metrics_add_up_all_engines() -> None:
    engine = ENGINE
    other = engine | {"compares": "nothing", "diverged_requests": [["free", "blocks_in_use", "differ", 4]]}
    answers = [{report.SHADOW: report.as_json(one)} for one in (engine, other)]

    async def serve() -> None:
        front_end = FrontEnd()
        metrics.watch_counts(front_end, answers, ("kvplug_report",))
        front_end._kvplug_polling_task.cancel()

    asyncio.run(serve())
    for name, labels, value in (
        ("info", {"serving": "upstream", "follower": "small", "level": "decision"}, 1),
        ("engines", {"compares": "decision"}, 1),
        ("engines", {"compares": "nothing"}, 1),
        ("engines", {"compares": "exact"}, 0),
        ("calls", {"outcome": "compared"}, 200),
        ("calls", {"outcome": "skipped"}, 6),
        ("requests", {"outcome": "followed"}, 20),
        ("requests", {"outcome": "diverged"}, 4),
        ("diverged_requests", {"method": "get_computed_blocks", "reason": "hit_tokens", "pools": "same"}, 2),
        ("diverged_requests", {"method": "free", "reason": "blocks_in_use", "pools": "differ"}, 4),
        ("diverged_calls", {"method": "reset_prefix_cache", "reason": "done", "pools": "differ"}, 2),
        ("overhead_seconds", {}, 0.5),
    ):
        assert REGISTRY.get_sample_value(f"kvplug_shadow_{name}", labels) == value, (name, labels)


def test_engines_that_do_not_answer_are_asked_again(kvplug_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And meanwhile none is shown as one that compares."""
    seen: list[tuple[float, float | None]] = []

    async def sleep(duration_s: float) -> None:
        if len(seen) == 6:
            raise asyncio.CancelledError
        seen.append((duration_s, REGISTRY.get_sample_value("kvplug_shadow_engines", {"compares": "decision"})))

    monkeypatch.setattr(metrics.asyncio, "sleep", sleep)
    first, later = ({report.SHADOW: report.as_json(ENGINE | {"num_calls_compared": count})} for count in (100, 200))
    front_end = FrontEnd(first, TimeoutError("busy"), TimeoutError("busy"), later, TimeoutError("busy"), later)

    async def serve() -> None:
        metrics.watch_counts(front_end, [first], ("kvplug_report",))
        with pytest.raises(asyncio.CancelledError):
            await front_end._kvplug_polling_task

    asyncio.run(serve())
    usual, longer = metrics.POLLING_PERIOD_S, metrics.RETRYING_PERIOD_S
    assert longer > usual
    assert seen == [(usual, 1), (usual, 1), (longer, 0), (longer, 0), (usual, 1), (longer, 0)]
    assert REGISTRY.get_sample_value("kvplug_shadow_calls", {"outcome": "compared"}) == 200
    (line,) = kvplug_log
    assert line == "kvplug_shadow: not updated, asking again every 60 s: TimeoutError: busy"


def test_each_engine_has_a_bundle_of_its_own(kv_cache_config: Any, tmp_path: Path) -> None:
    """And the shadow itself can be recorded, as any manager."""
    config = {"bundle": str(tmp_path / "bundle"), "trace": str(tmp_path / "trace.jsonl.gz")}
    registry.validate("shadow", config)
    managers = [construct("shadow", config, kv_cache_config, engine_index=index) for index in (0, 1)]
    for manager in managers:
        assert isinstance(manager, ShadowManager)
        manager.new_step_starts()
        assert manager.shadow_report()["num_calls_compared"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "bundle",
        "bundle.engine1",
        "trace.jsonl.gz",
        "trace.jsonl.gz.engine1",
    }
