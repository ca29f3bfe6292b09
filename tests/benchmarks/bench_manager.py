"""`make bench`: kvplug's manager alone, to be compared between commits (pytest-benchmark compare).

Not a suite, and pytest does not collect it by itself: the file must be named. What is measured, and how, are rows of
`kvplug bench manager`.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from vllm_kvplug.evals.performance.catalogue import Row, all_rows
from vllm_kvplug.evals.performance.measuring import Repeat, frozen_heap
from vllm_kvplug.evals.performance.sides import BenchedSide, prepare
from vllm_kvplug.evals.sides import SideChoice

_NAMES = (
    *("decode-nothing-new", "decode-new-block", "decode-full-block", "decode-step-256"),
    *("prefill-fresh-32k", "prefill-evicting-32k"),
    *("lookup-32k", "hybrid-lookup-hit-32k"),
    *("admit-free-32k", "admit-held-32k"),
    "free-32k",
    "pool-131928-time",
)
_ROWS = {row.name: row for row in all_rows()}
_GROUPS = {"hybrid": "lookup"}
_MAX_ROUNDS = 100


class _Clock:
    """A row's repeat prepares and times itself; pytest-benchmark, which times calls, reads that time here."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0

    def __call__(self) -> float:
        return self._elapsed_s

    def measure(self, repeat: Repeat) -> None:
        self._elapsed_s += repeat() / 1e6


_clock = _Clock()


@pytest.fixture(scope="module")
def side() -> BenchedSide:
    prepare()
    return BenchedSide(SideChoice("kvplug", "kvplug"))


def _benchmark(row: Row) -> object:
    group = _GROUPS.get(row.group, row.group)
    return pytest.param(row, id=row.name, marks=pytest.mark.benchmark(group=group, timer=_clock))


@pytest.mark.parametrize("row", [_benchmark(_ROWS[name]) for name in _NAMES])
def test_kvplug(row: Row, side: BenchedSide, benchmark: BenchmarkFixture) -> None:
    repeat = row.build(side)
    with frozen_heap() if row.is_frozen else nullcontext():
        benchmark.pedantic(
            _clock.measure, (repeat,), rounds=min(_MAX_ROUNDS, row.num_repeats[0]), warmup_rounds=row.num_warm_up
        )
