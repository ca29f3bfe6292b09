"""F18: requests that can never fit the pool, behind vLLM's own scheduler, with fake model outputs.

With 0.17.1's manager each of them is refused for ever, and all that wait behind it with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from tests.glue.support import ENGINE_ARGS, model_folder
from tests.lockstep.twins import prepare_hashing
from tests.scheduler.cases import Case, build_scheduler
from tests.scheduler.loops import Side, run_one
from tests.scheduler.traffic import Script
from vllm_kvplug.vllm_glue import never_fitting

# 19 usable blocks of 4 tokens: a request may have 76 computed tokens, and one more that it ends with.
NUM_BLOCKS, NUM_SLOTS = 20, 76
PLAIN = Case("plain", num_blocks=NUM_BLOCKS)
AT_ONCE = Case("not in chunks", num_blocks=NUM_BLOCKS, is_chunked=False, max_num_tokens=160)
# The kinds of steps in which a request can meet the end of the pool.
CASES = [
    PLAIN,
    Case("in chunks", num_blocks=NUM_BLOCKS, max_num_tokens=8),
    Case("long prefill threshold", num_blocks=NUM_BLOCKS, long_prefill_threshold=10),
    AT_ONCE,
    Case("no caching", num_blocks=NUM_BLOCKS, max_num_tokens=8, enable_caching=False),
    Case("priority", num_blocks=NUM_BLOCKS, policy="priority"),
    Case("batch queue", num_blocks=NUM_BLOCKS, num_in_flight=3),
    Case("batch queue, in chunks", num_blocks=NUM_BLOCKS, num_in_flight=3, max_num_tokens=8),
    Case("asynchronous", num_blocks=NUM_BLOCKS, is_async=True, num_in_flight=2),
    Case("asynchronous, in chunks", num_blocks=NUM_BLOCKS, is_async=True, num_in_flight=2, max_num_tokens=8),
]
DRAFTING = [
    Case("n-gram", num_blocks=NUM_BLOCKS, drafts="ngram"),
    Case("eagle", num_blocks=NUM_BLOCKS, drafts="eagle"),
    Case("eagle, in chunks", num_blocks=NUM_BLOCKS, drafts="eagle", max_num_tokens=8),
    Case("asynchronous eagle", num_blocks=NUM_BLOCKS, drafts="eagle", is_async=True, num_in_flight=2),
]


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    prepare_hashing()
    model = model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen2")
    return EngineArgs(model=model, **ENGINE_ARGS).create_engine_config()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of here."""
    messages: list[str] = []
    monkeypatch.setattr(never_fitting.logger, "warning", lambda message, *args: messages.append(message % args))
    return messages


def script(name: str, num_prompt_tokens: int, max_tokens: int, arrives_at: int = 0, **changes: Any) -> Script:
    family = sum(map(ord, name)) % 40
    return Script(name, family, 0, 1 + family, num_prompt_tokens, max_tokens, arrives_at, **changes)


def answers(engine_config: Any, case: Case, *scripts: Script) -> dict[str, tuple[int, str]]:
    """Number of tokens and reason of the end, by request. The run is stopped if it does not end."""
    side = Side(case, engine_config, "kvplug", scripts)
    found = run_one(side, scripts).answers
    for one in scripts:
        tokens, _ = found[one.request_id]
        assert tokens == [one.token(one.num_prompt_tokens + n) for n in range(len(tokens))], one.request_id
    assert side.manager.pool.num_held_blocks == 0
    assert not side.scheduler.requests
    return {request_id: (len(tokens), reason) for request_id, (tokens, reason) in found.items()}


@pytest.fixture(params=CASES + DRAFTING, ids=lambda case: case.name)
def any_case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_a_prompt_that_can_never_fit_ends_and_others_go_on(engine_config: Any, any_case: Case) -> None:
    found = answers(engine_config, any_case, script("long", 120, 5), script("behind", 9, 5), script("later", 20, 5, 30))
    assert found == {"long": (0, "error"), "behind": (5, "length"), "later": (5, "length")}


def test_a_request_that_outgrows_the_pool_keeps_its_tokens(engine_config: Any, case: Case) -> None:
    found = answers(engine_config, case, script("grows", 10, 140))
    assert found == {"grows": (NUM_SLOTS - 10 + 1, "error")}


def test_with_drafts_it_ends_near_there(engine_config: Any) -> None:
    for case in DRAFTING:
        num_tokens, reason = answers(engine_config, case, script("grows", 10, 140))["grows"]
        assert reason == "error", case.name
        # Slots for drafts, which may be right, are needed at the same time.
        assert NUM_SLOTS - 10 - 2 * (case.num_drafts + 1) <= num_tokens <= NUM_SLOTS - 10 + 1, (case.name, num_tokens)


def test_a_request_that_ends_in_the_last_slot_is_served(engine_config: Any, case: Case) -> None:
    found = answers(engine_config, case, script("fits", 10, NUM_SLOTS - 10 + 1), script("prompt", NUM_SLOTS, 1))
    assert found == {"fits": (NUM_SLOTS - 10 + 1, "length"), "prompt": (1, "length")}


def test_one_that_outgrows_the_pool_among_others(engine_config: Any, any_case: Case) -> None:
    others = [script(f"other {n}", 5 + 4 * n, 30, arrives_at=7 * n) for n in range(8)]
    found = answers(engine_config, any_case, script("grows", 12, 140), *others)
    assert found.pop("grows")[1] == "error"
    assert found == {f"other {n}": (30, "length") for n in range(8)}


def test_two_that_outgrow_the_pool_end_both(engine_config: Any, any_case: Case) -> None:
    found = answers(engine_config, any_case, script("one", 12, 140), script("two", 40, 110), script("three", 8, 8))
    assert {name: reason for name, (_, reason) in found.items()} == {"one": "error", "two": "error", "three": "length"}


def test_priorities_do_not_save_it(engine_config: Any) -> None:
    case = dataclasses.replace(PLAIN, policy="priority")
    scripts = (script("low", 20, 30, priority=5), script("grows", 10, 140, priority=1), script("mid", 20, 30, 4))
    assert {name: reason for name, (_, reason) in answers(engine_config, case, *scripts).items()} == {
        "low": "length",
        "grows": "error",
        "mid": "length",
    }


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_one_that_fits_by_its_length_but_not_in_steps_of_this_size(engine_config: Any, num_in_flight: int) -> None:
    """A window's blocks are given back after the step: 60 tokens in one step need all of them at once."""
    case = Case("window", ("full", "window:8"), num_blocks=28, max_num_tokens=60, num_in_flight=num_in_flight)
    long = script("long", 60, 4)
    side = Side(case, engine_config, "kvplug", [long])
    side.add(long)
    assert side.manager.never_fits(side.scheduler.requests["long"]) is None
    assert answers(engine_config, case, long, script("behind", 9, 5)) == {"long": (0, "error"), "behind": (5, "length")}
    # In smaller steps it is served.
    smaller = dataclasses.replace(case, max_num_tokens=16)
    assert answers(engine_config, smaller, long) == {"long": (4, "length")}


def test_an_aborted_one_is_not_told_of(engine_config: Any) -> None:
    side = Side(AT_ONCE, engine_config, "kvplug", [])
    side.add(script("long", 120, 5))
    side.schedule()
    side.abort("long")
    assert all(not outputs["outputs"] for outputs in side.update().values())


def test_a_token_on_its_way_is_waited_for(engine_config: Any) -> None:
    """It may be the last one: the request would have ended well."""
    side = Side(AT_ONCE, engine_config, "kvplug", [])
    side.add(script("long", 120, 5))
    for num_on_its_way, ends in ((1, False), (1, False), (0, True)):
        side.scheduler.requests["long"].num_output_placeholders = num_on_its_way
        side.schedule()
        told = [one for outputs in side.update().values() for one in outputs["outputs"]]
        assert len(told) == ends


def test_the_client_is_told_and_the_front_end_that_it_is_finished(engine_config: Any, warnings: list[str]) -> None:
    side = Side(AT_ONCE, engine_config, "kvplug", [])
    # As with several API servers and data parallel.
    side.scheduler.finished_req_ids_dict = {0: set(), 3: set()}
    request = script("long", 120, 5).request(AT_ONCE.num_tokens_per_block)
    request.client_index = 3
    side.scheduler.add_request(request)
    warnings.clear()
    side.schedule()
    output, model_output, _ = side.in_flight.popleft()
    outputs = side.scheduler.update_from_output(output, model_output)
    (told,) = outputs[3].outputs
    assert (told.request_id, told.finish_reason, told.new_token_ids) == ("long", FinishReason.ERROR, [])
    assert told.num_cached_tokens == 0
    assert "needs 30 KV cache blocks at one time, and the engine has 19" in told.stop_reason
    assert outputs[3].finished_requests == {"long"}
    (line,) = warnings
    assert line == f"Request long ended with an error: {told.stop_reason}"


def test_vllms_own_manager_is_left_as_it_is(engine_config: Any) -> None:
    scheduler = build_scheduler(PLAIN, engine_config, "upstream")
    assert not {"schedule", "update_from_output"} & set(vars(scheduler))


@pytest.mark.parametrize(("num_blocks", "warns"), [(40, True), (41, False)])
def test_a_pool_smaller_than_the_longest_request_is_warned_of(
    engine_config: Any,
    warnings: list[str],
    num_blocks: int,
    warns: bool,
) -> None:
    build_scheduler(dataclasses.replace(PLAIN, num_blocks=num_blocks), engine_config, "kvplug")
    lines = [line for line in warnings if "does not fit" in line]
    assert len(lines) == warns
    if warns:
        assert "max_model_len 160 does not fit the KV cache: it needs 40 blocks, and there are 39" in lines[0]
        assert "Prompts that fit have at most 156 tokens, and" in lines[0]


def test_what_goes_on_at_its_next_attempt_is_not_ended(engine_config: Any) -> None:
    """Slots for drafts make it preempt itself after each chunk; each time it hits one chunk more."""
    case = Case("window", ("window:8",), num_blocks=11, max_num_tokens=32, drafts="eagle")
    assert answers(engine_config, case, script("x", 128, 1)) == {"x": (1, "length")}


def test_a_hit_that_makes_a_request_need_more_than_the_pool_is_dropped(engine_config: Any) -> None:
    case = Case("align", ("full", "mamba:align"), num_blocks=6)
    first = Script("first", 1, 0, 5, 12, 1, 0)
    second = Script("second", 1, 12, 5, 16, 1, 5)
    assert answers(engine_config, case, first, second) == {"first": (1, "length"), "second": (1, "length")}
