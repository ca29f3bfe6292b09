"""The two sides of a comparison as the user chooses them, and what they add to a server's command line."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.vllm_glue import registry

UPSTREAM = "upstream"
# What the tools set themselves, so that it is equal on both sides or a free port.
_RESERVED = (
    *("--kv-cache-manager", "--kv-cache-manager-config", "--host", "--port", "--served-model-name", "--model"),
    "--api-key",  # the comparison has none, and reports show command lines
)


@dataclass(frozen=True)
class SideChoice:
    """A manager with its settings. `label` tells the sides apart in tables, also where both are the same manager."""

    label: str
    manager: str
    settings: dict[str, Any] = field(default_factory=dict)

    def server_args(self) -> list[str]:
        """The side's arguments of `vllm serve`; none for vLLM's own manager without settings, which stays untouched."""
        if self.manager == UPSTREAM and not self.settings:
            return []
        args = ["--kv-cache-manager", self.manager]
        if self.settings:
            args += ["--kv-cache-manager-config", json.dumps(self.settings, sort_keys=True)]
        return args


def choices(
    baseline: str = UPSTREAM,
    candidate: str = "kvplug",
    baseline_config: str | None = None,
    candidate_config: str | None = None,
) -> tuple[SideChoice, SideChoice]:
    """Both sides from the command line's values; configs are JSON objects.

    Raises:
        EvalUsageError: a config that is no JSON object, a manager without a name or a class whose module is not there.
        SettingsError: an unknown name, or wrong settings of a manager of ours.
    """
    settings = (
        _settings("--baseline-config", baseline_config),
        _settings("--candidate-config", candidate_config),
    )
    names = (baseline, candidate)
    for option, name in zip(("--baseline", "--candidate"), names, strict=True):
        _check_manager(option, name)
    labels = names
    if baseline == candidate:
        labels = (f"{baseline} (1)", f"{candidate} (2)")
    first, second = (SideChoice(*side) for side in zip(labels, names, settings, strict=True))
    for side in (first, second):
        registry.policy_of(side.manager, side.settings)  # refuses wrong settings of ours
    return first, second


def _check_manager(option: str, name: str) -> None:
    """What can be known without importing vLLM: the other side may serve for many minutes before this one starts."""
    if not name.strip():
        raise EvalUsageError(f"{option}: expected a KV cache manager's name or module:Class, found {name!r}")
    module_name, is_class, _ = registry.target(name).partition(":")
    try:
        found = not is_class or importlib.util.find_spec(module_name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise EvalUsageError(f"{option}: expected a class that can be imported (PYTHONPATH), found {name!r}")


def _settings(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise EvalUsageError(f"{option}: expected a JSON object, found {text!r} ({error})") from None
    if not isinstance(settings, dict):
        raise EvalUsageError(f"{option}: expected a JSON object, found {text!r}")
    return settings


def split_server_args(text: str | None) -> list[str]:
    """`--server-args` as a shell would split it.

    Raises:
        EvalUsageError: an open quote, or an option that the tools set themselves.
    """
    try:
        args = shlex.split(text or "")
    except ValueError as error:
        raise EvalUsageError(
            f"--server-args: expected arguments as a shell reads them, found {text!r} ({error})"
        ) from None
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if name in _RESERVED or name.startswith("--kv-cache-manager-config."):
            raise EvalUsageError(
                f"--server-args: {name} is set for each side by the comparison itself; choose managers with --baseline "
                "and --candidate, and leave ports, names and keys out"
            )
    return args


def max_model_len_of(args: Sequence[str]) -> int | None:
    """What servers' arguments limit a request to, where they say so in plain digits; the last one counts."""
    text = ""
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == "--max-model-len":
            text = value if equals else "".join(args[place + 1 : place + 2])
    return int(text) if text.isascii() and text.isdigit() else None


def with_defaults(args: Sequence[str], defaults: Sequence[tuple[str, ...]]) -> list[str]:
    """`args` behind those of `defaults` (an option and its values each) whose option they do not give themselves."""
    given = {arg.partition("=")[0].replace("_", "-") for arg in args}
    kept = [part for default in defaults if default[0] not in given for part in default]
    return [*kept, *args]
