"""The settings of `--kv-cache-manager shadow`: who serves, who follows, and what is compared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vllm_kvplug.errors import KVPlugError, SettingsError
from vllm_kvplug.settings import ParsedSettings, TraceSettings
from vllm_kvplug.vllm_glue import registry


class ShadowSettings(ParsedSettings):
    """Example: `ShadowSettings.parse({"serving": "kvplug", "follower": "my_module:MyManager"})`."""

    serving: str = Field(default="upstream", description="the manager whose answers the scheduler gets")
    serving_config: dict[str, Any] = Field(default_factory=dict, description="its settings")
    follower: str = Field(default="kvplug", description="the manager that is compared with it")
    follower_config: dict[str, Any] = Field(default_factory=dict, description="its settings")
    level: Literal["exact", "decision"] | None = Field(
        default=None,
        description="exact: block ids and all answers; decision: hit tokens, admissions, blocks in use. Default: exact "
        "where both sides are upstream or kvplug with one eviction policy",
    )
    log_first: int = Field(default=10, ge=0, description="so many divergences are logged in full")
    bundle: str | None = Field(
        default=None, min_length=1, description="folder for a trace of the serving side and the logged divergences"
    )
    bundle_max_mib: int = Field(default=256, ge=1, description="the most that the bundle's trace takes, in MiB")

    @property
    def level_in_force(self) -> str:
        """`level`, or what it is by default."""
        if self.level is not None:
            return self.level
        policies = self._policies()
        return "exact" if policies[0] is not None and policies[0] == policies[1] else "decision"

    def check(self) -> None:
        """Look at both sides' classes and settings, and at what they have in common.

        Raises:
            SettingsError: an unknown manager, wrong settings of one, a trace of one side, a shadow within a shadow, or
                a level that the two cannot be compared at.
            ContractError: a class that cannot serve.
        """
        for side in ("serving", "follower"):
            name = getattr(self, side)
            try:
                if registry.is_shadow(name):
                    raise SettingsError(f"kv_cache_manager: expected a manager that serves by itself, found {name!r}")
                self._refuse_trace(side)
                registry.validate(name, getattr(self, f"{side}_config"))
            except KVPlugError as error:
                raise type(error)(f"kv_cache_manager_config: setting {side!r} of 'shadow': {error}") from error
        policies = self._policies()
        if self.level == "exact" and None not in policies and policies[0] != policies[1]:
            raise SettingsError(
                f"kv_cache_manager_config: setting 'level': expected decision for managers of different eviction "
                f"({policies[0]} and {policies[1]}), which give different blocks, found 'exact'"
            )

    def _refuse_trace(self, side: str) -> None:
        """A trace is one of the shadow: the scheduler's calls, and what it was answered."""
        for key in getattr(self, f"{side}_config"):
            if key.replace("-", "_") in TraceSettings.model_fields:
                raise SettingsError(f"expected the setting {key!r} beside {side!r}, not in {side + '_config'!r}")

    def _policies(self) -> tuple[str | None, str | None]:
        """The eviction policy of each side; None: a third party's."""
        return (
            registry.policy_of(self.serving, self.serving_config),
            registry.policy_of(self.follower, self.follower_config),
        )
