"""The settings of `--kv-cache-manager-config`, validated once, before anything is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_kvplug import eviction as eviction_policies
from vllm_kvplug.errors import SettingsError


class Settings(BaseModel):
    """What a user can set. Unknown keys and wrong types are refused; dashes in a key read as underscores.

    Example: `Settings.parse({"eviction": "lru"})`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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

    @classmethod
    def parse(cls, values: Mapping[str, Any] | Settings | None) -> Settings:
        """Settings from a mapping of keys to values (None: the defaults).

        Raises:
            SettingsError: names the key, what is allowed and what was found.
        """
        if isinstance(values, Settings):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise SettingsError(f"kv_cache_manager_config: expected an object of settings, found {values!r}")
        named: dict[str, Any] = {}
        for key, value in (values or {}).items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if not isinstance(name, str) or name not in cls.model_fields:
                allowed = ", ".join(sorted(cls.model_fields))
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
