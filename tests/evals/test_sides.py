"""The sides as typed: what they add to a server, and what is refused before one is started."""

from __future__ import annotations

import pytest

from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.sides import choices, max_model_len_of, split_server_args, with_defaults


def test_plain_upstream_adds_nothing_so_that_no_code_of_ours_is_in_force() -> None:
    baseline, candidate = choices()
    assert (baseline.label, baseline.server_args()) == ("upstream", [])
    assert candidate.server_args() == ["--kv-cache-manager", "kvplug"]


def test_settings_travel_as_json() -> None:
    _, candidate = choices(candidate="tests.glue.managers:Plain", candidate_config='{"b": 1, "a": {"c": "d e"}}')
    assert candidate.server_args() == [
        *("--kv-cache-manager", "tests.glue.managers:Plain"),
        *("--kv-cache-manager-config", '{"a": {"c": "d e"}, "b": 1}'),
    ]


@pytest.mark.parametrize(
    ("manager", "config", "message"),
    [
        ("kvplugg", None, "unknown manager 'kvplugg'.*did you mean 'kvplug'"),
        ("kvplug", '{"evicton": "lru"}', "unknown setting 'evicton'"),
        ("shadow", '{"serving": "nobody"}', "unknown manager 'nobody'"),
        ("no_such_package.module:Manager", None, "^--candidate: expected a class that can be imported"),
        (" ", None, "^--candidate: expected a KV cache manager's name"),
    ],
)
def test_a_wrong_manager_is_refused_before_the_other_one_serves(manager: str, config: str | None, message: str) -> None:
    with pytest.raises(KVPlugError, match=message):
        choices(candidate=manager, candidate_config=config)


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


def test_the_maximum_length_is_read_from_the_servers_arguments() -> None:
    assert max_model_len_of(["--x", "--max-model-len", "512"]) == 512
    assert max_model_len_of(["--max_model_len=4096"]) == 4096
    assert max_model_len_of(["--max-model-len", "512", "--max-model-len=256"]) == 256
    assert max_model_len_of(["--max-model-len", "32k"]) is None
    assert max_model_len_of([]) is None
