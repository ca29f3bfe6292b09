"""The choice of a manager as it travels: in `VllmConfig.additional_config`, pickled, to every engine process.

In a patched tree it travels in `VllmConfig.cache_config` (`patched_tree.py`), from the command line up to there in
`additional_config` as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_kvplug.errors import SettingsError
from vllm_kvplug.vllm_glue import patched_tree

KEY = "kv_cache_manager"
CONFIG_KEY = "kv_cache_manager_config"
UPSTREAM = "upstream"


class ManagerChoice(dict[str, Any]):
    """`{"name": str, "config": {...}}`: a manager other than vLLM's, or vLLM's own to be recorded; checked.

    Unpickling it puts the hooks in place and activates the choice in that process; a process without the package fails
    with an ImportError instead of serving with another manager. `dataclasses.asdict` rebuilds it from pairs.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (self["name"], self["config"])


class CommandLineChoice(ManagerChoice):
    """A choice made on the command line of this process, where a refusal ends the process with one line.

    The type is the mark, because `dataclasses.asdict` keeps types and drops attributes. Pickling loses it: another
    process has its own command line.
    """


def restore(name: str, config: dict[str, Any]) -> ManagerChoice:
    """Rebuild a pickled choice: hooks first, then the choice is in force for the engines of this process."""
    from vllm_kvplug.vllm_glue import install, seams

    install.install()
    seams.activate()
    return ManagerChoice(name=name, config=config)


def chosen(vllm_config: Any) -> ManagerChoice | None:
    """The choice that a VllmConfig carries; None: vLLM's own manager, untouched, or no VllmConfig."""
    if (carried := patched_tree.carried(vllm_config)) is not None:
        return ManagerChoice(name=carried[0], config=carried[1])
    extra = getattr(vllm_config, "additional_config", None)
    choice = extra.get(KEY) if isinstance(extra, dict) else None
    return choice if isinstance(choice, ManagerChoice) else None


def settle(
    additional_config: Any,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    kind: type[ManagerChoice] = ManagerChoice,
) -> tuple[Any, ManagerChoice | None]:
    """Bring all statements of a choice together: `name` and `config`, and the two keys of `additional_config`.

    Returns an additional_config that carries just the choice (the given object itself when nothing is stated; without
    our keys for `upstream`) and the choice (None for vLLM's own manager, unless its calls are to be recorded). Changes
    nothing that was given.

    Raises:
        SettingsError: malformed, unknown, or two statements that differ.
        ContractError, UnsupportedError: a class that cannot serve, or a vLLM version that we do not know.
    """
    if not isinstance(additional_config, dict):
        if name is None and config is None:
            return additional_config, None
        found = type(additional_config).__name__
        raise SettingsError(f"{KEY}: expected additional_config to be a dict that can carry the choice, found {found}")
    _refuse_near_misses(additional_config)
    if name is None and config is None and KEY not in additional_config and CONFIG_KEY not in additional_config:
        return additional_config, None

    others = {key: value for key, value in additional_config.items() if key not in (KEY, CONFIG_KEY)}
    stated = additional_config.get(KEY)
    if isinstance(stated, CommandLineChoice):
        kind = CommandLineChoice
    stated_name, stated_config = _parts(stated)
    configs = [part for part in (config, stated_config, additional_config.get(CONFIG_KEY)) if part is not None]
    name = _same_name(name, stated_name)
    merged: dict[str, Any] = {}
    for part in configs:
        merged = merge_settings(merged, part)
    if name is None or (name == UPSTREAM and not _asks_for_trace(merged)):
        if configs:
            raise SettingsError(
                f"{CONFIG_KEY}: expected a {KEY} other than {UPSTREAM} to configure, found {name or 'none'}; "
                f"choose kvplug, or leave the settings out ({UPSTREAM} takes those of a trace alone)"
            )
        return others, None
    choice = _checked(name, merged, kind)
    return {**others, KEY: choice}, choice


def _asks_for_trace(config: Mapping[str, Any]) -> bool:
    """Whether the settings are, or name, a trace: then vLLM's own manager, too, is one that we construct."""
    from vllm_kvplug.settings import TraceSettings  # pydantic: not for everybody who has the plugin installed

    return TraceSettings.split(config)[0].trace is not None


def _refuse_near_misses(additional_config: Mapping[Any, Any]) -> None:
    """vLLM ignores keys that it does not know: a dash in ours would end in upstream's manager without a word."""
    for key in additional_config:
        meant = key.replace("-", "_").lower() if isinstance(key, str) else key
        if meant in (KEY, CONFIG_KEY) and key != meant:
            raise SettingsError(f"additional_config: expected the key {meant!r}, found {key!r}")


def _parts(stated: Any) -> tuple[str | None, Mapping[str, Any] | None]:
    """Name and config of what a user put under KEY: a plain name, or an object with both."""
    if stated is None or isinstance(stated, str):
        return stated, None
    if not isinstance(stated, Mapping) or "name" not in stated or not set(stated) <= {"name", "config"}:
        raise SettingsError(
            f'additional_config["{KEY}"]: expected a name or {{"name": ..., "config": {{...}}}}, found {stated!r}'
        )
    if stated["name"] is None:
        raise SettingsError(f"{KEY}: expected a name or 'module:Class', found None")
    return stated["name"], stated.get("config")


def _same_name(name: Any, stated_name: Any) -> str | None:
    for value in (name, stated_name):
        if value is not None and not isinstance(value, str):
            raise SettingsError(f"{KEY}: expected a name or 'module:Class', found {value!r}")
    if name is not None and stated_name is not None and name != stated_name:
        raise SettingsError(f"{KEY}: chosen twice, as {name!r} and in additional_config as {stated_name!r}; choose one")
    return name if name is not None else stated_name


def merge_settings(first: Mapping[str, Any], second: Any, path: str = "") -> dict[str, Any]:
    """Both objects in one; objects inside are merged, and a key with two different values is refused."""
    if not isinstance(second, Mapping):
        raise SettingsError(f"{CONFIG_KEY}: expected an object of settings, found {second!r}")
    merged = dict(first)
    for key, value in second.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], Mapping) and isinstance(value, Mapping):
            merged[key] = merge_settings(merged[key], value, f"{path}{key}.")
        elif merged[key] != value:
            twice = f"setting {path + key!r} is given twice, as {merged[key]!r} and {value!r}"
            raise SettingsError(f"{CONFIG_KEY}: {twice}; give it once")
    return merged


def _checked(name: str, config: dict[str, Any], kind: type[ManagerChoice]) -> ManagerChoice:
    from vllm_kvplug.vllm_glue import registry, version

    registry.target(name)  # an unknown name is refused first
    version.require_supported_version(name)
    try:
        json.dumps(config, sort_keys=True)  # as vLLM and our report write it
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{CONFIG_KEY}: expected values that JSON can carry, found {config!r} ({error})") from None
    registry.validate(name, config)
    return kind(name=name, config=config)
