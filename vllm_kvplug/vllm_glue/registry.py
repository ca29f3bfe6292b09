"""Names of managers and what is behind them: the built-in ones, other packages' entry points, and `module:Class`."""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import reduce
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_kvplug.errors import ContractError, KVPlugError, SettingsError
from vllm_kvplug.redaction import redacted
from vllm_kvplug.settings import Settings, TraceSettings
from vllm_kvplug.vllm_glue import contract, patched_tree

if TYPE_CHECKING:
    from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

GROUP = "vllm_kvplug.managers"
_UPSTREAM_TARGET = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_KVPLUG_TARGET = "vllm_kvplug.vllm_glue.manager:KVCacheManager"
_SHADOW_TARGET = "vllm_kvplug.vllm_glue.shadow:ShadowManager"
# What upstream's manager reuses first, by kvplug's name for it.
_UPSTREAMS_EVICTION = "lru"
_NUM_DIGEST_ROUNDS = 200_000
_BUILT_IN = {"upstream": _UPSTREAM_TARGET, "kvplug": _KVPLUG_TARGET, "shadow": _SHADOW_TARGET}


def names() -> list[str]:
    """The names that `--kv-cache-manager` takes beside `module:Class`."""
    return sorted({*_BUILT_IN, *_offered_targets()})


def is_built_in(name: str) -> bool:
    """Whether the name is one of this package's."""
    return name in _BUILT_IN


def is_ours(name: str) -> bool:
    """Whether the name, or the `module:Class`, stands for something of this package."""
    return is_built_in(name) or name.partition(":")[0].split(".")[0] == __name__.split(".")[0]


def own_targets() -> dict[str, str]:
    """`module:Class` by name: the built-in managers, and those of our entry point group that one package claims."""
    offered = _entry_point_targets()
    return {name: next(iter(found)) for name, found in offered.items() if len(found) == 1} | _BUILT_IN


def _entry_point_targets() -> dict[str, set[str]]:
    targets: dict[str, set[str]] = {}
    for entry_point in entry_points(group=GROUP):
        targets.setdefault(entry_point.name, set()).add(entry_point.value)
    return targets


def _offered_targets() -> dict[str, set[str]]:
    """What other packages offer, to us or to the registry of a patched vLLM."""
    targets = _entry_point_targets()
    for name, found in patched_tree.targets().items():
        targets.setdefault(name, set()).add(found)
    return targets


def target(name: str) -> str:
    """The `module:Class` behind a name; the name itself if it is one.

    Raises:
        SettingsError: unknown, claimed by two packages, or no class.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        return name
    targets = _offered_targets().get(name, set())
    if len(targets) > 1:
        raise SettingsError(
            f"kv_cache_manager: {name!r} is claimed by {' and '.join(sorted(targets))}; give one as module:Class"
        )
    if targets:
        return targets.pop()
    if patched_tree.is_no_class(name):
        raise SettingsError(
            "kv_cache_manager: expected a class for what kvplug does with it (trace, shadow, additional_config), "
            f"found {name!r} registered with vLLM as something else; choose it by --kv-cache-manager, without these"
        )
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise SettingsError(
        f"kv_cache_manager: unknown manager {name!r}{hint}; known managers: {', '.join(names())}, "
        "or a class as module:Class"
    )


def is_kvplug(name: str) -> bool:
    """Whether the name stands for our own manager."""
    return target(name) == _KVPLUG_TARGET


def is_upstream(name: str) -> bool:
    """Whether the name stands for vLLM's own manager."""
    return target(name) == _UPSTREAM_TARGET


def is_shadow(name: str) -> bool:
    """Whether the name stands for the manager that compares two others."""
    return target(name) == _SHADOW_TARGET


def policy_of(name: str, config: Mapping[str, Any]) -> str | None:
    """The eviction policy by which a choice gives blocks, by kvplug's name for it; None: another package's own. Of a
    shadow it is that of its serving side. Managers of one policy answer alike.

    Raises:
        SettingsError: an unknown name, or wrong settings.
    """
    name, config = _answering(name, config)
    if is_upstream(name):
        return _UPSTREAMS_EVICTION
    return Settings.parse(own_settings(config)).eviction if is_kvplug(name) else None


def likeness_of(name: str, config: Mapping[str, Any], salt: str) -> str:
    """What two choices that answer alike have in common: their `policy_of`, else class and settings, where secrets
    among these are told apart by a digest alone that is slow to guess from.

    Raises:
        SettingsError: an unknown name, or wrong settings.
    """
    policy = policy_of(name, config)
    if policy is not None:
        return policy
    name, config = _answering(name, config)
    own = own_settings(config)
    text, shown = (json.dumps(value, sort_keys=True) for value in (own, redacted(own)))
    if text != shown:
        digest = hashlib.pbkdf2_hmac("sha256", text.encode(), salt.encode(), _NUM_DIGEST_ROUNDS, 16)
        shown += f" {digest.hex()}"
    return f"{target(name)} {shown}"


def _answering(name: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The choice whose answers the scheduler gets."""
    if not is_shadow(name):
        return name, config
    settings = _shadow_settings(config)
    return settings.serving, settings.serving_config


def involves_kvplug(name: str, config: Mapping[str, Any]) -> bool:
    """Whether our own manager is at work with this choice, be it as a shadow's follower."""
    if not is_shadow(name):
        return is_kvplug(name)
    settings = _shadow_settings(config)
    return is_kvplug(settings.serving) or is_kvplug(settings.follower)


def hasher_factory(name: str, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What makes the block hasher of engines with this choice (a shadow: its serving side); None: vLLM's own does."""
    if is_shadow(name):
        name = _shadow_settings(config).serving
    return contract.hasher_factory(load(name))


def _shadow_settings(config: Mapping[str, Any]) -> ShadowSettings:
    from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

    return ShadowSettings.parse(own_settings(config), known_elsewhere=TraceSettings.model_fields)


def own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A manager's own settings: without those of a trace, which every manager has."""
    return TraceSettings.split(config)[1]


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
    config = own_settings(config)
    if is_kvplug(name):
        Settings.parse(config, known_elsewhere=TraceSettings.model_fields)
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


def factory(name: str, config: Mapping[str, Any], *, engine_index: int = 0) -> Callable[..., Any]:
    """What a scheduler calls in the place of vLLM's class: the chosen class with its settings, recorded if they say.

    `engine_index` counts the engines of a server (data parallel): each records to a file of its own.
    """
    manager_cls = load(name)
    trace, config = TraceSettings.split(config)
    takes_settings = contract.takes_settings(manager_cls)

    def construct(*args: Any, **kwargs: Any) -> Any:
        if takes_settings:
            # A copy: what another package does to its settings must not change the choice that is reported.
            kwargs["settings"] = copy.deepcopy(config)
        if is_shadow(name):
            kwargs["engine_index"] = engine_index
        try:
            manager = manager_cls(*args, **kwargs)
        except KVPlugError:
            raise
        except (Exception, SystemExit) as error:  # whatever another package's class raises
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise ContractError(
                f"kv_cache_manager: {name!r} ({manager_cls.__module__}.{manager_cls.__qualname__}): expected to be "
                f"constructed with vLLM's keywords, found {message}"
            ) from error
        if trace.trace is not None:
            from vllm_kvplug.vllm_glue import recording

            recording.start(manager, name, config, trace, kwargs, engine_index=engine_index)
        return manager

    return construct
