"""How the glue changes vLLM: methods wrapped once, in modules that are imported already or as soon as they are.

Waiting for a module costs nothing in a process that never imports it: a worker needs no argument parser, and the
subprocess that inspects a model class needs none of this.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MARK = "__kvplug_hook__"

Patch = Callable[[ModuleType], None]


def wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `around(original, *args, **kwargs)`. A second call changes nothing.

    A static method stays static. `original` is what was there: another plugin's wrapper, or vLLM's own.
    """
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hook, _MARK, True)
    is_static = any(isinstance(vars(base).get(name), staticmethod) for base in owner.__mro__)
    setattr(owner, name, staticmethod(hook) if is_static else hook)


def is_hooked(owner: type, name: str) -> bool:
    """Whether `wrap_method` has been here (also below another plugin's wrapper made with functools.wraps)."""
    return getattr(getattr(owner, name), _MARK, False)


class _ImportWatcher(MetaPathFinder):
    """Finds nothing by itself: lets the other finders find a watched module, and patches it when it is executed."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.patches or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for patch in self.patches.pop(fullname, []):
                patch(module)
            if not self.patches and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec


_watcher = _ImportWatcher()


def when_imported(module_name: str, patch: Patch) -> None:
    """Run `patch(module)` now if the module is imported, else right after its import. A patch waits only once."""
    module = sys.modules.get(module_name)
    if module is not None:
        patch(module)
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    waiting = _watcher.patches.setdefault(module_name, [])
    if patch not in waiting:
        waiting.append(patch)
