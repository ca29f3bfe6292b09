"""The two options on every command line that starts an engine, and what is refused at parse time."""

from __future__ import annotations

import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.glue.support import IS_PATCHED, own_lines, run_python, seams_only
from vllm_kvplug.settings import Settings, TraceSettings
from vllm_kvplug.vllm_glue.choice import CommandLineChoice
from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

COMMANDS = {
    "serve": ["serve", "some-model"],
    "run-batch": ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "some-model"],
    "bench latency": ["bench", "latency", "--model", "some-model"],
    "bench throughput": ["bench", "throughput", "--model", "some-model"],
    "bench startup": ["bench", "startup", "--model", "some-model"],
}
LRU = {"name": "kvplug", "config": {"eviction": "lru"}}


def choice_of(namespace: Any) -> Any:
    return namespace.additional_config.get("kv_cache_manager")


def refused(parser: Any, args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(args)
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    return stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    "options",
    [
        ["--kv-cache-manager", "kvplug", "--kv-cache-manager-config", '{"eviction": "lru"}'],
        ["--kv-cache-manager=kvplug", '--kv-cache-manager-config={"eviction": "lru"}'],
        ["--kv_cache_manager", "kvplug", "--kv_cache_manager_config", '{"eviction": "lru"}'],
        ["--kv-cache-manager", "kvplug", "--kv-cache-manager-config.eviction", "lru"],
        ["--kv_cache_manager=kvplug", "--kv_cache_manager_config.eviction=lru"],
        [
            "--kv-cache-manager",
            "kvplug",
            "--kv-cache-manager-config",
            "{}",
            "--kv-cache-manager-config.eviction",
            "lru",
        ],
        ["--additional-config", '{"kv_cache_manager": "kvplug", "kv_cache_manager_config": {"eviction": "lru"}}'],
        ["--additional-config", '{"kv_cache_manager": "kvplug"}', "--kv-cache-manager-config.eviction", "lru"],
    ],
)
def test_every_spelling_on_every_command(cli_parser: Any, command: list[str], options: list[str]) -> None:
    namespace = cli_parser.parse_args(command + options)
    assert namespace.additional_config == {"kv_cache_manager": LRU}
    assert type(choice_of(namespace)) is CommandLineChoice


def test_api_server_module(api_server_parser: Any) -> None:
    namespace = api_server_parser.parse_args(["--model", "m", "--kv-cache-manager", "kvplug"])
    assert choice_of(namespace) == {"name": "kvplug", "config": {}}


@pytest.mark.parametrize("options", [[], ["--kv-cache-manager", "upstream"]])
def test_upstream_or_nothing_is_vllms_own_namespace(cli_parser: Any, options: list[str]) -> None:
    namespace = cli_parser.parse_args(["serve", "m", "--additional-config", '{"other": 1}', *options])
    assert namespace.additional_config == {"other": 1}
    assert hasattr(namespace, "kv_cache_manager") == (IS_PATCHED or bool(options))
    assert hasattr(namespace, "kv_cache_manager_config") == IS_PATCHED


@pytest.mark.parametrize(
    ("in_file", "on_command_line"),
    [
        ("kv-cache-manager: kvplug\nkv-cache-manager-config:\n  eviction: lru\n", []),
        ('kv_cache_manager: kvplug\nkv_cache_manager_config: \'{"eviction": "lru"}\'\n', []),
        ("kv-cache-manager: kvplug\n", ["--kv-cache-manager-config.eviction", "lru"]),
        ("kv-cache-manager-config:\n  eviction: lru\n", ["--kv-cache-manager", "kvplug"]),
        ("kv-cache-manager: upstream\n", ["--kv-cache-manager", "kvplug", "--kv-cache-manager-config.eviction", "lru"]),
    ],
)
@pytest.mark.parametrize("parser", ["cli_parser", "api_server_parser"])
def test_config_file(
    parser: str, in_file: str, on_command_line: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "c.yaml").write_text(in_file)
    command = ["serve", "m"] if parser == "cli_parser" else ["--model", "m"]
    options = ["--config", str(tmp_path / "c.yaml"), *on_command_line]
    namespace = request.getfixturevalue(parser).parse_args([*command, *options])
    assert choice_of(namespace) == LRU


@pytest.mark.parametrize(
    "in_file",
    [
        pytest.param("kv-cache-manager-config:\n  eviction: lru\n", marks=seams_only),
        "kv-cache-manager-config.eviction: lru\n",
    ],
)
def test_config_file_and_command_line_disagree(
    cli_parser: Any, in_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("kv-cache-manager: kvplug\n" + in_file)
    options = ["--config", str(tmp_path / "c.yaml"), "--kv-cache-manager-config.eviction", "fifo"]
    assert "'eviction' is given twice, as 'lru' and 'fifo'" in refused(cli_parser, ["serve", "m", *options], capsys)


def test_a_config_file_that_vllm_ignores_is_refused_where_it_chooses(
    cli_parser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM reads a file only from `--config FILE`, two arguments."""
    path = tmp_path / "c.yaml"
    path.write_text("port: 8080\nkv_cache_manager: kvplug\n")
    assert f"write --config {path}" in refused(cli_parser, ["serve", "m", f"--config={path}"], capsys)
    path.write_text("port: 8080\n")
    assert cli_parser.parse_args(["serve", "m", f"--config={path}"]).additional_config == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [[], ["--kv-cache-manager-config.eviction", "lru"]])
def test_a_config_file_is_read_once(cli_parser: Any, options: list[str], tmp_path: Path) -> None:
    """A pipe has no second reading; whoever tried would wait for ever."""
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    in_file = "kv-cache-manager: kvplug\n" if options else "max-model-len: 64\n"
    writer = threading.Thread(target=pipe.write_text, args=(in_file,), daemon=True)
    writer.start()
    namespace = cli_parser.parse_args(["serve", "m", "--config", str(pipe), *options])
    assert choice_of(namespace) == (LRU if options else None)
    assert "load_config_file" not in vars(cli_parser)


def test_the_namespace_carries_the_choice_to_further_api_servers(cli_parser: Any) -> None:
    namespace = cli_parser.parse_args(
        ["serve", "m", "--kv-cache-manager", "kvplug", "--kv-cache-manager-config.eviction=lru"]
    )
    assert choice_of(pickle.loads(pickle.dumps(namespace))) == LRU


CHOOSE = ["--kv-cache-manager", "kvplug"]
CONFIG = "--kv-cache-manager-config"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--kv-cache-manager", "kvplg"],
            "unknown manager 'kvplg' (did you mean 'kvplug'?); known managers: kvplug, shadow, upstream",
        ),
        (["--kv-cache-manager", "zzz"], "unknown manager 'zzz'; known managers: kvplug, shadow, upstream"),
        pytest.param(
            [*CHOOSE, CONFIG, '{"eviction":'], "--kv-cache-manager-config: expected a JSON object", marks=seams_only
        ),
        pytest.param([*CHOOSE, CONFIG, "lru"], "--kv-cache-manager-config: expected a JSON object", marks=seams_only),
        ([*CHOOSE, CONFIG, '["lru"]'], "--kv-cache-manager-config: expected an object of settings, found ['lru']"),
        pytest.param([*CHOOSE, CONFIG, "null"], "expected an object of settings, found None", marks=seams_only),
        (
            [*CHOOSE, CONFIG, '{"evict": "lru"}'],
            "--kv-cache-manager-config: unknown setting 'evict'; known settings: "
            "check_invariants, check_invariants_every, eviction, trace, trace_max_mib, trace_tokens",
        ),
        ([*CHOOSE, CONFIG, '{"eviction": "fifo"}'], "setting 'eviction': expected one of lru, found 'fifo'"),
        ([*CHOOSE, CONFIG, '{"eviction": 3}'], "setting 'eviction': "),
        ([*CHOOSE, CONFIG + ".eviction", "3"], "setting 'eviction': "),
        pytest.param(
            [*CHOOSE, CONFIG, '{"eviction": "lru", "eviction": "x"}'],
            "'eviction' is given twice, as 'lru' and 'x'",
            marks=seams_only,
        ),
        pytest.param(
            [*CHOOSE, CONFIG, '{"eviction": "lru"}', CONFIG + ".eviction", "x"],
            "'eviction' is given twice, as 'lru' and 'x'",
            marks=seams_only,
        ),
        ([*CHOOSE, CONFIG + ".eviction=lru", CONFIG + ".eviction", "x"], "'eviction' is given twice, as 'lru' and 'x'"),
        ([*CHOOSE, CONFIG + ".a.b=1", CONFIG + ".a", "x"], "'a' is given twice"),
        ([CONFIG, '{"eviction": "lru"}'], "expected a kv_cache_manager other than upstream to configure, found none"),
        (["--kv-cache-manager", "upstream", CONFIG + ".eviction", "lru"], "to configure, found upstream"),
        (
            ["--kv-cache-manager", "upstream", CONFIG, '{"eviction": "lru", "trace": "t.gz"}'],
            "'upstream' takes no settings",
        ),
        ([*CHOOSE, CONFIG + ".trace_max_mib", "3"], "setting 'trace_max_mib': expected the setting 'trace'"),
        ([*CHOOSE, CONFIG + ".trace", "t.gz", CONFIG + ".trace_max_mib", "0"], "setting 'trace_max_mib'"),
        ([*CHOOSE, "--additional-config", '{"kv_cache_manager": "upstream"}'], "chosen twice, as 'kvplug' and"),
        (
            ["--kv-cache-manager", "no_such_module:Class"],
            "'no_such_module:Class' cannot be imported: ModuleNotFoundError",
        ),
        (["--kv-cache-manager", "tests.glue.managers:Missing"], "cannot be imported: AttributeError"),
        (["--kv-cache-manager", "tests.glue.managers:NOT_A_CLASS"], "to be a class, found 3"),
        (["--kv-cache-manager", "tests.glue.managers:Incomplete"], "evict_blocks(...) is missing"),
        (["--kv-cache-manager", "tests.glue.managers:Plain", CONFIG + ".depth", "1"], "takes no settings"),
        (
            ["--kv-cache-manager", "tests.glue.managers:WithSettings", CONFIG + ".width", "1"],
            "unknown ['width'], allowed: depth",
        ),
        ([*CHOOSE, "--kv-cache-manager-config.eviction"], "expected a value behind --kv-cache-manager-config.eviction"),
        ([*CHOOSE, "--kv-cache-manager-config.eviction", "--port", "8080"], "config.eviction, found none"),
        pytest.param(
            [*CHOOSE, "--kv-cache-manager-config", "[" * 100_000],
            "expected a JSON object, found '[[[",
            marks=seams_only,
        ),
        pytest.param(
            [*CHOOSE, "--kv-cache-manager-config", '{"eviction": ' + "9" * 5000 + "}"],
            "expected a JSON object, found",
            marks=seams_only,
        ),
        (["--kv-cache-manager", "builtins:dict"], "does not keep the contract"),
        (["--kv-cache-manager", "tests.glue.exits_at_import:Manager"], "cannot be imported: SystemExit: 0"),
        (["--additional-config", '{"kv-cache-manager": "kvplug"}'], "expected the key 'kv_cache_manager', found"),
        (["--additional-config.KV-cache-manager-config.eviction", "lru"], "found 'KV-cache-manager-config'"),
        (
            ["--additional-config", '{"kv_cache_manager": {"name": null}}'],
            "expected a name or 'module:Class', found None",
        ),
    ],
)
def test_refusals_are_one_line_and_status_2(
    cli_parser: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(cli_parser, ["serve", "m", *options], capsys)
    assert line.startswith("vllm")
    assert re.search(": error: (--kv-cache-manager|additional_config)", line)
    assert message in line
    assert len(line) < 2000


def test_another_vllm_version_is_refused_only_when_chosen(
    cli_parser: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.20.0+cpu")
    line = refused(cli_parser, ["serve", "m", *CHOOSE], capsys)
    assert "expects vLLM 0.17.0, 0.17.1, 0.18.0, 0.18.1, 0.19.0, 0.19.1, found 0.20.0, " in line
    for options in ([], ["--kv-cache-manager", "upstream"]):
        assert cli_parser.parse_args(["serve", "m", *options]).additional_config == {}


def test_upstream_with_a_trace_is_a_choice(cli_parser: Any) -> None:
    options = ["--kv-cache-manager", "upstream", CONFIG + ".trace", "t.gz", CONFIG + ".trace-max-mib", "3"]
    choice = cli_parser.parse_args(["serve", "m", *options]).additional_config["kv_cache_manager"]
    assert choice == {"name": "upstream", "config": {"trace": "t.gz", "trace-max-mib": 3}}


@seams_only
@pytest.mark.parametrize("topic", ["kv-cache-manager", "kv_cache_manager"])
def test_help_topic(
    cli_parser: Any, topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    with pytest.raises(SystemExit) as ended:
        cli_parser.parse_args(["serve", f"--help={topic}"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("kv-cache-manager:")
    assert "--kv-cache-manager {kvplug,shadow,upstream,module:Class}" in shown
    assert "--kv-cache-manager-config JSON" in shown
    assert "eviction: which free block is reused first" in shown
    assert "trace: record every call to this file" in " ".join(shown.split())
    lines = [line.strip() for line in shown.splitlines()]
    for cls in (Settings, ShadowSettings, TraceSettings):
        for name in cls.model_fields:
            assert any(line.startswith(f"- {name}: ") for line in lines), name
    assert "Settings of shadow (two managers side by side):" in lines
    assert "hybrid" not in shown


@seams_only
def test_help_lists_the_group(
    cli_parser: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for keyword, expected in ((None, "kv-cache-manager        "), ("all", "--kv-cache-manager-config JSON")):
        monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", keyword)
        with pytest.raises(SystemExit):
            cli_parser.parse_args(["serve", "--help"])
        assert expected in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("module", ["vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server"])
def test_a_refused_process_ends_with_one_line_and_status_2(module: str) -> None:
    command = ["serve", "m"] if module.endswith("main") else ["--model", "m"]
    process = run_python("-m", module, *command, "--kv-cache-manager", "kvplg")
    assert process.returncode == 2
    (line,) = own_lines(process.stderr)
    assert "unknown manager 'kvplg'" in line
    assert "Traceback" not in process.stdout
