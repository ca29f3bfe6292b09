"""Run an engine and print, as one JSON line, what is in force: `python -m tests.glue.engine_probe SCENARIO MODEL`.

Each scenario in a process of its own, as a user's program would be: `test_engine.py` reads the answers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from types import FunctionType, MethodType
from typing import Any

from tests.glue.support import ENGINE_ARGS

PROMPT = list(range(2, 60))
# vLLM adds arguments of its own to what it unpickles only if told so; the probe is a function of ours.
PROBE_ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def qualname(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def foreign_names() -> list[str]:
    """Everything in vLLM's modules, classes included, whose code is ours."""
    found = set()
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "vllm":
            continue
        for name, value in list(vars(module).items()):
            owners = [(f"{module_name}.{name}", value)]
            if isinstance(value, type) and value.__module__ == module_name:
                owners += [(f"{module_name}.{name}.{member}", attribute) for member, attribute in vars(value).items()]
            found.update(label for label, thing in owners if is_ours(thing))
    return sorted(found)


def is_ours(thing: Any) -> bool:
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if isinstance(thing, FunctionType):
        return "vllm_kvplug" in thing.__code__.co_filename
    return str(getattr(thing, "__module__", "")).startswith("vllm_kvplug")


def engine_core_of_this_process() -> Any:
    """The EngineCore below which this code runs."""
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if type(found).__name__ in ("EngineCore", "EngineCoreProc", "DPEngineCoreProc"):
            return found
        frame = frame.f_back
    raise LookupError("no EngineCore among the callers")


def in_engine_core(_worker: Any) -> dict[str, Any]:
    """Runs in the worker, which lives in the EngineCore's process with one rank."""
    return {"pid": os.getpid(), **describe(engine_core_of_this_process())}


def describe(core: Any) -> dict[str, Any]:
    from vllm.v1.engine import core as core_module
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvplug.vllm_glue.choice import chosen
    from vllm_kvplug.vllm_glue.report import as_json

    choice = chosen(core.vllm_config)
    manager = core.scheduler.kv_cache_manager
    pool = getattr(manager, "block_pool", None)
    stats = core.scheduler.make_stats()
    return {
        "scheduler": qualname(type(core.scheduler)),
        "manager": qualname(type(manager)),
        "block_pool": qualname(type(pool)) if pool is not None else None,
        "hasher": qualname(core.request_block_hasher),
        "stats": None if stats is None else qualname(type(stats)),
        "stats_class_is_vllms": core_module.SchedulerStats is SchedulerStats,
        "log_stats": core.log_stats,
        "foreign": foreign_names(),
        "report": core.kvplug_report(choice["name"], as_json(choice["config"])) if choice else None,
    }


def generate(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, use_tqdm=False)
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
    }


def one_after_another(model: str) -> Any:
    """In-process engines with different managers, one after another in one process."""
    import vllm_kvplug

    vllm_kvplug.install()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    answers = []
    for choice in (
        {"kv_cache_manager": "kvplug", "kv_cache_manager_config": {"eviction": "lru"}},
        {},
        {"kv_cache_manager": "tests.glue.managers:Plain"},
        {"kv_cache_manager": "upstream"},
    ):
        llm = LLM(model, **ENGINE_ARGS, **choice)
        core = llm.llm_engine.engine_core.engine_core
        answers.append({**describe(core), **generate(llm)})
        del llm, core
        gc.collect()
        cleanup_dist_env_and_memory()
    return answers


def engine_core_process(model: str, **kwargs: Any) -> Any:
    """The EngineCore in a process of its own; nothing of ours is imported by hand."""
    from vllm import LLM

    llm = LLM(model, **ENGINE_ARGS, **kwargs)
    (engine,) = llm.collective_rpc(in_engine_core)
    front_end = {"pid": os.getpid(), "foreign": foreign_names()}
    return {"front_end": front_end, "engine_core": engine, **generate(llm)}


def async_front_end(model: str) -> Any:
    """AsyncLLM without statistics, as under `vllm serve --disable-log-stats`."""
    from prometheus_client import generate_latest
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    async def run() -> list[str]:
        engine_args = AsyncEngineArgs(
            model=model, disable_log_stats=True, additional_config={"kv_cache_manager": "kvplug"}, **ENGINE_ARGS
        )
        engine = AsyncLLM.from_engine_args(engine_args)
        try:
            await engine.get_supported_tasks()
            lines = generate_latest(get_prometheus_registry()).decode().splitlines()
            return [line for line in lines if line.startswith("kvplug_info{")]
        finally:
            engine.shutdown()

    return asyncio.run(run())


def async_not_chosen(model: str) -> Any:
    """AsyncLLM with statistics and nothing chosen, as under a plain `vllm serve`."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, disable_log_stats=False, **ENGINE_ARGS))
        try:
            await engine.get_supported_tasks()
            loggers = [qualname(type(logger)) for logger in engine.logger_manager.stat_loggers]
            return {"foreign": foreign_names(), "stat_loggers": loggers}
        finally:
            engine.shutdown()

    return asyncio.run(run())


SCENARIOS = {
    "one_after_another": one_after_another,
    "kvplug": lambda model: engine_core_process(
        model, additional_config={"kv_cache_manager": "kvplug"}, scheduler_cls="tests.glue.schedulers.Inherited"
    ),
    # LLM leaves statistics off by itself: once without them, once with.
    "omitted": engine_core_process,
    "upstream": lambda model: engine_core_process(
        model, additional_config={"kv_cache_manager": "upstream"}, disable_log_stats=False
    ),
    "ignoring_scheduler": lambda model: engine_core_process(
        model, additional_config={"kv_cache_manager": "kvplug"}, scheduler_cls="tests.glue.schedulers.Ignoring"
    ),
    "async_front_end": async_front_end,
    "async_not_chosen": async_not_chosen,
}

if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", **PROBE_ENV}
    if sys.argv[1] == "one_after_another":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print("ANSWER " + json.dumps(SCENARIOS[sys.argv[1]](sys.argv[2])), flush=True)
