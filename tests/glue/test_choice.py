"""The choice as a value: it survives what vLLM does to `additional_config`, and statements of it meet."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.glue.support import activated_hook, is_hooked
from vllm_kvplug.errors import SettingsError
from vllm_kvplug.vllm_glue.choice import CommandLineChoice, ManagerChoice, merge_settings, settle

KVPLUG = {"name": "kvplug", "config": {"eviction": "lru"}}


@dataclass
class Args:
    additional_config: dict[str, Any]


def test_asdict_keeps_the_type() -> None:
    args = Args({"kv_cache_manager": CommandLineChoice(KVPLUG)})
    rebuilt = dataclasses.asdict(args)["additional_config"]["kv_cache_manager"]
    assert type(rebuilt) is CommandLineChoice
    assert rebuilt == KVPLUG


@pytest.mark.parametrize("kind", [ManagerChoice, CommandLineChoice])
def test_unpickling_activates_and_another_process_has_its_own_command_line(kind: type[ManagerChoice]) -> None:
    received = pickle.loads(pickle.dumps({"kv_cache_manager": kind(KVPLUG)}))["kv_cache_manager"]
    assert type(received) is ManagerChoice
    assert received == KVPLUG
    assert is_hooked(*activated_hook())


def test_copies_are_choices() -> None:
    for copied in (copy.copy(ManagerChoice(KVPLUG)), copy.deepcopy(ManagerChoice(KVPLUG))):
        assert type(copied) is ManagerChoice
        assert copied == KVPLUG


def test_json_carries_it() -> None:
    assert json.loads(json.dumps({"kv_cache_manager": ManagerChoice(KVPLUG)}, sort_keys=True)) == {
        "kv_cache_manager": KVPLUG
    }


def test_a_process_without_the_package_fails_and_names_it() -> None:
    pickled = pickle.dumps({"kv_cache_manager": ManagerChoice(KVPLUG)})
    # Isolated and without site-packages: an interpreter that has never heard of the package.
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import pickle; pickle.loads({pickled!r})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'vllm_kvplug'"


@pytest.mark.parametrize(
    ("additional_config", "name", "config"),
    [
        ({}, "kvplug", {"eviction": "lru"}),
        ({"kv_cache_manager": "kvplug", "kv_cache_manager_config": {"eviction": "lru"}}, None, None),
        ({"kv_cache_manager": KVPLUG}, None, None),
        ({"kv_cache_manager": ManagerChoice(KVPLUG)}, None, None),
        ({"kv_cache_manager": "kvplug"}, None, {"eviction": "lru"}),
        ({"kv_cache_manager": KVPLUG}, "kvplug", {"eviction": "lru"}),
    ],
)
def test_every_way_to_state_it_meets(additional_config: dict[str, Any], name: Any, config: Any) -> None:
    given = {"other": 1, **additional_config}
    before = copy.deepcopy(given)
    settled, choice = settle(given, name, config)
    assert type(choice) is ManagerChoice
    assert settled == {"other": 1, "kv_cache_manager": KVPLUG}
    assert settled["kv_cache_manager"] is choice
    assert given == before
    assert settle(settled)[0] == settled


def test_nothing_stated_is_the_given_object() -> None:
    given = {"other": 1}
    assert settle(given) == (given, None)
    assert settle(given)[0] is given
    opaque = object()
    assert settle(opaque)[0] is opaque


@pytest.mark.parametrize("additional_config", [{}, {"kv_cache_manager": "upstream"}, {"kv_cache_manager": None}])
def test_upstream_leaves_nothing_behind(additional_config: dict[str, Any]) -> None:
    assert settle({"other": 1, **additional_config}, "upstream") == ({"other": 1}, None)


@pytest.mark.parametrize("additional_config", [{}, {"kv_cache_manager": "upstream"}])
def test_upstream_with_a_trace_is_a_choice_like_others(additional_config: dict[str, Any]) -> None:
    config = {"trace": "trace.gz", "trace_tokens": True}
    settled, choice = settle({"other": 1, **additional_config}, "upstream", config)
    assert type(choice) is ManagerChoice
    assert settled == {"other": 1, "kv_cache_manager": {"name": "upstream", "config": config}}
    assert settle(settled) == (settled, choice)
    assert pickle.loads(pickle.dumps(choice)) == choice


@pytest.mark.parametrize(
    ("additional_config", "name", "config", "message"),
    [
        (
            {"kv_cache_manager": "kvplug"},
            "upstream",
            None,
            "chosen twice, as 'upstream' and in additional_config as 'kvplug'",
        ),
        ({"kv_cache_manager": {"nam": "kvplug"}}, None, None, "expected a name or"),
        ({"kv_cache_manager": {"name": "kvplug", "configs": {}}}, None, None, "expected a name or"),
        ({"kv_cache_manager": 3}, None, None, "found 3"),
        ({"kv_cache_manager": {"name": 3}}, None, None, "expected a name or 'module:Class', found 3"),
        ({}, None, {"eviction": "lru"}, "expected a kv_cache_manager other than upstream to configure, found none"),
        ({}, "upstream", {"eviction": "lru"}, "to configure, found upstream"),
        ({}, None, {"trace": "trace.gz"}, "to configure, found none"),
        ({}, "upstream", {"trace_tokens": True}, "setting 'trace_tokens': expected the setting 'trace'"),
        ({"kv_cache_manager_config": {"eviction": "lru"}}, None, None, "to configure, found none"),
        ({}, "kvplug", "lru", "expected an object of settings, found 'lru'"),
        ({"kv_cache_manager": KVPLUG}, None, {"eviction": "fifo"}, "'eviction' is given twice, as 'fifo' and 'lru'"),
        (
            {},
            "kvplug",
            {"evict": 1},
            "unknown setting 'evict'; known settings: check_invariants, check_invariants_every, eviction, trace, "
            "trace_max_mib, trace_tokens",
        ),
        ({}, "kvplug", {"eviction": 1}, "setting 'eviction'"),
        ({}, "kvplug", {"eviction": object()}, "expected values that JSON can carry"),
        (object(), "kvplug", None, "expected additional_config to be a dict"),
    ],
)
def test_refusals_name_what_was_found(additional_config: Any, name: Any, config: Any, message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        settle(additional_config, name, config)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_merging_goes_into_objects() -> None:
    assert merge_settings({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": 2}) == {"a": {"b": 1, "d": 3}, "c": 2}
    with pytest.raises(SettingsError, match=r"'a\.b' is given twice, as 1 and 2"):
        merge_settings({"a": {"b": 1}}, {"a": {"b": 2}})
    with pytest.raises(SettingsError, match="'a' is given twice"):
        merge_settings({"a": {"b": 1}}, {"a": 1})
