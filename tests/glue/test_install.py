"""The entry hooks: idempotent, free of charge, and in place whatever is imported first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_kvplug
from tests.glue.support import run_python
from vllm_kvplug.errors import KVPlugError, SettingsError
from vllm_kvplug.vllm_glue import patching


def test_install_twice_changes_nothing() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    hooks = [
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "__init__"),
        (AsyncEngineArgs, "__init__"),
        (EngineArgs, "create_engine_config"),
        (FlexibleArgumentParser, "parse_args"),
    ]
    vllm_kvplug.install()
    before = [vars(owner)[name] for owner, name in hooks]
    assert all(patching.is_hooked(owner, name) for owner, name in hooks)
    vllm_kvplug.install()
    vllm_kvplug.register()
    assert [vars(owner)[name] for owner, name in hooks] == before


def test_install_imports_nothing_of_vllm() -> None:
    code = """
import sys, time
start = time.perf_counter()
import vllm_kvplug
vllm_kvplug.register()
assert "vllm" not in sys.modules
assert not any(name.startswith("vllm_kvplug") and "glue" not in name and "errors" not in name for name in sys.modules
               if name != "vllm_kvplug"), [name for name in sys.modules if name.startswith("vllm_kvplug")]
print(time.perf_counter() - start)
"""
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 1


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_patch_waits_for_the_import(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_late.py").write_text("VALUE = 1\n")
    seen: list[Any] = []

    def patch(module: Any) -> None:
        seen.append(module.VALUE)

    patching.when_imported("kvplug_probe_late", patch)
    patching.when_imported("kvplug_probe_late", patch)
    assert seen == []
    import kvplug_probe_late

    assert seen == [1]
    patching.when_imported("kvplug_probe_late", patch)
    assert seen == [1, 1]
    assert kvplug_probe_late.__spec__.loader.get_source("kvplug_probe_late") == "VALUE = 1\n"


def test_a_patch_that_fails_fails_the_import(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_broken.py").write_text("VALUE = 1\n")

    def patch(module: Any) -> None:
        raise AttributeError("gone")

    patching.when_imported("kvplug_probe_broken", patch)
    with pytest.raises(AttributeError, match="gone"):
        __import__("kvplug_probe_broken")
    assert "kvplug_probe_broken" not in sys.modules


def test_static_methods_stay_static() -> None:
    class Owner:
        @staticmethod
        def double(value: int) -> int:
            return 2 * value

    patching.wrap_method(Owner, "double", lambda original, value: original(value) + 1)
    patching.wrap_method(Owner, "double", lambda original, value: original(value) + 1)
    assert Owner.double(3) == Owner().double(3) == 7


def test_llm_keywords_after_install(make_config: Any) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"eviction": "lru"})
    assert vllm_config.additional_config["kv_cache_manager"] == {"name": "kvplug", "config": {"eviction": "lru"}}


def test_engine_args_keep_what_was_given(tiny_model: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {"other": 1}
    engine_args = AsyncEngineArgs(model=tiny_model, additional_config=given, kv_cache_manager="kvplug")
    assert given == {"other": 1}
    assert engine_args.additional_config == {"other": 1, "kv_cache_manager": {"name": "kvplug", "config": {}}}
    assert AsyncEngineArgs(model=tiny_model, additional_config=given).additional_config is given


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kv_cache_manager": "kvplg"}, "did you mean 'kvplug'"),
        ({"kv_cache_manager": "kvplug", "kv_cache_manager_config": {"evict": 1}}, "unknown setting 'evict'"),
        ({"kv_cache_manager_config": {"eviction": "lru"}}, "to configure, found none"),
        ({"additional_config": {"kv_cache_manager": "kvplg"}}, "did you mean 'kvplug'"),
    ],
)
def test_python_refusals(make_config: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_config(**kwargs)


def test_another_vllm_version_is_refused(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.18.0")
    with pytest.raises(KVPlugError, match=r"expects vLLM 0\.17\.1, found 0\.18\.0"):
        make_config(additional_config={"kv_cache_manager": "kvplug"})
    assert make_config().additional_config == {}


def test_a_vllm_that_lacks_our_hooks_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    import vllm

    from vllm_kvplug.vllm_glue import install

    empty = ModuleType("vllm.engine.arg_utils")
    with pytest.raises(AttributeError, match="EngineArgs"):
        install._patch_engine_args(empty)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    install._patch_engine_args(empty)
