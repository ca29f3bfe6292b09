"""Would the conformance run notice? Its verdict on made-up results, and five replacements with one fault each."""

from __future__ import annotations

import pytest

from tests.conformance import survey, verdict
from tests.conformance.__main__ import run_suite
from tests.conformance.expectations import (
    SUITES,
    ListedTest,
    listed_tests,
    must_construct_ours,
    must_hash_with_ours,
    node_ids,
)
from tests.conformance.sdist import SuiteError
from tests.conformance.verdict import Results, Swapped

A, B = "tests/v1/core/test_x.py::test_a", "tests/v1/core/test_x.py::test_b"
OPEN = {B: ListedTest("open", "not yet", "UnsupportedError")}


def results(outcomes: dict[str, str], messages: dict[str, str] | None = None, **counted: object) -> Results:
    swapped = {
        "names": ["KVCacheManager"],
        "made_ours": {"KVCacheManager": 2},
        "made_upstream": {},
        "made_by_test": {node_id: {"KVCacheManager": 1} for node_id in outcomes},
        "called_ours": {"hash_block_tokens": 1},
        "called_by_test": {node_id: {"hash_block_tokens": 1} for node_id in outcomes},
        "leftovers": [],
        "inherited": [],
    }
    return Results(list(outcomes), outcomes, messages or {}, Swapped(**(swapped | counted)))  # type: ignore[arg-type]


def test_as_expected() -> None:
    run = results({A: "passed", B: "failed"}, {B: "UnsupportedError: sliding window"})
    assert verdict.problems_of_ours(run, OPEN, {A, B}, {A, B}) == []
    row = verdict.table({"upstream": None, "kvplug": run}, OPEN).splitlines()[-1].split()
    assert row == ["all", "1", "0", "1"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (results({A: "failed"}, {A: "assert 1 == 2"}), f"{A} failed: assert 1 == 2"),
        (results({A: "skipped"}), f"{A} skipped"),
        (results({A: "passed", B: "passed"}), f"{B} passes but is listed as open"),
        (results({A: "passed", B: "failed"}, {B: "KeyError: 3"}), f"{B} failed: KeyError: 3"),
        (results({A: "passed"}, made_upstream={"BlockPool": 1}), "constructed: BlockPool 1"),
        (results({A: "passed"}, made_ours={}), "no class of ours was constructed"),
        (results({A: "passed"}, made_by_test={}), f"{A} passes without constructing a class of ours"),
        (results({A: "passed"}, called_by_test={}), f"{A} passes without calling a function of ours"),
        (results({A: "passed"}, leftovers=["vllm.x.BlockPool"]), "left at vllm.x.BlockPool"),
        (results({A: "passed"}, inherited=["BlockPool: vllm.x.BlockPool"]), "vllm.x.BlockPool is a class of vLLM"),
    ],
)
def test_each_problem_is_told(run: Results, expected: str) -> None:
    problems = verdict.problems_of_ours(run, OPEN, {A}, {A})
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_selected_test_that_did_not_run_is_a_problem() -> None:
    run = Results([A, B], {A: "passed"})
    assert verdict.problems_of_upstream(run) == [f"upstream: {B} not run"]


def test_runs_add_up() -> None:
    both = results({A: "passed"}) + results({B: "failed"}, {B: "KeyError: 3"}, made_upstream={"BlockPool": 1})
    assert (both.selected, both.outcome(B), both.messages) == ([A, B], "failed", {B: "KeyError: 3"})
    assert both.swapped is not None
    assert (both.swapped.made_ours, both.swapped.made_upstream) == ({"KVCacheManager": 4}, {"BlockPool": 1})
    rows = verdict.table({"kvplug": both}, {}, {"fast": {A}, "slow": set()}).splitlines()
    assert [row.split() for row in rows[-2:]] == [["fast", "(1", "tests)", "1", "0", "0"], ["all", "1", "1", "0"]]


def test_lists_agree() -> None:
    sizes = {"standard": 403, "relevant": 222, "fast": 400, "end_to_end": 3, "slow": 20}
    assert {suite: len(set(node_ids(suite))) for suite in SUITES} == sizes
    assert set(node_ids("relevant")) <= set(node_ids("fast"))
    assert set(node_ids("end_to_end")) <= set(node_ids("slow"))
    assert len(must_hash_with_ours()) == 17


def test_no_exception_but_the_linked_list_and_the_adapter_key() -> None:
    file = "tests/v1/core/test_kv_cache_utils.py"
    assert {test.status for test in listed_tests().values()} == {"left out"}
    assert set(listed_tests()) == {
        f"{file}::test_free_kv_cache_block_queue_operations",
        f"{file}::test_free_kv_cache_block_queue_append_n",
        f"{file}::test_free_kv_cache_block_queue_popleft_n",
        f"{file}::test_generate_block_hash_extra_keys_lora",
    }


PREFILL = "test_prefill and not hybrid"


def run_candidate(name: str, suite: str = "relevant", tests: str = PREFILL, num_tests: int = 4) -> list[str]:
    run = run_suite(suite, f"candidates.{name}", ["-k", tests])
    assert len(run.selected) == num_tests
    return verdict.problems_of_ours(run, listed_tests(), must_construct_ours(), must_hash_with_ours())


@pytest.mark.slow
def test_a_wrong_free_order_is_found() -> None:
    problems = run_candidate("wrong_free_order")
    assert problems
    assert all(" failed" in problem for problem in problems)


@pytest.mark.slow
def test_wrong_hashes_are_found() -> None:
    problems = run_candidate("wrong_hashes", "fast", "test_request_block_hasher and not embeds", num_tests=2)
    assert sum("test_request_block_hasher" in problem and " failed" in problem for problem in problems) == 2


@pytest.mark.slow
def test_upstream_behind_ours_is_found() -> None:
    assert run_candidate("upstream_behind") == ["kvplug: classes of upstream were constructed: BlockHashToBlockMap 4"]


@pytest.mark.slow
def test_inheriting_from_upstream_is_found() -> None:
    problems = run_candidate("inherited")
    assert "kvplug: KVCacheManager: vllm.v1.core.kv_cache_manager.KVCacheManager is a class of vLLM" in problems


@pytest.mark.slow
def test_a_missing_replacement_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SuiteError, match="wrote no report"):
        run_candidate("incomplete")
    assert "does not replace: BlockPool" in capfd.readouterr().out


def test_a_survey_of_the_baselines_series_would_change_its_lists_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survey, "VLLM_VERSION", "0.17.0")
    monkeypatch.setattr(survey, "_run", lambda *_: pytest.fail("the tests are run"))
    with pytest.raises(SystemExit, match=r"the lists are those of the series of 0\.17\.1, found 0\.17\.0"):
        survey.main()
