"""One call on both managers, and everything that must then be equal.

Requests and answers come in pairs, one for each side, so that neither side can disturb the other. Where upstream has a
public fault (`deviations.py`), its side is put right before the comparison (`mends.py`).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as UpstreamBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager

from tests.lockstep import deviations
from tests.lockstep.mends import Mends
from tests.lockstep.mixes import kv_cache_config
from tests.lockstep.oracle import Hit, longest_hit, needed_positions
from tests.lockstep.states import State, num_new_nulls, our_state, plain, upstream_state
from tests.lockstep.trace import Setup
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
    """Both managers over equal configurations (F8: upstream's with specs that differ where no manager looks)."""

    def build(manager_class: type[Any], *, unequal: bool) -> Any:
        return manager_class(
            kv_cache_config=kv_cache_config(setup.num_blocks, setup.groups, setup.num_ranks, unequal=unequal),
            max_model_len=setup.max_model_len,
            hash_block_size=setup.mix.hash_block_size,
            enable_caching=setup.enable_caching,
            use_eagle=setup.use_eagle,
            log_stats=setup.log_stats,
            enable_kv_cache_events=setup.enable_kv_cache_events,
            dcp_world_size=setup.mix.dcp,
            pcp_world_size=setup.mix.pcp,
        )

    return Both(build(UpstreamManager, unequal=deviations.has_equal_specs(setup)), build(OurManager, unequal=False))


_TAKING = [
    name
    for name in ("take_events", "make_prefix_cache_stats", "take_new_block_ids")
    if hasattr(UpstreamManager, name)  # not each version has each
]


class Pair:
    """Both managers. `call` is the only way to them; it compares everything after each call.

    Attributes:
        counts: what happened, by name, for the summary.
        state: upstream's state after the last call.
        invariant_error: the first invariant that ours broke. Raised at once as a `Mismatch`, unless
            `stops_at_invariants` is off.
    """

    def __init__(self, setup: Setup, counts: Counter[str], *, stops_at_invariants: bool = True) -> None:
        self.setup = setup
        self.counts = counts
        self._description: tuple[str, tuple[Any, ...], dict[str, Any]] = ("construction", (), {})
        self.managers = build_managers(setup)
        self._mends = Mends(setup, self.managers.upstream, counts)
        self.state: State = upstream_state(self.managers.upstream, setup)
        self.invariant_error: InvariantError | None = None
        self._stops_at_invariants = stops_at_invariants
        self._kept_answers: list[Both] = []
        self._mends.triggers.call_starts()
        if deviations.has_equal_specs(setup):
            self._mends.triggers.note("F8")
        self._compare_state()
        self._mends.triggers.call_ends()

    def is_admitted(self, request_id: str) -> bool:
        """Whether the request has had its lookup's answer in every group, or cached a block there."""
        counts = [
            counts
            for group, counts in zip(self.setup.groups, self.state["cached counts"], strict=True)
            if group.kind != "cross"
        ]
        return bool(counts) and all(request_id in group_counts for group_counts in counts)

    def has_blocks(self, request_id: str) -> bool:
        """Whether the request has a table that is not empty."""
        return any(tables.get(request_id) for tables in self.state["tables"])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Both:
        """Call the method on both managers, each with its part of every argument; compare outcomes and states."""
        if name == "evict_blocks":
            return self._evict_blocks(name, args, kwargs)
        answers = self._call_one(name, args, kwargs)
        if self.setup.takes_each_call and not name.startswith(("take_", "make_")):
            for taking in _TAKING:
                # Statistics after a lookup are a deviation (F10), and too common to be one each time.
                if not (taking == "make_prefix_cache_stats" and name == "get_computed_blocks"):
                    self._call_one(taking, (), {})
        return answers

    def _evict_blocks(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Both:
        """Its events are taken alone: several holders of failed blocks (F15) have no order among them."""
        self._call_one("take_events", (), {})
        answers = self._call_one(name, args, kwargs)
        self._call_one("take_events", (), {}, in_any_order=self._mends.triggers.has("F15"))
        return answers

    def keep(self, answers: Both) -> None:
        """Look at these answers again after every later call: a scheduler keeps them for a while."""
        self._kept_answers = [*self._kept_answers[-3:], answers]

    def _call_one(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_any_order: bool = False
    ) -> Both:
        self._description = (name, args, kwargs)
        self.counts["calls"] += 1
        self._mends.triggers.call_starts()
        self._before(name, args, kwargs)
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
        self._after(name, args, answers)
        if in_any_order:
            answers = Both(sorted(answers.upstream, key=repr), sorted(answers.ours, key=repr))
        self._compare_answers(answers)
        if not name.startswith(("take_", "make_")):
            self._compare_state()
        self._mends.triggers.call_ends()
        return answers

    # What deviations want to know, and where they put upstream's answer right

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_external_tokens = kwargs.get("num_external_computed_tokens", 0)
        if name == "allocate_slots" and (args[1] or num_external_tokens):
            request = args[0].upstream
            num_present_tokens = request.num_computed_tokens + num_external_tokens
            num_present_tokens += kwargs.get("num_new_computed_tokens", 0)
            num_present_tokens = min(num_present_tokens, self.setup.max_model_len)
            self._mends.drafting.step_starts(request, num_present_tokens, args[1])
        elif name == "can_fit_full_sequence":
            self._mends.positions.has_deferred = False

    def _after(self, name: str, args: tuple[Any, ...], answers: Both) -> None:
        if name == "allocate_slots":
            self._mends.drafting.step_ends()
            if not isinstance(answers.upstream, Raised) and answers.upstream is not None:
                self._mends.stats.admitted(args[0].upstream)
        elif name == "free":
            self._mends.request_goes(args[0].request_id)
        elif name == "can_fit_full_sequence":
            answers.upstream = self._fits(args[0].request_id, answers.upstream)
        elif name == "take_new_block_ids":
            answers.upstream = self._named_once(answers.upstream)
        elif name == "make_prefix_cache_stats":
            answers.upstream = self._mends.stats.take(answers.upstream)
        elif name == "get_computed_blocks":
            request = args[0].upstream
            if self.setup.enable_caching and not request.skip_reading_prefix_cache:
                self._judge_lookup(request, answers)

    def _fits(self, request_id: str, fits: Any) -> Any:
        if fits is not False or self._mends.positions.has_deferred:
            return fits
        if not deviations.waits_alone(self.state["tables"], request_id):
            return False
        self._mends.triggers.note("F18")
        return True

    def _named_once(self, block_ids: list[int]) -> list[int]:
        if not deviations.is_named_again(block_ids):
            return block_ids
        self._mends.triggers.note("F14")
        return list(dict.fromkeys(block_ids))

    def _judge_lookup(self, request: Any, answers: Both) -> None:
        """Compare both answers with the rule itself; upstream's is put right where a deviation allows it."""
        right = longest_hit(self.setup, request.block_hashes, request.num_tokens, self.state["cached blocks"])
        self._mends.stats.looked_up(request, right.num_tokens)
        if right.num_tokens:
            self.counts.update(f"hits: {name}" for name in {group.name for group in self.setup.groups})
        self.counts["hits shortened by another group"] += right.is_shortened and bool(right.num_tokens)
        self.counts["hits with skipped blocks"] += any(0 in row for row in right.block_ids)
        self.counts["hits with eagle"] += self.setup.use_eagle and bool(right.num_tokens)
        self._compare_with_rule(right, answers.ours)
        found = answers.upstream
        is_answer = not isinstance(found, Raised)
        if is_answer and (found[0].get_block_ids(), found[1]) == (right.block_ids, right.num_tokens):
            return
        if deviations.drops_blocks_repeatedly(self.setup) and (not is_answer or found[1] < right.num_tokens):
            self._mends.triggers.note("F7")
        elif is_answer and self._lacks_a_windows_blocks(*found):
            self._mends.triggers.note("D4")
        elif deviations.leaves_hits_uncut(self.setup) and is_answer and found[1] == right.num_tokens:
            self._mends.triggers.note("F8" if deviations.has_equal_specs(self.setup) else "D1")
        else:
            return  # to be found different
        upstream = self.managers.upstream
        blocks = tuple([upstream.block_pool.blocks[block_id] for block_id in row] for row in right.block_ids)
        is_empty = not any(blocks)
        answers.upstream = (upstream.empty_kv_cache_blocks if is_empty else UpstreamBlocks(blocks), right.num_tokens)

    def _lacks_a_windows_blocks(self, blocks: UpstreamBlocks, num_hit_tokens: int) -> bool:
        rows = blocks.get_block_ids()
        needed = [needed_positions(self.setup, group_id, num_hit_tokens) for group_id in range(len(rows))]
        return deviations.lacks_a_windows_blocks(self.setup, rows, needed)

    def _compare_with_rule(self, right: Hit, ours: Any) -> None:
        if isinstance(ours, Raised):
            raise self._mismatch("rule of hits", right, ours)
        found = self._read(lambda: (ours[0].get_block_ids(), ours[1]))
        if found != (right.block_ids, right.num_tokens):
            raise self._mismatch("rule of hits", (right.block_ids, right.num_tokens), found)

    # Comparing

    def _compare_answers(self, answers: Both) -> None:
        if isinstance(answers.upstream, Raised) or isinstance(answers.ours, Raised):
            if not (isinstance(answers.upstream, Raised) and isinstance(answers.ours, Raised)):
                raise self._mismatch("outcome", answers.upstream, answers.ours)
            self.counts["refused misuses"] += 1
            return
        upstream = plain(answers.upstream, self.managers.upstream)
        ours = self._read(lambda: plain(answers.ours, self.managers.ours))
        if self._description[0] == "take_events":
            self.counts["events"] += len(upstream)
        if upstream != ours or type(upstream) is not type(ours):
            raise self._mismatch("answer", upstream, ours)

    def _compare_state(self) -> None:
        before, upstream = self.state, upstream_state(self.managers.upstream, self.setup)
        self.state = upstream
        ours = self._read(lambda: our_state(self.managers.ours, self.setup))
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

    def _count_changes(self, before: State, after: State) -> None:
        if before["block hashes"] != after["block hashes"] and self._description[0] == "allocate_slots":
            pairs = zip(before["block hashes"], after["block hashes"], strict=True)
            self.counts["evictions"] += sum(old is not None and old != new for old, new in pairs)
        if before["cached blocks"] != after["cached blocks"]:
            old = before["cached blocks"]
            self.counts["duplicates"] += sum(
                len(ids) > 1 and len(ids) > len(old.get(key, ())) for key, ids in after["cached blocks"].items()
            )
        for group, tables, old_tables in zip(self.setup.groups, after["tables"], before["tables"], strict=True):
            if not group.is_full and tables != old_tables:
                self._count_group(group.name, old_tables, tables)

    def _count_group(self, name: str, before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
        if name == "cross":
            self.counts["cross: encoder allocations"] += any(request_id not in before for request_id in after)
        else:
            self.counts[f"{name}: blocks left behind"] += sum(
                num_new_nulls(row, after[request_id]) for request_id, row in before.items() if request_id in after
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
