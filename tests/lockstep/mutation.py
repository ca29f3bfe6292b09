"""How a deliberate mistake is put into our code and taken out again.

A mistake replaces a piece of a function's text while it is applied. The piece must occur exactly once: where the code
has moved on, the mistake says so instead of silently testing nothing, and is to be written anew.
"""

from __future__ import annotations
import __future__

import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.lockstep.trace import Setup

# Statements for a mistake: give `runs`, the last of a request first, back the other way round, block by block.
FIRST_BLOCK_FIRST = """blocks = []
for run in runs[::-1]:
    blocks.append(run)
    while len(blocks[-1].block_ids) > 1:
        blocks.append(self._pool.split(blocks[-1], 1))
self._pool.release(blocks)"""


class MistakeDoesNotFit(Exception):
    """The text that a mistake replaces is not there (any more)."""


@dataclass(frozen=True)
class Edit:
    """One replacement: `place` is a dotted name below the package, as `block_pool.BlockPool.take`."""

    place: str
    old: str
    new: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        owner, name, value = self._find()
        edited = self._edited(owner, value)
        with contextlib.ExitStack() as stack:
            for holder in _holders(owner, name, value):
                stack.enter_context(mock.patch.object(holder, name, edited))
            yield

    def _find(self) -> tuple[Any, str, Any]:
        """The module or class that holds the function, the function's name and, as it stands there, the function."""
        parts = self.place.split(".")
        for end in range(len(parts) - 1, 0, -1):
            with contextlib.suppress(ModuleNotFoundError):
                owner: Any = importlib.import_module(".".join(["vllm_kvplug", *parts[:end]]))
                break
        else:
            raise MistakeDoesNotFit(f"{self.place}: no such module")
        try:
            owner = functools.reduce(getattr, parts[end:-1], owner)
            return owner, parts[-1], vars(owner)[parts[-1]]
        except (AttributeError, KeyError) as error:
            raise MistakeDoesNotFit(f"{self.place}: not found") from error

    def _edited(self, owner: Any, value: Any) -> Any:
        function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise MistakeDoesNotFit(f"{self.place}: expected {self.old!r} once, found {source.count(self.old)} times")
        # Within a function of a parameter so named, super() finds its class.
        body = textwrap.indent(source.replace(self.old, self.new), "    ")
        text = f"def make(__class__):\n{body}\n    return {function.__name__}"
        flags = __future__.annotations.compiler_flag
        namespace: dict[str, Any] = {}
        exec(
            compile(text, f"<mistake in {self.place}>", "exec", flags, dont_inherit=True),
            function.__globals__,
            namespace,
        )
        return namespace["make"](owner)


def _holders(owner: Any, name: str, value: Any) -> list[Any]:
    """Where the function is bound: its class, or every module of the package that holds or imported it."""
    if not inspect.ismodule(owner):
        return [owner]
    ours = [module for module_name, module in list(sys.modules.items()) if module_name.startswith("vllm_kvplug")]
    return [module for module in ours if vars(module).get(name) is value]


@dataclass(frozen=True)
class Mistake:
    """A deliberate mistake.

    Attributes:
        rule: what must hold, and does not while the mistake is applied.
        edits: the replacements; the first names the module.
        needs: which setups it is tried on: those in which it could show.
    """

    rule: str
    edits: tuple[Edit, ...]
    needs: Callable[[Setup], bool] = lambda setup: True

    def tried_where(self, needs: Callable[[Setup], bool]) -> Mistake:
        """The same mistake, on other setups."""
        return replace(self, needs=needs)

    @property
    def module(self) -> str:
        """The module's path below the package."""
        parts = self.edits[0].place.split(".")
        names = [part for part in parts[:-1] if part.islower()]
        return "/".join(names) + ".py"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Our code with the mistake in it."""
        with contextlib.ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.applied())
            yield


def mistake(rule: str, place: str, old: str, new: str, *more: Edit) -> Mistake:
    """A mistake of one replacement, or of several where `more` has further ones."""
    return Mistake(rule, (Edit(place, old, new), *more))
