"""What is in force, told by the engine itself: a log line at start, and the answer behind `kvplug_info` on /metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue import registry
from vllm_kvplug.vllm_glue.choice import ManagerChoice, chosen

# The labels of kvplug_info; a manager that says nothing about one of them leaves it empty.
LABELS = ("manager", "version", "eviction", "groups", "num_blocks", "block_size")


def describe(scheduler: Any, choice: ManagerChoice) -> dict[str, str]:
    """The manager in force: what is known of any, and over it what the manager's own `describe()` says, if it has one.

    Names are those of `LABELS` and more; `num_blocks` counts the null block, `block_size` is in tokens, by group.
    """
    manager, kv_cache_config = scheduler.kv_cache_manager, scheduler.kv_cache_config
    manager_cls = type(manager)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    package = sys.modules.get(manager_cls.__module__.partition(".")[0])
    described = {
        "version": getattr(package, "__version__", ""),
        "groups": ",".join(type(spec).__name__ for spec in specs),
        "num_blocks": kv_cache_config.num_blocks,
        "block_size": ",".join(str(spec.block_size) for spec in specs),
    }
    own = getattr(manager, "describe", None)
    if callable(own):
        answer = own()
        if not isinstance(answer, Mapping):
            raise ContractError(f"{choice['name']!r}: expected describe() to return names and values, found {answer!r}")
        described.update(answer)
    described.update(manager=choice["name"], **{"class": f"{manager_cls.__module__}:{manager_cls.__qualname__}"})
    return {str(name): str(value) for name, value in described.items()}


def log_in_force(scheduler: Any, choice: ManagerChoice) -> None:
    """The line that says, once for each engine, which manager serves."""
    from vllm.logger import init_logger

    described = describe(scheduler, choice)
    init_logger("vllm.kvplug").info(
        "KV cache manager in force: %s %s, settings %s, groups %s, %s blocks of %s tokens (%s)",
        described["manager"],
        described["version"],
        json.dumps(registry.effective_settings(choice["name"], choice["config"]), sort_keys=True),
        described["groups"],
        described["num_blocks"],
        described["block_size"],
        described["class"],
    )


def of_engine_core(engine_core: Any) -> dict[str, str]:
    """The utility method `kvplug_report` of EngineCore: the manager of its scheduler, as it is now."""
    choice = chosen(engine_core.vllm_config)
    if choice is None:
        raise ContractError("kvplug_report: expected an engine with a kv_cache_manager chosen, found vLLM's own")
    return describe(engine_core.scheduler, choice)
