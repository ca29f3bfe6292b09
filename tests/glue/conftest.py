"""Fixtures: vLLM's parsers with our option, and a real configuration with one KV cache group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.glue.support import ENGINE_ARGS, activated_hook, is_hooked, model_folder
from tests.scheduler.conftest import base_config  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts in a process in which nothing was chosen."""
    owner, name = activated_hook()
    if is_hooked(owner, name):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


@pytest.fixture(scope="session")
def cli_parser() -> Any:
    """The parser of the `vllm` command, built as the command builds it; the plugin comes in by its entry point."""
    import vllm.entrypoints.cli.benchmark.main as bench
    from vllm.entrypoints.cli import run_batch, serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for module in (serve, bench, run_batch):
        for command in module.cmd_init():
            command.subparser_init(subparsers)
    return parser


@pytest.fixture(scope="session")
def api_server_parser() -> Any:
    """The parser of `python -m vllm.entrypoints.openai.api_server`."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="api_server.py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture
def make_config(tiny_model: str) -> Any:
    """Makes a VllmConfig as an engine would: `make_config(kv_cache_manager="kvplug")`."""
    import vllm_kvplug

    vllm_kvplug.install()
    from vllm.engine.arg_utils import EngineArgs

    def make(model: str = tiny_model, **kwargs: Any) -> Any:
        vllm_config = EngineArgs(model=model, **ENGINE_ARGS | kwargs).create_engine_config()
        vllm_config.cache_config.num_gpu_blocks = 64
        return vllm_config

    return make


@pytest.fixture
def kv_cache_config() -> Any:
    """64 blocks of 16 tokens, one group of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])


@pytest.fixture
def kvplug_log() -> Iterator[list[str]]:
    """The messages of our logger, which hands nothing to the root logger, where caplog listens."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kvplug")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
