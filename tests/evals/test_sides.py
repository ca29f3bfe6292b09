"""The sides as typed: what they add to a server, and what is refused before one is started."""

from __future__ import annotations

import pytest

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.sides import choices, split_server_args, with_defaults


def test_plain_upstream_adds_nothing_so_that_no_code_of_ours_is_in_force() -> None:
    baseline, candidate = choices()
    assert (baseline.label, baseline.server_args()) == ("upstream", [])
    assert candidate.server_args() == ["--kv-cache-manager", "kvplug"]


def test_settings_travel_as_json() -> None:
    _, candidate = choices(candidate="my.module:Manager", candidate_config='{"b": 1, "a": {"c": "d e"}}')
    assert candidate.server_args() == [
        *("--kv-cache-manager", "my.module:Manager"),
        *("--kv-cache-manager-config", '{"a": {"c": "d e"}, "b": 1}'),
    ]


def test_a_against_a_has_two_labels() -> None:
    assert [side.label for side in choices("kvplug", "kvplug")] == ["kvplug (1)", "kvplug (2)"]


@pytest.mark.parametrize("config", ["{", "[1]", "lru", '"lru"'])
def test_a_config_that_is_no_object_is_refused_by_its_option(config: str) -> None:
    with pytest.raises(EvalUsageError, match=r"^--candidate-config: expected a JSON object, found"):
        choices(candidate_config=config)


@pytest.mark.parametrize(
    "args",
    [
        "--port 80",
        "--api-key secret",
        "--kv-cache-manager kvplug",
        "--kv_cache_manager=x",
        "--kv-cache-manager-config.eviction lru",
    ],
)
def test_what_the_comparison_sets_itself_is_refused(args: str) -> None:
    with pytest.raises(EvalUsageError, match=r"^--server-args: --.* is set for each side"):
        split_server_args(args)


def test_an_open_quote_is_refused() -> None:
    with pytest.raises(EvalUsageError, match="as a shell reads them"):
        split_server_args("--foo 'bar")


def test_given_arguments_replace_defaults_in_any_spelling() -> None:
    args = ["--block_size=32", "--seed", "1"]
    assert with_defaults(args, [("--enforce-eager",), ("--block-size", "16")]) == ["--enforce-eager", *args]
