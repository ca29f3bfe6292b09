"""The core imports no vLLM: importing it takes 10 to 20 s, and core tests must run in seconds."""

from __future__ import annotations

import subprocess
import sys

IMPORT_CORE_WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None  # importing either now raises
import pkgutil, importlib, vllm_kvplug
names = [m.name for m in pkgutil.walk_packages(vllm_kvplug.__path__, "vllm_kvplug.") if "vllm_glue" not in m.name]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_everything_but_the_glue_imports_without_vllm_and_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_CORE_WITHOUT_VLLM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15


def test_public_names_are_listed_and_unknown_ones_refused() -> None:
    import vllm_kvplug

    assert vllm_kvplug.Settings is not None
    assert {"KVCacheManager", "KVCacheBlocks", "BlockPool", "install", "register"} <= set(vllm_kvplug.__all__)
    try:
        vllm_kvplug.KVCacheManger  # noqa: B018
    except AttributeError as error:
        assert "KVCacheManger" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a misspelt public name was found")
