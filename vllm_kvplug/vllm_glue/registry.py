"""Names of managers and what is behind them: `upstream`, `kvplug`, other packages' entry points, and `module:Class`."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from importlib.metadata import entry_points
from typing import Any

from vllm_kvplug.errors import ContractError, KVPlugError, SettingsError
from vllm_kvplug.settings import Settings
from vllm_kvplug.vllm_glue import contract

GROUP = "vllm_kvplug.managers"
_KVPLUG = "kvplug"
_KVPLUG_TARGET = "vllm_kvplug.vllm_glue.manager:KVCacheManager"


def names() -> list[str]:
    """The names that `--kv-cache-manager` takes beside `module:Class`."""
    return sorted({"upstream", _KVPLUG, *_entry_point_targets()})


def _entry_point_targets() -> dict[str, set[str]]:
    targets: dict[str, set[str]] = {}
    for entry_point in entry_points(group=GROUP):
        targets.setdefault(entry_point.name, set()).add(entry_point.value)
    return targets


def target(name: str) -> str:
    """The `module:Class` behind a name other than `upstream`; the name itself if it is one.

    Raises:
        SettingsError: unknown, or claimed by two packages.
    """
    if name == _KVPLUG:
        return _KVPLUG_TARGET
    if ":" in name:
        return name
    targets = _entry_point_targets().get(name, set())
    if len(targets) > 1:
        raise SettingsError(
            f"kv_cache_manager: {name!r} is claimed by {' and '.join(sorted(targets))}; give one as module:Class"
        )
    if targets:
        return targets.pop()
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise SettingsError(
        f"kv_cache_manager: unknown manager {name!r}{hint}; known managers: {', '.join(names())}, "
        "or a class as module:Class"
    )


def is_kvplug(name: str) -> bool:
    """Whether the name stands for our own manager."""
    return target(name) == _KVPLUG_TARGET


def load(name: str) -> type:
    """The class behind a name, imported and checked against the contract.

    Raises:
        SettingsError: it cannot be imported or is no class.
        ContractError: it lacks something that vLLM's scheduler uses.
    """
    module_name, _, path = target(name).partition(":")
    try:
        manager_cls = reduce(getattr, path.split("."), importlib.import_module(module_name))
    except (Exception, SystemExit) as error:  # whatever another package's module raises while it is imported
        raise SettingsError(
            f"kv_cache_manager: {name!r} cannot be imported: {type(error).__name__}: {error}; expected module:Class, "
            "installed or on PYTHONPATH"
        ) from error
    if not inspect.isclass(manager_cls):
        raise SettingsError(f"kv_cache_manager: expected {name!r} to be a class, found {manager_cls!r}")
    contract.check_class(manager_cls, name)
    return manager_cls


def validate(name: str, config: Mapping[str, Any]) -> None:
    """Check a manager's class and settings before anything is started.

    Raises:
        SettingsError: an unknown or ill-typed setting, or settings for a class that takes none.
        ContractError: see `load`.
    """
    manager_cls = load(name)
    if is_kvplug(name):
        Settings.parse(config)
        return
    if config and not contract.takes_settings(manager_cls):
        raise SettingsError(
            f"kv_cache_manager_config: {name!r} takes no settings (its __init__ has no keyword `settings`), "
            f"found {config!r}"
        )
    check = getattr(manager_cls, "validate_settings", None)
    if check is None:
        return
    try:
        check(copy.deepcopy(config))
    except KVPlugError:
        raise
    except Exception as error:
        raise SettingsError(f"kv_cache_manager_config: {name!r} refuses {config!r}: {error}") from error


def factory(name: str, config: Mapping[str, Any]) -> Callable[..., Any]:
    """What a scheduler calls in the place of vLLM's class: the chosen class, with its settings."""
    manager_cls = load(name)
    takes_settings = contract.takes_settings(manager_cls)

    def construct(*args: Any, **kwargs: Any) -> Any:
        if takes_settings:
            # A copy: what another package does to its settings must not change the choice that is reported.
            kwargs["settings"] = copy.deepcopy(config)
        try:
            return manager_cls(*args, **kwargs)
        except KVPlugError:
            raise
        except (Exception, SystemExit) as error:  # whatever another package's class raises
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise ContractError(
                f"kv_cache_manager: {name!r} ({manager_cls.__module__}.{manager_cls.__qualname__}): expected to be "
                f"constructed with vLLM's keywords, found {message}"
            ) from error

    return construct
