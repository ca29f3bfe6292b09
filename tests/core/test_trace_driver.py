"""The driver: the recorded calls where managers decide alike, and sensible ones where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.core.trace_support import (
    MIB,
    TOKENS_PER_BLOCK,
    FullContractManager,
    SmallScheduler,
    header,
    make_manager,
    operations,
)
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.trace.comparison import compare
from vllm_kvplug.trace.driver import AHEAD, FOREIGN_BLOCKS, LEFT_OUT, UNKNOWN_CALL, ManagerDriver, Outcome
from vllm_kvplug.trace.operations import NOTHING, REFUSED, Answer, Operation, RequestState, equal_rows
from vllm_kvplug.trace.recorder import Recorder
from vllm_kvplug.trace.replay import Replay, ReplayedManager
from vllm_kvplug.trace.stand_in import StandIn, UnknownTokens
from vllm_kvplug.trace.writer import TraceWriter


class Spy:
    """A manager that answers as told, and remembers its calls."""

    class Blocks:
        def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...]:
            return ([1],)

        def new_empty(self) -> Spy.Blocks:
            return Spy.Blocks()

    def __init__(self, num_hit_tokens: int = 0) -> None:
        self.empty_kv_cache_blocks = self.Blocks()
        self.hits = self.Blocks()
        self.num_hit_tokens = num_hit_tokens
        self.refuses = False
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def get_computed_blocks(self, request: Any) -> tuple[Any, int]:
        self.calls.append(("get_computed_blocks", (request.num_computed_tokens,), {}))
        return (self.hits if self.num_hit_tokens else self.empty_kv_cache_blocks), self.num_hit_tokens

    def allocate_slots(self, request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
        self.calls.append(("allocate_slots", (request.num_computed_tokens, num_new_tokens), kwargs))
        return None if self.refuses else self.Blocks()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            shown = tuple(arg.request_id if hasattr(arg, "request_id") else arg for arg in args)
            self.calls.append((name, shown, kwargs))
            return self.Blocks() if name in ("get_blocks", "get_block_ids") else None

        return call

    def take(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        calls, self.calls = self.calls, []
        return calls


def lookup(num_hit_tokens: int, **state: Any) -> Operation:
    request = request_state(**state)
    answer = Answer(blocks=[[]], num_hit_tokens=num_hit_tokens)
    return Operation("get_computed_blocks", {}, request, request.number, answer)


def request_state(**changes: Any) -> RequestState:
    return msgspec.structs.replace(RequestState(0, 100, 0, 0, 0, False, []), **changes)


def admit(num_hit_tokens: int, num_new_tokens: int, *, refused: bool = False, **arguments: Any) -> Operation:
    arguments = {
        "num_new_tokens": num_new_tokens,
        "hits": "lookup" if num_hit_tokens else "empty",
        "num_new_computed_tokens": num_hit_tokens,
        **arguments,
    }
    return Operation("allocate_slots", arguments, request_state(), 0, REFUSED if refused else Answer(blocks=[[1]]))


def step(num_computed_tokens: int, num_new_tokens: int = 1, *, refused: bool = False) -> Operation:
    request = request_state(num_computed_tokens=num_computed_tokens)
    answer = REFUSED if refused else Answer(blocks=[[]])
    return Operation("allocate_slots", {"num_new_tokens": num_new_tokens}, request, 0, answer)


def free(*, is_finished: bool = False) -> Operation:
    return Operation("free", {"is_finished": True} if is_finished else {}, request_state(), 0)


def drive(driver: ManagerDriver, *made: Operation) -> list[Outcome]:
    return [driver.apply(operation) for operation in made]


def test_the_very_calls_where_both_decide_alike() -> None:
    made = operations(num_steps=60)
    assert any(operation.answer.refused for operation in made)
    driver = ManagerDriver(make_manager())
    for operation in made:
        outcome = driver.apply(operation)
        assert outcome.answer is not None
        assert compare(operation, outcome.answer, same_class=True) is None
        assert not outcome.is_adjusted
    check_invariants(driver.manager)
    assert driver.manager.usage == 0
    assert driver.counts["preemptions"] > 0
    assert driver.counts["skipped"] == driver.counts["refusals"] == driver.counts["withdrawals"] == 0
    assert not driver._seats  # nothing is kept of requests that have ended


def test_a_running_request_is_driven_as_a_scheduler_calls() -> None:
    spy = Spy()
    driver = ManagerDriver(spy)
    drive(driver, lookup(0), admit(0, 100), step(100))
    assert spy.take()[-1] == ("allocate_slots", (100, 1), {"num_lookahead_tokens": 0})


@pytest.mark.parametrize(
    ("own_hits", "num_new_tokens"), [(0, 100), (16, 84), (32, 68), (96, 4)], ids=["none", "fewer", "same", "more"]
)
def test_its_own_hits_up_to_the_same_total(own_hits: int, num_new_tokens: int) -> None:
    spy = Spy(own_hits)
    driver = ManagerDriver(spy)
    outcome = drive(driver, lookup(32), admit(32, 68))[-1]
    name, args, kwargs = spy.take()[-1]
    assert (name, args[1]) == ("allocate_slots", num_new_tokens)
    assert kwargs["num_new_computed_tokens"] == own_hits
    assert kwargs["new_computed_blocks"] is (spy.hits if own_hits else spy.empty_kv_cache_blocks)
    assert outcome.is_adjusted is (own_hits != 32)
    assert drive(driver, step(100))[0].answer is not None
    assert driver.counts["hit_tokens"] == own_hits


def test_hits_that_reach_further_than_the_recorded_step() -> None:
    spy = Spy(64)
    driver = ManagerDriver(spy)
    # Recorded: no hit, and a prompt that is computed in steps of 40 tokens.
    outcomes = drive(driver, lookup(0), admit(0, 40))
    assert spy.take()[-1][1:] == (
        (0, 1),
        {
            "num_new_computed_tokens": 64,
            "new_computed_blocks": spy.hits,
            "num_lookahead_tokens": 0,
            "num_external_computed_tokens": 0,
            "delay_cache_blocks": False,
            "num_encoder_tokens": 0,
        },
    )
    assert outcomes[-1].is_adjusted
    skipped = drive(driver, step(40, 25))[0]  # up to 65, which it has
    assert skipped.skipped == AHEAD
    assert not spy.take()
    assert drive(driver, step(65, 35))[0].skipped is None
    assert spy.take()[-1][1] == (65, 35)
    drive(driver, free(), lookup(0), admit(0, 40))
    assert spy.take()[-1][2]["num_new_computed_tokens"] == 64
    drive(driver, step(40, 60))  # passes it within a step
    assert spy.take()[-1][1] == (65, 35)
    drive(driver, step(100))
    assert spy.take()[-1][1] == (100, 1)


@pytest.mark.parametrize(("own_hits", "external", "new"), [(32, 16, 52), (16, 32, 52), (64, 0, 36), (40, 8, 52)])
def test_external_tokens_bring_it_to_the_same_token(own_hits: int, external: int, new: int) -> None:
    spy = Spy(own_hits)
    drive(ManagerDriver(spy), lookup(32), admit(32, 52, num_external_computed_tokens=16))
    _, args, kwargs = spy.take()[-1]
    assert (kwargs["num_external_computed_tokens"], args[1]) == (external, new)


def test_whether_all_of_it_fits_is_asked_with_its_own_hits() -> None:
    spy = Spy(16)
    driver = ManagerDriver(spy)
    arguments = {"hits": "lookup", "num_new_computed_tokens": 32, "num_external_computed_tokens": 8}
    asked = Operation("can_fit_full_sequence", arguments, request_state(), 0, Answer(done=True))
    outcome = drive(driver, lookup(32), asked)[-1]
    assert spy.take()[-1] == (
        "can_fit_full_sequence",
        ("request-0",),
        {
            "num_new_computed_tokens": 16,
            "new_computed_blocks": spy.hits,
            "num_external_computed_tokens": 8,
            "num_encoder_tokens": 0,
        },
    )
    assert outcome.is_adjusted
    assert outcome.answer == Answer(done=False)
    difference = compare(asked, outcome.answer, same_class=False)
    assert difference is not None
    assert (difference.expected, difference.found) == ("True", "False")


def test_a_call_that_its_vllm_does_not_have_is_skipped() -> None:
    class Older:
        empty_kv_cache_blocks = Spy.Blocks()

    asked = Operation("can_fit_full_sequence", {}, request_state(), 0, Answer(done=True))
    driver = ManagerDriver(Older())
    assert driver.apply(asked).skipped == UNKNOWN_CALL
    assert driver.counts["skipped"] == 1


def test_a_misuse_is_repeated_as_it_was() -> None:
    spy = Spy(32)
    drive(ManagerDriver(spy), lookup(32), admit(32, 0))
    assert spy.take()[-1][1] == (0, 0)


def test_loads_that_come_later() -> None:
    spy = Spy(32)
    driver = ManagerDriver(spy)
    drive(driver, lookup(32), admit(32, 0, num_external_computed_tokens=48, delay_cache_blocks=True))
    _, args, kwargs = spy.take()[-1]
    assert (args[1], kwargs["num_external_computed_tokens"], kwargs["delay_cache_blocks"]) == (0, 48, True)
    request = request_state(num_computed_tokens=80)
    cached = Operation("cache_blocks", {"num_computed_tokens": 80}, request, 0)
    again = Operation("allocate_slots", {"num_new_tokens": 20, "hits": "empty"}, request, 0, Answer(blocks=[[2]]))
    assert [outcome.skipped for outcome in drive(driver, cached, again)] == [None, None]
    (_, cached_args, _), (_, args, kwargs) = spy.take()
    assert cached_args[1] == 80
    assert args == (80, 20)
    assert kwargs["new_computed_blocks"] is spy.empty_kv_cache_blocks


def test_a_waiting_request_that_it_refuses_is_left_out_until_it_is_admitted_again() -> None:
    spy = Spy()
    driver = ManagerDriver(spy)
    spy.refuses = True
    outcomes = drive(driver, lookup(0), admit(0, 100))
    assert driver.counts["refusals"] == 1
    assert outcomes[-1].answer == REFUSED
    spy.take()
    left_out = [
        step(100),
        Operation("cache_blocks", {"num_computed_tokens": 96}, request_state(), 0),
        Operation("get_blocks", {}, None, 0),
        free(),
    ]
    assert [outcome.skipped for outcome in drive(driver, *left_out)] == [LEFT_OUT] * 4
    assert not spy.take()
    assert driver.request_id(0) is not None  # the recorded manager has given it up, too
    spy.refuses = False
    assert drive(driver, lookup(0), admit(0, 100))[-1].skipped is None
    assert driver.counts["refusals"] == 1


def test_a_running_request_that_it_refuses_gives_its_blocks_back() -> None:
    spy = Spy()
    driver = ManagerDriver(spy)
    drive(driver, lookup(0), admit(0, 100))
    spy.take()
    spy.refuses = True
    assert drive(driver, step(100))[0].answer == REFUSED
    assert [name for name, _, _ in spy.take()] == ["allocate_slots", "free"]
    spy.refuses = False
    assert drive(driver, step(101))[0].skipped == LEFT_OUT
    assert driver.request_id(0) is None
    assert driver.counts["preemptions"] == 1


def test_it_is_admitted_again_at_its_next_step_where_that_was_asked_for() -> None:
    spy = Spy()
    driver = ManagerDriver(spy, readmits_refused=True)
    drive(driver, lookup(0), admit(0, 100))
    spy.refuses = True
    drive(driver, step(100))
    spy.take()
    tried = drive(driver, step(101))[0]  # still no room
    assert (tried.answer, tried.is_adjusted) == (REFUSED, True)
    assert driver.counts["readmissions"] == 0
    spy.refuses, spy.num_hit_tokens = False, 48
    spy.take()
    back = drive(driver, step(102))[0]
    assert back.is_adjusted
    (looked_up, (num_computed_tokens,), _), (_, args, kwargs) = spy.take()
    assert (looked_up, num_computed_tokens) == ("get_computed_blocks", 0)
    assert (args, kwargs["num_new_computed_tokens"]) == ((0, 103 - 48), 48)
    drive(driver, step(103))
    assert spy.take()[-1][1] == (103, 1)
    assert (driver.counts["refusals"], driver.counts["readmissions"]) == (1, 1)
    # It has been preempted once more than recorded.
    assert driver._seats[0].stand_in.num_preemptions == 1


def test_a_waiting_request_that_it_admits_alone_is_freed_at_once() -> None:
    spy = Spy(16)
    driver = ManagerDriver(spy)
    drive(driver, lookup(0), admit(0, 100, refused=True))
    calls = spy.take()
    assert [name for name, _, _ in calls] == ["get_computed_blocks", "allocate_slots", "free"]
    assert calls[1][2]["delay_cache_blocks"] is True
    assert drive(driver, lookup(0), admit(0, 100))[-1].skipped is None
    assert spy.take()[1][2]["delay_cache_blocks"] is False
    assert driver.counts["withdrawals"] == 1
    assert driver.counts["admissions"] == 1


def test_blocks_of_a_request_that_was_withdrawn_are_no_hits() -> None:
    """Nothing was computed into them."""
    made = operations(num_steps=20)
    request = next(operation.request for operation in made if operation.method == "get_computed_blocks")
    assert request is not None
    assert len(request.block_hashes) >= 2
    driver = ManagerDriver(make_manager())
    first = Operation("get_computed_blocks", {}, request, request.number, Answer(blocks=[[]], num_hit_tokens=0))
    arguments = {"num_new_tokens": request.num_tokens, "hits": "empty"}
    refused = Operation("allocate_slots", arguments, request, request.number, REFUSED)
    drive(driver, first, refused)
    again = drive(driver, first)[0]
    assert driver.counts["withdrawals"] == 1
    assert again.answer is not None
    assert again.answer.num_hit_tokens == 0


def test_a_running_request_that_it_serves_alone_keeps_its_slots() -> None:
    spy = Spy()
    driver = ManagerDriver(spy)
    drive(driver, lookup(0), admit(0, 100))
    spy.take()
    drive(driver, step(100, refused=True))
    assert driver.counts["withdrawals"] == 1
    assert spy.take() == [("allocate_slots", (100, 1), {"num_lookahead_tokens": 0})]
    assert drive(driver, step(100))[0].skipped == AHEAD  # the recorded manager's second attempt
    assert drive(driver, step(101))[0].skipped is None
    assert spy.take()[-1][1] == (101, 1)


def test_a_trace_that_begins_in_the_middle_of_a_request() -> None:
    for readmits, skipped in ((False, LEFT_OUT), (True, None)):
        spy = Spy(32)
        driver = ManagerDriver(spy, readmits_refused=readmits)
        asked, stepped = drive(driver, Operation("get_blocks", {}, None, 0), step(60))
        assert asked.skipped == LEFT_OUT
        assert stepped.skipped == skipped
    assert spy.take()[-1][1] == (0, 29)


def test_errors_are_outcomes() -> None:
    class Broken(Spy):
        def allocate_slots(self, request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
            raise RuntimeError("broken")

    driver = ManagerDriver(Broken())
    outcome = drive(driver, lookup(0), admit(0, 100))[-1]
    assert isinstance(outcome.error, RuntimeError)
    assert outcome.answer == Answer(error="RuntimeError")
    assert drive(driver, step(100))[0].skipped == LEFT_OUT


def test_block_ids_are_passed_on_only_where_they_mean_the_same() -> None:
    evict = Operation("evict_blocks", {"block_ids": [3, 1]})
    spy = Spy()
    assert ManagerDriver(spy).apply(evict).answer == NOTHING
    assert spy.take() == [("evict_blocks", ({1, 3},), {})]
    assert ManagerDriver(spy, takes_block_ids=False).apply(evict).skipped == FOREIGN_BLOCKS
    assert not spy.take()


def test_unknown_requests_are_asked_for_by_an_id_that_nobody_has() -> None:
    spy = Spy()
    driver = ManagerDriver(spy)
    drive(driver, lookup(0), admit(0, 100), Operation("get_blocks", {}, None, -1))
    (_, (request_id,), _) = spy.take()[-1]
    assert request_id not in {driver.request_id(0), None}


def test_a_stand_in_has_what_managers_read() -> None:
    stand_in = StandIn(3, 100)
    stand_in.follow(request_state(num_tokens=103, num_preemptions=1), 2)
    assert stand_in.num_preemptions == 3
    assert stand_in.num_output_tokens == 3
    assert stand_in.all_token_ids[98:110] == [0] * 5
    stand_in.own_mark = 1  # a third party may
    tokens = UnknownTokens(2)
    assert list(tokens) == [0, 0]
    with pytest.raises(IndexError):
        tokens[2]


@pytest.mark.parametrize("num_blocks", [20, 24, 60])
def test_another_pool(num_blocks: int) -> None:
    """All ends well: nothing is held at the end. A smaller pool refuses some, a larger one admits what had to wait."""
    made = operations(num_steps=80, seed=3)
    driver = ManagerDriver(make_manager(num_blocks), readmits_refused=True, takes_block_ids=False)
    for operation in made:
        outcome = driver.apply(operation)
        assert outcome.error is None, (operation, outcome.error)
        check_invariants(driver.manager)
    assert driver.manager.usage == 0
    assert (driver.counts["refusals"] > 0) is (num_blocks < 30)
    assert (driver.counts["readmissions"] > 0) is (num_blocks < 30)
    if num_blocks > 30:
        assert driver.counts["withdrawals"] > 0


@pytest.mark.parametrize("num_blocks", [20, 30])
def test_a_driven_manager_sees_which_free_is_a_request_s_last(num_blocks: int, tmp_path: Path) -> None:
    """So that whatever keeps something of a request, as a recorder does, can forget it."""
    made = operations(num_steps=80, seed=3)
    manager = make_manager(num_blocks)
    seen: list[bool] = []
    free = manager.free

    def watched(request: Any) -> None:
        seen.append(request.is_finished())
        free(request)

    manager.free = watched  # type: ignore[method-assign]
    recorder = Recorder(manager, TraceWriter(tmp_path / "trace.gz", header(), max_bytes=MIB))
    driver = ManagerDriver(manager, readmits_refused=True, takes_block_ids=False)
    for operation in made:
        assert driver.apply(operation).error is None
        assert driver.request_id(-1) is None
    num_requests = sum(operation.arguments.get("is_finished", False) for operation in made)
    assert seen.count(True) == num_requests > 20
    assert seen.count(False) > 0
    assert not recorder._calls._numbers
    assert not recorder._calls._lookups
    assert not recorder.writer._encoder._requests
    recorder.close()


class Forgetful(FullContractManager):
    """A deliberate fault: after a while, lookups find a block less than they could."""

    num_lookups = 0

    def get_computed_blocks(self, request: Any) -> Any:
        self.num_lookups += 1
        blocks, num_hit_tokens = super().get_computed_blocks(request)
        if self.num_lookups > 5 and num_hit_tokens:
            shorter = type(request)(0, 0)
            shorter.__dict__.update(request.__dict__, num_tokens=num_hit_tokens)
            return super().get_computed_blocks(shorter)
        return blocks, num_hit_tokens


def test_a_replay_finds_a_deliberate_fault_and_goes_on() -> None:
    made = operations(num_steps=60)
    right, wrong = make_manager(), make_manager()
    wrong.__class__ = Forgetful
    managers = [
        ReplayedManager(name, manager, is_compared=True, same_class=True)
        for name, manager in (("right", right), ("wrong", wrong))
    ]
    replay = Replay(managers, [type(right), type(wrong)])
    replay.run(made)
    assert managers[0].is_equal
    first = managers[1].first_difference
    assert first is not None
    assert first.operation.method == "get_computed_blocks"
    assert first.operation.answer.num_hit_tokens is not None
    assert str(first) == str(replay.first_apart["wrong"])
    expected, found = first.operation.answer.num_hit_tokens, first.operation.answer.num_hit_tokens - TOKENS_PER_BLOCK
    assert f"expected {expected} hit tokens, found {found}" in str(first)
    assert f"operation {first.operation.number}, get_computed_blocks(request " in str(first)
    assert managers[1].differences["get_computed_blocks"] >= 1
    assert replay.num_apart["wrong"] == sum(managers[1].differences.values())
    check_invariants(wrong)


def test_a_manager_that_raises_is_driven_no_further() -> None:
    class Raising(FullContractManager):
        def free(self, request: Any) -> None:
            raise RuntimeError("two\nlines")

    manager = make_manager()
    manager.__class__ = Raising
    replayed = ReplayedManager("raising", manager, is_compared=False, same_class=False)
    Replay([replayed], [Raising]).run(operations(num_steps=10))
    assert replayed.error is not None
    assert replayed.error.endswith("raised RuntimeError: two lines")
    assert not replayed.is_equal
    assert len(replayed.times["free"].durations_ns) == 1


@pytest.mark.parametrize(
    ("method", "expected", "found", "excuse"),
    [
        ("make_prefix_cache_stats", Answer(counts={"requests": 2}), Answer(counts={"requests": 1}), "F10"),
        ("take_events", Answer(counts={"BlockRemoved": 2}), Answer(counts={}), "F13"),
        ("take_events", Answer(counts={"BlockStored": 2}), Answer(counts={"BlockStored": 1}), None),
        ("take_new_block_ids", Answer(numbers=[1, 2, 1]), Answer(numbers=[1, 2]), "F14"),
        ("take_new_block_ids", Answer(numbers=[1, 2]), Answer(numbers=[2, 1]), None),
        ("get_num_common_prefix_blocks", Answer(numbers=[1]), Answer(numbers=[1, 1]), None),
        ("allocate_slots", REFUSED, Answer(blocks=[[1]]), None),
        ("allocate_slots", Answer(error="AssertionError"), Answer(blocks=[[1]]), None),
        ("reset_prefix_cache", Answer(done=True), Answer(done=False), None),
    ],
)
def test_what_is_excused_and_what_is_not(method: str, expected: Answer, found: Answer, excuse: str | None) -> None:
    operation = Operation(method, {}, answer=expected)
    difference = compare(operation, found, same_class=False)
    assert difference is not None
    assert difference.excuse == excuse
    same = compare(operation, found, same_class=True)
    assert same is not None
    assert same.excuse is None
    assert compare(operation, expected, same_class=False) is None


def test_two_errors_are_equal_whatever_their_types() -> None:
    operation = Operation("allocate_slots", {}, answer=Answer(error="AssertionError"))
    assert compare(operation, Answer(error="CallError"), same_class=False) is None


def test_long_rows_are_compared_by_digest() -> None:
    from vllm_kvplug.trace.operations import short_row

    row = list(range(40))
    assert equal_rows([short_row(row)], [row])
    operation = Operation("get_blocks", {}, None, 0, Answer(blocks=[short_row(row)]))
    assert compare(operation, Answer(blocks=[row]), same_class=True) is None
    difference = compare(operation, Answer(blocks=[row[::-1]]), same_class=True)
    assert difference is not None
    assert difference.expected.startswith("blocks 40 blocks (digest ")


def test_the_scheduler_here_serves_everything() -> None:
    manager = make_manager()
    scheduler = SmallScheduler(manager, 3)
    scheduler.run(40)
    assert scheduler.num_preemptions
    assert manager.usage == 0
