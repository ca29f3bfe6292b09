"""Drift: a vLLM that differs is told what differs, in words, from its files alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.glue.support import IS_PATCHED, patched_only, seams_only
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue import contract, drift, patched_tree, relied_on, version

FILES = {*relied_on.FUNCTIONS, *relied_on.FIELDS, *relied_on.CLASSES, relied_on.REQUEST_FILE} | {
    "v1/core/sched/async_scheduler.py",
    *relied_on.PATCH_FIELDS,
    *(["v1/core/kv_cache_manager_factory.py"] if IS_PATCHED else []),
}
Change = Callable[[str, str, str], tuple[str, ...]]


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """Replaces a text in one file of a copy of the installed vLLM's, and answers what `drift` finds then."""
    import vllm

    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(vllm.__path__[0]) / name, path)

    def change(name: str, text: str, replacement: str) -> tuple[str, ...]:
        path = tmp_path / name
        code = path.read_text()
        assert text in code, name
        path.write_text(code.replace(text, replacement))
        return drift.find_in(tmp_path)

    return change


def test_the_installed_version_is_as_the_glue_knows_it() -> None:
    assert drift.find() == ()
    assert version.vllm_version() in version.SUPPORTED_VLLM_VERSIONS


@seams_only
@pytest.mark.parametrize(
    ("name", "text", "replacement", "expected"),
    [
        (
            drift.SCHEDULER,
            "self.kv_cache_manager.get_computed_blocks(request)",
            "self.kv_cache_manager.get_computed_blocks(request, step=1)",
            "Scheduler calls get_computed_blocks(..., step=), expected get_computed_blocks(...)",
        ),
        (
            drift.SCHEDULER,
            "self.kv_cache_manager.new_step_starts()",
            "self.kv_cache_manager.step_starts(1, 2)",
            "Scheduler calls step_starts(..., ...), which no manager here has",
        ),
        (
            drift.SCHEDULER,
            "self.kv_cache_manager.new_step_starts()",
            "pass",
            "Scheduler does not call new_step_starts",
        ),
        (
            drift.SCHEDULER,
            "self.kv_cache_manager.usage",
            "self.kv_cache_manager.coordinator.usage",
            "Scheduler reads kv_cache_manager.coordinator",
        ),
        (
            drift.SCHEDULER,
            "new_computed_blocks, num_new_local_computed_tokens = (",
            "new_computed_blocks, num_new_local_computed_tokens, further = (",
            "Scheduler takes 3 values from get_computed_blocks, expected 2",
        ),
        (
            drift.SCHEDULER,
            "metrics_collector=self.kv_metrics_collector",
            "collector=self.kv_metrics_collector",
            "Scheduler constructs KVCacheManager with collector=",
        ),
        (
            drift.SCHEDULER,
            "def update_from_output(",
            "def update(",
            "Scheduler.update_from_output is missing in vllm/v1/core/sched/scheduler.py",
        ),
        (
            "config/scheduler.py",
            "def get_scheduler_cls(self",
            "def get_scheduler_cls(config, kind",
            "SchedulerConfig.get_scheduler_cls(config, kind), expected (self, ...)",
        ),
        (
            "distributed/kv_events.py",
            "    block_size: int\n",
            "    block_size: int\n    group: int\n",
            "BlockStored has the further fields group",
        ),
        (
            "v1/kv_cache_interface.py",
            "class MambaSpec(",
            "class StateSpec(",
            "MambaSpec is missing in vllm/v1/kv_cache_interface.py",
        ),
        ("v1/request.py", "self.cache_salt", "self.salt", "Request lacks cache_salt"),
        (
            "v1/engine/core.py",
            "get_request_block_hasher(",
            "make_block_hasher(",
            "EngineCore does not call get_request_block_hasher",
        ),
    ],
)
def test_a_drift_is_named(changed: Change, name: str, text: str, replacement: str, expected: str) -> None:
    assert expected in changed(name, text, replacement)


@seams_only
def test_a_file_that_is_gone_or_no_python_is_a_drift_too(changed: Change) -> None:
    found = changed(drift.SCHEDULER, "class Scheduler(", "class class (")
    assert found[0] == "vllm/v1/core/sched/scheduler.py is missing"
    assert "Scheduler.schedule is missing in vllm/v1/core/sched/scheduler.py" in found


def test_of_many_drifts_the_first_are_told(tmp_path: Path) -> None:
    found = drift.find_in(tmp_path)
    assert found[0] == "vllm/v1/core/sched/scheduler.py is missing"
    assert found[-1].startswith("and ")
    assert len(found) < 12


def test_a_drifted_version_is_refused_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version alone proves nothing: a fork may carry its number."""
    version.require_supported_version("kvplug")
    monkeypatch.setitem(contract.CALLS, "named_here", (contract.Call(1),))
    monkeypatch.setattr(drift, "find", drift.find.__wrapped__)
    with pytest.raises(UnsupportedError) as refusal:
        version.require_supported_version("kvplug")
    line = str(refusal.value)
    assert "'kvplug'" in line
    assert f"expects vLLM {version.vllm_version()} as it was released" in line
    assert "Scheduler does not call named_here" in line
    assert "\n" not in line


def test_a_later_version_is_refused_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(drift, "find", lambda: ("Scheduler calls later(...), which no manager here has",))
    with pytest.raises(UnsupportedError, match=r"found 0\.32\.0, which differs: Scheduler calls later\(\.\.\.\)"):
        version.require_supported_version("kvplug")
    monkeypatch.setattr(drift, "find", lambda: ())
    with pytest.raises(UnsupportedError, match=r"found 0\.32\.0, with which kvplug was not tried; install"):
        version.require_supported_version("kvplug")


@pytest.mark.parametrize(
    ("number", "release"),
    [
        ("0.17.1", "0.17.1"),
        ("0.17.1.post1", "0.17.1"),
        ("0.17.2.dev3", "0.17.1"),
        ("0.19.2rc1.dev45", None),
        ("0.18.0rc1", None),
        ("0.18.0.dev9", None),
        ("dev", None),
    ],
)
def test_a_forks_build_is_told_by_the_release_before_it(number: str, release: str | None) -> None:
    assert version.release_of(number) == release


@pytest.mark.parametrize("number", ["0.17.2.dev3", "0.19.1.post1"])
def test_a_forks_build_is_known_where_it_carries_the_patch(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "vllm_version", lambda: number)
    monkeypatch.setattr(drift, "find", lambda: ())
    monkeypatch.setattr(patched_tree, "is_there", lambda: True)
    version.require_supported_version("kvplug")
    monkeypatch.setattr(drift, "find", lambda: ("Scheduler calls more(), which no manager here has",))
    with pytest.raises(UnsupportedError, match=r"expects vLLM 0\.1.*\.1 as it was released, found that it differs: S"):
        version.require_supported_version("kvplug")
    monkeypatch.setattr(drift, "find", lambda: ())
    monkeypatch.setattr(patched_tree, "is_there", lambda: False)
    with pytest.raises(UnsupportedError, match=f"found {number}, with which kvplug was not tried"):
        version.require_supported_version("kvplug")


@patched_only
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "v1/engine/core.py",
            "KVCacheManagerFactory.create_block_hasher(",
            "EngineCore does not call KVCacheManagerFactory.create_block_hasher, as the patch has it",
        ),
        ("config/cache.py", "    kv_cache_manager: str", "CacheConfig lacks kv_cache_manager, which the patch adds"),
        ("engine/arg_utils.py", "    kv_cache_manager: str", "EngineArgs lacks kv_cache_manager, which the patch adds"),
    ],
)
def test_a_patch_that_is_there_in_part_is_a_drift(changed: Change, name: str, text: str, expected: str) -> None:
    assert expected in changed(name, text, "    another: str" if ":" in text else "other(")


def test_versions_are_ordered_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for running, expected in (("0.19.1", True), ("0.19.0rc1", True), ("0.18.1", False), ("0.100.0", True)):
        monkeypatch.setattr(version, "vllm_version", lambda running=running: running)
        assert version.is_since.__wrapped__("0.19.0") is expected, running
