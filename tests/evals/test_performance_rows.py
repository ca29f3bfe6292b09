"""Each row of `kvplug bench manager` measures what it says: on both managers, with pools and prompts that are small."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from tests.evals.performance_support import NUM_BLOCKS, WatchedSide, new_ids, times
from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.performance import calls_decode, calls_pool, calls_prefill, catalogue, sides
from vllm_kvplug.evals.performance.catalogue import all_rows, chosen_rows
from vllm_kvplug.evals.performance.manager_bench import measure
from vllm_kvplug.evals.performance.results import Goal
from vllm_kvplug.evals.performance.sides import NUM_TOKENS_PER_BLOCK, Prompts

NUM_RUNNING = 32
NUM_TOKENS = 2_048
NUM_PROMPT_BLOCKS = NUM_TOKENS // NUM_TOKENS_PER_BLOCK


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sides, calls_prefill):
        monkeypatch.setattr(module, "NUM_BLOCKS", NUM_BLOCKS)
    monkeypatch.setattr(calls_decode, "NUM_RUNNING", NUM_RUNNING)
    monkeypatch.setattr(calls_decode, "NUM_PROMPT_TOKENS", 64)
    sides.prepare()


@pytest.fixture(params=["upstream", "kvplug"])
def side(request: pytest.FixtureRequest) -> WatchedSide:
    return WatchedSide(request.param)


def test_upstream_is_vllms_own_class(side: WatchedSide) -> None:
    module = type(side.manager().watched).__module__
    assert module.split(".")[0] == {"upstream": "vllm", "kvplug": "vllm_kvplug"}[side.label]


# Decode


@pytest.mark.parametrize(
    ("phase", "num_new"), [(calls_decode.nothing_new, 0), (calls_decode.new_block, 1), (calls_decode.full_block, 0)]
)
def test_each_call_of_a_decode_row_is_in_its_phase(side: WatchedSide, phase: object, num_new: int) -> None:
    repeat = calls_decode.decode_call(side, phase)  # type: ignore[arg-type]
    (manager,) = side.managers
    for _ in range(3):
        manager.allocations.clear()
        assert repeat() > 0
        # The last calls are the measured ones.
        measured = manager.allocations[-NUM_RUNNING:]
        assert [num for _, _, num in measured] == [num_new] * NUM_RUNNING
        assert len({request.request_id for request, _, _ in measured}) == NUM_RUNNING
        for request, answer, _ in measured:
            assert len((new_ids(answer) or [[]])[0]) == num_new
            # The step's token was the last of a block, and has been counted since.
            is_full = request.num_computed_tokens % NUM_TOKENS_PER_BLOCK == 0
            assert is_full == (phase is calls_decode.full_block)


def test_a_block_that_became_full_is_cached(side: WatchedSide) -> None:
    repeat = calls_decode.decode_call(side, calls_decode.full_block)
    repeat()
    request, _, _ = side.managers[0].allocations[-1]
    tokens = list(request.all_token_ids)[: request.num_computed_tokens]
    again = side.request([*tokens, 0])
    assert side.managers[0].watched.get_computed_blocks(again)[1] == len(tokens)


@pytest.mark.parametrize("name", ["decode-nothing-new", "decode-new-block", "decode-full-block", "block-ids-32k"])
def test_the_pool_lasts_for_all_repeats(side: WatchedSide, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "NUM_BLOCKS", 1)  # so that only what the row asked for is there
    monkeypatch.setattr(calls_decode, "NUM_RUNNING", 2)
    monkeypatch.setattr(catalogue, "_SIZES", dict.fromkeys(catalogue._SIZES, 64))
    (row,) = chosen_rows(name, quick=False)
    times(row.num_warm_up + max(row.num_repeats), row.build(side))
    assert all(answer is not None for _, answer, _ in side.managers[0].allocations)


@pytest.mark.parametrize("num_windows", [0, 2])
def test_a_decode_step_holds_all_phases_and_all_calls(side: WatchedSide, num_windows: int) -> None:
    repeat = calls_decode.decode_step(side, NUM_RUNNING, num_windows=num_windows)
    (manager,) = side.managers
    for _ in range(3):
        manager.allocations.clear()
        manager.common.clear()
        repeat()
        assert len(manager.allocations) == NUM_RUNNING
        assert len(manager.common) == 1
        assert len(manager.common[0]) == 1 + num_windows
        num_new = sum(new_ids(answer) is not None for _, answer, _ in manager.allocations)
        assert num_new == NUM_RUNNING // NUM_TOKENS_PER_BLOCK


def test_the_steps_fit_for_all_repeats(side: WatchedSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "NUM_BLOCKS", 1)
    most = max(row.num_warm_up + max(row.num_repeats) for row in all_rows() if "decode-step" in row.name)
    times(most, calls_decode.decode_step(side, 2))
    assert all(answer is not None for _, answer, _ in side.managers[0].allocations)


def test_cold_means_that_memory_is_walked_before_each_step(side: WatchedSide, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    monkeypatch.setattr(calls_decode, "cool_caches", lambda: walked.append(len(side.managers[0].allocations)))
    times(2, calls_decode.decode_step(side, NUM_RUNNING, is_cold=True))
    # Before the first call of each step: NUM_RUNNING admissions came before.
    assert walked == [NUM_RUNNING, 2 * NUM_RUNNING]
    times(2, calls_decode.decode_step(side, NUM_RUNNING))
    assert len(walked) == 2


def test_block_ids_are_asked_of_requests_with_a_new_block(side: WatchedSide) -> None:
    times(2, calls_decode.block_ids(side, NUM_TOKENS))
    lengths = [len(ids[0]) for ids in side.managers[0].ids]
    assert lengths == [NUM_PROMPT_BLOCKS + 1] * 8 + [NUM_PROMPT_BLOCKS + 2] * 8


def test_the_common_prefix_is_the_prompt_but_its_last_block(side: WatchedSide) -> None:
    times(2, calls_decode.common_prefix(side, NUM_TOKENS))
    # A lookup never hits the last token, so that each of the four has a last block of its own.
    assert side.managers[0].common == [[NUM_PROMPT_BLOCKS - 1]] * 2
    assert [num for _, _, num in side.managers[0].allocations[-2:]] == [1, 1]


# Prompts


def test_a_fresh_pools_blocks_were_never_used(side: WatchedSide) -> None:
    num_in_a_pool = (NUM_BLOCKS - 1) // NUM_PROMPT_BLOCKS
    times(num_in_a_pool + 2, calls_prefill.prefill_fresh(side, NUM_TOKENS))
    assert [len(manager.allocations) for manager in side.managers] == [num_in_a_pool, 2]
    for manager in side.managers:
        ids = [block_id for _, answer, _ in manager.allocations for block_id in new_ids(answer)[0]]
        assert len(set(ids)) == len(ids) == len(manager.allocations) * NUM_PROMPT_BLOCKS
        # The requests go on running.
        assert manager.num_used == len(ids)
        assert {num for _, num in manager.hits} == {0}


def test_evicting_evicts_a_cached_block_for_each_new_one(side: WatchedSide) -> None:
    repeat = calls_prefill.prefill_evicting(side, NUM_TOKENS)
    (manager,) = side.managers
    num_prompts = (NUM_BLOCKS - 1) // NUM_PROMPT_BLOCKS
    prompts = Prompts()
    before = [prompts.next(NUM_TOKENS) for _ in range(num_prompts)]
    rest = prompts.next((NUM_BLOCKS - 1) % NUM_PROMPT_BLOCKS * NUM_TOKENS_PER_BLOCK)
    # Every block of the pool is free, and cached.
    assert manager.num_used == 0
    assert [side.num_hit_tokens(prompt) for prompt in before] == [NUM_TOKENS] * num_prompts
    assert side.num_hit_tokens(rest) == len(rest)
    for number in range(1, 4):
        repeat()
        assert manager.allocations[-1][2] == NUM_PROMPT_BLOCKS
        assert [side.num_hit_tokens(prompt) for prompt in before] == [0] * number + [NUM_TOKENS] * (
            num_prompts - number
        )
    assert manager.num_used == 0


def test_evicting_takes_what_many_short_requests_left(side: WatchedSide) -> None:
    num_short_tokens = 48
    repeat = calls_prefill.prefill_evicting(side, NUM_TOKENS, num_tokens_before=num_short_tokens)
    prompts = Prompts()
    before = [prompts.next(num_short_tokens) for _ in range(NUM_PROMPT_BLOCKS)]
    assert [side.num_hit_tokens(prompt) for prompt in before] == [num_short_tokens] * NUM_PROMPT_BLOCKS
    repeat()
    hits = [side.num_hit_tokens(prompt) for prompt in before]
    # 128 blocks: 42 requests of three, and the last two blocks of the next.
    assert hits == [0] * 42 + [NUM_TOKENS_PER_BLOCK] + [num_short_tokens] * (NUM_PROMPT_BLOCKS - 43)


def test_a_freed_requests_blocks_are_its_own(side: WatchedSide) -> None:
    repeat = calls_prefill.free(side, NUM_TOKENS)
    (manager,) = side.managers
    manager.freed.clear()
    times(3, repeat)
    assert manager.freed == [NUM_PROMPT_BLOCKS] * 3


@pytest.mark.parametrize("num_windows", [0, 5])
def test_a_lookup_hits_the_whole_prompt_of_a_request_never_seen(side: WatchedSide, num_windows: int) -> None:
    repeat = calls_prefill.lookup(side, NUM_TOKENS, num_windows=num_windows)
    (manager,) = side.managers
    assert manager.num_used == 0
    manager.hits.clear()
    times(6, repeat)
    assert [num for _, num in manager.hits] == [NUM_TOKENS] * 6
    assert len({request_id for request_id, _ in manager.hits}) == 6


def test_a_lookup_that_hits_less_is_no_sample(side: WatchedSide) -> None:
    repeat = calls_prefill.lookup(side, NUM_TOKENS)
    assert side.managers[0].reset_prefix_cache()
    with pytest.raises(AssertionError):
        repeat()


@pytest.mark.parametrize(("num_kept", "num_hit_tokens"), [(0, 0), (31, 31 * NUM_TOKENS_PER_BLOCK)])
def test_only_the_windows_blocks_are_gone(side: WatchedSide, num_kept: int, num_hit_tokens: int) -> None:
    repeat = calls_prefill.lookup_without_windows(side, NUM_TOKENS, num_windows=5, num_blocks_kept=num_kept)
    (manager,) = side.managers
    for number, (full, *windows) in enumerate(manager.ids):
        evicted = set().union(*manager.evicted[5 * number : 5 * number + 5])
        assert evicted.isdisjoint(full)
        assert len(evicted) == sum(len(ids) // (num_kept + 1) for ids in windows)
    manager.hits.clear()
    times(5, repeat)
    assert [num for _, num in manager.hits] == [num_hit_tokens] * 5


@pytest.mark.parametrize("is_held", [False, True])
def test_blocks_that_are_hit_are_free_or_held_as_the_row_says(side: WatchedSide, is_held: bool) -> None:
    repeat = calls_prefill.admit_on_hits(side, NUM_TOKENS, is_held=is_held)
    (manager,) = side.managers
    num_held = calls_prefill.NUM_CACHED_PROMPTS * (NUM_PROMPT_BLOCKS + 1) if is_held else 0
    assert manager.num_used == num_held
    manager.hits.clear()
    manager.allocations.clear()
    times(6, repeat)
    assert [num for _, num in manager.hits] == [NUM_TOKENS] * 6
    # One block is new; those that were hit come into use again unless they are.
    num_new = 1 if is_held else NUM_PROMPT_BLOCKS + 1
    assert [num for _, _, num in manager.allocations] == [num_new] * 6
    assert manager.num_used == num_held


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_whole_life_hits_as_it_says_and_leaves_nothing(side: WatchedSide, is_hit: bool) -> None:
    repeat = calls_prefill.life(side, NUM_TOKENS, is_hit=is_hit)
    (manager,) = side.managers
    manager.hits.clear()
    manager.freed.clear()
    times(5, repeat)
    assert [num for _, num in manager.hits] == [NUM_TOKENS * is_hit] * 5
    assert manager.freed == [NUM_PROMPT_BLOCKS + 1] * 5
    assert manager.num_used == 0


def test_other_hashes_than_vllms_are_no_sample(side: WatchedSide) -> None:
    repeat = calls_prefill.hash_prompt(side, NUM_TOKENS)
    assert repeat() > 0
    own = side.hasher
    side.hasher = lambda request: own(request)[:-1]
    with pytest.raises(AssertionError, match=f"{side.label}: other hashes than vLLM's"):
        repeat()


# Pools


def test_a_pools_rows_build_pools_of_their_size(side: WatchedSide) -> None:
    assert calls_pool.construction(side, 3_000)() > 0
    for calls in (calls_pool.memory, calls_pool.collectable_objects):
        few, many = (calls(side, num_blocks)() for num_blocks in (1_000, 5_000))
        assert min(few, many) > 0
        if side.label == "upstream":  # which has an object for each block, of some bytes
            assert many - few > 3_000
    assert [manager.num_blocks for manager in side.managers] == [3_000, 1_000, 5_000, 1_000, 5_000]
    assert not tracemalloc.is_tracing()


# The catalogue


def test_names_are_unique_and_goals_are_in_the_table() -> None:
    rows = all_rows()
    assert len({row.name for row in rows}) == len(rows)
    assert [row.name for row in rows if row.goal != Goal() and not row.in_table] == []
    assert [row.name for row in rows if not row.in_table and row.point is None] == []
    assert all(0 < row.num_repeats[1] <= row.num_repeats[0] for row in rows)


@pytest.mark.parametrize(
    ("pattern", "quick", "names"),
    [
        ("decode-n*", False, ["decode-nothing-new", "decode-new-block"]),
        ("block-ids", False, ["block-ids-32k"]),
        ("free-[0-9]*k", False, ["free-2k", "free-8k", "free-32k", "free-128k"]),
        # With --quick only the table's.
        ("free-[0-9]*k", True, ["free-2k", "free-32k", "free-128k"]),
        ("free-8k", True, ["free-8k"]),
        ("pool-2000000-time", True, ["pool-2000000-time"]),
        ("pool-*-time", True, ["pool-131928-time"]),
    ],
)
def test_rows_are_picked_by_part_or_pattern(pattern: str, quick: bool, names: list[str]) -> None:
    assert [row.name for row in chosen_rows(pattern, quick=quick)] == names


def test_without_a_pattern_all_rows_or_the_quick_ones() -> None:
    assert [row.name for row in chosen_rows(None, quick=False)] == [row.name for row in all_rows()]
    quick = [row.name for row in chosen_rows(None, quick=True)]
    assert quick == [row.name for row in all_rows() if row.in_table and "2000000" not in row.name]


def test_a_pattern_that_matches_nothing_names_all_rows() -> None:
    with pytest.raises(EvalUsageError, match=r"--rows no-such: expected .*, found no row; rows: decode-") as caught:
        chosen_rows("no-such", quick=False)
    assert all(row.name in str(caught.value) for row in all_rows())


def test_a_row_is_measured_frozen_or_not_and_leaves_the_heap_unfrozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "_SIZES", dict.fromkeys(catalogue._SIZES, 64))
    both = (WatchedSide("upstream"), WatchedSide("kvplug"))
    frozen: list[int] = []
    for name, is_frozen in (("common-prefix-32k", True), ("pool-10000-time", False)):
        (row,) = chosen_rows(name, quick=False)
        frozen.clear()
        result = measure(row, both, 2, on_repeat=lambda: frozen.append(gc.get_freeze_count()))
        assert [len(samples) for samples in result.samples] == [2, 2]
        # Some Python versions keep a few hundred objects there themselves.
        assert (min(frozen) > 10_000) == is_frozen
        assert gc.get_freeze_count() < 10_000
        assert (result.name, result.unit, result.goal) == (row.name, row.unit, row.goal)
