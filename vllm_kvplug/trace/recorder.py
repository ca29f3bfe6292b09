"""Records a manager: the setting `trace`.

The wrappers are attributes of the one manager, over its class's methods (or over the wrappers of `check_invariants`),
so the class, and every other manager, stays as it is; where nothing is recorded, nothing of this is built. Calls that a
manager makes of its own methods are no operations.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.live_calls import LiveCalls, repeatable
from vllm_kvplug.trace.operations import METHODS, VERSIONS_METHODS, Operation
from vllm_kvplug.trace.writer import TraceWriter

_logger = logging.getLogger("vllm.kvplug.trace")


class Recorder:
    """Hands every call on a manager, with its answer, to a writer. It never changes an answer, and what goes wrong in
    it ends the recording with a line in the log, not the call.
    """

    def __init__(self, manager: Any, writer: TraceWriter, *, reads_tokens: bool = False) -> None:
        """Begin to record.

        Raises:
            TraceError: the manager takes no attributes.
        """
        self.writer = writer
        self._calls = LiveCalls(manager.empty_kv_cache_blocks, reads_tokens=reads_tokens)
        self._started_ns = time.perf_counter_ns()
        self._is_inside = False
        self._manager = weakref.ref(manager)
        # What was there before, by name, of those that were attributes of the manager itself.
        self._before: dict[str, Any] = {}
        try:
            for name in METHODS:
                if name in VERSIONS_METHODS and not hasattr(manager, name):
                    continue
                if name in vars(manager):
                    self._before[name] = vars(manager)[name]
                setattr(manager, name, self._recorded(name, self._inner(manager, name)))
        except (AttributeError, TypeError) as error:
            raise TraceError(
                f"trace: expected a manager whose methods can be watched, found {type(manager).__qualname__}: {error}"
            ) from None
        weakref.finalize(manager, writer.close)

    def detach(self) -> None:
        """Take the wrappers away: the manager is as before."""
        manager = self._manager()
        if manager is None:
            return
        for name in METHODS:
            if name in self._before:
                setattr(manager, name, self._before[name])
            elif name in vars(manager):
                delattr(manager, name)

    def close(self) -> None:
        """Stop recording, and write what is left, which is waited for."""
        self.detach()
        self.writer.close()

    def _inner(self, manager: Any, name: str) -> Callable[..., Any]:
        """Called with the manager in front, as a function of its class is."""
        if name in self._before:
            before = self._before[name]
            return lambda _, *args, **kwargs: before(*args, **kwargs)
        found = inspect.getattr_static(type(manager), name)
        if inspect.isfunction(found):
            return found
        return lambda manager, *args, **kwargs: found.__get__(manager, type(manager))(*args, **kwargs)

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        # No cycle between manager and wrapper: vLLM takes both out of the garbage collector's sight.
        reference, begin = self._manager, self._calls.begin

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            manager = reference()
            if manager is None:
                raise ReferenceError(f"{name}: expected a KV cache manager to call, found it gone")
            if self._is_inside:
                return method(manager, *args, **kwargs)
            args = repeatable(name, args)
            try:
                operation = begin(name, args, kwargs)
            except Exception as error:
                self._fail(name, error)
                return method(manager, *args, **kwargs)
            self._is_inside = True
            try:
                result = method(manager, *args, **kwargs)
            except Exception as error:
                self._write(self._calls.fail, operation, error)
                raise
            finally:
                self._is_inside = False
            self._write(self._calls.end, operation, result)
            return result

        return call

    def _write(self, complete: Callable[[Operation, Any], Operation], operation: Operation, outcome: Any) -> None:
        try:
            complete(operation, outcome)
            operation.time_us = (time.perf_counter_ns() - self._started_ns) // 1000
            if not self.writer.append(operation):
                self.detach()
        except Exception as error:
            self._fail(operation.method, error)

    def _fail(self, name: str, error: Exception) -> None:
        _logger.error(
            "KV cache trace %s: stopped at a call of %s, which cannot be recorded: %s: %s. Serving goes on.",
            self.writer.path,
            name,
            type(error).__name__,
            error,
        )
        self.detach()
        self.writer.close(wait=False)  # this thread serves
