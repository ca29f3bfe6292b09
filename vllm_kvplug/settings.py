"""The settings of `--kv-cache-manager-config`, validated once, before anything is built from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_kvplug import eviction as eviction_policies
from vllm_kvplug.errors import SettingsError

_Parsed = TypeVar("_Parsed", bound="ParsedSettings")


class ParsedSettings(BaseModel):
    """Settings of one manager. Unknown keys and wrong types are refused; dashes in a key read as underscores."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def parse(
        cls: type[_Parsed], values: Mapping[str, Any] | _Parsed | None, *, known_elsewhere: Iterable[str] = ()
    ) -> _Parsed:
        """Settings from a mapping of keys to values (None: the defaults).

        Args:
            values: what was set.
            known_elsewhere: further names for the message about an unknown one.

        Raises:
            SettingsError: names the key, what is allowed and what was found.
        """
        if isinstance(values, cls):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise SettingsError(f"kv_cache_manager_config: expected an object of settings, found {values!r}")
        named: dict[str, Any] = {}
        for key, value in (values or {}).items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if not isinstance(name, str) or name not in cls.model_fields:
                allowed = ", ".join(sorted([*cls.model_fields, *known_elsewhere]))
                raise SettingsError(f"kv_cache_manager_config: unknown setting {key!r}; known settings: {allowed}")
            if name in named:
                raise SettingsError(
                    f"kv_cache_manager_config: setting {name!r} is given twice, as dashes and underscores"
                )
            named[name] = value
        try:
            return cls(**named)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            expected = first["msg"].removeprefix("Value error, ")
            raise SettingsError(
                f"kv_cache_manager_config: setting {key!r}: {expected}, found {first['input']!r}"
            ) from None


class Settings(ParsedSettings):
    """What a user can set of kvplug.

    Example: `Settings.parse({"eviction": "lru"})`.
    """

    eviction: str = Field(default="lru", description="which free block is reused first: lru, the default")
    check_invariants: Literal["off", "log", "stop"] = Field(
        default="off",
        description="check the manager after its calls, slowly: log counts and logs findings, stop ends the engine",
    )
    check_invariants_every: int = Field(default=1, ge=1, description="calls of the manager from one check to the next")

    @field_validator("eviction")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in eviction_policies.names():
            raise ValueError(f"expected one of {', '.join(eviction_policies.names())}")
        return name


class TraceSettings(ParsedSettings):
    """The settings that every manager has beside its own: of recording its calls to a file, see docs/traces.md."""

    trace: str | None = Field(
        default=None, min_length=1, description="record every call to this file, gzipped JSON lines"
    )
    trace_max_mib: int = Field(default=256, ge=1, description="MiB that the trace's files have at most; the oldest go")
    trace_tokens: bool = Field(default=False, description="record token ids, too")

    @classmethod
    def split(cls, config: Mapping[str, Any]) -> tuple[TraceSettings, dict[str, Any]]:
        """The settings of a trace in a manager's configuration, and the rest of it, which is the manager's own.

        Raises:
            SettingsError: a setting of a trace that is ill-typed, or that has no trace to go with.
        """
        rest = {key: value for key, value in config.items() if not _names_one_of(cls, key)}
        settings = cls.parse({key: value for key, value in config.items() if key not in rest})
        if settings.trace is None and (further := settings.model_fields_set - {"trace"}):
            raise SettingsError(
                f"kv_cache_manager_config: setting {min(further)!r}: expected the setting 'trace', a file's path, "
                "to go with it, found none"
            )
        return settings, rest


def _names_one_of(cls: type[ParsedSettings], key: Any) -> bool:
    return isinstance(key, str) and key.replace("-", "_") in cls.model_fields
