"""All rows of `kvplug bench manager`: what is measured, how often, and what it is to reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.performance import calls_decode, calls_pool, calls_prefill
from vllm_kvplug.evals.performance.measuring import Repeat
from vllm_kvplug.evals.performance.results import CurvePoint, Goal, Unit
from vllm_kvplug.evals.performance.sides import MANY_BLOCKS, NUM_BLOCKS, BenchedSide

_SIZES = {"2k": 2_048, "8k": 8_192, "32k": 32_768, "128k": 131_072}
_TABLE_SIZES = ("2k", "32k", "128k")
_NUM_RUNNING = (64, 256, 1_024, 4_096)
_POOL_SIZES = (10_000, NUM_BLOCKS, 500_000, MANY_BLOCKS)
_NUM_WINDOWS = (0, 1, 3, 5, 7)
# Repeats of a row, and with --quick, by what one costs.
_REPEATS = {"2k": (200, 40), "8k": (100, 20), "32k": (60, 14), "128k": (24, 6)}


@dataclass(frozen=True)
class Row:
    """One row: `build` makes a side's repeat.

    Attributes:
        num_repeats: samples of each side, and with --quick.
        is_frozen: whether the heap is frozen before, as after an engine's start; else the row cares for itself.
        in_table: else it is only a point of a curve.
        in_quick: whether --quick measures it although it was not named.
    """

    name: str
    group: str
    what: str
    build: Callable[[BenchedSide], Repeat]
    num_repeats: tuple[int, int]
    num_warm_up: int = 1
    goal: Goal = field(default_factory=Goal)
    unit: Unit = "us"
    is_frozen: bool = True
    in_table: bool = True
    in_quick: bool = True
    point: CurvePoint | None = None


def all_rows() -> list[Row]:
    """In the order of the table; points of curves that are not in it come last of their operation."""
    return [*_decode(), *_decode_steps(), *_by_context(), *_admissions(), *_reads(), *_hybrid(), *_pools(), *_lives()]


def chosen_rows(pattern: str | None, *, quick: bool) -> list[Row]:
    """Those whose name has the pattern in it, or matches it as a shell's; all without one. `quick` leaves out points
    that are not in the table, and the largest pools, unless named in full.

    Raises:
        EvalUsageError: none matches.
    """
    rows = all_rows()
    if pattern is not None:
        found = [row for row in rows if pattern in row.name or fnmatchcase(row.name, pattern)]
        if not found:
            raise EvalUsageError(
                f"--rows {pattern}: expected part of a row's name or a pattern (*, ?, [...]), found no row; rows: "
                f"{', '.join(row.name for row in rows)}"
            )
        rows = found
    short = [row for row in rows if (row.in_table and row.in_quick) or row.name == pattern] if quick else rows
    return short or rows


def _decode() -> Iterator[Row]:
    phases: Sequence[tuple[str, str, Callable[[int], bool], Goal]] = (
        ("nothing-new", "nothing new", calls_decode.nothing_new, Goal(target=15, stretch=20)),
        ("new-block", "new block", calls_decode.new_block, Goal(target=3, stretch=4)),
        ("full-block", "block becomes full and is cached", calls_decode.full_block, Goal(target=5, stretch=6)),
    )
    for name, what, phase, goal in phases:
        yield Row(
            f"decode-{name}",
            "decode",
            f"allocate_slots, decode: {what}",
            partial(calls_decode.decode_call, phase=phase),
            num_repeats=(200 if name == "nothing-new" else 48, 24 if name == "nothing-new" else 12),
            goal=goal,
        )


def _decode_steps() -> Iterator[Row]:
    for num_running in _NUM_RUNNING:
        is_goal = num_running in (256, 1_024)
        yield Row(
            f"decode-step-{num_running}",
            "decode",
            f"decode step, {num_running} running",
            partial(calls_decode.decode_step, num_running=num_running),
            num_repeats=(200 if num_running < 4_096 else 40, 40),
            goal=Goal(target=8, stretch=10) if is_goal else Goal(),
            in_table=is_goal,
            point=CurvePoint(curve="running", line="decode step", x=num_running),
        )
    for num_running, goal in ((256, Goal()), (1_024, Goal(target=15, stretch=30))):
        yield Row(
            f"decode-step-{num_running}-cold",
            "decode",
            f"decode step, {num_running} running, cold caches",
            partial(calls_decode.decode_step, num_running=num_running, is_cold=True),
            num_repeats=(40, 10),
            goal=goal,
            point=CurvePoint(curve="running", line="decode step, cold caches", x=num_running),
        )


_ContextCalls = Callable[[BenchedSide, int], Repeat]


def _by_context() -> Iterator[Row]:
    operations: Sequence[tuple[str, str, str, str, _ContextCalls, Goal]] = (
        (
            *("prefill-fresh", "prefill", "allocate_slots, prefill {} tokens, fresh pool", "prefill, fresh pool"),
            calls_prefill.prefill_fresh,
            Goal(target=6, stretch=10),
        ),
        (
            *("prefill-evicting", "prefill", "the same, every block evicts a cached one: {}", "prefill, evicting"),
            calls_prefill.prefill_evicting,
            Goal(target=6, stretch=8),
        ),
        (
            *("lookup", "lookup", "get_computed_blocks, full hit, never looked up before, {}", "lookup, full hit"),
            calls_prefill.lookup,
            Goal(target=10, stretch=100),
        ),
        (*("free", "free", "free, {}", "free"), calls_prefill.free, Goal(target=10, stretch=100)),
    )
    for name, group, what, line, calls, goal in operations:
        for size, num_tokens in _SIZES.items():
            in_table = size in _TABLE_SIZES
            yield Row(
                f"{name}-{size}",
                group,
                what.format(size),
                partial(calls, num_tokens=num_tokens),  # type: ignore[call-arg]
                num_repeats=_REPEATS[size],
                goal=goal if in_table else Goal(),
                in_table=in_table,
                point=CurvePoint(curve="context", line=line, x=num_tokens),
            )
    # Eviction at its hardest: the free blocks come from thousands of short requests.
    yield Row(
        "prefill-evicting-32k-short",
        "prefill",
        "the same, 32k, the blocks left by requests of 48 tokens each",
        partial(calls_prefill.prefill_evicting, num_tokens=_SIZES["32k"], num_tokens_before=48),
        num_repeats=_REPEATS["32k"],
    )


def _admissions() -> Iterator[Row]:
    for is_held, name, what, line, goal in (
        (False, "free", "free blocks", "admit on free hits", Goal(target=10, stretch=100)),
        (True, "held", "blocks in use by others", "admit on held hits", Goal(target=1.4, stretch=10)),
    ):
        for size, num_tokens in _SIZES.items():
            in_table = size == "32k"
            yield Row(
                f"admit-{name}-{size}",
                "admit",
                f"allocate_slots on hits, {what}, {size}",
                partial(calls_prefill.admit_on_hits, num_tokens=num_tokens, is_held=is_held),
                num_repeats=_REPEATS[size],
                goal=goal if in_table else Goal(),
                in_table=in_table,
                point=CurvePoint(curve="context", line=line, x=num_tokens),
            )


def _reads() -> Iterator[Row]:
    for name, what, calls, goal in (
        ("block-ids", "get_block_ids", calls_decode.block_ids, Goal(target=10)),
        ("common-prefix", "get_num_common_prefix_blocks, four share", calls_decode.common_prefix, Goal(target=25)),
    ):
        yield Row(
            f"{name}-32k",
            "read",
            f"{what}, 32k",
            partial(calls, num_tokens=_SIZES["32k"]),
            num_repeats=(100, 20),
            goal=goal,
        )


def _hybrid() -> Iterator[Row]:
    goal = Goal(target=7, stretch=12)
    for num_windows in _NUM_WINDOWS:
        is_table = num_windows == 5
        yield Row(
            "hybrid-lookup-hit-32k" if is_table else f"hybrid-lookup-hit-32k-{1 + num_windows}-groups",
            "hybrid",
            f"get_computed_blocks, full + {num_windows} x sliding window, hit, 32k",
            partial(calls_prefill.lookup, num_tokens=_SIZES["32k"], num_windows=num_windows),
            num_repeats=_REPEATS["32k"],
            goal=goal if is_table else Goal(),
            in_table=is_table,
            point=CurvePoint(curve="groups", line="lookup, 32k", x=1 + num_windows),
        )
    for name, what, num_blocks_kept in (("evicted", "the windows' blocks gone", 0), ("holes", "a hole each 32nd", 31)):
        yield Row(
            f"hybrid-lookup-{name}-32k",
            "hybrid",
            f"the same, {what}",
            partial(
                calls_prefill.lookup_without_windows,
                num_tokens=_SIZES["32k"],
                num_windows=5,
                num_blocks_kept=num_blocks_kept,
            ),
            num_repeats=_REPEATS["32k"],
            goal=goal,
        )
    for num_windows in _NUM_WINDOWS:
        yield Row(
            f"hybrid-decode-step-{1 + num_windows}-groups",
            "hybrid",
            f"decode step, 256 running, full + {num_windows} x sliding window",
            partial(calls_decode.decode_step, num_running=256, num_windows=num_windows),
            num_repeats=(60, 20),
            in_table=num_windows == 5,
            point=CurvePoint(curve="groups", line="decode step, 256", x=1 + num_windows),
        )


def _pools() -> Iterator[Row]:
    for num_blocks in _POOL_SIZES:
        in_table = num_blocks in (NUM_BLOCKS, MANY_BLOCKS)
        is_many = num_blocks == MANY_BLOCKS
        yield Row(
            f"pool-{num_blocks}-time",
            "pool",
            f"pool of {num_blocks:,} blocks: construction",
            partial(calls_pool.construction, num_blocks=num_blocks),
            num_repeats=(1, 1) if is_many else (8, 3),
            num_warm_up=0 if is_many else 1,
            goal=Goal(target=100, stretch=200) if in_table else Goal(),
            is_frozen=False,
            in_table=in_table,
            in_quick=not is_many,
            point=CurvePoint(curve="pool", line="construction", x=num_blocks),
        )
    for num_blocks in (NUM_BLOCKS, MANY_BLOCKS):
        others: tuple[tuple[str, Unit, Callable[..., Repeat], Goal], ...] = (
            ("memory", "bytes", calls_pool.memory, Goal(target=10)),
            ("objects", "objects", calls_pool.collectable_objects, Goal(limit=99)),
        )
        for name, unit, calls, goal in others:
            yield Row(
                f"pool-{num_blocks}-{name}",
                "pool",
                f"the same: {name}" + (" the collector sees" if name == "objects" else ""),
                partial(calls, num_blocks=num_blocks),
                num_repeats=(1, 1),
                # What is imported or made once by the first construction is not the pool's.
                num_warm_up=0 if num_blocks == MANY_BLOCKS else 1,
                goal=goal,
                unit=unit,
                is_frozen=False,
                in_quick=num_blocks != MANY_BLOCKS,
            )


def _lives() -> Iterator[Row]:
    yield Row(
        "hash-32k",
        "life",
        "hash a prompt of 32k tokens, the same bytes",
        partial(calls_prefill.hash_prompt, num_tokens=_SIZES["32k"]),
        num_repeats=_REPEATS["32k"],
        goal=Goal(target=1.4, stretch=1.5),
    )
    for size, num_tokens in _SIZES.items():
        in_table = size == "32k"
        yield Row(
            f"life-hit-{size}",
            "life",
            f"whole life of a request that hits fully, {size}",
            partial(calls_prefill.life, num_tokens=num_tokens, is_hit=True),
            num_repeats=_REPEATS[size],
            goal=Goal(target=2.2, stretch=11) if in_table else Goal(),
            in_table=in_table,
            point=CurvePoint(curve="context", line="whole life, full hit", x=num_tokens),
        )
    yield Row(
        "life-new-32k",
        "life",
        "whole life of a request that hits nothing, 32k",
        partial(calls_prefill.life, num_tokens=_SIZES["32k"], is_hit=False),
        num_repeats=_REPEATS["32k"],
    )
