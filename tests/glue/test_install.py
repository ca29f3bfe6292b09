"""The entry hooks: idempotent, free of charge, and in place whatever is imported first."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_kvplug
from tests.glue.support import is_hooked, run_python
from vllm_kvplug.errors import KVPlugError


def test_install_twice_changes_nothing() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    hooks = [
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "from_cli_args"),
        (EngineArgs, "__init__"),
        (AsyncEngineArgs, "__init__"),
        (EngineArgs, "create_engine_config"),
        (FlexibleArgumentParser, "parse_args"),
    ]
    vllm_kvplug.install()
    before = [vars(owner)[name] for owner, name in hooks]
    assert all(is_hooked(owner, name) for owner, name in hooks)
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
