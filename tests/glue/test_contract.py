"""The contract: the tables say what the installed scheduler does, and a class that drifts is told how."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from tests.glue import managers
from tests.glue.support import IS_PATCHED
from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue import contract
from vllm_kvplug.vllm_glue.contract import Call


def scheduler_sources() -> list[ast.Module]:
    from vllm.v1.core.sched import async_scheduler, scheduler

    return [ast.parse(inspect.getsource(module)) for module in (scheduler, async_scheduler)]


def manager_member(node: ast.AST) -> str | None:
    """The name X of a node `self.kv_cache_manager.X`."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "kv_cache_manager"
    ):
        return node.attr
    return None


def test_the_tables_are_what_the_installed_scheduler_does() -> None:
    calls: dict[str, set[Call]] = {}
    members: set[str] = set()
    constructions = []
    constructor = "KVCacheManagerFactory.create_manager" if IS_PATCHED else "KVCacheManager"
    for node in (node for source in scheduler_sources() for node in ast.walk(source)):
        if (member := manager_member(node)) is not None:
            members.add(member)
        if isinstance(node, ast.Call):
            if (name := manager_member(node.func)) is not None:
                keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                calls.setdefault(name, set()).add(Call(len(node.args), keywords))
            if ast.unparse(node.func) == constructor:
                arguments = [ast.unparse(argument) for argument in node.args]
                constructions.append((arguments, tuple(keyword.arg for keyword in node.keywords)))
    assert {name: set(shapes) for name, shapes in contract.CALLS.items()} == calls
    assert {*contract.ATTRIBUTES, *contract.CONNECTOR_ATTRIBUTES} == members - set(calls)
    arguments = ["self.cache_config"] if IS_PATCHED else []
    assert constructions == [(arguments, contract.CONSTRUCTOR_KEYWORDS)]


def test_vllms_own_and_ours_keep_it(kv_cache_config: Any) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    import vllm_kvplug

    for manager_cls in (KVCacheManager, vllm_kvplug.KVCacheManager):
        contract.check_class(manager_cls, "name")
        manager = manager_cls(kv_cache_config=kv_cache_config, max_model_len=256, hash_block_size=16)
        contract.check_instance(manager, "name")


def test_each_drift_is_named() -> None:
    with pytest.raises(ContractError) as refusal:
        contract.check_class(managers.Incomplete, "theirs")
    message = str(refusal.value)
    assert message.startswith("kv_cache_manager: 'theirs' (tests.glue.managers.Incomplete) does not keep the contract")
    assert "method evict_blocks(...) is missing" in message
    assert (
        "cannot be called as remove_skipped_blocks(request_id=, total_computed_tokens=): missing a required" in message
    )
    assert message.count(";") == 1


def test_constructor_drift_is_named() -> None:
    with pytest.raises(
        ContractError, match=r"__init__\(.*\) cannot be called as .*: got an unexpected keyword argument"
    ):
        contract.check_class(managers.NoEagle, "theirs")


@pytest.mark.parametrize("name", contract.CALLS)
def test_every_method_is_missed(name: str) -> None:
    lacking = type("Lacking", (managers.Plain,), {name: None})
    with pytest.raises(ContractError, match=rf"method {name}\("):
        contract.check_class(lacking, "theirs")


@pytest.mark.parametrize("name", contract.CALLS)
def test_every_method_with_other_arguments_is_found(name: str) -> None:
    def other(self: Any, one: Any, two: Any, three: Any, four: Any) -> None: ...

    with pytest.raises(ContractError, match=rf"{name}\(self, one.*cannot be called as {name}\("):
        contract.check_class(type("Other", (managers.Plain,), {name: other}), "theirs")


def test_static_and_class_methods_are_called_without_self() -> None:
    members = {"new_step_starts": staticmethod(lambda: None), "free": classmethod(lambda cls, request: None)}
    contract.check_class(type("Static", (managers.Plain,), members), "theirs")


def test_instances_are_checked(kv_cache_config: Any) -> None:
    manager = managers.WithoutEmptyBlocks(kv_cache_config=kv_cache_config, max_model_len=256, hash_block_size=16)
    with pytest.raises(ContractError, match="attribute empty_kv_cache_blocks is missing"):
        contract.check_instance(manager, "theirs")
    manager.empty_kv_cache_blocks = object()
    with pytest.raises(ContractError) as refusal:
        contract.check_instance(manager, "theirs")
    assert "method empty_kv_cache_blocks.get_block_ids(allow_none=) is missing" in str(refusal.value)
    assert "attribute empty_kv_cache_blocks.blocks is missing" in str(refusal.value)
