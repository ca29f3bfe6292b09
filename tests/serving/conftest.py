"""A real `vllm serve` with kvplug, one for all server tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.client import Client
from tests.serving.engine_run import DTYPE
from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.cli.server_process import ServerProcess

NUM_BLOCKS = 400
SERVER_ARGS = [
    "--kv-cache-manager=kvplug",
    '--kv-cache-manager-config={"check_invariants": "log"}',
    "--served-model-name=default",
    f"--dtype={DTYPE}",
    "--enforce-eager",
    "--block-size=16",
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--enable-prompt-tokens-details",
]
SERVER_ENV = {
    **os.environ,
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def model_path() -> str:
    return ensure_model("default")


@pytest.fixture(scope="module")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_path = Path(tmp_path_factory.mktemp("server")) / "server.log"
    with ServerProcess(model_path, SERVER_ARGS, SERVER_ENV, log_path) as process:
        process.wait_ready(timeout_s=300)
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server.url, "default")
