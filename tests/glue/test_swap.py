"""The swap: vLLM's own schedulers, a user's, and those that take no part. The choice is in force, or it is an error."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_kvplug
from tests.glue.support import IS_PATCHED, fake_engine_core, is_hooked, patched_only, seams_only, with_choice
from vllm_kvplug.errors import ContractError, UnsupportedError
from vllm_kvplug.vllm_glue import report, seams
from vllm_kvplug.vllm_glue.choice import ManagerChoice, chosen

HOLDERS = ["vllm.v1.core.sched.scheduler", "tests.glue.own_scheduler"]


@pytest.fixture
def upstream_manager() -> Any:
    """vLLM's own class; after the test it is back under its name wherever it was."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    yield KVCacheManager
    for name in HOLDERS:
        if name in sys.modules:
            assert sys.modules[name].KVCacheManager is KVCacheManager


def build(vllm_config: Any, kv_cache_config: Any) -> Any:
    """A scheduler, made as EngineCore makes it."""
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=SimpleNamespace(),
        include_finished_set=False,
        log_stats=True,
        block_size=16,
    )


def test_nothing_chosen_is_the_class_itself(make_config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    for kwargs in ({}, {"kv_cache_manager": "upstream"}):
        vllm_config = make_config(**kwargs)
        assert vllm_config.additional_config == {}
        assert vllm_config.scheduler_config.get_scheduler_cls() is Scheduler


@patched_only
def test_the_compile_hash_of_a_patched_tree_does_not_depend_on_the_choice(make_config: Any) -> None:
    plain = make_config(additional_config={"other": 1}).compute_hash()
    for kwargs in ({"kv_cache_manager": "kvplug"}, {"kv_cache_manager": "upstream"}):
        assert make_config(additional_config={"other": 1}, **kwargs).compute_hash() == plain
    assert make_config(additional_config={"other": 1, "kv_cache_manager": "kvplug"}).compute_hash() == plain
    assert make_config().compute_hash() != plain


@patched_only
def test_the_choice_is_pickled_in_vllms_own_fields(make_config: Any, kv_cache_config: Any) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"eviction": "lru"})
    for received in (pickle.loads(pickle.dumps(vllm_config)), copy.deepcopy(vllm_config)):
        fields = received.cache_config.kv_cache_manager, received.cache_config.kv_cache_manager_config
        assert fields == ("kvplug", {"eviction": "lru"})
        assert type(fields[0]) is type(vllm_config.cache_config.kv_cache_manager)
        assert json.dumps(fields[0]) == '"kvplug"'
        assert received.additional_config == {}
        assert chosen(received) == {"name": "kvplug", "config": {"eviction": "lru"}}
        assert type(build(received, kv_cache_config).kv_cache_manager) is vllm_kvplug.KVCacheManager


@pytest.mark.parametrize("is_async", [False, True])
def test_vllms_own_schedulers(make_config: Any, kv_cache_config: Any, upstream_manager: type, is_async: bool) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"eviction": "lru"})
    vllm_config.scheduler_config.async_scheduling = is_async
    scheduler = build(vllm_config, kv_cache_config)
    assert type(scheduler) is (AsyncScheduler if is_async else Scheduler)
    assert type(scheduler.kv_cache_manager) is vllm_kvplug.KVCacheManager
    assert scheduler.kv_cache_manager.settings.eviction == "lru"
    assert scheduler.kv_cache_manager.log_stats


def test_a_users_own_scheduler_class(make_config: Any, kv_cache_config: Any, upstream_manager: type) -> None:
    from tests.glue.schedulers import Inherited

    vllm_config = make_config(kv_cache_manager="kvplug", scheduler_cls="tests.glue.schedulers.Inherited")
    scheduler = build(vllm_config, kv_cache_config)
    assert type(scheduler) is Inherited
    assert type(scheduler.kv_cache_manager) is vllm_kvplug.KVCacheManager


@seams_only
def test_a_scheduler_that_ignores_the_choice_is_an_error(
    make_config: Any, kv_cache_config: Any, upstream_manager: type
) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", scheduler_cls="tests.glue.schedulers.Ignoring")
    with pytest.raises(ContractError) as refusal:
        build(vllm_config, kv_cache_config)
    message = str(refusal.value)
    assert message.startswith("scheduler tests.glue.schedulers.Ignoring: expected kv_cache_manager 'kvplug' in force")
    assert "found vllm.v1.core.kv_cache_manager.KVCacheManager" in message


def test_a_failing_scheduler_leaves_vllm_as_it_was(
    make_config: Any, kv_cache_config: Any, upstream_manager: type
) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", scheduler_cls="tests.glue.schedulers.Failing")
    with pytest.raises(RuntimeError, match="no scheduler today"):
        build(vllm_config, kv_cache_config)


def test_one_after_another_in_one_process(kv_cache_config: Any, upstream_manager: type) -> None:
    from tests.glue import managers
    from tests.glue.own_scheduler import Small

    builder = seams.SchedulerBuilder(Small)
    expected = {
        "kvplug": vllm_kvplug.KVCacheManager,
        None: upstream_manager,
        "tests.glue.managers:Another": managers.Another,
        "tests.glue.managers:Plain": managers.Plain,
    }
    for name, manager_cls in expected.items():
        scheduler = builder(vllm_config=with_choice(name), kv_cache_config=kv_cache_config)
        assert type(scheduler.kv_cache_manager) is manager_cls
    by_position = builder(with_choice("kvplug"), kv_cache_config)
    assert type(by_position.kv_cache_manager) is vllm_kvplug.KVCacheManager


def test_an_engine_with_vllms_own_manager_beside_one_under_construction(
    kv_cache_config: Any, upstream_manager: type
) -> None:
    from tests.glue.own_scheduler import Small

    bound, release = threading.Event(), threading.Event()

    class Held(Small):
        """Stays under construction until it is released."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bound.set()
            assert release.wait(60)

    def start(pool: ThreadPoolExecutor, scheduler_cls: type, name: str | None) -> Future[Any]:
        return pool.submit(seams.SchedulerBuilder(scheduler_cls), with_choice(name), kv_cache_config)

    with ThreadPoolExecutor(2) as pool:
        ours = start(pool, Held, "kvplug")
        assert bound.wait(60)
        theirs = start(pool, Small, None)
        wait([theirs], timeout=0.3)  # long enough to be built, were it let
        release.set()
        assert type(theirs.result().kv_cache_manager) is upstream_manager
        assert type(ours.result().kv_cache_manager) is vllm_kvplug.KVCacheManager


def test_settings_reach_a_third_party(kv_cache_config: Any) -> None:
    from tests.glue.own_scheduler import Small

    choice = with_choice("tests.glue.managers:WithSettings", {"depth": 3})
    scheduler = seams.SchedulerBuilder(Small)(vllm_config=choice, kv_cache_config=kv_cache_config)
    assert scheduler.kv_cache_manager.settings == {"depth": 3}


def test_an_instance_that_drifts_is_an_error(kv_cache_config: Any) -> None:
    from tests.glue.own_scheduler import Small

    choice = with_choice("tests.glue.managers:WithoutEmptyBlocks")
    with pytest.raises(ContractError, match="attribute empty_kv_cache_blocks is missing"):
        seams.SchedulerBuilder(Small)(vllm_config=choice, kv_cache_config=kv_cache_config)


def test_an_engine_whose_hook_was_replaced_does_not_start(kv_cache_config: Any, upstream_manager: Any) -> None:
    sizes = {"kv_cache_config": kv_cache_config, "max_model_len": 256, "hash_block_size": 16}
    upstream, ours = upstream_manager(**sizes), vllm_kvplug.KVCacheManager(**sizes)

    def start(choice: Any, manager: Any) -> None:
        # vLLM's __init__ is over by then; the engine is as another plugin left it.
        seams._around_engine_core_init(lambda engine: None, fake_engine_core(choice, manager, kv_cache_config))

    start(with_choice("kvplug"), ours)
    start(with_choice(None), upstream)
    with pytest.raises(ContractError, match="expected kv_cache_manager 'kvplug' in force"):
        start(with_choice("kvplug"), upstream)


def test_activation_hooks_the_engine_once() -> None:
    from vllm.v1.engine.core import EngineCore

    seams.activate()
    hooked = EngineCore.__init__
    assert is_hooked(EngineCore, "__init__")
    seams.activate()
    assert EngineCore.__init__ is hooked
    assert EngineCore.kvplug_report is report.of_engine_core


def test_config_carries_the_very_choice(make_config: Any) -> None:
    vllm_config = make_config(additional_config={"kv_cache_manager": "kvplug", "other": 1})
    assert type(chosen(vllm_config)) is ManagerChoice
    assert chosen(vllm_config) == {"name": "kvplug", "config": {}}
    carried = {} if IS_PATCHED else {"kv_cache_manager": {"name": "kvplug", "config": {}}}
    assert vllm_config.additional_config == carried | {"other": 1}
    assert vllm_config.compute_hash()


@seams_only
def test_another_connector_that_takes_the_pool_is_refused_when_it_is_constructed(
    make_config: Any, kv_cache_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by nobody: what it has tells. vLLM's own manager serves with it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    connector = SimpleNamespace(bind_gpu_block_pool=lambda pool: None)
    original = Scheduler.__init__

    def with_connector(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        scheduler.connector = connector

    monkeypatch.setattr(Scheduler, "__init__", with_connector)
    with pytest.raises(UnsupportedError, match=r"not support SimpleNamespace \(.*it has bind_gpu_block_pool\), which"):
        build(make_config(kv_cache_manager="kvplug"), kv_cache_config)
    assert build(make_config(), kv_cache_config).connector is connector
