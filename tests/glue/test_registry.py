"""Names of managers: built in, other packages' entry points, and `module:Class`."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug.errors import ContractError, SettingsError
from vllm_kvplug.vllm_glue import registry

PLAIN = "tests.glue.managers:Plain"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What other packages registered; the test fills it."""
    registered: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in registered if point.group == group])
    return registered


def test_entry_points_are_names(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("plain", PLAIN, "vllm_kvplug.managers"))
    entry_points.append(EntryPoint("elsewhere", PLAIN, "another.group"))
    assert registry.names() == ["kvplug", "plain", "shadow", "upstream"]
    from tests.glue.managers import Plain

    assert registry.load("plain") is Plain
    assert registry.load(PLAIN) is Plain


def test_a_name_claimed_twice_is_refused(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("plain", PLAIN, "vllm_kvplug.managers"))
    entry_points.append(EntryPoint("plain", "tests.glue.managers:Another", "vllm_kvplug.managers"))
    with pytest.raises(SettingsError, match=r"'plain' is claimed by .*Another and .*Plain"):
        registry.target("plain")


def test_our_own_name_cannot_be_taken(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("kvplug", PLAIN, "vllm_kvplug.managers"))
    from vllm_kvplug import KVCacheManager

    assert registry.load("kvplug") is KVCacheManager
    assert registry.is_kvplug("kvplug")
    assert registry.is_kvplug("vllm_kvplug.vllm_glue.manager:KVCacheManager")
    assert not registry.is_kvplug(PLAIN)


def test_settings_reach_only_a_class_that_takes_them(kv_cache_config: Any) -> None:
    registry.validate(PLAIN, {})
    with pytest.raises(SettingsError, match=r"takes no settings .* found \{'depth': 1\}"):
        registry.validate(PLAIN, {"depth": 1})
    with_settings = "tests.glue.managers:WithSettings"
    registry.validate(with_settings, {"depth": 1})
    with pytest.raises(SettingsError, match=r"unknown .'width'., allowed: depth"):
        registry.validate(with_settings, {"width": 1})
    build = registry.factory(with_settings, {"depth": 1})
    assert build(kv_cache_config=kv_cache_config, max_model_len=64, hash_block_size=16).settings == {"depth": 1}


def test_settings_of_a_trace_are_no_third_partys(kv_cache_config: Any, tmp_path: Path) -> None:
    config = {"depth": 1, "trace": str(tmp_path / "trace.gz"), "trace-max-mib": 1}
    with_settings = "tests.glue.managers:WithSettings"
    for name, own in ((PLAIN, {}), (with_settings, {"depth": 1})):
        given = {key: value for key, value in config.items() if key in own or key.startswith("trace")}
        registry.validate(name, given)
        manager = registry.factory(name, given)(kv_cache_config=kv_cache_config, max_model_len=64, hash_block_size=16)
        assert getattr(manager, "settings", {}) == own
        assert "allocate_slots" in vars(manager)
        del manager


def test_a_third_party_gets_settings_of_its_own(kv_cache_config: Any) -> None:
    config = {"depth": {"first": 1}}
    with_settings = "tests.glue.managers:WithSettings"
    build = registry.factory(with_settings, config)
    for _ in range(2):
        manager = build(kv_cache_config=kv_cache_config, max_model_len=64, hash_block_size=16)
        assert manager.settings == {"depth": {"first": 1}}
        manager.settings["depth"].clear()
    assert config == {"depth": {"first": 1}}


@pytest.mark.parametrize("error", [OSError("no disk\nleft"), SystemExit(0)])
def test_a_class_that_fails_in_its_constructor_is_named(
    kv_cache_config: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    from tests.glue.managers import Plain

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Plain, "__init__", fail)
    with pytest.raises(ContractError, match=rf"{PLAIN}.*expected to be constructed.*{type(error).__name__}") as caught:
        registry.factory(PLAIN, {})(kv_cache_config=kv_cache_config)
    assert "\n" not in str(caught.value)


def test_a_third_partys_check_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.glue.managers import WithSettings

    monkeypatch.setattr(WithSettings, "validate_settings", lambda settings: settings.clear())
    config = {"depth": 1}
    registry.validate("tests.glue.managers:WithSettings", config)
    assert config == {"depth": 1}


@pytest.mark.parametrize(
    ("name", "config", "policy"),
    [
        ("upstream", {"trace": "x"}, "lru"),
        ("kvplug", {"eviction": "lru", "trace": "x"}, "lru"),
        ("tests.glue.managers:Plain", {}, None),
        ("shadow", {}, "lru"),
        ("shadow", {"serving": "tests.glue.managers:Plain", "follower": "kvplug"}, None),
        ("shadow", {"serving": "kvplug", "follower": "tests.glue.managers:Plain", "trace": "x"}, "lru"),
    ],
)
def test_the_policy_of_a_choice(name: str, config: dict[str, Any], policy: str | None) -> None:
    assert registry.policy_of(name, config) == policy
