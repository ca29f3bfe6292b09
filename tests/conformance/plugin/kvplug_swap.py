"""pytest plugin for upstream's suite: puts another module's classes in the place of vLLM's, and reports what happened.

    KVPLUG_SWAP=MODULE          the module that defines the replacements; absent: plain upstream, results only
    KVPLUG_SWAP_REQUIRE=a,b     names that it must define (default: all of upstream's KV cache management and hashing)
    KVPLUG_SWAP_XFAIL=FILE      node ids that are expected to fail: no traceback for them
    KVPLUG_SWAP_REPORT=FILE     where the report is written, as JSON

It imports nothing of this project: it runs inside upstream's suite, where `tests` is upstream's package. The names are
swapped before pytest reads the first conftest.py, so a test module never sees upstream's object. Constructions are
counted on both sides: upstream's must stay at zero. Of ours, calls of functions are counted, too.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

_CORE = "vllm.v1.core."
# Where upstream defines the classes and functions that a KV cache manager replaces.
HOMES: dict[str, tuple[str, ...]] = {
    _CORE + "kv_cache_utils": (
        "KVCacheBlock",
        "FreeKVCacheBlockQueue",
        "need_extra_keys",
        "generate_block_hash_extra_keys",
        "hash_block_tokens",
        "get_request_block_hasher",
    ),
    _CORE + "block_pool": ("BlockHashToBlockMap", "BlockPool"),
    _CORE + "single_type_kv_cache_manager": (
        "SingleTypeKVCacheManager",
        "FullAttentionManager",
        "SlidingWindowManager",
        "ChunkedLocalAttentionManager",
        "MambaManager",
        "CrossAttentionManager",
        "SinkFullAttentionManager",
        "spec_manager_map",
        "get_manager_for_kv_cache_spec",
    ),
    _CORE + "kv_cache_coordinator": (
        "KVCacheCoordinator",
        "KVCacheCoordinatorNoPrefixCache",
        "UnitaryKVCacheCoordinator",
        "HybridKVCacheCoordinator",
        "get_kv_cache_coordinator",
    ),
    _CORE + "kv_cache_manager": ("KVCacheBlocks", "KVCacheManager"),
}
# What belongs to hashes, too: swapped where the module defines it, never required.
OPTIONAL_HOMES: dict[str, tuple[str, ...]] = {
    _CORE + "kv_cache_utils": (
        "BlockHashListWithBlockSize",
        "make_block_hash_with_group_id",
        "get_block_hash",
        "get_group_id",
        "maybe_convert_block_hash",
        "init_none_hash",
    ),
}
# These hold references to the names above from their import on.
_USERS = (_CORE + "sched.scheduler", _CORE + "sched.async_scheduler", _CORE + "kv_cache_metrics")
# Tests of these folders never touch a device: upstream's clean-up of the device after each test is left out.
_WITHOUT_DEVICE = tuple(f"tests/v1/{name}/" for name in ("core", "kv_connector", "kv_offload", "streaming_input"))


class Swap:
    """The replacement of upstream's names by those of one module, and the counts of what was constructed."""

    def __init__(self, module_name: str) -> None:
        self.module_name = module_name
        self.upstream: dict[str, Any] = {}
        self.ours: dict[str, Any] = {}
        self.num_made_upstream: collections.Counter[str] = collections.Counter()
        self.num_made_ours: collections.Counter[str] = collections.Counter()
        self.num_called_ours: collections.Counter[str] = collections.Counter()
        self._name_of: dict[int, str] = {}

    def apply(self) -> None:
        """Import upstream's modules and ours, and point every reference at ours."""
        homes = {name: importlib.import_module(name) for name in HOMES}
        for name in _USERS:
            importlib.import_module(name)
        module = importlib.import_module(self.module_name)
        required = os.environ.get("KVPLUG_SWAP_REQUIRE")
        required_names = [n for names in HOMES.values() for n in names] if required is None else required.split(",")
        for home, name in _all_names():
            theirs, ours = getattr(homes[home], name), getattr(module, name, None)
            if ours is not None and ours is not theirs:
                self.upstream[name], self.ours[name] = theirs, ours
                self._name_of[id(theirs)] = name
        missing = [name for name in required_names if name and name not in self.ours]
        if missing:
            raise RuntimeError(f"{self.module_name} does not replace: {', '.join(missing)}")
        # Of upstream, an attempt is one too many; of ours, a refusal is no use of it.
        _count_constructions(self.upstream.values(), self.num_made_upstream, attempts=True)
        _count_constructions(self.ours.values(), self.num_made_ours, attempts=False)
        for name, ours in self.ours.items():
            if isinstance(ours, FunctionType):
                self.ours[name] = _counting_calls(ours, name, self.num_called_ours)
        for holder, attribute, name in list(self._references()):
            setattr(holder, attribute, self.ours[name])
        self._swap_after_reload()

    def leftovers(self) -> list[str]:
        """References to upstream's objects that are still there."""
        return [f"{holder.__name__}.{attribute}" for holder, attribute, _ in self._references()]

    def inherited(self) -> list[str]:
        """Classes of ours that are vLLM's underneath."""
        found = []
        for name, ours in self.ours.items():
            bases = ours.__mro__ if isinstance(ours, type) else ()
            found += [
                f"{name}: {base.__module__}.{base.__qualname__}"
                for base in bases
                if base.__module__.split(".")[0] == "vllm"
            ]
        return found

    def _references(self) -> Iterator[tuple[ModuleType, str, str]]:
        for module_name, module in list(sys.modules.items()):
            if module is None or module_name.split(".")[0] not in ("vllm", "tests"):
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                name = self._name_of.get(id(value))
                if name is not None and self.upstream[name] is value:
                    yield module, attribute, name

    def _swap_after_reload(self) -> None:
        """A test reloads kv_cache_utils, which defines upstream's names anew: put ours back."""
        real_reload = importlib.reload

        def reload(module: ModuleType) -> ModuleType:
            reloaded = real_reload(module)
            for home, name in _all_names():
                if home == module.__name__ and name in self.ours:
                    setattr(module, name, self.ours[name])
            return reloaded

        importlib.reload = reload


def _all_names() -> Iterator[tuple[str, str]]:
    for homes in (HOMES, OPTIONAL_HOMES):
        for home, names in homes.items():
            for name in names:
                yield home, name


def _count_constructions(values: Iterable[Any], counter: collections.Counter[str], attempts: bool) -> None:
    """Count the objects whose exact type is among `values`: those attempted, or only those done."""
    classes = {value for value in values if isinstance(value, type)}

    def counting(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            # Once for each object, however many of its base classes are counted too.
            counts = type(self) in classes and type(self).__init__ is wrapper
            counter[type(self).__name__] += counts and attempts
            init(self, *args, **kwargs)
            counter[type(self).__name__] += counts and not attempts

        return wrapper

    for cls in classes:
        if "__init__" in vars(cls):
            cls.__init__ = counting(vars(cls)["__init__"])


def _counting_calls(function: Callable[..., Any], name: str, counter: collections.Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        counter[name] += 1
        return function(*args, **kwargs)

    return wrapper


class Recorder:
    """The pytest hooks: results of every test, and for each test what of ours it constructed and called."""

    def __init__(self, swap: Swap | None) -> None:
        self.swap = swap
        self.selected: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.made_by_test: dict[str, dict[str, int]] = {}
        self.called_by_test: dict[str, dict[str, int]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        path = os.environ.get("KVPLUG_SWAP_XFAIL")
        expected_to_fail = set(Path(path).read_text().splitlines()) if path else set()
        for item in items:
            if item.nodeid in expected_to_fail:
                item.add_marker(pytest.mark.xfail(reason="listed", strict=False))
            if item.nodeid.startswith(_WITHOUT_DEVICE):
                item.add_marker("skip_global_cleanup")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = [item.nodeid for item in session.items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if self.swap is None:
            return (yield)
        made, called = collections.Counter(self.swap.num_made_ours), collections.Counter(self.swap.num_called_ours)
        answer = yield
        self.made_by_test[item.nodeid] = dict(self.swap.num_made_ours - made)
        self.called_by_test[item.nodeid] = dict(self.swap.num_called_ours - called)
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and hasattr(report, "wasxfail")):
            self.outcomes[report.nodeid] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = str(crash.message if crash else report.longrepr).splitlines() or [""]
            self.messages.setdefault(report.nodeid, lines[0])
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self) -> None:
        path = os.environ.get("KVPLUG_SWAP_REPORT")
        if not path:
            return
        report: dict[str, Any] = {"selected": self.selected, "outcomes": self.outcomes, "messages": self.messages}
        if self.swap is not None:
            report["swap"] = {
                "names": sorted(self.swap.ours),
                "made_ours": +self.swap.num_made_ours,
                "made_upstream": +self.swap.num_made_upstream,
                "made_by_test": self.made_by_test,
                "called_ours": +self.swap.num_called_ours,
                "called_by_test": self.called_by_test,
                "leftovers": self.swap.leftovers(),
                "inherited": self.swap.inherited(),
            }
        Path(path).write_text(json.dumps(report, indent=1))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py: swap, and hang the recorder in."""
    module_name = os.environ.get("KVPLUG_SWAP")
    swap = Swap(module_name) if module_name else None
    if swap is not None:
        swap.apply()
    early_config.pluginmanager.register(Recorder(swap), "kvplug_recorder")
