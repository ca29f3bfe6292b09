"""The setting `trace` in force: which managers it records, what the file says of them, and that it is off otherwise."""

from __future__ import annotations

import dataclasses
import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_kvplug
from tests.lockstep.mixes import GroupSetup
from tests.lockstep.mixes import kv_cache_config as mixed_config
from vllm_kvplug.errors import SettingsError, TraceError
from vllm_kvplug.trace.format import Header, encode_header
from vllm_kvplug.trace.live_calls import LiveCalls
from vllm_kvplug.trace.operations import METHODS, REQUEST_ID_METHODS, REQUEST_METHODS, VERSIONS_METHODS
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.vllm_glue import contract, recording, registry
from vllm_kvplug.vllm_glue import replay as glue_replay
from vllm_kvplug.vllm_glue.choice import ManagerChoice, chosen, settle
from vllm_kvplug.vllm_glue.version import vllm_version

GROUPS = [
    GroupSetup("full", 16),
    GroupSetup("mla", 16),
    GroupSetup("sink", 16, num_sink_blocks=2),
    GroupSetup("sliding", 16, window=40),
    GroupSetup("chunked", 16, chunk=32),
    GroupSetup("mamba", 16, mode="align", num_speculative_blocks=2),
    GroupSetup("cross", 16),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl.gz"


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


def closed(scheduler: Any, path: Path) -> TraceReader:
    """The trace, complete: the scheduler's manager is gone."""
    del scheduler.kv_cache_manager
    gc.collect()
    return TraceReader(path)


def test_operations_are_the_contract() -> None:
    # Of all versions: a trace of one can be read beside another.
    assert set(METHODS) == {*contract.CALLS, *VERSIONS_METHODS}
    assert set(REQUEST_ID_METHODS) <= set(METHODS)
    calls = LiveCalls(SimpleNamespace(get_block_ids=lambda: ([],)))
    request = SimpleNamespace(
        request_id="a",
        num_tokens=3,
        num_computed_tokens=0,
        num_output_placeholders=0,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        is_finished=lambda: False,
    )
    for method, ways in contract.CALLS.items():
        for way in ways:
            args: list[Any] = [7] * way.num_positional
            kwargs: dict[str, Any] = dict.fromkeys(way.keywords, 8)
            if method in REQUEST_METHODS:
                args[0] = request
            elif method == "evict_blocks":
                args[0] = {7}
            operation = calls.begin(method, tuple(args), kwargs)
            assert operation.method == method
            expected = {name for name in way.keywords if name not in ("request_id", "new_computed_blocks")}
            assert expected <= set(operation.arguments)


@pytest.mark.parametrize(
    "name", ["upstream", "kvplug", "tests.glue.managers:Plain", "tests.glue.managers:WithSettings"]
)
def test_every_manager_can_be_recorded(make_config: Any, kv_cache_config: Any, path: Path, name: str) -> None:
    vllm_config = make_config(kv_cache_manager=name, kv_cache_manager_config={"trace": str(path)})
    assert isinstance(chosen(vllm_config), ManagerChoice)
    scheduler = build(vllm_config, kv_cache_config)
    manager = scheduler.kv_cache_manager
    assert type(manager) is registry.load(name)
    if name.endswith("WithSettings"):
        assert manager.settings == {}  # the trace's settings are none of its own
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    del manager
    reader = closed(scheduler, path)
    assert [operation.method for operation in reader][:1] == ["new_step_starts"]
    header = reader.header
    assert header.manager["name"] == name
    assert header.manager["config"] == {}
    assert header.kv_cache_config["num_blocks"] == 64
    assert header.kv_cache_config["groups"][0]["spec"] == "FullAttentionSpec"
    assert header.constructor["hash_block_size"] == 16
    assert header.constructor["log_stats"] is True
    assert header.versions["vllm"] == vllm_version()


@pytest.mark.parametrize("name", ["kvplug", "tests.glue.managers:Plain"])
def test_off_adds_nothing_to_any_call(make_config: Any, kv_cache_config: Any, name: str) -> None:
    scheduler = build(make_config(kv_cache_manager=name), kv_cache_config)
    assert not set(METHODS) & set(vars(scheduler.kv_cache_manager))
    assert "trace" not in str(chosen(scheduler.vllm_config))


def test_upstream_without_a_trace_stays_untouched(make_config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    vllm_config = make_config(kv_cache_manager="upstream")
    assert vllm_config.additional_config == {}
    assert vllm_config.scheduler_config.get_scheduler_cls() is Scheduler


def test_upstream_keeps_its_own_hasher() -> None:
    assert registry.hasher_factory("upstream", {"trace": "x"}) is None


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("kvplug", {"trace": 3}, "setting 'trace'"),
        ("kvplug", {"trace": ""}, "setting 'trace'"),
        ("kvplug", {"trace": "x", "trace_max_mib": 0}, "setting 'trace_max_mib'"),
        ("kvplug", {"trace-max-mib": 3}, "setting 'trace_max_mib': expected the setting 'trace'.*found none"),
        ("upstream", {"trace_tokens": True}, "setting 'trace_tokens': expected the setting 'trace'"),
        ("upstream", {"trace": "x", "eviction": "lru"}, "'upstream' takes no settings"),
        ("upstream", {"trace": None}, "expected a kv_cache_manager other than upstream to configure"),
        ("kvplug", {"trace": "x", "trase": "y"}, "unknown setting 'trase'; known settings: .*trace, trace_max_mib"),
        ("tests.glue.managers:Plain", {"trace": "x", "depth": 1}, "takes no settings.*found {'depth': 1}"),
    ],
)
def test_refusals(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        settle({}, name, config)
    assert "\n" not in str(caught.value)


def test_a_path_that_cannot_be_written_ends_the_start(make_config: Any, kv_cache_config: Any, tmp_path: Path) -> None:
    missing = tmp_path / "no folder" / "trace"
    for name in ("kvplug", "upstream"):
        vllm_config = make_config(kv_cache_manager=name, kv_cache_manager_config={"trace": str(missing)})
        with pytest.raises(TraceError, match=rf"trace {re.escape(str(missing))}: expected a file that can be written"):
            build(vllm_config, kv_cache_config)
    diary = tmp_path / "diary"
    diary.write_text("dear diary")
    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"trace": str(diary)})
    with pytest.raises(TraceError, match="will not replace"):
        build(vllm_config, kv_cache_config)
    assert diary.read_text() == "dear diary"


def test_each_engine_has_a_file_of_its_own(make_config: Any, kv_cache_config: Any, path: Path) -> None:
    schedulers = []
    for index in (0, 1, 2):
        vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"trace": str(path)})
        vllm_config.parallel_config.data_parallel_index = index
        schedulers.append(build(vllm_config, kv_cache_config))
    for index, scheduler in enumerate(schedulers):
        own_path = path.with_name(path.name + (f".engine{index}" if index else ""))
        assert closed(scheduler, own_path).is_complete


def test_two_engines_with_one_path_are_refused(make_config: Any, kv_cache_config: Any, path: Path) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"trace": str(path)})
    scheduler = build(vllm_config, kv_cache_config)
    with pytest.raises(TraceError, match="expected no other engine to write there"):
        build(vllm_config, kv_cache_config)
    assert scheduler.kv_cache_manager is not None


def test_secrets_of_a_third_party_stay_out(kv_cache_config: Any) -> None:
    config = {"api_key": "hunter2", "depth": 3, "max_num_tokens": 4, "peers": [{"authToken": "hunter3"}]}
    constructor = {"kv_cache_config": kv_cache_config, "max_model_len": 64, "metrics_collector": object()}
    header = recording.header_of(vllm_kvplug.KVCacheManager, "x:Y", config, constructor)
    expected = {"api_key": "(left out)", "depth": 3, "max_num_tokens": 4, "peers": [{"authToken": "(left out)"}]}
    assert header.manager["config"] == expected
    assert header.constructor == {"max_model_len": 64}
    assert b"hunter" not in encode_header(header)
    # Those of a shadow's side, too.
    shadow = {"serving": "x:Y", "serving_config": config, "follower_config": {"private_key": "hunter4"}}
    header = recording.header_of(vllm_kvplug.KVCacheManager, "shadow", shadow, constructor)
    assert header.manager["config"]["serving_config"] == expected
    assert b"hunter" not in encode_header(header)


def test_what_is_left_out_does_not_decide_whether_answers_are_compared(kv_cache_config: Any) -> None:
    constructor = {"kv_cache_config": kv_cache_config, "max_model_len": 64}
    config = {"depth": 3, "eviction_key": "oldest"}  # a name like a secret's, and yet it decides

    def header_of(name: str, config: dict[str, Any]) -> Header:
        return recording.header_of(vllm_kvplug.KVCacheManager, name, config, constructor)

    header = header_of("x:Y", config)
    assert header.manager["config"]["eviction_key"] == "(left out)"
    assert glue_replay.is_alike("x:Y", dict(reversed(config.items())), header)
    assert glue_replay.is_alike("shadow", {"serving": "x:Y", "serving_config": config}, header)
    assert not glue_replay.is_alike("x:Y", {**config, "eviction_key": "newest"}, header)
    assert not glue_replay.is_alike("x:Y", {**config, "depth": 4}, header)
    assert not glue_replay.is_alike("x:Z", config, header)
    assert not glue_replay.is_alike("upstream", {}, header)
    # No two traces say the same of a secret.
    assert header_of("x:Y", config).manager["likeness"] != header.manager["likeness"]
    header = header_of("upstream", {})
    assert glue_replay.is_alike("kvplug", {"eviction": "lru"}, header)
    assert glue_replay.is_alike("shadow", {}, header)
    assert not glue_replay.is_alike("x:Y", {}, header)
    # A trace that does not say.
    del header.manager["likeness"]
    assert glue_replay.is_alike("kvplug", {}, header)
    header.manager["name"] = "not-installed-here"
    assert not glue_replay.is_alike("kvplug", {}, header)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.kind)
def test_every_spec_comes_back_from_its_plain_values(group: GroupSetup) -> None:
    config = mixed_config(40, [group, GROUPS[0]], 1, unequal=False)
    plain = recording.plain_kv_cache_config(config)
    header = Header(trace_id="x", kv_cache_config=plain)
    built = glue_replay.kv_cache_config_of(header)
    assert [one.kv_cache_spec for one in built.kv_cache_groups] == [one.kv_cache_spec for one in config.kv_cache_groups]
    assert built.num_blocks == 40
    assert glue_replay.kv_cache_config_of(header, 7).num_blocks == 7
    for one, expected in zip(built.kv_cache_groups, config.kv_cache_groups, strict=True):
        values = dataclasses.asdict(one.kv_cache_spec)
        assert {key: type(value) for key, value in values.items()} == {
            key: type(value) for key, value in dataclasses.asdict(expected.kv_cache_spec).items()
        }


def test_unknown_specs_are_refused_by_name() -> None:
    group = {"spec": "TelepathySpec", "fields": {}, "num_layers": 1}
    header = Header(trace_id="x", kv_cache_config={"num_blocks": 4, "groups": [group]})
    with pytest.raises(TraceError, match="found one of TelepathySpec"):
        glue_replay.kv_cache_config_of(header)
    group |= {"spec": "FullAttentionSpec", "fields": {"colour": "blue"}}
    with pytest.raises(TraceError, match=r"expected a header whose kv_cache_config this vLLM can build.*colour"):
        glue_replay.kv_cache_config_of(header)
