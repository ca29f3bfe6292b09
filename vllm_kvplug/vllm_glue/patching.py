"""How the glue changes vLLM: methods wrapped once, in modules that are imported already or as soon as they are.

Hooks wait for a module because importing it for their sake is not free. With `vllm.config` imported, this machine takes
a further 0.5 s for `vllm.engine.arg_utils`, 0.7 s for `vllm.v1.engine.core` and 0.3 s for `vllm.v1.engine.async_llm`.
Workers and the subprocess that inspects a model class load every plugin and need none of the three, and a user may
import vLLM and call `vllm_kvplug.install()` in any order.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOOK_MARK = "__kvplug_hook__"

Patch = Callable[[ModuleType], None]


def wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `around(original, *args, **kwargs)`. A second call changes nothing.

    A static method stays static. A class method stays one: `args` then begin with the class that was called, which
    `original` takes too. `original` is what was there: another plugin's wrapper, or vLLM's own.
    """
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
    original = found.__func__ if isinstance(found, (staticmethod, classmethod)) else getattr(owner, name)
    if getattr(original, HOOK_MARK, False):
        return

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hook, HOOK_MARK, True)
    setattr(owner, name, hook if kind is None else kind(hook))


class _ImportWatcher(MetaPathFinder):
    """Finds nothing by itself: asks the other finders for a watched module, and patches it when it has been executed.

    Patches stay: a module that is imported again, because a patch failed or it was reloaded, gets them again. So does
    the watcher in `sys.meta_path`: another thread may be walking through that list.
    """

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.patches:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        loader.exec_module = exec_module
        return spec

    def patch(self, module: ModuleType) -> None:
        for patch in tuple(self.patches[module.__name__]):
            patch(module)


_watcher = _ImportWatcher()


def when_imported(module_name: str, patch: Patch) -> None:
    """Run `patch(module)` after each import of the module, and now if it is imported. A patch may run more than once.

    A patch that raises fails the import, each time.
    """
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    waiting = _watcher.patches.setdefault(module_name, [])
    if patch not in waiting:
        waiting.append(patch)
    # Asked only now: a module that another thread began to import before it was watched is here. If that import is
    # still going on, import_module waits for it.
    if sys.modules.get(module_name) is not None:
        patch(importlib.import_module(module_name))
