"""Patches wait for an import, whatever thread it is in, and are not lost when something fails."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_kvplug.vllm_glue import patching


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import from; what is watched for there is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patching._watcher, "patches", dict(patching._watcher.patches))
    return tmp_path


def test_a_patch_waits_for_the_import(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_late.py").write_text("VALUE = 1\n")
    seen: list[Any] = []

    def patch(module: Any) -> None:
        seen.append(module.VALUE)

    patching.when_imported("kvplug_probe_late", patch)
    patching.when_imported("kvplug_probe_late", patch)
    assert seen == []
    import kvplug_probe_late

    assert seen == [1]
    patching.when_imported("kvplug_probe_late", patch)
    assert seen == [1, 1]
    importlib.reload(kvplug_probe_late)
    assert seen == [1, 1, 1]
    assert kvplug_probe_late.__spec__.loader.get_source("kvplug_probe_late") == "VALUE = 1\n"


def test_a_module_of_a_package(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_package").mkdir()
    (module_folder / "kvplug_probe_package" / "__init__.py").touch()
    (module_folder / "kvplug_probe_package" / "inner.py").write_text("VALUE = 1\n")
    seen: list[Any] = []
    patching.when_imported("kvplug_probe_package.inner", lambda module: seen.append(module.VALUE))
    importlib.import_module("kvplug_probe_package")
    assert seen == []
    importlib.import_module("kvplug_probe_package.inner")
    assert seen == [1]


def test_a_patch_that_fails_fails_every_import_until_it_succeeds(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_broken.py").write_text("VALUE = 1\n")
    fails = True

    def patch(module: Any) -> None:
        if fails:
            raise AttributeError("gone")
        module.VALUE = 2

    patching.when_imported("kvplug_probe_broken", patch)
    for _ in range(2):
        with pytest.raises(AttributeError, match="gone"):
            importlib.import_module("kvplug_probe_broken")
        assert "kvplug_probe_broken" not in sys.modules
    fails = False
    assert importlib.import_module("kvplug_probe_broken").VALUE == 2


def test_the_list_of_finders_does_not_shrink_while_another_thread_walks_through_it(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_walked.py").touch()
    patching.when_imported("kvplug_probe_walked", lambda module: None)
    # All that is waited for has come: nothing is left for the watcher to do.
    patching._watcher.patches = {"kvplug_probe_walked": patching._watcher.patches["kvplug_probe_walked"]}
    before = list(sys.meta_path)
    walk = iter(sys.meta_path)
    assert next(walk) is before[0]
    importlib.import_module("kvplug_probe_walked")
    assert list(walk) == before[1:]


def test_a_patch_waits_for_an_import_that_another_thread_has_begun(module_folder: Path) -> None:
    (module_folder / "kvplug_probe_slow.py").write_text("import time\ntime.sleep(0.3)\nVALUE = 1\n")
    seen: list[Any] = []
    thread = threading.Thread(target=importlib.import_module, args=("kvplug_probe_slow",))
    thread.start()
    while "kvplug_probe_slow" not in sys.modules:
        time.sleep(0.001)
    patching.when_imported("kvplug_probe_slow", lambda module: seen.append(module.VALUE))
    assert seen == [1]
    thread.join()


def test_static_methods_stay_static() -> None:
    class Owner:
        @staticmethod
        def double(value: int) -> int:
            return 2 * value

    patching.wrap_method(Owner, "double", lambda original, value: original(value) + 1)
    patching.wrap_method(Owner, "double", lambda original, value: original(value) + 1)
    assert Owner.double(3) == Owner().double(3) == 7


def test_class_methods_get_the_class_that_was_called() -> None:
    class Owner:
        @classmethod
        def make(cls, value: int) -> tuple[type, int]:
            return cls, value

    class Derived(Owner):
        pass

    for _ in range(2):
        patching.wrap_method(Owner, "make", lambda original, cls, value: original(cls, value + 1))
    assert Owner.make(3) == (Owner, 4)
    assert Derived.make(3) == Derived().make(3) == (Derived, 4)
