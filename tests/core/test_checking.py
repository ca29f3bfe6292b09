"""A manager that checks itself: when it checks, what it raises, counts and logs; switched off nothing is built."""

from __future__ import annotations

import gc
import inspect
import logging
import random
import weakref

import pytest

from tests.core.pools import damage, isolate
from tests.core.support import FakeRequest, make_hybrid_manager, run_decode, run_prefill
from vllm_kvplug.checking import MAX_LOGGED_FINDINGS, CheckedCalls
from vllm_kvplug.errors import CallError, SettingsError
from vllm_kvplug.geometry import AttentionKind, GroupGeometry, MambaMode
from vllm_kvplug.invariants import InvariantError
from vllm_kvplug.manager import CacheManager
from vllm_kvplug.settings import Settings
from vllm_kvplug.story import NUM_EVENTS_PER_BLOCK, NUM_OWNERS_PER_BLOCK, BlockStory

FULL = GroupGeometry(AttentionKind.FULL, 4)
PUBLIC_CALLS = {name for name, member in vars(CacheManager).items() if inspect.isfunction(member) and name[0] != "_"}


def make_checked(action: str, num_blocks: int = 11, every: int = 1) -> CacheManager:
    settings = Settings.parse({"check_invariants": action, "check_invariants_every": every})
    return make_hybrid_manager(num_blocks, groups=(FULL,), settings=settings)


def checks_of(manager: CacheManager) -> CheckedCalls:
    assert manager.checks is not None
    return manager.checks


def repair(manager: CacheManager, block_id: int) -> None:
    isolate(manager.pool, block_id).num_holders -= 1


# Switched off


def test_switched_off_nothing_is_built_or_wrapped() -> None:
    manager = make_hybrid_manager()
    assert manager.checks is None
    assert Settings().check_invariants == "off"
    assert not PUBLIC_CALLS & vars(manager).keys()
    assert manager._observers.on_take == manager._observers.on_release == ()


def test_switched_on_every_public_call_of_this_manager_alone_is_wrapped() -> None:
    manager = make_checked("stop")
    assert {"allocate_slots", "free", "get_computed_blocks", "evict_blocks", "take_new_block_ids"} < PUBLIC_CALLS
    assert vars(manager).keys() >= PUBLIC_CALLS
    for name in PUBLIC_CALLS:
        assert not hasattr(getattr(CacheManager, name), "__wrapped__")
        signature = inspect.signature(getattr(CacheManager, name))
        assert inspect.signature(getattr(manager, name)) == signature


# "stop"


def test_stop_raises_out_of_the_call_with_the_whole_story() -> None:
    manager = make_checked("stop")
    request = FakeRequest("a", list(range(8)))
    run_prefill(manager, request)
    manager.evict_blocks({2})
    damage(manager, 2)
    with pytest.raises(InvariantError) as caught:
        manager.new_step_starts()
    assert str(caught.value).splitlines() == [
        "KV cache invariant broken, found after call 5, new_step_starts: block 2: references: expected 1, found 2",
        "  block 2 now: references 2, held by request 'a' (group 0, position 1); not free; not cached",
        "  last owners, oldest first: request 'a' (call 2)",
        "  last events, oldest first:",
        "    call 2, allocate_slots of request 'a': taken",
        "    call 2, allocate_slots of request 'a': cached in group 0",
        "    call 4, evict_blocks: withdrawn",
        "    call 4, evict_blocks: evicted",
    ]
    with pytest.raises(InvariantError, match="after call 6, free of request 'a'"):
        manager.free(request)  # as long as it stands
    assert checks_of(manager).num_findings >= 2


@pytest.mark.parametrize("name", sorted(PUBLIC_CALLS))
def test_stop_checks_after_every_public_call(name: str) -> None:
    manager = make_checked("stop")
    request = FakeRequest("a", list(range(8)))
    run_prefill(manager, request)
    arguments = {
        "allocate_slots": (request, 1),
        "cache_blocks": (request, 8),
        "evict_blocks": ({1},),
        "remove_skipped_blocks": ("a", 8),
    }
    arguments |= dict.fromkeys(("get_computed_blocks", "can_fit_full_sequence", "free", "never_fits"), (request,))
    arguments |= dict.fromkeys(("get_blocks", "get_block_ids", "get_num_common_prefix_blocks"), ("a",))
    if name == "allocate_slots":
        request.tokens.append(1)
    damage(manager, 9)
    with pytest.raises(InvariantError, match=rf"after call \d+, {name}.*block 9: references: expected 0, found 1"):
        getattr(manager, name)(*arguments.get(name, ()))


def test_a_call_that_raises_is_checked_too() -> None:
    manager = make_checked("stop")
    request = FakeRequest("a", list(range(8)))
    with pytest.raises(CallError, match="num_new_tokens"):
        manager.allocate_slots(request, 0)
    damage(manager, 3)
    with pytest.raises(InvariantError, match="after call 2, allocate_slots of request 'a': block 3") as caught:
        manager.allocate_slots(request=request, num_new_tokens=0)
    assert isinstance(caught.value.__context__, CallError)


def test_others_of_the_same_check_are_numbered() -> None:
    manager = make_checked("stop")
    damage(manager, 3)
    damage(manager, 4)
    with pytest.raises(InvariantError, match=r"block 3: references(.|\n)*and 4 more findings of this check"):
        manager.new_step_starts()


def test_structures_that_cannot_be_read_are_a_finding() -> None:
    manager = make_checked("stop")
    manager.pool.held_runs = None  # type: ignore[assignment]
    with pytest.raises(InvariantError, match=r"the check itself: expected to read all structures, found TypeError"):
        manager.new_step_starts()


def test_every_nth_call() -> None:
    manager = make_checked("stop", every=3)
    damage(manager, 3)
    manager.new_step_starts()
    manager.new_step_starts()
    with pytest.raises(InvariantError, match="after call 3, new_step_starts"):
        manager.new_step_starts()


# "log"


def test_log_goes_on_and_logs_and_counts_each_finding_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_checked("log")
    run_prefill(manager, FakeRequest("a", list(range(8))))
    assert (checks_of(manager).num_findings, caplog.messages) == (0, [])
    damage(manager, 2)
    manager.new_step_starts()
    damage(manager, 2)  # the same, with another number
    manager.new_step_starts()
    repair(manager, 2)
    assert checks_of(manager).num_findings == 1
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("vllm.kvplug.invariants", logging.ERROR)
    assert "after call 4, new_step_starts: block 2: references: expected 1, found 2\n" in record.getMessage()
    assert "call 2, allocate_slots of request 'a': taken" in record.getMessage()
    repair(manager, 2)
    manager.new_step_starts()
    damage(manager, 2)
    manager.new_step_starts()
    assert checks_of(manager).num_findings == 2


def test_log_stops_logging_and_goes_on_counting(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_checked("log", num_blocks=31)
    for block_id in range(1, 31):
        damage(manager, block_id)  # its references, and that it is in a run though it was never used
        manager.new_step_starts()
    assert checks_of(manager).num_findings == 2 * 30 + 1  # and the conservation
    assert len(caplog.records) == MAX_LOGGED_FINDINGS + 1
    assert caplog.messages[-1] == "KV cache invariants: 10 findings logged, further ones are counted only"


def test_log_survives_structures_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_checked("log")
    manager.pool.held_runs = None  # type: ignore[assignment]
    manager.new_step_starts()
    assert "the check itself: expected to read all structures, found TypeError" in caplog.messages[0]


# The story


def test_a_story_is_bounded_and_keeps_the_last() -> None:
    manager = make_checked("stop", num_blocks=3)
    for number in range(20):
        request = FakeRequest(f"r{number}", [number] * 8)
        run_prefill(manager, request)
        manager.free(request)
    story = checks_of(manager).story
    assert {len(story.events(block_id)) for block_id in (1, 2)} == {NUM_EVENTS_PER_BLOCK}
    assert [call.request_id for call in story.owners(1)] == ["r16", "r17", "r18", "r19"]
    assert len(story.owners(1)) == NUM_OWNERS_PER_BLOCK
    events = story.events(1)
    assert [event.what for event in events] == ["evicted", "taken", "cached in group 0", "released"] * 2
    assert [event.call.request_id for event in events] == ["r18"] * 4 + ["r19"] * 4
    assert story.events(0) == story.owners(0) == ()


def test_hits_and_resets_are_part_of_the_story() -> None:
    manager = make_checked("stop")
    for request_id in "ab":
        request = FakeRequest(request_id, list(range(8)))
        run_prefill(manager, request)
        manager.free(request)
    assert manager.reset_prefix_cache()
    manager.new_step_starts()
    story = checks_of(manager).story
    assert [event.what for event in story.events(1)] == [
        "taken",
        "cached in group 0",
        "released",
        "hit",
        "released",
        "reset",
    ]
    assert [str(event.call) for event in story.events(1)][-3:] == [
        "call 6, allocate_slots of request 'b'",
        "call 8, free of request 'b'",
        "call 9, reset_prefix_cache",
    ]
    assert [call.request_id for call in story.owners(1)] == ["a", "b"]


def test_what_happens_outside_any_call_is_told_as_such() -> None:
    manager = make_checked("stop")
    run_prefill(manager, FakeRequest("a", list(range(8))))
    manager.pool.release([isolate(manager.pool, 2)])
    with pytest.raises(InvariantError, match="outside any call, after call 3: released"):
        manager.new_step_starts()


def test_a_story_of_nothing() -> None:
    story = BlockStory()
    assert story.events(5) == story.owners(5) == ()
    assert str(story.call) == "outside any call, after call 0"


@pytest.mark.parametrize("kinds", [(), (AttentionKind.SLIDING_WINDOW,)], ids=["one group", "two groups"])
def test_a_manager_is_no_cycle(kinds: tuple[AttentionKind, ...]) -> None:
    gc.disable()
    try:
        manager = make_hybrid_manager(groups=(FULL, *(GroupGeometry(kind, 4, window_tokens=9) for kind in kinds)))
        run_prefill(manager, FakeRequest("a", list(range(8))))
        gone = weakref.ref(manager)
        del manager
        assert gone() is None
    finally:
        gc.enable()


def test_a_checked_manager_is_no_cycle() -> None:
    gc.disable()
    try:
        manager = make_checked("stop")
        run_prefill(manager, FakeRequest("a", list(range(8))))
        gone = weakref.ref(manager)
        free = manager.free
        del manager
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="free: expected a KV cache manager"):
        free(FakeRequest("a", []))


# Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"check_invariants": "yes"}, r"setting 'check_invariants': .*'off', 'log' or 'stop', found 'yes'"),
        ({"check_invariants": True}, r"setting 'check_invariants': .*'off', 'log' or 'stop', found True"),
        ({"check_invariants": None}, r"setting 'check_invariants': .*'off', 'log' or 'stop', found None"),
        ({"check_invariants": ["log"]}, r"setting 'check_invariants': .*'off', 'log' or 'stop', found \['log'\]"),
        ({"check_invariants_every": 0}, r"setting 'check_invariants_every': .*greater than or equal to 1, found 0"),
        ({"check_invariants_every": "2"}, r"setting 'check_invariants_every': .*valid integer, found '2'"),
    ],
)
def test_bad_settings_name_the_choices(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        Settings.parse(values)
    assert "\n" not in str(caught.value)


# Random traffic

HYBRIDS = {
    "full and window": (FULL, GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=6)),
    "sinks and chunks": (
        GroupGeometry(AttentionKind.SINK, 4, num_sink_blocks=2),
        GroupGeometry(AttentionKind.CHUNKED_LOCAL, 8, chunk_tokens=16),
    ),
    "full and aligned Mamba": (
        FULL,
        GroupGeometry(AttentionKind.MAMBA, 8, mamba_mode=MambaMode.ALIGN, num_speculative_blocks=1),
    ),
    "Mamba's states and two windows": (
        GroupGeometry(AttentionKind.MAMBA, 8, mamba_mode=MambaMode.ALL),
        GroupGeometry(AttentionKind.SLIDING_WINDOW, 4, window_tokens=5),
        GroupGeometry(AttentionKind.SLIDING_WINDOW, 8, window_tokens=17),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HYBRIDS)
def test_random_traffic_breaks_nothing(name: str, seed: int) -> None:
    """Prompts with shared beginnings, decoding, frees, failed loads, resets: after each call everything agrees."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    manager = make_hybrid_manager(25, groups=HYBRIDS[name], settings=Settings(check_invariants="stop"))
    held: dict[str, FakeRequest] = {}
    num_hit_tokens = 0
    for number in range(250):
        manager.new_step_starts()
        action = rng.random()
        if action < 0.3 or not held:
            tokens = [rng.randrange(2)] * rng.choice((8, 13, 16, 22, 24)) + [number] * rng.randrange(4)
            request = FakeRequest(f"r{number}", tokens)
            hit, block_ids = run_prefill(manager, request)
            num_hit_tokens += hit
            if block_ids is not None:
                held[request.request_id] = request
        elif action < 0.75:
            run_decode(manager, rng.choice(list(held.values())), rng.randrange(3))
        elif action < 0.95:
            manager.free(held.pop(rng.choice(list(held))))
        elif action < 0.98:
            manager.evict_blocks(set(rng.choices(range(25), k=2)))
        else:
            for request in held.values():
                manager.free(request)
            held = {}
            assert manager.reset_prefix_cache()
    assert num_hit_tokens
    assert checks_of(manager).num_findings == 0
    assert checks_of(manager).story.call.number > 500
