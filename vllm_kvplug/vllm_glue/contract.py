"""The contract that the running vLLM's scheduler has with its manager, and the check of a class against it.

The tables are read off `vllm/v1/core/sched/scheduler.py` and `async_scheduler.py` of the supported versions; `drift.py`
reads the installed files again when a manager is chosen, and says what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue.version import is_since

# What the scheduler's module calls the class that it constructs, by keyword only.
CLASS_NAME = "KVCacheManager"
CONSTRUCTOR_KEYWORDS = (
    "kv_cache_config",
    "max_model_len",
    "enable_caching",
    "use_eagle",
    "log_stats",
    "enable_kv_cache_events",
    "dcp_world_size",
    "pcp_world_size",
    "hash_block_size",
    "metrics_collector",
)
# What the engine's module calls the function that makes its requests' block hasher, and the attribute of a manager
# class whose value takes that function's place for engines with the manager. Absent or None: vLLM's own stays.
HASHER_NAME = "get_request_block_hasher"
HASHER_ATTRIBUTE = "block_hasher"


class Call(NamedTuple):
    """One way in which a scheduler calls a method: how many arguments by position, which by keyword."""

    num_positional: int
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"({', '.join(['...'] * self.num_positional + [f'{name}=' for name in self.keywords])})"


CALLS: dict[str, tuple[Call, ...]] = {
    "new_step_starts": (Call(0),),
    "get_computed_blocks": (Call(1),),
    "allocate_slots": (
        Call(2, ("num_lookahead_tokens",)),
        Call(
            2,
            (
                "num_new_computed_tokens",
                "new_computed_blocks",
                "num_lookahead_tokens",
                "num_external_computed_tokens",
                "delay_cache_blocks",
                "num_encoder_tokens",
            ),
        ),
    ),
    "get_blocks": (Call(1),),
    "get_block_ids": (Call(1),),
    "get_num_common_prefix_blocks": (Call(1),),
    "take_events": (Call(0),),
    "free": (Call(1),),
    "remove_skipped_blocks": (Call(0, ("request_id", "total_computed_tokens")),),
    "cache_blocks": (Call(2),),
    "evict_blocks": (Call(1),),
    "reset_prefix_cache": (Call(0),),
    "make_prefix_cache_stats": (Call(0),),
}
if is_since("0.17.1"):
    CALLS["take_new_block_ids"] = (Call(0),)
if is_since("0.19.0"):
    CALLS["can_fit_full_sequence"] = (
        Call(
            1,
            (
                "num_new_computed_tokens",
                "new_computed_blocks",
                "num_external_computed_tokens",
                "num_encoder_tokens",
            ),
        ),
    )
# By position: tokens of each hash, hash function.
HASHER_CALL = Call(2)
# Read from the instance; `empty_kv_cache_blocks` is what a connector's request starts from.
ATTRIBUTES = ("usage", "empty_kv_cache_blocks")
# Read for connectors that ask for it alone, so a manager need not have it.
CONNECTOR_ATTRIBUTES = ("block_pool",) if is_since("0.19.0") else ()
RESULT_CALLS: dict[str, tuple[Call, ...]] = {
    "get_block_ids": (Call(0), Call(0, ("allow_none",))),
    "get_unhashed_block_ids": (Call(0),),
    "new_empty": (Call(0),),
}
if is_since("0.18.0"):
    RESULT_CALLS["get_unhashed_block_ids_all_groups"] = (Call(0),)
RESULT_ATTRIBUTES = ("blocks",)


def takes_settings(manager_cls: type) -> bool:
    """Whether the class is constructed with a keyword `settings` beside vLLM's: a parameter of that name says so."""
    try:
        return "settings" in inspect.signature(manager_cls).parameters
    except (TypeError, ValueError):  # a class made in C tells no signature
        return False


def hasher_factory(manager_cls: type) -> Callable[..., Any] | None:
    """What makes the block hasher for engines with this manager; None: vLLM's own does."""
    return getattr(manager_cls, HASHER_ATTRIBUTE, None)


def check_class(manager_cls: type, name: str) -> None:
    """Raise a ContractError that lists everything the class lacks of what can be seen before it is constructed."""
    keywords = CONSTRUCTOR_KEYWORDS + (("settings",) if takes_settings(manager_cls) else ())
    drifts = _drifts_of_call("__init__", manager_cls, Call(0, keywords))
    for method_name, calls in CALLS.items():
        # The class's function takes self as its first argument, a class or static method does not.
        static = inspect.getattr_static(manager_cls, method_name, None)
        num_self = 0 if isinstance(static, (classmethod, staticmethod)) else 1
        shifted = tuple(call._replace(num_positional=call.num_positional + num_self) for call in calls)
        drifts += _drifts_of_method(manager_cls, method_name, shifted, shown=calls)
    if hasher_factory(manager_cls) is not None:
        drifts += _drifts_of_method(manager_cls, HASHER_ATTRIBUTE, (HASHER_CALL,))
    _raise_if_any(drifts, name, manager_cls)


def check_instance(manager: Any, name: str) -> None:
    """Raise a ContractError that lists what a constructed manager lacks, its allocation result included."""
    drifts = [f"attribute {attribute} is missing" for attribute in ATTRIBUTES if not hasattr(manager, attribute)]
    empty = getattr(manager, "empty_kv_cache_blocks", None)
    if empty is not None:
        for method_name, calls in RESULT_CALLS.items():
            drifts += _drifts_of_method(empty, method_name, calls, prefix="empty_kv_cache_blocks.")
        drifts += [
            f"attribute empty_kv_cache_blocks.{attribute} is missing"
            for attribute in RESULT_ATTRIBUTES
            if not hasattr(empty, attribute)
        ]
    _raise_if_any(drifts, name, type(manager))


def _drifts_of_method(
    owner: Any, method_name: str, calls: tuple[Call, ...], *, shown: tuple[Call, ...] | None = None, prefix: str = ""
) -> list[str]:
    method = getattr(owner, method_name, None)
    if not callable(method):
        return [f"method {prefix}{method_name}{(shown or calls)[-1]} is missing"]
    drifts = []
    for call, as_called in zip(calls, shown or calls, strict=True):
        drifts += _drifts_of_call(prefix + method_name, method, call, as_called)
    return drifts


def _drifts_of_call(
    shown_name: str, function: Callable[..., Any], call: Call, as_called: Call | None = None
) -> list[str]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function without a signature: only a call can tell
        return []
    try:
        signature.bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        found = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
        return [f"{shown_name}{found} cannot be called as {shown_name}{as_called or call}: {error}"]
    return []


def _raise_if_any(drifts: list[str], name: str, manager_cls: type) -> None:
    if drifts:
        raise ContractError(
            f"kv_cache_manager: {name!r} ({manager_cls.__module__}.{manager_cls.__qualname__}) does not keep the "
            f"contract of vLLM's scheduler: {'; '.join(drifts)}"
        )
