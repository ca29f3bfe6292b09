"""The patched copy of the installed vLLM, made once, and environments in which Python finds it."""

from __future__ import annotations

import os

import pytest

from tests.glue.support import ROOT
from tests.patches.tree import make_patched_copy


@pytest.fixture(scope="session")
def patched_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What PYTHONPATH is for `import vllm` to find the patched copy, and for docs/examples' toy manager to be found."""
    folder = make_patched_copy(tmp_path_factory.mktemp("patched"))
    return os.pathsep.join(map(str, (folder, ROOT, ROOT / "docs" / "examples")))


@pytest.fixture(scope="session")
def patched_env(patched_path: str) -> dict[str, str]:
    """For engines in the process itself."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, "PYTHONPATH": patched_path} | settings
