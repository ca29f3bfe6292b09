"""One call on both managers, and everything that must then be equal.

Requests and answers come in pairs, one for each side, so that neither side can disturb the other. Our internals are
read in `_our_state` alone, upstream's in `_upstream_state` alone.
"""

from __future__ import annotations

import operator
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks as UpstreamBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from tests.lockstep.trace import Setup
from vllm_kvplug.block import KVCacheBlocks as OurBlocks
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.invariants import InvariantError, check_invariants
from vllm_kvplug.vllm_glue.manager import KVCacheManager as OurManager


@dataclass(eq=False)
class Both:
    """Something that each side has its own of."""

    upstream: Any
    ours: Any


class Mismatch(Exception):
    """The two sides differ, or ours contradicts itself (`field` is then "invariant")."""

    def __init__(self, call: str, field: str, upstream: Any, ours: Any) -> None:
        super().__init__(call, field, upstream, ours)
        self.call, self.field, self.upstream, self.ours = call, field, upstream, ours

    def __str__(self) -> str:
        return f"after {self.call}\n  {self.field}\n    upstream: {self.upstream}\n    ours:     {self.ours}"


@dataclass
class Raised:
    """A call's outcome where it raised."""

    error: Exception

    def __repr__(self) -> str:
        return f"raised {type(self.error).__name__}: {self.error}"


def build_managers(setup: Setup) -> Both:
    """Both managers over equal configurations."""

    def build(manager_class: type[Any]) -> Any:
        spec_class = MLAAttentionSpec if setup.is_mla else FullAttentionSpec
        spec = spec_class(block_size=setup.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return manager_class(
            kv_cache_config=KVCacheConfig(setup.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=setup.max_model_len,
            hash_block_size=setup.block_size,
            enable_caching=setup.enable_caching,
            use_eagle=setup.use_eagle,
            log_stats=setup.log_stats,
            enable_kv_cache_events=setup.enable_kv_cache_events,
        )

    return Both(build(UpstreamManager), build(OurManager))


def _upstream_state(manager: Any) -> dict[str, Any]:
    pool = manager.block_pool
    (group,) = manager.coordinator.single_type_managers
    cached = pool.cached_block_hash_to_block._cache.items()
    return {
        "usage": manager.usage,
        "number of free blocks": pool.get_num_free_blocks(),
        "free order": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "references": [block.ref_cnt for block in pool.blocks[1:]],
        "block hashes": [block.block_hash for block in pool.blocks],
        "cached blocks": {key: list(found) if type(found) is dict else [found.block_id] for key, found in cached},
        "tables": {name: [block.block_id for block in blocks] for name, blocks in group.req_to_blocks.items()},
        "cached counts": dict(group.num_cached_block),
    }


def _our_state(manager: OurManager) -> dict[str, Any]:
    pool = manager.pool
    (group,) = manager.groups
    return {
        "usage": manager.usage,
        "number of free blocks": pool.num_free_blocks,
        "free order": list(pool.free_blocks),
        "references": list(pool.reference_counts[1:]),
        "block hashes": [
            None if block_hash is None else block_hash + pool.block_group_ids[block_id].to_bytes(4, "big")
            for block_id, block_hash in enumerate(pool.block_hashes)
        ],
        "cached blocks": {
            block_hash + group_id.to_bytes(4, "big"): block_ids
            for group_id, index in enumerate(pool.indexes)
            for block_hash, block_ids in index.items()
        },
        "tables": {name: list(table.block_ids) for name, table in group.tables.items()},
        "cached counts": {name: table.num_cached_blocks for name, table in group.tables.items() if table.is_admitted},
    }


def _plain(value: Any, manager: Any) -> Any:
    """An answer as values that compare across the sides."""
    if isinstance(value, (UpstreamBlocks, OurBlocks)):
        (row,) = value.blocks
        return {
            "block ids": value.get_block_ids(),
            "block ids or None": value.get_block_ids(allow_none=True),
            "unhashed block ids": value.get_unhashed_block_ids(),
            "blocks": [(block.block_id, block.ref_cnt, block.block_hash, block.is_null) for block in row],
            "is the shared empty answer": value is manager.empty_kv_cache_blocks,
            "new_empty": value.new_empty().get_block_ids(),
            "added to itself": operator.add(value, value).get_block_ids(),
        }
    if isinstance(value, tuple):
        return tuple(_plain(part, manager) for part in value)
    return value


class Pair:
    """Both managers. `call` is the only way to them; it compares everything after each call.

    Attributes:
        counts: what happened, by name, for the summary.
        invariant_error: the first invariant that ours broke. Raised at once as a `Mismatch`, unless
            `stops_at_invariants` is off.
    """

    def __init__(self, setup: Setup, counts: Counter[str], *, stops_at_invariants: bool = True) -> None:
        self.setup = setup
        self.managers = build_managers(setup)
        self.counts = counts
        self.state: dict[str, Any] = _upstream_state(self.managers.upstream)
        self.invariant_error: InvariantError | None = None
        self._stops_at_invariants = stops_at_invariants
        self._kept_answers: list[Both] = []
        self._description: tuple[str, tuple[Any, ...], dict[str, Any]] = ("construction", (), {})
        self._compare_state()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Both:
        """Call the method on both managers, each with its part of every argument; compare outcomes and states."""
        self._description = (name, args, kwargs)
        self.counts["calls"] += 1
        answers = Both(None, None)
        for side in ("upstream", "ours"):
            manager = getattr(self.managers, side)
            side_args = [_part(value, side) for value in args]
            side_kwargs = {key: _part(value, side) for key, value in kwargs.items()}
            # What upstream uses to refuse, and what ours must use. Anything else is a fault, of this test or of ours.
            refusals = (AssertionError, ValueError) if side == "upstream" else (KVPlugError,)
            try:
                setattr(answers, side, getattr(manager, name)(*side_args, **side_kwargs))
            except refusals as error:
                setattr(answers, side, Raised(error))
            except Exception as error:
                if side == "upstream":
                    raise
                raise self._mismatch("outcome", answers.upstream, f"{error!r}\n{traceback.format_exc()}") from error
        self._compare_answers(answers)
        self._compare_state()
        if self.setup.takes_each_call and not name.startswith(("take_", "make_")):
            for taking in ("take_events", "make_prefix_cache_stats", "take_new_block_ids"):
                self._description = (f"{taking}, after {name}", args, kwargs)
                taken = Both(*(getattr(getattr(self.managers, side), taking)() for side in ("upstream", "ours")))
                self.counts["calls"] += 1
                self._compare_answers(taken)
        return answers

    def keep(self, answers: Both) -> None:
        """Look at these answers again after every later call: a scheduler keeps them for a while."""
        self._kept_answers = [*self._kept_answers[-3:], answers]

    def _compare_answers(self, answers: Both) -> None:
        if isinstance(answers.upstream, Raised) or isinstance(answers.ours, Raised):
            if not (isinstance(answers.upstream, Raised) and isinstance(answers.ours, Raised)):
                raise self._mismatch("outcome", answers.upstream, answers.ours)
            self.counts["refused misuses"] += 1
            return
        upstream = _plain(answers.upstream, self.managers.upstream)
        ours = self._read(lambda: _plain(answers.ours, self.managers.ours))
        if self._description[0].startswith("take_events"):
            self.counts["events"] += len(upstream)
        if self._description[0].startswith("take_new_block_ids") and upstream != ours:
            # docs/deviations.md: an id that was handed out again since the last call is named once.
            self.counts["block ids named once"] += 1
            upstream = list(dict.fromkeys(upstream))
        if upstream != ours or type(upstream) is not type(ours):
            raise self._mismatch("answer", upstream, ours)

    def _compare_state(self) -> None:
        before, upstream = self.state, _upstream_state(self.managers.upstream)
        self.state = upstream
        ours = self._read(lambda: _our_state(self.managers.ours))
        if upstream != ours:
            field = next(field for field in upstream if upstream[field] != ours[field])
            raise self._mismatch(field, upstream[field], ours[field])
        for answers in self._kept_answers:
            kept, our_kept = answers.upstream.get_block_ids(), self._read(answers.ours.get_block_ids)
            if kept != our_kept:
                raise self._mismatch("an answer of an earlier get_blocks", kept, our_kept)
        try:
            check_invariants(self.managers.ours)
        except InvariantError as error:
            self.invariant_error = self.invariant_error or error
            if self._stops_at_invariants:
                raise self._mismatch("invariant", "(no answer differs yet)", error) from error
        self._count_changes(before, upstream)

    def _read(self, read: Callable[[], Any]) -> Any:
        """What `read` answers of our side; that it fails is a mismatch too."""
        try:
            return read()
        except Exception as error:
            raise self._mismatch("reading our side", "", f"{error!r}\n{traceback.format_exc()}") from error

    def _count_changes(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        if before["block hashes"] != after["block hashes"] and self._description[0] == "allocate_slots":
            pairs = zip(before["block hashes"], after["block hashes"], strict=True)
            self.counts["evictions"] += sum(old is not None and old != new for old, new in pairs)
        if before["cached blocks"] != after["cached blocks"]:
            old = before["cached blocks"]
            self.counts["duplicates"] += sum(
                len(ids) > 1 and len(ids) > len(old.get(key, ())) for key, ids in after["cached blocks"].items()
            )

    def _mismatch(self, field: str, upstream: Any, ours: Any) -> Mismatch:
        name, args, kwargs = self._description
        shown = [_shown(value) for value in args] + [f"{key}={_shown(value)}" for key, value in kwargs.items()]
        return Mismatch(f"{name}({', '.join(shown)})", field, upstream, ours)


def _part(value: Any, side: str) -> Any:
    return getattr(value, side) if isinstance(value, Both) else value


def _shown(value: Any) -> str:
    if not isinstance(value, Both):
        return repr(value)
    request_id = getattr(value.upstream, "request_id", None)
    return repr(request_id) if request_id is not None else f"<blocks {value.upstream.get_block_ids()}>"
