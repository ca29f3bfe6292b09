"""Two managers side by side on real serving: one answers the scheduler, the other follows and is compared.

Whatever the follower does, the scheduler gets the serving manager's answers, unchanged. An exception in the follower,
or in the comparison, ends the comparing with one line in the log and a traceback; the follower is dropped then.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import vllm_kvplug
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.trace.live_calls import repeatable
from vllm_kvplug.vllm_glue import contract, registry
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.shadow_bundle import Bundle
from vllm_kvplug.vllm_glue.shadow_divergences import Tally
from vllm_kvplug.vllm_glue.shadow_follower import Follower, FollowerError
from vllm_kvplug.vllm_glue.shadow_settings import ShadowSettings

_STEP_KEYWORDS = {"num_lookahead_tokens"}


class ShadowManager:
    """Takes the place of vLLM's KVCacheManager. The contract's methods are made below the class, all alike; everything
    else (`usage`, what a manager has of its own) is the serving manager's.

    Args:
        kv_cache_config, metrics_collector: vLLM's; the follower gets a copy of the first, and not the second.
        settings: see `ShadowSettings`.
        engine_index: which of several engines (data parallel); a bundle is of one engine.
        keywords: vLLM's others, handed to both sides as they are.

    Attributes:
        serving: the manager whose answers the scheduler gets.
        tally: what has diverged so far.

    Raises:
        SettingsError: wrong settings, of the shadow or of a side.
        ContractError, UnsupportedError: a side that cannot be constructed, or lacks something.
        TraceError: a bundle that cannot be written.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        *,
        metrics_collector: Any = None,
        settings: ShadowSettings | Mapping[str, Any] | None = None,
        engine_index: int = 0,
        **keywords: Any,
    ) -> None:
        self.settings = ShadowSettings.parse(settings)
        self.settings.check()
        self.serving = self._construct(
            "serving", kv_cache_config=kv_cache_config, metrics_collector=metrics_collector, **keywords
        )
        self.empty_kv_cache_blocks = self.serving.empty_kv_cache_blocks
        # Nothing that the follower could change is shared; blocks are sampled on the serving side alone.
        following = self._construct(
            "follower", kv_cache_config=copy.deepcopy(kv_cache_config), metrics_collector=None, **keywords
        )
        is_exact = self.settings.level_in_force == "exact"
        self.tally = Tally(is_exact=is_exact, max_first=self.settings.log_first)
        self._sides = {
            "serving": self.settings.serving,
            "follower": self.settings.follower,
            "level": self.settings.level_in_force,
        }
        self._num_told = 0
        self._bundle: Bundle | None = None
        if self.settings.bundle is not None:
            self._bundle = Bundle(
                self.settings.bundle,
                self.serving,
                self.settings.serving,
                self.settings.serving_config,
                {"kv_cache_config": kv_cache_config, **keywords},
                self._sides,
                self.tally,
                max_mib=self.settings.bundle_max_mib,
                engine_index=engine_index,
            )
        self._follower: Follower | None = Follower(
            self.serving,
            following,
            kv_cache_config.num_blocks,
            self.tally,
            is_exact=is_exact,
            record=None if self._bundle is None else self._bundle.append,
        )

    def _construct(self, side: str, **keywords: Any) -> Any:
        name, config = getattr(self.settings, side), getattr(self.settings, f"{side}_config")
        try:
            manager = registry.factory(name, config)(**keywords)
            contract.check_instance(manager, name)
        except KVPlugError as error:
            raise type(error)(f"the {side} side of 'shadow': {error}") from error
        return manager

    @classmethod
    def validate_settings(cls, settings: Mapping[str, Any]) -> None:
        """Before anything is started. Raises what `ShadowSettings.check` raises."""
        ShadowSettings.parse(settings).check()

    def __getattr__(self, name: str) -> Any:
        if name == "serving" or name.startswith("__"):  # not constructed yet; what copying and pickling look for
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.serving, name)

    @property
    def usage(self) -> float:
        """The serving side's."""
        return self.serving.usage

    @property
    def managers(self) -> tuple[Any, ...]:
        """The serving manager and, as long as it is compared, the follower."""
        return (self.serving,) if self._follower is None else (self.serving, self._follower.manager)

    def describe(self) -> dict[str, str]:
        """Both sides by name, and the shape of the cache as the serving manager tells it."""
        own = getattr(self.serving, "describe", None)
        told = dict(own()) if callable(own) else {}
        return {
            **{name: told[name] for name in ("groups", "num_blocks", "block_size") if name in told},
            "version": vllm_kvplug.__version__,
            **self._sides,
        }

    def shadow_report(self) -> dict[str, Any]:
        """What has been compared and found so far, as plain values. A bundle gets it, too, if there is anything new."""
        if self._bundle is not None:
            self._bundle.update()
        return {**self._sides, **self.tally.summary()}

    def _both(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the contract, to the serving manager and then to the follower."""
        follower = self._follower
        if follower is None:
            return getattr(self.serving, method)(*args, **kwargs)
        started_ns = time.perf_counter_ns()
        # As a scheduler asks for a running request's next step.
        is_step = method == "allocate_slots" and len(args) == 2 and kwargs.keys() == _STEP_KEYWORDS
        operation = None
        try:
            args = repeatable(method, args)
            # `begin` notes the request as it is before the call. For a step it may come after the call, and only where
            # the shortest way does not do: a step names no prefix hits, and `allocate_slots` changes the manager alone
            # (the request is the scheduler's, who changes it later), so it notes the same then.
            if not is_step:
                operation = follower.begin(method, args, kwargs)
        except Exception as error:
            self._stop(method, error)
        served_ns = time.perf_counter_ns()
        result = getattr(self.serving, method)(*args, **kwargs)
        resumed_ns = time.perf_counter_ns()
        if self._follower is not None:
            try:
                if operation is not None:
                    follower.end(operation, result)
                elif not follower.step(args[0], args[1], kwargs["num_lookahead_tokens"], result):
                    follower.end(follower.begin(method, args, kwargs), result)
                if self._num_told < len(self.tally.first):
                    self._tell()
            except Exception as error:
                self._stop(method, error)
        self.tally.overhead_ns += time.perf_counter_ns() - resumed_ns + served_ns - started_ns
        return result

    def _stop(self, method: str, error: Exception) -> None:
        """The comparing ends; called where the exception is handled."""
        self._follower = None
        self.tally.has_stopped = True
        has_raised = isinstance(error, FollowerError)
        logger.exception(
            "shadow: %s failed in %s; comparing stops here, and %r goes on serving",
            f"the follower {self.settings.follower!r}" if has_raised else "comparing",
            method,
            self.settings.serving,
        )
        if self._bundle is not None:
            self._bundle.end_trace()

    def _tell(self) -> None:
        for told in self.tally.first[self._num_told :]:
            logger.warning("%s", told.text())
        if not self._num_told and self._bundle is None:
            logger.warning("shadow: to replay what led to a divergence, set 'bundle' to a folder, from the start on")
        self._num_told = len(self.tally.first)
        if self._num_told == self.settings.log_first:
            logger.warning("shadow: %d divergences are logged, further ones are counted only", self._num_told)
        if self._bundle is not None:
            self._bundle.update()


def _method(name: str) -> Callable[..., Any]:
    def call(self: ShadowManager, *args: Any, **kwargs: Any) -> Any:
        return self._both(name, args, kwargs)

    call.__name__, call.__qualname__ = name, f"{ShadowManager.__name__}.{name}"
    return call


for _name in contract.CALLS:
    setattr(ShadowManager, _name, _method(_name))


def serving_manager(manager: Any) -> Any:
    """The manager that answers the scheduler: a shadow's serving side, else `manager` itself."""
    return manager.serving if isinstance(manager, ShadowManager) else manager
