"""The way from a namespace to an engine's configuration: whichever parser made it, the choice is not lost."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_kvplug
from tests.glue.support import ENGINE_ARGS, IS_PATCHED, model_folder, seams_only
from tests.glue.test_features import MIXED
from vllm_kvplug.errors import SettingsError, UnsupportedError
from vllm_kvplug.vllm_glue.choice import CommandLineChoice, ManagerChoice, chosen
from vllm_kvplug.vllm_glue.version import is_since

LRU = {"name": "kvplug", "config": {"eviction": "lru"}}
OPTIONS = ["--kv-cache-manager", "kvplug", "--kv-cache-manager-config", '{"eviction": "lru"}']


def plain_parser() -> Callable[[list[str]], argparse.Namespace]:
    """Python's own parser, as a program that embeds vLLM may use it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args


def known_args_parser() -> Callable[[list[str]], argparse.Namespace]:
    """vLLM's parser by the method that it leaves as Python's."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return lambda args: parser.parse_known_args([*args, "--not-of-vllm"])[0]


PARSERS = [plain_parser, known_args_parser]


@seams_only
@pytest.mark.parametrize("args_cls", ["EngineArgs", "AsyncEngineArgs"])
@pytest.mark.parametrize("make_parser", PARSERS)
def test_another_parsers_namespace_is_settled(make_parser: Any, args_cls: str) -> None:
    from vllm.engine import arg_utils

    namespace = make_parser()(["--model", "some-model", "--additional-config", '{"other": 1}', *OPTIONS])
    before = copy.deepcopy(vars(namespace))
    engine_args = getattr(arg_utils, args_cls).from_cli_args(namespace)
    assert type(engine_args) is getattr(arg_utils, args_cls)
    assert engine_args.additional_config == {"other": 1, "kv_cache_manager": LRU}
    assert type(engine_args.additional_config["kv_cache_manager"]) is ManagerChoice
    assert vars(namespace) == before


@seams_only
@pytest.mark.parametrize("make_parser", PARSERS)
def test_another_parsers_refusal_is_raised(make_parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace = make_parser()(["--model", "some-model", "--kv-cache-manager", "kvplg"])
    with pytest.raises(SettingsError, match="unknown manager 'kvplg'"):
        AsyncEngineArgs.from_cli_args(namespace)


@pytest.mark.parametrize("make_parser", PARSERS)
@pytest.mark.parametrize("options", [[], ["--kv-cache-manager", "upstream"]])
def test_another_parser_without_a_choice(make_parser: Any, options: list[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    namespace = make_parser()(["--model", "some-model", "--additional-config", '{"other": 1}', *options])
    assert EngineArgs.from_cli_args(namespace).additional_config == {"other": 1}


def test_another_parsers_choice_reaches_the_engine_and_its_refusal_is_raised(tiny_model: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    sizes = ["--model", tiny_model, "--block-size", "16", "--max-model-len", "256", "--skip-tokenizer-init"]
    vllm_config = EngineArgs.from_cli_args(plain_parser()([*sizes, *OPTIONS])).create_engine_config()
    assert chosen(vllm_config) == LRU
    # Not our command line: the program that parsed it decides what becomes of an error.
    sizes[1] = model_folder(tmp_path / "mixed", **MIXED)
    ranks = ["--decode-context-parallel-size", "2", "--tensor-parallel-size", "2"]
    with pytest.raises(UnsupportedError, match="decode context parallelism"):
        EngineArgs.from_cli_args(plain_parser()([*sizes, *OPTIONS, *ranks])).create_engine_config()


def test_a_namespace_that_parse_args_settled_is_settled_once_more(cli_parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace = cli_parser.parse_args(["serve", "m", *OPTIONS])
    before = copy.deepcopy(vars(namespace))
    for _ in range(2):
        engine_args = AsyncEngineArgs.from_cli_args(namespace)
        assert engine_args.additional_config == {"kv_cache_manager": LRU}
        # Still the mark of the command line, where a refusal is one line and an exit status.
        assert type(engine_args.additional_config["kv_cache_manager"]) is CommandLineChoice
    assert vars(namespace) == before


class Stopped(Exception):
    """Instead of an engine: the arguments that it would be made from."""


@pytest.mark.parametrize("command", ["latency", "throughput", "startup"])
def test_the_benchmarks_way_keeps_the_choice(
    cli_parser: Any, tiny_model: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the arguments apart into a dictionary and hand that to LLM, one of them in another process."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_kvplug.vllm_glue.seams import SchedulerBuilder

    taken_apart = vars if is_since("0.19.0") else dataclasses.asdict  # by LLM.from_engine_args from 0.19 on

    def stop(engine_args: Any, **_: Any) -> None:
        raise Stopped(engine_args)

    namespace = cli_parser.parse_args(["bench", command, "--model", tiny_model, *OPTIONS])
    monkeypatch.setattr(LLMEngine, "from_engine_args", stop)
    with pytest.raises(Stopped) as stopped:
        LLM(**taken_apart(EngineArgs.from_cli_args(namespace)) | ENGINE_ARGS)
    vllm_config = stopped.value.args[0].create_engine_config()
    assert chosen(vllm_config) == LRU
    assert isinstance(vllm_config.scheduler_config.get_scheduler_cls(), SchedulerBuilder) != IS_PATCHED


def test_keywords_after_install(make_config: Any) -> None:
    vllm_config = make_config(kv_cache_manager="kvplug", kv_cache_manager_config={"eviction": "lru"})
    assert chosen(vllm_config) == LRU


@seams_only
def test_engine_args_keep_what_was_given(tiny_model: str) -> None:
    vllm_kvplug.install()
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
