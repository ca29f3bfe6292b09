"""A manager that checks itself after every call: the setting `check_invariants`.

`"off"` builds nothing of this, and costs nothing. `"log"` counts findings and logs the first ones; `"stop"` raises the
finding out of the call, which ends the engine. The wrappers are attributes of the one manager, over its class's
methods, so the class, and every other manager, stays as it is.

One check walks the pool and all tables. Measured with one group of full attention, every block cached, half of them
held, in CPU time (Python 3.12, a virtual machine with 2 cores, both busy): 2 to 5 ms for 1,000 blocks, 25 to 28 ms for
10,000, 350 to 456 ms for 100,000; a server's request of 4 tokens makes about 20 calls. `check_invariants_every` spreads
the checks; a fault is then found some calls later. The recorded events take at most 1.8 kB for each block.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvplug.errors import CallError
from vllm_kvplug.invariants import Finding, InvariantError, find_contradictions, tell
from vllm_kvplug.settings import Settings
from vllm_kvplug.story import BlockStory

if TYPE_CHECKING:
    from vllm_kvplug.manager import CacheManager

# So many findings are logged in full; the others are counted only.
MAX_LOGGED_FINDINGS = 10

# The logger's name puts it below the glue's, which is below vLLM's: in a server it has that one's level, handler and
# format; elsewhere it is a logger like any other.
_logger = logging.getLogger("vllm.kvplug.invariants")


class CheckedCalls:
    """Checks a manager after each of its public calls.

    Attributes:
        story: the observer that remembers what befell each block; the manager's pool must know it.
        num_findings: contradictions found so far. One that stands over several calls counts once.
    """

    def __init__(self, *, stops: bool, num_calls_per_check: int = 1) -> None:
        self.story = BlockStory()
        self.num_findings = 0
        self._stops = stops
        self._num_calls_per_check = num_calls_per_check
        self._depth = 0
        self._standing: frozenset[str] = frozenset()

    @classmethod
    def of_settings(cls, settings: Settings) -> CheckedCalls | None:
        """What the settings ask for; None where they ask for no check."""
        if settings.check_invariants == "off":
            return None
        return cls(stops=settings.check_invariants == "stop", num_calls_per_check=settings.check_invariants_every)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise CallError(
            "a manager that checks itself: expected not to be copied or pickled; set check_invariants to off"
        )

    def watch(self, manager: CacheManager, base: type[CacheManager]) -> None:
        """From now on, check after every public method of `base`, as this manager has it."""
        for name, member in vars(base).items():
            if not name.startswith("_") and inspect.isfunction(member):
                setattr(manager, name, self._checked(weakref.ref(manager), name, getattr(type(manager), name)))

    def _checked(
        self, reference: weakref.ref[CacheManager], name: str, method: Callable[..., Any]
    ) -> Callable[..., Any]:
        # No cycle between manager and wrapper: vLLM takes both out of the garbage collector's sight.
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            manager = reference()
            if manager is None:
                raise ReferenceError(f"{name}: expected a KV cache manager to call, found it gone")
            if self._depth:  # a call within a call: between calls is later
                return method(manager, *args, **kwargs)
            self._depth += 1
            self.story.begin_call(name, _request_id(args, kwargs))
            try:
                return method(manager, *args, **kwargs)
            finally:
                # After a call that raised, too: it must have changed nothing.
                self._depth -= 1
                try:
                    if self.story.call.number % self._num_calls_per_check == 0:
                        self._check(manager)
                finally:
                    self.story.end_call()

        return call

    def _check(self, manager: CacheManager) -> None:
        try:
            findings = list(find_contradictions(manager))
        except Exception as error:  # structures so broken that they cannot be read
            findings = [Finding(f"the check itself: expected to read all structures, found {error!r}")]
        if findings and self._stops:
            self.num_findings += len(findings)
            raise InvariantError(self._text(manager, findings[0], len(findings) - 1))
        new = [finding for finding in findings if finding.what not in self._standing]
        self._standing = frozenset(finding.what for finding in findings)
        for finding in new:
            self.num_findings += 1
            if self.num_findings <= MAX_LOGGED_FINDINGS:
                _logger.error("%s", self._text(manager, finding, 0))
            if self.num_findings == MAX_LOGGED_FINDINGS:
                _logger.error(
                    "KV cache invariants: %d findings logged, further ones are counted only", self.num_findings
                )

    def _text(self, manager: CacheManager, finding: Finding, num_others: int) -> str:
        try:
            text = tell(manager, finding, self.story)
        except Exception as error:
            text = f"{finding.message}\n  (its story cannot be told: {error!r})"
        others = f"\n  and {num_others} more findings of this check" if num_others else ""
        return f"KV cache invariant broken, found after {self.story.call}: {text}{others}"


def _request_id(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Of the request that a call is for: its first argument, as the request or its id."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return first if isinstance(first, str) else getattr(first, "request_id", None)
