"""The second place where vLLM is changed: the block hasher that an engine gives to its requests.

`vllm/v1/engine/core.py` asks for it once, in the engine's constructor and in the thread that constructs, under the name
`contract.HASHER_NAME` of its own module. A manager class says by its attribute `contract.HASHER_ATTRIBUTE` that its
engines hash with another; without that, and without a choice, the module is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_kvplug.errors import ContractError
from vllm_kvplug.vllm_glue import contract

HasherFactory = Callable[..., Any]


@contextmanager
def in_force(engine_core: Any, name: str, factory: HasherFactory) -> Iterator[None]:
    """Inside, this thread constructs `engine_core`, and `factory` makes its hasher if it asks for one.

    Raises:
        ContractError: the engine ended up with another hasher; another plugin changes it too.
    """
    with _seam.waiting(factory) as wanted:
        yield
    check_in_force(engine_core, name, wanted.made)


def check_in_force(engine_core: Any, name: str, made: Any) -> None:
    """Raise a ContractError unless a constructed engine hashes with what was made for it; None: it has no hasher."""
    found = getattr(engine_core, "request_block_hasher", None)
    if found is not made:
        raise ContractError(
            f"kv_cache_manager {name!r}: expected the engine to hash with {made!r}, its manager's own, found {found!r}"
        )


@dataclass
class _Wanted:
    """The hasher of one engine under construction; `made` is None until the engine has asked for it."""

    factory: HasherFactory
    made: Any = None


class _Seam:
    """Binds vLLM's name while engines wait for their hasher, several threads' at a time.

    A waiting thread's first call is answered by its own factory, all other calls by what stood there before. That is
    back as soon as nobody waits: after the call, or when a construction ends without one, because prefix caching is off
    or something failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, _Wanted] = {}
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def waiting(self, factory: HasherFactory) -> Iterator[_Wanted]:
        """Answer this thread's next call by `factory`, until the context ends."""
        wanted = _Wanted(factory)
        with self._lock:
            if self._restore is None:
                self._restore = self._bind()
            self._waiting[threading.get_ident()] = wanted
        try:
            yield wanted
        finally:
            self._end_wait()

    def _bind(self) -> Callable[[], None]:
        from vllm.v1.engine import core as module

        original = vars(module)[contract.HASHER_NAME]

        # A new function each time: should another plugin keep one in a wrapper of its own, it still knows its original.
        def answer(*args: Any, **kwargs: Any) -> Any:
            wanted = self._end_wait()
            if wanted is None:
                return original(*args, **kwargs)
            wanted.made = wanted.factory(*args, **kwargs)
            return wanted.made

        def restore() -> None:
            if vars(module)[contract.HASHER_NAME] is answer:
                setattr(module, contract.HASHER_NAME, original)

        setattr(module, contract.HASHER_NAME, answer)
        return restore

    def _end_wait(self) -> _Wanted | None:
        with self._lock:
            wanted = self._waiting.pop(threading.get_ident(), None)
            if not self._waiting and self._restore is not None:
                self._restore()
                self._restore = None
        return wanted


_seam = _Seam()
