"""The second seam: whose hasher an engine gets, and that vLLM's own name is back as soon as it has it."""

from __future__ import annotations

import ast
import functools
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
from vllm.v1.engine import core as core_module

import vllm_kvplug
from tests.glue import managers
from tests.glue.support import seams_only, with_choice
from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue import contract, registry, seams

pytestmark = seams_only

UPSTREAM = kv_cache_utils.get_request_block_hasher


class OptedOut(vllm_kvplug.KVCacheManager):
    """Ours, with vLLM's hashes: it shares a store with engines that have them."""

    block_hasher = None  # type: ignore[assignment]


class WithHasher(managers.Plain):
    """A third party's, with a hasher of its own."""

    @classmethod
    def block_hasher(cls, block_size: int, caching_hash_fn: Any) -> Any:
        return ("of a third party", block_size, caching_hash_fn)


class Heir(vllm_kvplug.KVCacheManager):
    """A third party's over ours."""


class DriftingHasher(managers.Plain):
    """Its hasher cannot be called as the engine calls it."""

    @staticmethod
    def block_hasher(block_size: int) -> Any: ...


MANAGERS: dict[str | None, type] = {
    None: UpstreamManager,
    "kvplug": vllm_kvplug.KVCacheManager,
    "tests.glue.managers:Plain": managers.Plain,
} | {f"{__name__}:{cls.__name__}": cls for cls in (OptedOut, WithHasher, Heir)}


@pytest.fixture(autouse=True)
def vllms_own_before_and_after() -> Iterator[None]:
    assert core_module.get_request_block_hasher is UPSTREAM
    yield
    assert core_module.get_request_block_hasher is UPSTREAM


@pytest.fixture
def start(kv_cache_config: Any) -> Any:
    """Construct, through the hook, as much of an engine as asks for a hasher; `step` runs just before it asks."""

    def start(name: str | None, step: Any = None, enable_caching: bool = True, by_keyword: bool = False) -> Any:
        def construct(engine: Any, vllm_config: Any) -> None:
            manager = MANAGERS[name](kv_cache_config=kv_cache_config, max_model_len=256, hash_block_size=16)
            engine.vllm_config = vllm_config
            engine.scheduler = SimpleNamespace(kv_cache_manager=manager, kv_cache_config=kv_cache_config)
            engine.name_before = core_module.get_request_block_hasher
            if step is not None:
                step()
            engine.request_block_hasher = None
            if enable_caching:
                engine.request_block_hasher = core_module.get_request_block_hasher(16, sha256)
                engine.name_after = core_module.get_request_block_hasher

        engine = SimpleNamespace()
        arguments, keywords = ((), {"vllm_config": with_choice(name)}) if by_keyword else ((with_choice(name),), {})
        seams._around_engine_core_init(construct, engine, *arguments, **keywords)
        return engine

    return start


def module_of(hasher: Any) -> str:
    return hasher.__module__


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", ["kvplug", f"{__name__}:Heir"])
def test_our_manager_and_its_heirs_hash_with_ours(start: Any, name: str, by_keyword: bool) -> None:
    engine = start(name, by_keyword=by_keyword)
    assert module_of(engine.request_block_hasher) == "vllm_kvplug.hashing"
    assert engine.name_after is UPSTREAM  # restored by the call


@pytest.mark.parametrize("name", [None, "tests.glue.managers:Plain", f"{__name__}:OptedOut"])
def test_without_a_hasher_of_its_own_the_module_is_never_touched(start: Any, name: str | None) -> None:
    engine = start(name)
    assert engine.name_before is UPSTREAM
    assert module_of(engine.request_block_hasher) == "vllm.v1.core.kv_cache_utils"


def test_a_third_partys_hasher(start: Any) -> None:
    assert start(f"{__name__}:WithHasher").request_block_hasher == ("of a third party", 16, sha256)


def test_a_hasher_that_cannot_be_called_is_a_drift() -> None:
    with pytest.raises(ContractError, match=r"block_hasher\(block_size\) cannot be called as block_hasher\(..., ...\)"):
        registry.load(f"{__name__}:DriftingHasher")


def test_without_prefix_caching_nobody_asks_and_nothing_leaks(start: Any) -> None:
    engine = start("kvplug", enable_caching=False)
    assert engine.name_before is not UPSTREAM
    assert engine.request_block_hasher is None
    assert core_module.get_request_block_hasher is UPSTREAM


def test_a_start_that_fails_leaks_nothing(start: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no memory today")

    with pytest.raises(RuntimeError, match="no memory today"):
        start("kvplug", fail)
    assert core_module.get_request_block_hasher is UPSTREAM
    assert module_of(start("kvplug").request_block_hasher) == "vllm_kvplug.hashing"


def test_a_factory_that_fails_leaks_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(block_size: int, caching_hash_fn: Any) -> Any:
        raise RuntimeError("no hash today")

    monkeypatch.setattr(WithHasher, "block_hasher", fail)
    with pytest.raises(RuntimeError, match="no hash today"):
        start(f"{__name__}:WithHasher")


def test_only_the_first_call_is_answered(start: Any) -> None:
    answers: list[Any] = []

    def ask_twice() -> None:
        by_the_name_of_before = core_module.get_request_block_hasher
        answers.extend(by_the_name_of_before(16, sha256) for _ in range(2))

    with pytest.raises(ContractError, match="expected the engine to hash with"):
        start("kvplug", ask_twice)
    assert [module_of(answer) for answer in answers] == ["vllm_kvplug.hashing", "vllm.v1.core.kv_cache_utils"]


def test_another_plugin_that_replaces_the_hasher_stops_the_start(start: Any) -> None:
    def theirs(*args: Any) -> str:
        return "theirs"

    def replace() -> None:
        core_module.get_request_block_hasher = theirs

    try:
        with pytest.raises(ContractError) as refusal:
            start("kvplug", replace)
        assert core_module.get_request_block_hasher is theirs  # theirs to take back
    finally:
        core_module.get_request_block_hasher = UPSTREAM
    assert str(refusal.value).startswith("kv_cache_manager 'kvplug': expected the engine to hash with")
    assert str(refusal.value).endswith("found 'theirs'")


def test_another_plugin_that_wraps_ours_meanwhile(start: Any) -> None:
    def wrap() -> None:
        core_module.get_request_block_hasher = functools.partial(core_module.get_request_block_hasher)

    try:
        assert module_of(start("kvplug", wrap).request_block_hasher) == "vllm_kvplug.hashing"
        wrapper = core_module.get_request_block_hasher
        assert module_of(wrapper(16, sha256)) == "vllm.v1.core.kv_cache_utils"
        assert module_of(start("kvplug").request_block_hasher) == "vllm_kvplug.hashing"
        assert core_module.get_request_block_hasher is wrapper
        assert module_of(wrapper(16, sha256)) == "vllm.v1.core.kv_cache_utils"
    finally:
        core_module.get_request_block_hasher = UPSTREAM


def test_what_another_plugin_had_put_there_before_is_put_back(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any) -> Any:
        return UPSTREAM(*args)

    with monkeypatch.context() as patch:
        patch.setattr(core_module, "get_request_block_hasher", theirs)
        assert module_of(start("kvplug").request_block_hasher) == "vllm_kvplug.hashing"
        assert core_module.get_request_block_hasher is theirs


def test_engines_that_start_at_the_same_time(start: Any) -> None:
    """All are under construction before the first asks; each gets its own, whatever the order."""
    names = ["kvplug", None, f"{__name__}:WithHasher", "kvplug", "tests.glue.managers:Plain"]
    together = threading.Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as pool:
        engines = list(pool.map(lambda name: start(name, lambda: together.wait(60)), names))
    hashers = [engine.request_block_hasher for engine in engines]
    assert hashers[2] == ("of a third party", 16, sha256)
    ours, theirs = "vllm_kvplug.hashing", "vllm.v1.core.kv_cache_utils"
    assert [module_of(hashers[position]) for position in (0, 1, 3, 4)] == [ours, theirs, ours, theirs]


def test_the_engine_asks_as_the_contract_says() -> None:
    """Once, in EngineCore's constructor, by the name in its own module, after the scheduler is there."""
    tree = ast.parse(inspect.getsource(core_module))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == contract.HASHER_NAME
    ]
    (call,) = calls
    assert contract.Call(len(call.args), tuple(str(keyword.arg) for keyword in call.keywords)) == contract.HASHER_CALL
    (engine,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineCore"]
    (init,) = [node for node in engine.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert call in ast.walk(init)
    assert vllm_kvplug.KVCacheManager.block_hasher is vllm_kvplug.get_request_block_hasher
    assert list(inspect.signature(vllm_kvplug.get_request_block_hasher).parameters) == list(
        inspect.signature(UPSTREAM).parameters
    )
