"""The entry hooks: idempotent, free of charge, and in place whatever is imported first."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import pytest

import vllm_kvplug
from tests.glue.support import IS_PATCHED, is_hooked, patched_only, run_python
from vllm_kvplug.errors import KVPlugError


def test_install_twice_changes_nothing() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    hooks = [(EngineArgs, "create_engine_config"), (FlexibleArgumentParser, "parse_args")]
    of_the_options = [
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "from_cli_args"),
        (EngineArgs, "__init__"),
        (AsyncEngineArgs, "__init__"),
    ]
    vllm_kvplug.install()
    assert all(is_hooked(owner, name) != IS_PATCHED for owner, name in of_the_options)
    if not IS_PATCHED:
        hooks += of_the_options
    before = [vars(owner)[name] for owner, name in hooks]
    assert all(is_hooked(owner, name) for owner, name in hooks)
    vllm_kvplug.install()
    vllm_kvplug.register()
    assert [vars(owner)[name] for owner, name in hooks] == before


def test_install_imports_nothing_of_vllm() -> None:
    # What it imports is its cost: a timing would fail on a busy machine.
    code = """
import sys
before = set(sys.modules)
import vllm_kvplug
vllm_kvplug.register()
new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(sorted(new))
"""
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr
    assert literal_eval(process.stdout) == [
        "vllm_kvplug",
        "vllm_kvplug.errors",
        "vllm_kvplug.vllm_glue",
        "vllm_kvplug.vllm_glue.choice",
        "vllm_kvplug.vllm_glue.install",
        "vllm_kvplug.vllm_glue.patched_tree",
        "vllm_kvplug.vllm_glue.patching",
        "vllm_kvplug.vllm_glue.version",
    ]


def test_another_vllm_version_is_refused(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.20.0")
    with pytest.raises(KVPlugError, match=r"expects vLLM 0\.17\.0, .*0\.19\.1, found 0\.20\.0, "):
        make_config(additional_config={"kv_cache_manager": "kvplug"})
    assert make_config().additional_config == {}


@patched_only
def test_a_forks_manager_on_another_version_is_not_ours_to_refuse(
    make_config: Any, cli_parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    theirs = "tests.glue.managers:Plain"
    monkeypatch.setattr(vllm, "__version__", "0.20.1")
    cache_config = make_config(kv_cache_manager=theirs).cache_config
    assert (type(cache_config.kv_cache_manager), cache_config.kv_cache_manager) == (str, theirs)
    namespace = cli_parser.parse_args(["serve", "m", "--kv-cache-manager", theirs])
    assert (namespace.kv_cache_manager, namespace.additional_config) == (theirs, {})
    for ours in ("kvplug", "vllm_kvplug.vllm_glue.manager:KVCacheManager"):
        with pytest.raises(KVPlugError, match=r"expects vLLM 0\.17\.0, .*0\.19\.1, found 0\.20\.1, "):
            make_config(kv_cache_manager=ours)


@patched_only
def test_a_forks_manager_on_a_supported_version_that_was_changed_is_not_ours_to_refuse(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kvplug.vllm_glue import drift

    monkeypatch.setattr(drift, "find", lambda: ("Scheduler calls forks_own(), which no manager here has",))
    theirs = "tests.glue.managers:Plain"
    assert make_config(kv_cache_manager=theirs).cache_config.kv_cache_manager == theirs
    with pytest.raises(KVPlugError, match="found that it differs: Scheduler calls forks_own"):
        make_config(kv_cache_manager="kvplug")


def test_a_vllm_that_lacks_our_hooks_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    import vllm

    from vllm_kvplug.vllm_glue import install

    empty = ModuleType("vllm.engine.arg_utils")
    with pytest.raises(AttributeError, match="EngineArgs"):
        install._patch_engine_args(empty)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    install._patch_engine_args(empty)
