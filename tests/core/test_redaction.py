"""What is left out of settings and command lines, and what is not."""

from __future__ import annotations

import json

import pytest

from vllm_kvplug.redaction import LEFT_OUT, is_secret, redacted, redacted_args


@pytest.mark.parametrize(
    "name",
    ["key", "api_key", "api-key", "apiKey", "access_key", "private_key", "AWS_SECRET_ACCESS_KEY", "keys", "api_keys"]
    + ["auth", "authToken", "basic_auth", "token", "hf_token", "HF-TOKEN", "client_secret", "password", "db.passwd"]
    + ["credentials", "APIKey", "Authorization", "--kv-cache-manager-config.serving_config.api_key"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_num_tokens", "num_tokens", "tokens", "trace_tokens", "tokenizer", "tokenizer_mode", "keyboard", "monkey"]
    + ["author", "authors", "depth", "long_prefill_token_threshold", "--return-tokens-as-token-ids", "secretary", ""],
)
def test_names_of_none(name: str) -> None:
    assert not is_secret(name)


def test_settings_at_any_depth() -> None:
    config = {
        "serving": "x:Y",
        "serving_config": {"api_key": "hunter2", "max_num_tokens": 3, "peers": [{"token": "t", "port": 1}, "x"]},
        "follower_config": {"nested": ({"private_key": ["a", "b"]},), "auth": {"user": "u", "pin": 7}},
        "auth": None,
        "token": True,
    }
    before = json.dumps(config)
    assert redacted(config) == {
        "serving": "x:Y",
        "serving_config": {
            "api_key": LEFT_OUT,
            "max_num_tokens": 3,
            "peers": [{"token": LEFT_OUT, "port": 1}, "x"],
        },
        "follower_config": {"nested": [{"private_key": LEFT_OUT}], "auth": LEFT_OUT},
        "auth": None,
        "token": True,
    }
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["serve", "M", "--hf-token", "X", "--port", "1"], ["serve", "M", "--hf-token", LEFT_OUT, "--port", "1"]),
        (["--hf-token=X", "M"], [f"--hf-token={LEFT_OUT}", "M"]),
        (["--api-key", "X", "Y", "--seed", "0"], ["--api-key", LEFT_OUT, LEFT_OUT, "--seed", "0"]),
        (["--api_key", "X"], ["--api_key", LEFT_OUT]),
        (["--config.api_key", "X"], ["--config.api_key", LEFT_OUT]),
        (["HF_TOKEN=X", "serve"], [f"HF_TOKEN={LEFT_OUT}", "serve"]),
        (["--config", '{"a": {"api_key": "X"}}'], ["--config", f'{{"a": {{"api_key": "{LEFT_OUT}"}}}}']),
        (['--config={"api_key": "X"}'], [f'--config={{"api_key": "{LEFT_OUT}"}}']),
        (['x:Y={"token": "X"}'], [f'x:Y={{"token": "{LEFT_OUT}"}}']),
        (['[{"token": "a=b"}]'], [f'[{{"token": "{LEFT_OUT}"}}]']),
    ],
)
def test_command_lines(args: list[str], expected: list[str]) -> None:
    before = list(args)
    assert redacted_args(args) == expected
    assert args == before


def test_what_has_no_secret_stays_as_it_was_typed() -> None:
    args = ["serve", "M", "--config", '{"a":1}', "--max-num-batched-tokens", "64", "--tokenizer", "T", "-tp", "1", "-"]
    args += ["--return-tokens-as-token-ids", "--enable-x", "{broken", "--x={", "a=b"]
    assert redacted_args(args) == args
