"""`--kv-cache-manager shadow` on vLLM's schedulers: it serves what one side alone would, and finds what differs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.glue.shadow_runs import Run, run
from tests.scheduler.cases import HAS_FULL_PROMPT_RESERVATION, Case
from vllm_kvplug.cli.main import main
from vllm_kvplug.errors import ContractError, SettingsError
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.vllm_glue import contract, shadow_bundle
from vllm_kvplug.vllm_glue.shadow_follower import Follower

TIGHT = Case("preempting", num_blocks=44)
FAULTY = "tests.glue.shadow_sides:Faulty"
VANDAL = "tests.glue.shadow_sides:Vandal"
CASES = [
    TIGHT,
    Case("no room to spare", num_blocks=41),
    Case("priority policy", policy="priority", num_blocks=44),
    Case("asynchronous", is_async=True, num_in_flight=2, num_blocks=44),
    Case("eagle", drafts="eagle", num_blocks=60),
    Case("without prefix caching", enable_caching=False, num_blocks=44),
    Case("window and chunked local", ("window:17", "chunk:24"), num_blocks=70),
    Case("full and Mamba align", ("full", "mamba:align"), num_blocks=60),
    Case("a connector", loads="any", num_blocks=52),
]
if HAS_FULL_PROMPT_RESERVATION:
    CASES.append(Case("full prompts reserved", num_blocks=44, reserves_full_prompts=True))
SIDES = [("upstream", "kvplug"), ("kvplug", "upstream")]


def faulty(fault: str, method: str, **further: Any) -> dict[str, Any]:
    return {"follower": FAULTY, "follower_config": {"fault": fault, "method": method, **further}}


def assert_serves_as_alone(done: Run, alone: Run) -> None:
    """Every answer is that of the serving manager without a shadow."""
    assert len(done.answers) == len(alone.answers)
    for number, (found, expected) in enumerate(zip(done.answers, alone.answers, strict=True)):
        assert found == expected, f"call {number}"
    assert done.side.counts == alone.side.counts
    assert alone.side.counts.preemptions > 0


@pytest.mark.parametrize("level", ["exact", "decision"])
@pytest.mark.parametrize("sides", SIDES, ids=lambda sides: f"{sides[0]} serves")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_upstream_and_kvplug_do_not_diverge(case: Case, sides: tuple[str, str], level: str, base_config: Any) -> None:
    serving, follower = sides
    done = run(case, base_config, "shadow", {"serving": serving, "follower": follower, "level": level}, seed=5)
    alone = run(case, base_config, serving, {}, seed=5)
    assert_serves_as_alone(done, alone)
    report = done.report
    assert report["diverged_requests"] == report["diverged_calls"] == []
    assert (report["compares"], report["num_calls_skipped"], report["num_requests_diverged"]) == (level, 0, 0)
    assert report["num_calls_compared"] == len(done.answers)
    assert report["num_requests_followed"] == 30
    assert report["overhead_s"] > 0
    assert done.num_resets > 0 or case.is_async or case.loads


@pytest.mark.parametrize(
    ("config", "method", "reason"),
    [
        (faulty("hits_less", "get_computed_blocks", times=20), "get_computed_blocks", "hit_tokens"),
        (faulty("hits_less", "get_computed_blocks"), "get_computed_blocks", "hit_tokens"),
        (faulty("refuses_waiting", "allocate_slots", after=30, times=20), "allocate_slots", "refused"),
        (faulty("refuses_running", "allocate_slots", after=30, times=20), "allocate_slots", "refused"),
        (faulty("takes_more", "allocate_slots", after=10), "allocate_slots", "blocks_in_use"),
        (faulty("leaks", "free", times=3), "free", "blocks_in_use"),
        (faulty("keeps", "reset_prefix_cache"), "reset_prefix_cache", "done"),
    ],
    ids=lambda value: json.dumps(value["follower_config"]) if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("level", ["exact", "decision"])
def test_a_followers_fault_is_found(
    config: dict[str, Any],
    method: str,
    reason: str,
    level: str,
    base_config: Any,
) -> None:
    alone = run(TIGHT, base_config, "upstream", {}, seed=5)
    done = run(TIGHT, base_config, "shadow", config | {"level": level}, seed=5)
    assert_serves_as_alone(done, alone)
    report = done.report
    assert report["compares"] == "decision"
    assert report["num_calls_compared"] + report["num_calls_skipped"] == len(done.answers)
    first = done.manager.tally.first[0]
    assert (first.method, first.reason, first.pools) == (method, reason, "same")
    counted = report["diverged_calls" if method == "reset_prefix_cache" else "diverged_requests"]
    assert [method, reason, "same"] in [row[:3] for row in counted]


@pytest.mark.parametrize("level", ["exact", "decision"])
def test_a_request_counts_once(level: str, base_config: Any) -> None:
    """Whatever follows from a difference is no further one of that request, and is told apart from the first."""
    report = run(TIGHT, base_config, "shadow", faulty("refuses_waiting", "allocate_slots") | {"level": level}, 5).report
    ((method, reason, pools, count), *others) = sorted(report["diverged_requests"], key=lambda row: row[2] != "same")
    assert (method, reason, pools, count) == ("allocate_slots", "refused", "same", 1)
    by_request = sum(row[3] for row in report["diverged_requests"])
    if level == "exact":
        assert by_request == report["num_requests_diverged"] <= report["num_requests_followed"]
    # All that were admitted, but for those that the serving side never admitted.
    assert report["num_requests_diverged"] >= 25
    assert {row[2] for row in others} == {"differ"}
    assert report["num_calls_skipped"] > 100


def test_what_a_serving_side_refuses_and_a_follower_admits(base_config: Any) -> None:
    config = {
        "serving": FAULTY,
        "serving_config": {"fault": "refuses_running", "method": "allocate_slots", "after": 60, "times": 3},
        "follower": "upstream",
    }
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    assert_serves_as_alone(done, run(TIGHT, base_config, FAULTY, config["serving_config"], seed=5))  # type: ignore[arg-type]
    assert done.report["level"] == "decision"
    assert ["allocate_slots", "admitted", "same", 1] in done.report["diverged_requests"]


def test_block_ids_alone_are_a_matter_of_the_exact_level(base_config: Any) -> None:
    config = faulty("turns", "new_step_starts", times=1)
    exact = run(Case("roomy", num_blocks=400), base_config, "shadow", config | {"level": "exact"}, seed=5).report
    # After the first one the ids say nothing, and nothing else differs.
    assert [row[:3] for row in exact["diverged_requests"]] == [["allocate_slots", "block_ids", "same"]]
    assert (exact["num_requests_diverged"], exact["compares"]) == (1, "decision")
    decision = run(Case("roomy", num_blocks=400), base_config, "shadow", config | {"level": "decision"}, seed=5).report
    assert decision["num_requests_diverged"] == 0


def test_a_common_reset_makes_the_pools_equal_again(base_config: Any) -> None:
    config = faulty("hits_less", "get_computed_blocks", after=10, times=8) | {"level": "decision"}
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    assert done.report["num_requests_diverged"] > 0
    assert done.num_resets > 0
    assert done.manager.tally.pools_are_same


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("level", ["exact", "decision"])
def test_a_follower_changes_nothing_of_the_serving_side(level: str, evicts: bool, base_config: Any) -> None:
    alone = run(TIGHT, base_config, "upstream", {}, 5, evicts=evicts)
    done = run(TIGHT, base_config, "shadow", {"follower": VANDAL, "level": level}, 5, evicts=evicts)
    assert_serves_as_alone(done, alone)
    assert done.manager.managers[1].num_damaged > 200
    # It damages its own copies after its work, which is right; they are fresh for each call.
    assert done.report["num_requests_diverged"] == 0
    assert (done.num_evictions > 0) is evicts


def test_evictions_reach_the_followers_own_blocks(base_config: Any) -> None:
    """With other block ids the follower's blocks in the same places are meant: hits stay equal."""
    config = faulty("turns", "new_step_starts", times=1) | {"level": "decision"}
    done = run(Case("roomy", num_blocks=400), base_config, "shadow", config, 5, evicts=True)
    assert done.num_evictions > 5
    assert done.report["num_requests_diverged"] == 0


METHODS = [
    name for name in contract.CALLS if name not in ("evict_blocks", "take_new_block_ids", "remove_skipped_blocks")
]


# What asks for a method that a plain scheduler does not ask for.
CASES_OF_METHODS = {
    "cache_blocks": Case("asynchronous", is_async=True, num_in_flight=2, num_blocks=44),
    "can_fit_full_sequence": Case("full prompts reserved", num_blocks=44, reserves_full_prompts=True),
}


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_the_follower_stops_the_comparing_alone(
    method: str,
    base_config: Any,
    kvplug_log: list[str],
) -> None:
    case = CASES_OF_METHODS.get(method, TIGHT)
    alone = run(case, base_config, "upstream", {}, seed=5)
    after = 0 if method == "reset_prefix_cache" else 10
    done = run(case, base_config, "shadow", faulty("raises", method, after=after), seed=5)
    if method == "get_block_ids":  # no scheduler without a connector asks
        for one in (done, alone):
            assert [one.manager.get_block_ids("unknown") for _ in range(11)] == [([],)] * 11
    assert_serves_as_alone(done, alone)
    report = done.report
    assert report["compares"] == "nothing"
    assert report["num_requests_diverged"] == 0
    assert done.manager.managers == (done.manager.serving,)
    (line,) = [line for line in kvplug_log if "comparing stops" in line]
    assert line == (
        f"shadow: the follower '{FAULTY}' failed in {method}; comparing stops here, and 'upstream' goes on serving"
    )


@pytest.mark.parametrize("name", ["begin", "_compare", "_are_equal_steps"])
def test_a_failure_of_the_comparing_is_not_laid_at_the_followers_door(
    name: str, base_config: Any, kvplug_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Follower, name, fail)
    done = run(TIGHT, base_config, "shadow", {}, seed=5)
    assert_serves_as_alone(done, run(TIGHT, base_config, "upstream", {}, seed=5))
    assert done.report["compares"] == "nothing"
    (line,) = [line for line in kvplug_log if "comparing stops" in line]
    assert re.fullmatch(r"shadow: comparing failed in \w+; comparing stops here, and 'upstream' goes on serving", line)


def test_the_first_divergences_are_logged_in_full(base_config: Any, kvplug_log: list[str]) -> None:
    config = faulty("hits_less", "get_computed_blocks") | {"log_first": 2}
    run(TIGHT, base_config, "shadow", config, seed=5)
    first, hint, second, last = [line for line in kvplug_log if line.startswith("shadow: ")]
    assert hint.startswith("shadow: to replay what led to a divergence, set 'bundle'")
    assert re.fullmatch(
        r"""shadow: divergence 1 of request 'r\d+' \(number \d+\): hit_tokens in get_computed_blocks, all calls .* equal
  call \d+: get_computed_blocks\(request \d+\)
  request: \{'num_tokens': .*\}
  serving:  \{'blocks': .*\}
  follower: \{'blocks': .*\}
  blocks in use, before and after: serving \d+ and \d+, follower \d+ and \d+""",
        first,
    )
    assert "there were differences before" in second
    assert last == "shadow: 2 divergences are logged, further ones are counted only"


def test_a_bundle_repeats_what_was_asked(base_config: Any, tmp_path: Path) -> None:
    config = faulty("hits_less", "get_computed_blocks") | {"bundle": str(tmp_path / "new" / "bundle"), "log_first": 3}
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    done.manager._bundle.close()
    folder = tmp_path / "new" / "bundle"
    assert sorted(path.name for path in folder.iterdir()) == ["divergences.json", "trace.jsonl.gz"]
    written = json.loads((folder / "divergences.json").read_text())
    assert (written["format"], written["version"]) == ("vllm_kvplug divergences", 1)
    assert written["trace"] == {
        "file": "trace.jsonl.gz",
        "first_operation": 0,
        "last_operation": len(done.answers) - 1,
        "stopped": None,
    }
    assert written["diverged_requests"] == done.report["diverged_requests"]
    assert [one["number"] for one in written["divergences"]] == [1, 2, 3]
    assert all(one["request_id"] is None for one in written["divergences"])

    operations = list(TraceReader(folder / "trace.jsonl.gz"))
    assert [operation.method for operation in operations] == [name for name, _ in done.answers]
    first = operations[written["divergences"][0]["operation"]]
    assert (first.method, first.request_number) == ("get_computed_blocks", written["divergences"][0]["request"])
    assert first.answer.num_hit_tokens == written["divergences"][0]["serving"]["num_hit_tokens"]


def test_a_bundle_that_cannot_be_written_refuses_the_start(base_config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"setting 'bundle': expected a folder that can be made, found .*file"):
        run(TIGHT, base_config, "shadow", {"bundle": str(tmp_path / "file")}, seed=5)


def test_a_full_bundle_keeps_the_first_calls_and_can_be_replayed(
    base_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_bundle, "_MIB", 8 << 10)
    append = shadow_bundle.Bundle.append

    def append_and_flush(bundle: Any, operation: Any) -> bool:
        if operation.number % 100 == 0:
            bundle._writer.flush()
        return append(bundle, operation)

    monkeypatch.setattr(shadow_bundle.Bundle, "append", append_and_flush)
    config = faulty("hits_less", "get_computed_blocks") | {"bundle": str(tmp_path), "bundle_max_mib": 1}
    done = run(TIGHT, base_config, "shadow", config, seed=5)
    assert done.report["num_calls_compared"] + done.report["num_calls_skipped"] == len(done.answers)
    done.manager._bundle.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["divergences.json", "trace.jsonl.gz"]
    written = json.loads((tmp_path / "divergences.json").read_text())
    operations = list(TraceReader(tmp_path / "trace.jsonl.gz"))
    assert 0 < len(operations) < len(done.answers) // 2
    assert [operation.method for operation in operations] == [name for name, _ in done.answers[: len(operations)]]
    assert written["trace"] | {"file": ""} == {
        "file": "",
        "first_operation": 0,
        "last_operation": len(operations) - 1,
        "stopped": "full",
    }
    first = written["divergences"][0]
    assert operations[first["operation"]].answer.num_hit_tokens == first["serving"]["num_hit_tokens"]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "trace.jsonl.gz"), "--manager", "upstream,kvplug"])
    assert ended.value.code == 0


def test_a_side_that_cannot_be_constructed_refuses_the_start(base_config: Any) -> None:
    for side in ("follower", "serving"):
        with pytest.raises(ContractError) as caught:
            run(TIGHT, base_config, "shadow", {side: "tests.glue.shadow_sides:Unbuildable"}, seed=5)
        message = str(caught.value)
        assert message.startswith(
            f"the {side} side of 'shadow': kv_cache_manager: 'tests.glue.shadow_sides:Unbuildable' "
        )
        assert message.endswith("OSError: no disk today")
