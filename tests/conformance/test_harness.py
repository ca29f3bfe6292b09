"""Would the conformance run notice? Its verdict on made-up results, and four replacements with one fault each."""

from __future__ import annotations

import pytest

from tests.conformance import verdict
from tests.conformance.__main__ import run_suite
from tests.conformance.expectations import SUITES, ListedTest, listed_tests, node_ids
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
        "leftovers": [],
        "inherited": [],
    }
    return Results(list(outcomes), outcomes, messages or {}, Swapped(**(swapped | counted)))  # type: ignore[arg-type]


def test_as_expected() -> None:
    run = results({A: "passed", B: "failed"}, {B: "UnsupportedError: sliding window"})
    assert verdict.problems_of_ours(run, OPEN, {A, B}) == []
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
        (results({A: "passed"}, leftovers=["vllm.x.BlockPool"]), "left at vllm.x.BlockPool"),
        (results({A: "passed"}, inherited=["BlockPool: vllm.x.BlockPool"]), "vllm.x.BlockPool is a class of vLLM"),
    ],
)
def test_each_problem_is_told(run: Results, expected: str) -> None:
    problems = verdict.problems_of_ours(run, OPEN, {A})
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_selected_test_that_did_not_run_is_a_problem() -> None:
    run = Results([A, B], {A: "passed"})
    assert verdict.problems_of_upstream(run) == [f"upstream: {B} not run"]


def test_lists_agree() -> None:
    assert {suite: len(node_ids(suite)) for suite in SUITES} == {"relevant": 222, "fast": 400, "slow": 20}
    assert set(node_ids("relevant")) <= set(node_ids("fast"))
    assert set(listed_tests()) <= set(node_ids("relevant"))


PREFILL = ["-k", "test_prefill and not hybrid"]


def run_candidate(name: str) -> list[str]:
    run = run_suite("relevant", f"candidates.{name}", PREFILL)
    assert len(run.selected) == 4
    return verdict.problems_of_ours(run, listed_tests(), set(run.selected))


@pytest.mark.slow
def test_a_wrong_free_order_is_found() -> None:
    problems = run_candidate("wrong_free_order")
    assert problems
    assert all(" failed" in problem for problem in problems)


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
    assert "does not replace: BlockPool" in capfd.readouterr().err
