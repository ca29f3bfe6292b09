"""A patched vLLM's registry, made from the patch itself, so that these tests are of both ways."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from tests.glue.managers import Plain
from tests.patches.test_register import new_file
from vllm_kvplug.cli.fork_patches import register as patches
from vllm_kvplug.errors import ContractError, SettingsError
from vllm_kvplug.vllm_glue import patched_tree, registry, seams, version
from vllm_kvplug.vllm_glue.choice import chosen, settle


def make_plain(**kwargs: Any) -> Plain:
    return Plain(**kwargs)


class Maker:
    def __call__(self, **kwargs: Any) -> Plain:
        return Plain(**kwargs)


class Local:
    """What a class defined in a function has for a name cannot be imported."""

    __qualname__ = "make.<locals>.Local"


NO_CLASSES = {
    "partial": functools.partial(Plain),
    "instance": Maker(),
    "function": make_plain,
    "local": Local,
}


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry, with one class in it and all of NO_CLASSES."""
    module = ModuleType(patched_tree.MODULE)
    exec(new_file(patches().patch[0]), module.__dict__)
    monkeypatch.setitem(sys.modules, patched_tree.MODULE, module)
    monkeypatch.setattr(patched_tree, "is_there", lambda: True)
    found = module.KVCacheManagerFactory
    for name, manager in {"plain": Plain, **NO_CLASSES}.items():
        found.register(name, manager)
    return found


def arguments(name: str, config: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(kv_cache_manager=name, kv_cache_manager_config=config or {}, additional_config={})


def test_classes_are_names_of_ours_and_the_others_vllms(factory: Any) -> None:
    assert registry.names() == ["kvplug", "plain", "shadow", "upstream"]
    assert registry.load("plain") is Plain
    for name, manager in NO_CLASSES.items():
        patched_tree.register(name)
        assert factory.find(name) is manager
    patched_tree.register("plain")
    assert factory.find("plain").target == registry.target("tests.glue.managers:Plain")


@pytest.mark.parametrize("name", NO_CLASSES)
def test_what_is_no_class_is_left_to_vllm(factory: Any, name: str) -> None:
    assert patched_tree.is_vllms_alone(arguments(name))
    assert patched_tree.is_vllms_alone(arguments(name, {"depth": 1}))
    assert not patched_tree.is_vllms_alone(arguments("plain"))
    assert not patched_tree.is_vllms_alone(arguments("unknown"))
    assert chosen(SimpleNamespace(cache_config=arguments(name), additional_config={})) is None
    assert chosen(SimpleNamespace(cache_config=arguments("plain"), additional_config={})) is not None


def test_what_is_no_class_has_no_traces_and_shadows(factory: Any, tmp_path: Path) -> None:
    refusal = r"kv_cache_manager: expected a class .* found 'partial' registered with vLLM as something else"
    traced = arguments("partial", {"trace": str(tmp_path / "trace.gz")})
    assert not patched_tree.is_vllms_alone(traced)
    with pytest.raises(SettingsError, match=refusal):
        settle({}, *patched_tree.stated(traced))
    with pytest.raises(SettingsError, match=refusal):
        settle({}, "shadow", {"serving": "partial", "follower": "kvplug"})
    with pytest.raises(SettingsError, match=refusal):
        settle({"kv_cache_manager": "partial"})


def test_what_is_no_name_is_refused_as_without_the_patch(factory: Any) -> None:
    stated: Any = arguments("plain")
    stated.kv_cache_manager = Plain
    assert not patched_tree.is_vllms_alone(stated)
    with pytest.raises(SettingsError, match=r"expected a name or 'module:Class', found <class .*Plain'>"):
        settle({}, *patched_tree.stated(stated))


def test_our_class_under_a_forks_name_is_not_left_unchecked(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    factory.register("renamed", "vllm_kvplug.vllm_glue.manager:KVCacheManager")
    monkeypatch.setattr(version, "is_supported", lambda: False)
    assert not patched_tree.is_vllms_alone(arguments("renamed"))
    assert patched_tree.is_vllms_alone(arguments("plain"))


def test_nothing_takes_a_name_of_ours(factory: Any) -> None:
    factory.register("kvplug", NO_CLASSES["partial"])
    assert not patched_tree.is_vllms_alone(arguments("kvplug"))
    patched_tree.register("kvplug")
    assert isinstance(factory.find("kvplug"), patched_tree.Registered)


@pytest.mark.parametrize("name", ["kvplug", "plain"])
def test_an_engine_that_hashes_with_another_than_the_registrys_does_not_start(
    factory: Any, kv_cache_config: Any, name: str
) -> None:
    """The patch is there in part, say, or another plugin has changed the engine."""
    vllm_config = SimpleNamespace(cache_config=arguments(name), additional_config={})
    patched_tree.offer(sys.modules[patched_tree.MODULE])
    patched_tree.register(name)

    def start(hashes_with_another: bool, enable_caching: bool = True) -> Any:
        def construct(engine: Any, vllm_config: Any) -> None:
            engine.vllm_config, engine.request_block_hasher = vllm_config, None
            manager = registry.load(name)(kv_cache_config=kv_cache_config, max_model_len=256, hash_block_size=16)
            engine.scheduler = SimpleNamespace(kv_cache_manager=manager, kv_cache_config=kv_cache_config)
            if enable_caching:
                made = factory.create_block_hasher(vllm_config.cache_config, 16, sha256)
                engine.request_block_hasher = get_request_block_hasher(16, sha256) if hashes_with_another else made

        engine = SimpleNamespace()
        seams._around_engine_core_init(construct, engine, vllm_config)
        return engine

    module = start(hashes_with_another=False).request_block_hasher.__module__
    assert module == {"kvplug": "vllm_kvplug.hashing", "plain": "vllm.v1.core.kv_cache_utils"}[name]
    assert start(hashes_with_another=False, enable_caching=False).request_block_hasher is None
    with pytest.raises(ContractError, match=f"'{name}': expected the engine to hash with .*, its manager's own, found"):
        start(hashes_with_another=True)


def test_processes_started_meanwhile_get_the_hooks() -> None:
    """A plain string would be unpickled there without a word."""
    cache_config = SimpleNamespace(kv_cache_manager=None, kv_cache_manager_config={})
    choice = {"name": "kvplug", "config": {"eviction": "lru"}}
    with patched_tree.in_fields(SimpleNamespace(cache_config=cache_config), choice, 0):
        received = pickle.loads(pickle.dumps(cache_config))
        assert type(received.kv_cache_manager) is patched_tree.CarriedName
        assert (received.kv_cache_manager, received.kv_cache_manager_config) == ("kvplug", {"eviction": "lru"})
    assert vars(cache_config) == {"kv_cache_manager": None, "kv_cache_manager_config": {}}


@pytest.mark.parametrize(
    ("has_registry", "scheduler", "is_patched"),
    [
        (True, "from vllm.v1.core.kv_cache_manager_factory import KVCacheManagerFactory\n", True),
        (True, "from vllm.v1.core.kv_cache_manager import KVCacheManager\n", False),  # left over by pip
        (True, None, False),
        (False, "from vllm.v1.core.kv_cache_manager import KVCacheManager\n", False),
    ],
)
def test_the_registrys_file_alone_is_no_patch(
    has_registry: bool, scheduler: str | None, is_patched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sched = tmp_path / "v1" / "core" / "sched"
    sched.mkdir(parents=True)
    if has_registry:
        (sched.parent / "kv_cache_manager_factory.py").touch()
    if scheduler is not None:
        (sched / "scheduler.py").write_text(scheduler)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "vllm" else None)
    assert patched_tree.is_there.__wrapped__() is is_patched
