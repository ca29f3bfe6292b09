"""The two options on vLLM's command lines. A refusal is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from vllm_kvplug.errors import KVPlugError, SettingsError
from vllm_kvplug.settings import Settings, TraceSettings
from vllm_kvplug.vllm_glue import patched_tree, registry
from vllm_kvplug.vllm_glue.choice import CONFIG_KEY, KEY, CommandLineChoice, merge_settings, settle

NAME_OPTION = "--kv-cache-manager"
CONFIG_OPTION = "--kv-cache-manager-config"
# vLLM looks a help topic up by the exact title: `--help=kv-cache-manager`.
GROUP_TITLE = "kv-cache-manager"
# An option of ours at the start of a line of a YAML file.
_IN_FILE = re.compile(r"^[\s\"']*kv[-_]cache[-_]manager", re.MULTILINE)
_MAX_SHOWN_CHARS = 200
_DOTTED = re.compile(r"--kv[-_]cache[-_]manager[-_]config\.(?P<path>[^=]+?)(?P<adds>\+?)(=(?P<value>.*))?", re.DOTALL)


def around_add_cli_args(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the option group behind vLLM's own."""
    parser = original(parser, *args, **kwargs)
    if NAME_OPTION not in parser._option_string_actions:
        _add_options(parser)
    return parser


def _add_options(parser: Any) -> None:
    group = parser.add_argument_group(
        title=GROUP_TITLE,
        description="The scheduler's KV cache manager, and its settings (package vllm_kvplug).",
    )
    # No default: without the option the namespace is vLLM's own.
    group.add_argument(
        NAME_OPTION,
        default=argparse.SUPPRESS,
        metavar="{" + ",".join(registry.names()) + ",module:Class}",
        help="The KV cache manager: a name, or a class as `module:Class`. `upstream`, the default, is vLLM's own.",
    )
    group.add_argument(
        CONFIG_OPTION,
        action=_MergeJSON,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help=f'Settings of the manager as a JSON object, for example \'{{"eviction": "lru"}}\' or '
        f"{CONFIG_OPTION}.eviction lru. Given several times, also in --config FILE, the objects are merged, and one "
        f"setting with two values is refused.\n\n{_settings_help()}".replace("%", "%%"),
    )


def _settings_help() -> str:
    """All settings; vLLM's help begins a line at an empty one."""
    from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

    told = (
        ("kvplug", Settings),
        ("shadow (two managers side by side)", ShadowSettings),
        ("every manager, upstream included", TraceSettings),
    )
    return "\n\n".join(
        "\n\n".join([f"Settings of {whose}:", *(f"- {name}: {field.description}" for name, field in fields.items())])
        for whose, fields in ((whose, cls.model_fields) for whose, cls in told)
    )


class _MergeJSON(argparse.Action):
    """Merges JSON objects. vLLM turns the dotted form into one more object, and puts a config file's in front."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            merged = merge_settings(getattr(namespace, self.dest, {}), _parse_json(values))
        except SettingsError as error:
            _refuse(parser, error)
        setattr(namespace, self.dest, merged)


def _parse_json(text: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for key, value in items:
            settings = merge_settings(settings, {key: value})
        return settings

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except KVPlugError:
        raise
    except (ValueError, RecursionError) as error:  # malformed, a number too long, or nested too deep
        found = repr(text) if len(text) <= _MAX_SHOWN_CHARS else repr(text[:_MAX_SHOWN_CHARS]) + "..."
        raise SettingsError(f"{CONFIG_KEY}: expected a JSON object, found {found} ({error})") from None


def around_parse_args(
    original: Callable[..., Any], parser: Any, args: Sequence[str] | None = None, namespace: Any = None
) -> Any:
    """Settle the choice as soon as everything is parsed, in the namespace, which further API servers get as it is."""
    given = sys.argv[1:] if args is None else args
    try:
        _check_dotted_values(given)
        _check_ignored_file(given)
        with _config_file_args(parser) as in_file:
            parsed = original(parser, args, namespace)
        _check_dotted([*in_file, *given])
        if hasattr(parsed, "additional_config") and not patched_tree.is_vllms_alone(parsed):
            parsed.additional_config, _ = settle(
                parsed.additional_config, *patched_tree.stated(parsed), kind=CommandLineChoice
            )
    except KVPlugError as error:
        _refuse(parser, error)
    return parsed


@contextmanager
def _config_file_args(parser: Any) -> Iterator[list[str]]:
    """The arguments that vLLM's parser takes from `--config FILE` meanwhile; the file may be a pipe, read once."""
    in_file: list[str] = []
    load = parser.load_config_file

    def load_and_remember(path: str) -> list[str]:
        loaded = load(path)
        in_file.extend(loaded)
        return loaded

    parser.load_config_file = load_and_remember
    try:
        yield in_file
    finally:
        del parser.load_config_file  # the class's method shows again


def _check_dotted_values(args: Sequence[str]) -> None:
    """Refuse the dotted form without a value: vLLM's parser takes the next option for it, or raises an IndexError."""
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        match = _DOTTED.fullmatch(arg)
        if match is not None and match["value"] is None and following.startswith("--"):
            raise SettingsError(f"{CONFIG_KEY}: expected a value behind {arg}, found none")


def _check_ignored_file(args: Sequence[str]) -> None:
    """Refuse `--config=FILE` with our options in it: vLLM reads a file only from `--config FILE`, two arguments."""
    for arg in args:
        path = Path(arg.removeprefix("--config="))
        if arg.startswith("--config=") and path.is_file() and _IN_FILE.search(path.read_text(errors="replace")):
            raise SettingsError(f"{KEY}: vLLM ignores the file of {arg}; write --config {path}")


def _check_dotted(args: Sequence[str]) -> None:
    """Refuse one setting with two values in the dotted form: vLLM's parser would keep the last."""
    merged: dict[str, Any] = {}
    for position, arg in enumerate(args):
        match = _DOTTED.fullmatch(arg)
        if match is None or match["adds"]:
            continue
        value: Any = match["value"] if match["value"] is not None else "".join(args[position + 1 : position + 2])
        for key in reversed(match["path"].split(".")):
            value = {key: value}
        merged = merge_settings(merged, value)


def _refuse(parser: argparse.ArgumentParser, error: KVPlugError) -> NoReturn:
    parser.exit(2, f"{parser.prog}: error: {one_line(error)}\n")
    raise AssertionError("unreachable: exit returned")


def one_line(error: KVPlugError) -> str:
    """The message on one line, with the options spelled as on the command line."""
    message = " ".join(str(error).split())
    return re.sub(r"^kv_cache_manager(_config)?\b", lambda match: "--" + match[0].replace("_", "-"), message)
