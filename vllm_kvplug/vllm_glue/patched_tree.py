"""A vLLM that carries our fork patch (patches/) chooses its manager by itself: from a registry, by two config fields.

There kvplug registers its managers and binds nothing at the seams. All that asks which way it is asks here. The choice
travels in `CacheConfig`, not in `additional_config`, so vLLM's compile hash does not depend on it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "vllm.v1.core.kv_cache_manager_factory"
NAME_FIELD = "kv_cache_manager"
CONFIG_FIELD = "kv_cache_manager_config"

# Which of several engines of a server (data parallel) has its scheduler under construction.
_engine_index: ContextVar[int] = ContextVar("engine_index", default=0)
# The block hashers that vLLM's registry made meanwhile.
_hashers: ContextVar[list[Any] | None] = ContextVar("hashers", default=None)


@functools.cache
def is_there() -> bool:
    """Whether the vLLM of this environment has the registry, and its scheduler asks it. Imports nothing of it.

    The file alone does not tell: pip leaves it behind when it replaces a patched package.
    """
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(is_patched(Path(folder)) for folder in folders)


def is_patched(folder: Path) -> bool:
    """The same of a vLLM whose package is `folder`."""
    core = folder / "v1" / "core"
    name = MODULE.rpartition(".")[2]
    scheduler = core / "sched" / "scheduler.py"
    return (core / f"{name}.py").is_file() and scheduler.is_file() and name.encode() in scheduler.read_bytes()


def way() -> str:
    """How the manager gets into the scheduler, for the line at start."""
    return "registered in vLLM's own registry (patched tree)" if is_there() else "bound at vLLM's seams"


class CarriedName(str):
    """The chosen manager's name in a `CacheConfig`. Unpickling puts the hooks in place in the engine's process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (str(self),)


def restore(name: str) -> CarriedName:
    """Rebuild a pickled name: hooks first, then the choice is in force for the engines of this process."""
    from vllm_kvplug.vllm_glue import install, seams

    install.install()
    seams.activate()
    return CarriedName(name)


def stated(holder: Any) -> tuple[str | None, Mapping[str, Any] | None]:
    """Name and settings that a namespace of arguments, or an EngineArgs, states; vLLM's empty default is none."""
    name, config = getattr(holder, NAME_FIELD, None), getattr(holder, CONFIG_FIELD, None)
    return name, (config or None) if is_there() else config


def is_vllms_alone(holder: Any) -> bool:
    """Whether a namespace, or an EngineArgs, chooses what vLLM's registry serves without us.

    That is a manager of the fork's in a patched vLLM that kvplug does not support, or one that is no class and not to
    be traced: nothing here may refuse it.
    """
    name = getattr(holder, NAME_FIELD, None)
    if not isinstance(name, str) or not is_there():  # what is no name at all, `settle` refuses
        return False
    from vllm_kvplug.settings import TraceSettings
    from vllm_kvplug.vllm_glue import registry, version

    if not version.is_supported():
        return not registry.is_ours(name) and not registry.is_ours(targets().get(name, name))
    return is_no_class(name) and TraceSettings.split(stated(holder)[1] or {})[0].trace is None


def hand_over(engine_args: Any, choice: Mapping[str, Any] | None) -> None:
    """Put a settled choice into vLLM's own fields, in the place of `additional_config`; None: vLLM's own manager."""
    extra = engine_args.additional_config
    if isinstance(extra, dict):
        engine_args.additional_config = {key: value for key, value in extra.items() if key != NAME_FIELD}
    setattr(engine_args, NAME_FIELD, choice["name"] if choice is not None else None)
    setattr(engine_args, CONFIG_FIELD, dict(choice["config"]) if choice is not None else {})


def carried(vllm_config: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and settings that a VllmConfig's own fields carry; None: vLLM's own manager, one that `is_no_class`, or no
    such fields."""
    cache_config = getattr(vllm_config, "cache_config", None)
    name = getattr(cache_config, NAME_FIELD, None)
    # A mocked configuration has whatever is asked for.
    if not isinstance(name, str) or is_no_class(name):
        return None
    return str(name), dict(getattr(cache_config, CONFIG_FIELD))


class Registered:
    """What vLLM's registry has under a name: the manager as kvplug makes it, with its settings, recorded if they say.

    Attributes:
        target: the manager's class, as `module:Class`.
    """

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.target = target

    def __call__(self, *, settings: Mapping[str, Any], **kwargs: Any) -> Any:
        """Construct the manager with the keywords of vLLM's scheduler."""
        from vllm_kvplug.vllm_glue import registry

        return registry.factory(self.name, settings, engine_index=_engine_index.get())(**kwargs)

    def block_hasher(self, block_size: int, caching_hash_fn: Callable[..., Any], *, settings: Mapping[str, Any]) -> Any:
        """Make the block hasher of engines with this manager."""
        from vllm_kvplug.vllm_glue import registry

        factory = registry.hasher_factory(self.name, settings)
        if factory is None:
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher

            factory = get_request_block_hasher
        hasher = factory(block_size, caching_hash_fn)
        if (hashers := _hashers.get()) is not None:
            hashers.append(hasher)
        return hasher


def offer(module: ModuleType) -> None:
    """Register our managers, and other packages' of our entry point group, where vLLM does not know the name."""
    from vllm_kvplug.vllm_glue import registry

    known = module.KVCacheManagerFactory.names()
    for name, target in registry.own_targets().items():
        if name not in known:
            module.KVCacheManagerFactory.register(name, Registered(name, target))


def constructs_its_manager(scheduler_cls: type) -> bool:
    """Whether a patched vLLM's own constructor is at work in the class, which asks the registry."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return issubclass(scheduler_cls, Scheduler)


def register(name: str) -> None:
    """Let vLLM's registry make this manager as kvplug does: checked, recorded if the settings say.

    Called when a scheduler is about to be constructed, whoever registered the name, or if it is `module:Class`: in an
    engine's process the fork's own plugins are loaded after the choice has arrived. What `is_no_class` stays.
    """
    from vllm_kvplug.vllm_glue import registry

    factory = importlib.import_module(MODULE).KVCacheManagerFactory
    found = factory.find(name)
    if not isinstance(found, Registered) and not is_no_class(name):
        factory.register(name, Registered(name, _target(found) or registry.target(name)))


@contextmanager
def in_fields(vllm_config: Any, choice: Mapping[str, Any], engine_index: int) -> Iterator[list[Any]]:
    """Inside, where an engine or its scheduler is constructed, vLLM's own fields say the choice in any case.

    They say it already, unless a program made a VllmConfig by hand, with the choice in `additional_config`. Processes
    that are started meanwhile get the hooks with it.

    Yields:
        The block hashers that the registry makes inside, as they come.
    """
    cache_config = vllm_config.cache_config
    before = getattr(cache_config, NAME_FIELD), getattr(cache_config, CONFIG_FIELD)
    cache_config.kv_cache_manager = CarriedName(choice["name"])
    cache_config.kv_cache_manager_config = choice["config"]
    hashers: list[Any] = []
    tokens = _engine_index.set(engine_index), _hashers.set(hashers)
    try:
        yield hashers
    finally:
        _engine_index.reset(tokens[0])
        _hashers.reset(tokens[1])
        cache_config.kv_cache_manager, cache_config.kv_cache_manager_config = before


def targets() -> dict[str, str]:
    """`module:Class` by name of what vLLM's registry and its entry points offer, as far as these are classes; nothing
    where there is no registry."""
    if not is_there():
        return {}
    factory = importlib.import_module(MODULE).KVCacheManagerFactory
    found = {name: _target(factory.find(name)) for name in factory.names() if ":" not in name}
    return {name: target for name, target in found.items() if target is not None}


def is_no_class(name: str) -> bool:
    """Whether vLLM's registry has something under the name that cannot be imported as a class: a function, a partial,
    an instance. kvplug leaves it to vLLM."""
    if not is_there():
        return False
    from vllm_kvplug.vllm_glue import registry

    try:
        found = importlib.import_module(MODULE).KVCacheManagerFactory.find(name)
    except ValueError:
        return False
    return _target(found) is None and not registry.is_built_in(name)


def _target(found: Any) -> str | None:
    if isinstance(found, str):
        return found
    if isinstance(found, Registered):
        return found.target
    if inspect.isclass(found) and "<locals>" not in found.__qualname__:
        return f"{found.__module__}:{found.__qualname__}"
    return None
