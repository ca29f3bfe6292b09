"""Where a chosen manager, and its block hasher, take the place of vLLM's own.

The same in all supported versions: `relied_on.py` has the names, and `drift.py` sees when one is another.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from vllm_kvplug.manager import CacheManager
from vllm_kvplug.vllm_glue import (
    contract,
    features,
    hasher_seam,
    never_fitting,
    patched_tree,
    patching,
    prompt_limit,
    registry,
    report,
)
from vllm_kvplug.vllm_glue.choice import ManagerChoice, chosen
from vllm_kvplug.vllm_glue.shadow import serving_manager

# A scheduler is constructed with the chosen class under the name of vLLM's in its modules. The lock makes that one
# scheduler at a time in a process, also one with vLLM's own manager: it must not find another engine's class there.
_swap_lock = threading.RLock()


def activate() -> None:
    """A manager was chosen in this process: from now on `SchedulerBuilder` builds the schedulers, and engines check.

    In a patched tree vLLM builds them, with what its registry has.
    """
    if patched_tree.is_there():
        patching.when_imported("vllm.v1.core.sched.scheduler", _patch_scheduler)
    else:
        patching.when_imported("vllm.config.scheduler", _patch_scheduler_config)
    patching.when_imported("vllm.v1.engine.core", _patch_engine_core)
    patching.when_imported("vllm.v1.engine.async_llm", _patch_front_end)
    patching.when_imported("vllm.v1.engine.llm_engine", _patch_llm_engine)
    patching.when_imported("vllm.v1.engine.input_processor", _patch_input_processor)


def _around_update_request_as_session(
    original: Callable[..., None], scheduler: Any, session: Any, *args: Any, **kwargs: Any
) -> None:
    """A session's next input drops the last sampled token; 0.17.1 keeps a block hash that the token was part of.

    The block that the input then fills would be cached under it: other requests would hit what is not theirs.
    """
    manager = serving_manager(scheduler.kv_cache_manager)
    if isinstance(manager, CacheManager):
        num_tokens_per_hash = manager.geometry.num_tokens_per_hash
        if num_tokens_per_hash is not None:
            del session.block_hashes[session.num_computed_tokens // num_tokens_per_hash :]
    original(scheduler, session, *args, **kwargs)


def _patch_scheduler_config(module: ModuleType) -> None:
    patching.wrap_method(module.SchedulerConfig, "get_scheduler_cls", _around_get_scheduler_cls)


def _around_get_scheduler_cls(original: Callable[..., type], *args: Any, **kwargs: Any) -> SchedulerBuilder:
    return SchedulerBuilder(original(*args, **kwargs))


class SchedulerBuilder:
    """Stands in for a scheduler class in its one call: constructs it with the manager that its VllmConfig carries.

    In a patched tree engines need no builder; who builds a scheduler by itself gets it here all the same.
    """

    def __init__(self, scheduler_cls: type) -> None:
        self.scheduler_cls = scheduler_cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vllm_config = _vllm_config_of(args, kwargs)
        choice = chosen(vllm_config)
        if choice is None:
            with _swap_lock:
                return self.scheduler_cls(*args, **kwargs)
        if patched_tree.is_there() and patched_tree.constructs_its_manager(self.scheduler_cls):
            activate()
            return self.scheduler_cls(*args, **kwargs)
        factory = registry.factory(choice["name"], choice["config"], engine_index=_engine_index(vllm_config))
        with _swap_lock, _bound(self.scheduler_cls, factory):
            scheduler = self.scheduler_cls(*args, **kwargs)
        _attend(scheduler, choice)
        return scheduler


def _vllm_config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a constructor of vLLM's is given first, by position or by name; None: nothing, which it will refuse."""
    return kwargs.get("vllm_config", args[0] if args else None)


def _engine_index(vllm_config: Any) -> int:
    """Which of several engines of a server this is; a scheduler alone need not have such a configuration."""
    return getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_index", 0)


def _attend(scheduler: Any, choice: ManagerChoice) -> None:
    """What a scheduler that was built with its manager gets: a check, the line at start, and what kvplug adds to it."""
    report.check_in_force(scheduler, choice)
    if isinstance(serving_manager(scheduler.kv_cache_manager), CacheManager):
        features.refuse_pool_connector(scheduler)
    report.log_in_force(scheduler, choice)
    never_fitting.watch(scheduler)
    if hasattr(scheduler, "_update_request_as_session"):
        patching.wrap_method(type(scheduler), "_update_request_as_session", _around_update_request_as_session)


def _patch_scheduler(module: ModuleType) -> None:
    patching.wrap_method(module.Scheduler, "__init__", _around_scheduler_init)


def _around_scheduler_init(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """A patched vLLM's scheduler asks its registry for the manager; it is then as one that `SchedulerBuilder` built."""
    vllm_config = _vllm_config_of(args, kwargs)
    choice = chosen(vllm_config)
    if choice is None:
        original(scheduler, *args, **kwargs)
        return
    patched_tree.register(choice["name"])
    with patched_tree.in_fields(vllm_config, choice, _engine_index(vllm_config)):
        original(scheduler, *args, **kwargs)
    _attend(scheduler, choice)


@contextmanager
def _bound(scheduler_cls: type, factory: Callable[..., Any]) -> Iterator[None]:
    """Bind `factory` under the manager's name in every module of the scheduler's classes that holds vLLM's own."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    modules = [sys.modules[name] for name in {base.__module__ for base in scheduler_cls.__mro__} if name in sys.modules]
    holders = [module for module in modules if vars(module).get(contract.CLASS_NAME) is KVCacheManager]
    for module in holders:
        setattr(module, contract.CLASS_NAME, factory)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, contract.CLASS_NAME, KVCacheManager)


def _patch_engine_core(module: ModuleType) -> None:
    patching.wrap_method(module.EngineCore, "__init__", _around_engine_core_init)
    module.EngineCore.kvplug_report = report.of_engine_core


def _around_engine_core_init(original: Callable[..., None], engine_core: Any, *args: Any, **kwargs: Any) -> None:
    """Construct the engine with the manager's block hasher, if it has one; then the last word at start-up.

    Another plugin may have replaced get_scheduler_cls, the scheduler or the hasher since.
    """
    given = _vllm_config_of(args, kwargs)
    choice = chosen(given)
    hashers = None
    with ExitStack() as seams:
        if choice is not None and patched_tree.is_there():
            hashers = seams.enter_context(patched_tree.in_fields(given, choice, _engine_index(given)))
        elif choice is not None:
            factory = registry.hasher_factory(choice["name"], choice["config"])
            if factory is not None:
                seams.enter_context(hasher_seam.in_force(engine_core, choice["name"], factory))
        original(engine_core, *args, **kwargs)
    choice = chosen(engine_core.vllm_config)
    if choice is not None:
        report.check_in_force(engine_core.scheduler, choice)
        if hashers is not None:
            hasher_seam.check_in_force(engine_core, choice["name"], hashers[-1] if hashers else None)


def _patch_front_end(module: ModuleType) -> None:
    from vllm_kvplug.vllm_glue import metrics

    patching.wrap_method(module.AsyncLLM, "get_supported_tasks", metrics.around_get_supported_tasks)
    patching.wrap_method(module.AsyncLLM, "generate", prompt_limit.around_generate)


def _patch_llm_engine(module: ModuleType) -> None:
    patching.wrap_method(module.LLMEngine, "get_supported_tasks", prompt_limit.around_llm_engine_get_supported_tasks)


def _patch_input_processor(module: ModuleType) -> None:
    patching.wrap_method(module.InputProcessor, "process_inputs", prompt_limit.around_process_inputs)
