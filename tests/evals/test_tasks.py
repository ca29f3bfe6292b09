"""The bundled tasks: equal for equal seeds, distinct items, prefixes that are shared, and answers that are right."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_kvplug.evals.tasks.generate import GENERATORS, counted_rows, sums
from vllm_kvplug.evals.tasks.suite import NAMES, SUITE, write_tasks
from vllm_kvplug.evals.tasks.words import CAPITALS, WORDS

GENERATIVE = sorted(set(GENERATORS) - {"kvplug_capital_choice"})


def items(name: str, seed: int = 1) -> list[dict[str, Any]]:
    return [dict(item) for item in GENERATORS[name](seed)]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_items_and_another_gives_others(name: str) -> None:
    random.seed(99)  # the generators have random numbers of their own
    first = items(name, seed=5)
    random.seed(1)
    assert items(name, seed=5) == first
    assert items(name, seed=6) != first


@pytest.mark.parametrize("name", GENERATORS)
def test_several_hundred_distinct_items(name: str) -> None:
    found = items(name)
    assert len(found) >= 290
    assert len({json.dumps(item, sort_keys=True) for item in found}) == len(found)
    assert len({item["prompt"] for item in found}) == len(found)


@pytest.mark.parametrize("name", GENERATORS)
def test_items_of_a_sheet_share_a_long_prefix_and_sheets_share_none(name: str) -> None:
    by_sheet: dict[int, list[str]] = {}
    for item in items(name):
        by_sheet.setdefault(item["sheet"], []).append(item["prompt"])
    assert len(by_sheet) >= 4
    for prompts in by_sheet.values():
        first, last = min(prompts), max(prompts)
        num_shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        assert num_shared > 0.6 * len(first)
    assert len({prompts[0][:120] for prompts in by_sheet.values()}) == len(by_sheet)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_first_items_are_of_all_sheets(name: str) -> None:
    """So that a run with a small limit uses them all."""
    found = items(name)
    num_sheets = len({item["sheet"] for item in found})
    for start in range(0, len(found), num_sheets):
        assert sorted(item["sheet"] for item in found[start : start + num_sheets]) == [*range(num_sheets)]


def test_counted_rows_are_asked_mixed() -> None:
    """lm-eval asks longer prompts first; equal lengths keep the order."""
    assert len({len(item["prompt"]) for item in counted_rows(1)}) == 1


@pytest.mark.parametrize("name", GENERATIVE)
def test_targets_are_one_line_and_not_given_away(name: str) -> None:
    for item in items(name):
        assert item["target"].strip() == item["target"] != ""
        assert "\n" not in item["target"]
        assert not item["prompt"].endswith(" ")
        *shown, asked = item["prompt"].splitlines()
        assert f"{asked} {item['target']}" not in shown


def test_rows_count_up() -> None:
    for item in counted_rows(3):
        given, *rest = map(int, re.findall(r"\d+", item["prompt"].splitlines()[-1] + " " + item["target"]))
        assert rest == [given + 1, given + 2, given + 3]


def test_sums_are_right_and_asked_once() -> None:
    for item in sums(3):
        question = item["prompt"].splitlines()[-1]
        digits = [int(char) for char in question if char.isdigit()]
        assert sum(digits) == int(item["target"])


def test_choices_are_distinct_and_gold_is_the_capital() -> None:
    golds: Counter[int] = Counter()
    for item in items("kvplug_capital_choice"):
        country = item["prompt"].rpartition("The capital of ")[2].removesuffix(" is")
        assert item["choices"][item["gold"]] == CAPITALS[country]
        assert len(set(item["choices"])) == 4
        golds[item["gold"]] += 1
    assert set(golds) == {0, 1, 2, 3}
    assert max(golds.values()) < 2 * min(golds.values())


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


def test_written_tasks_name_their_data(tmp_path: Path) -> None:
    write_tasks(tmp_path, seed=2, cache_folder=tmp_path / "cache")
    described = {path.stem: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*.yaml")}
    assert set(described) == set(NAMES)
    assert set(described[SUITE]["task"]) == set(GENERATORS)
    for name in GENERATORS:
        assert described[name]["task"] == name
        data_path = Path(described[name]["dataset_kwargs"]["data_files"]["test"])
        assert data_path.is_absolute()
        assert [json.loads(line) for line in data_path.read_text().splitlines()] == items(name, seed=2)
