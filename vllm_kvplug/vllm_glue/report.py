"""What is in force, told by the engine itself: a log line at start, and the answer behind `kvplug_info` on /metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from vllm_kvplug.checking import CheckedCalls
from vllm_kvplug.errors import ContractError
from vllm_kvplug.geometry import WINDOW_KINDS, CacheGeometry
from vllm_kvplug.settings import Settings
from vllm_kvplug.sizing import geometry_to_json, max_fitting_prompt_tokens
from vllm_kvplug.vllm_glue import contract, patched_tree, registry
from vllm_kvplug.vllm_glue.choice import ManagerChoice, chosen
from vllm_kvplug.vllm_glue.shadow import ShadowManager

# The labels of kvplug_info; a manager that says nothing about one of them leaves it empty.
LABELS = ("manager", "version", "eviction", "groups", "num_blocks", "block_size")
# The key of an engine's answer under which a manager of kvplug's tells the shape of its cache, as JSON.
GEOMETRY = "geometry"
# And the most tokens of a request that one step computes.
STEP_TOKENS = "max_step_tokens"
# And, where it checks itself (setting check_invariants), the number of its findings so far.
FINDINGS = "invariant_findings"
# And, of a shadow, what has diverged so far, as JSON.
SHADOW = "shadow"
# What a shadow describes of its settings.
_SIDES = ("serving", "follower", "level")
# How a scheduler class comes to the manager: by whether vLLM has a registry.
_HOW = {
    False: f"constructing the name {contract.CLASS_NAME} of its own module",
    True: "the construction in vLLM's own Scheduler",
}
# What a user changes where a request does not fit.
LARGER_POOL = "a higher --gpu-memory-utilization (VLLM_CPU_KVCACHE_SPACE on the CPU) or --num-gpu-blocks-override"


def max_step_tokens(scheduler: Any) -> int:
    """The most tokens of one request that the scheduler lets a step compute; any prompt's, if it does not tell."""
    config = getattr(scheduler, "scheduler_config", None)
    if config is None:
        return int(scheduler.kv_cache_manager.max_model_len)
    step_tokens = getattr(scheduler, "max_num_scheduled_tokens", None) or config.max_num_batched_tokens
    thresholds = (step_tokens, config.long_prefill_token_threshold)
    return min(threshold for threshold in thresholds if threshold > 0)


def fitting_prompts(geometry: CacheGeometry, max_step_tokens: int) -> str:
    """Which prompts fit, as a sentence's end."""
    num_tokens = max_fitting_prompt_tokens(geometry, max_step_tokens)
    has_window = any(group.kind in WINDOW_KINDS for group in geometry.groups)
    in_steps = f" in steps of {max_step_tokens} (--max-num-batched-tokens)" if has_window else ""
    return f"{num_tokens} tokens{in_steps}"


def check_in_force(scheduler: Any, choice: ManagerChoice) -> None:
    """Raise ContractError unless the scheduler's manager is of exactly the chosen class and keeps the contract."""
    expected = registry.load(choice["name"])
    found = type(getattr(scheduler, "kv_cache_manager", None))
    if found is not expected:
        raise ContractError(
            f"scheduler {_qualname(type(scheduler))}: expected kv_cache_manager {choice['name']!r} in force "
            f"({_qualname(expected)}), found {_qualname(found)}; a scheduler takes it by "
            f"{_HOW[patched_tree.is_there()]}: leave out --scheduler-cls, or --kv-cache-manager"
        )
    contract.check_instance(scheduler.kv_cache_manager, choice["name"])


def describe(scheduler: Any, choice: ManagerChoice) -> dict[str, str]:
    """The manager in force: what is known of any, and over it what the manager's own `describe()` says, if it has one.

    Names are those of `LABELS` and more; `num_blocks` counts the null block, `block_size` is in tokens, by group.

    Raises:
        ContractError: a scheduler that keeps no `kv_cache_config`, or a `describe()` that fails.
    """
    manager_cls = type(scheduler.kv_cache_manager)
    kv_cache_config = getattr(scheduler, "kv_cache_config", None)
    if kv_cache_config is None:
        raise ContractError(
            f"scheduler {_qualname(type(scheduler))}: expected an attribute kv_cache_config, as vLLM's own have, "
            "to tell what is in force, found none"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    package = sys.modules.get(manager_cls.__module__.partition(".")[0])
    described = {
        "version": str(getattr(package, "__version__", "")),
        "groups": ",".join(type(spec).__name__ for spec in specs),
        "num_blocks": str(kv_cache_config.num_blocks),
        "block_size": ",".join(str(spec.block_size) for spec in specs),
    }
    own = getattr(scheduler.kv_cache_manager, "describe", None)
    if callable(own):
        try:
            answer = own()
            described |= {str(name): str(value) for name, value in answer.items()}
        except Exception as error:  # whatever another package's method raises
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise ContractError(
                f"kv_cache_manager: {choice['name']!r} ({_qualname(manager_cls)}): expected describe() to return names "
                f"and values, found {message}"
            ) from error
    return described | {"manager": choice["name"], "class": f"{manager_cls.__module__}:{manager_cls.__qualname__}"}


def log_in_force(scheduler: Any, choice: ManagerChoice) -> None:
    """The line that says, once for each engine, which manager serves."""
    from vllm_kvplug.vllm_glue.log import logger

    described = describe(scheduler, choice)
    logger.info(
        "KV cache manager in force: %s %s, settings %s, groups %s, %s blocks of %s tokens (%s), %s",
        described["manager"],
        described["version"],
        as_json(_settings_in_force(described, choice["config"])),
        described["groups"],
        described["num_blocks"],
        described["block_size"],
        described["class"],
        patched_tree.way(),
    )


def _settings_in_force(described: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as given, and over them what the manager says of kvplug's, defaults included."""
    told = {name: described[name] for name in (*Settings.model_fields, *_SIDES) if name in described}
    return {name: value for name, value in config.items() if name.replace("-", "_") not in told} | told


def of_engine_core(engine_core: Any, expected_name: str, expected_config: str) -> dict[str, str]:
    """The utility method `kvplug_report` of EngineCore: the manager of its scheduler, as it is now.

    The front end says what it expects, the settings as JSON, so that an engine which differs answers with an error.

    Raises:
        ContractError: this engine has another choice, or another manager in force.
    """
    choice = chosen(engine_core.vllm_config)
    name, config = ("upstream", "{}") if choice is None else (choice["name"], as_json(choice["config"]))
    if choice is None or (name, config) != (expected_name, expected_config):
        expected = f"{expected_name!r} with settings {expected_config}"
        raise ContractError(f"expected kv_cache_manager {expected} chosen in this engine, found {name!r} with {config}")
    check_in_force(engine_core.scheduler, choice)
    manager = engine_core.scheduler.kv_cache_manager
    geometry = getattr(manager, "geometry", None)
    told: dict[str, str] = {}
    if isinstance(geometry, CacheGeometry):
        told = {
            GEOMETRY: geometry_to_json(geometry),
            STEP_TOKENS: str(max_step_tokens(engine_core.scheduler)),
        }
    is_shadow = isinstance(manager, ShadowManager)
    checks = [getattr(one, "checks", None) for one in (manager.managers if is_shadow else (manager,))]
    if found := [one.num_findings for one in checks if isinstance(one, CheckedCalls)]:
        told[FINDINGS] = str(sum(found))
    if is_shadow:
        told[SHADOW] = as_json(manager.shadow_report())
    return describe(engine_core.scheduler, choice) | told


def as_json(settings: Mapping[str, Any]) -> str:
    """Settings as they are shown and compared; the same text in every process."""
    return json.dumps(settings, sort_keys=True)


def _qualname(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
