"""The manager that docs/write_a_manager.md explains, with vLLM's scheduler: served, shadowed and replayed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.glue.shadow_runs import run
from tests.glue.support import ROOT
from tests.scheduler.cases import HAS_FULL_PROMPT_RESERVATION, Case
from tests.scheduler.loops import answers_of
from tests.scheduler.traffic import random_scripts
from vllm_kvplug.cli.main import main
from vllm_kvplug.errors import ContractError, SettingsError
from vllm_kvplug.vllm_glue import registry

SOURCE = "docs/examples/small_manager.py"
SMALL = "small_manager:SmallManager"
CASES = [
    Case("roomy", num_blocks=400),
    Case("preempting", num_blocks=44),
    Case("asynchronous", is_async=True, num_in_flight=2, num_blocks=44),
    Case("n-gram drafts", drafts="ngram", num_blocks=60),
    Case("without prefix caching", enable_caching=False, num_blocks=44),
    Case("a connector", loads="any", num_blocks=60),
]
if HAS_FULL_PROMPT_RESERVATION:
    CASES.append(Case("full prompts reserved", num_blocks=44, reserves_full_prompts=True))


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    monkeypatch.delitem(sys.modules, "small_manager", raising=False)


@pytest.mark.parametrize("config", [{}, {"reuse": "newest"}], ids=["oldest", "newest"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_serves(case: Case, config: dict[str, Any], base_config: Any) -> None:
    """The worker checks what each request reads; all that were not aborted get the right answer."""
    done = run(case, base_config, SMALL, config, seed=3)
    counts, scripts = done.side.counts, random_scripts(case, 3)
    answers = {name: tokens for name, (tokens, reason) in counts.answers.items() if reason == "length"}
    assert answers == {name: tokens for name, tokens in answers_of(scripts).items() if name in answers}
    assert len(answers) > 20
    assert (counts.hit_tokens > 0) is case.enable_caching
    assert (counts.preemptions > 0) is (case.num_blocks < 100)
    assert done.manager.usage == 0.0
    assert done.manager.reset_prefix_cache()
    assert not done.manager._block_of


def test_it_hits_what_upstream_hits_where_nothing_is_reused(base_config: Any) -> None:
    hits = [run(CASES[0], base_config, name, {}, seed=3).side.counts.hit_tokens for name in ("upstream", SMALL)]
    assert hits[0] == hits[1] > 0


@pytest.mark.parametrize(
    ("case", "config", "diverges"),
    [(CASES[0], {}, False), (CASES[1], {}, True), (CASES[1], {"reuse": "newest"}, True)],
    ids=["roomy", "preempting", "preempting, newest"],
)
def test_it_follows(case: Case, config: dict[str, Any], diverges: bool, base_config: Any) -> None:
    shadow = {"follower": SMALL, "follower_config": config}
    done = run(case, base_config, "shadow", shadow, seed=3)
    assert done.answers == run(case, base_config, "upstream", {}, seed=3).answers
    report = done.report
    assert (report["level"], report["compares"]) == ("decision", "decision")
    assert (report["num_requests_diverged"] > 0) is diverges
    assert {tuple(row[:2]) for row in report["diverged_requests"]} <= {
        ("get_computed_blocks", "hit_tokens"),
        ("allocate_slots", "blocks_in_use"),
        ("allocate_slots", "refused"),
        ("allocate_slots", "admitted"),
        ("free", "blocks_in_use"),
    }


def test_it_is_replayed(base_config: Any, tmp_path: Path) -> None:
    done = run(CASES[1], base_config, "shadow", {"follower": SMALL, "bundle": str(tmp_path)}, seed=3)
    done.manager._bundle.close()
    results_path = tmp_path / "results.json"
    arguments = [
        "replay",
        str(tmp_path / "trace.jsonl.gz"),
        "--manager",
        f"upstream,{SMALL}",
        "--json",
        str(results_path),
    ]
    for further, status in ([], 0), (["--num-blocks", "60"], 0), (["--exact"], 1):
        with pytest.raises(SystemExit) as ended:
            main(arguments + further)
        assert ended.value.code == status, further
        assert SMALL in results_path.read_text()


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match=r"SmallManager' refuses \{'reuse': 'best'\}: expected at most"):
        registry.validate(SMALL, {"reuse": "best"})


def test_what_it_cannot_serve_it_refuses(base_config: Any) -> None:
    for case in (Case("eagle", drafts="eagle"), Case("window", ("window:17",))):
        with pytest.raises(ContractError, match="found ValueError: expected"):
            run(case, base_config, SMALL, {}, seed=3)


def test_the_page_has_what_it_names() -> None:
    page = (ROOT / "docs" / "write_a_manager.md").read_text()
    for name in (SOURCE, "vllm_kvplug/vllm_glue/contract.py", "tests/glue/test_small_manager.py"):
        assert name in page
        assert Path(ROOT, name).is_file()
