"""Whether the vLLM that is installed is as the glue knows it, by names and signatures.

Its files are read, not imported: a command line asks before the engine's modules are there, and of a version that we do
not know even an import may fail. What a function does cannot be seen so: docs/versions.md says what was run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from vllm_kvplug.vllm_glue import contract, patched_tree, relied_on
from vllm_kvplug.vllm_glue.contract import Call

SCHEDULER = "v1/core/sched/scheduler.py"
_SCHEDULERS = (SCHEDULER, "v1/core/sched/async_scheduler.py")
_ENGINE = "v1/engine/core.py"
# Members of the manager that a released scheduler reads: those of contract.py, and `kv_cache_manager` itself.
_MANAGER = "kv_cache_manager"
# How many values a scheduler takes of an answer.
_NUM_ANSWERED = {"get_computed_blocks": 2}
_MAX_TOLD = 8


@functools.cache
def find() -> tuple[str, ...]:
    """What differs in the installed vLLM from what the glue relies on, a few words each; nothing: all is there."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return tuple(_told([drift for folder in folders for drift in _Tree(Path(folder)).drifts()]))


def find_in(folder: Path) -> tuple[str, ...]:
    """The same of a vLLM whose package is `folder`."""
    return tuple(_told(list(_Tree(folder).drifts())))


def _told(drifts: list[str]) -> list[str]:
    rest = len(drifts) - _MAX_TOLD
    return drifts if rest <= 0 else [*drifts[:_MAX_TOLD], f"and {rest} more"]


class _Tree:
    """The files of one vLLM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_patched = patched_tree.is_patched(folder)
        self._files: dict[str, ast.Module | None] = {}

    def drifts(self) -> Iterator[str]:
        """All that differs, the scheduler's calls first."""
        yield from self._calls()
        yield from self._constructions()
        yield from self._functions()
        yield from self._classes()
        yield from self._request()

    def _file(self, name: str) -> ast.Module | None:
        if name not in self._files:
            try:
                self._files[name] = ast.parse((self._folder / name).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self._files[name] = None
        return self._files[name]

    def _nodes(self, *names: str) -> Iterator[ast.AST]:
        for name in names:
            if (tree := self._file(name)) is not None:
                yield from ast.walk(tree)

    # The scheduler

    def _calls(self) -> Iterator[str]:
        """How the scheduler calls its manager, and what it reads of it."""
        if self._file(SCHEDULER) is None:
            yield f"vllm/{SCHEDULER} is missing"
            return
        called: dict[str, None] = {}
        told: dict[str, None] = {}
        for node in self._nodes(*_SCHEDULERS):
            if isinstance(node, ast.Call) and (name := _member(node.func)) is not None:
                called[name] = None
                told |= dict.fromkeys(_call_drifts(name, _call_of(node)))
            elif isinstance(node, ast.Assign):
                told |= dict.fromkeys(_answer_drifts(node))
        yield from told
        yield from (f"Scheduler does not call {name}" for name in contract.CALLS if name not in called)
        known = {*called, *contract.CALLS, *contract.ATTRIBUTES, *contract.CONNECTOR_ATTRIBUTES}
        members = dict.fromkeys(_member(node) for node in self._nodes(*_SCHEDULERS))
        yield from (f"Scheduler reads {_MANAGER}.{name}" for name in members if name is not None and name not in known)

    def _constructions(self) -> Iterator[str]:
        """With what the scheduler constructs its manager, and the engine its block hasher."""
        name = relied_on.PATCH_MANAGER_CALL if self._is_patched else contract.CLASS_NAME
        made = [node for node in self._nodes(SCHEDULER) if _is_call_of(node, name)]
        if not made and self._file(SCHEDULER) is not None:
            yield f"Scheduler does not construct {name}(...)"
        for node in made:
            found, known = set(_call_of(node).keywords), set(contract.CONSTRUCTOR_KEYWORDS)
            if found - known:
                yield f"Scheduler constructs {contract.CLASS_NAME} with {_listed(found - known)}"
            if known - found:
                yield f"Scheduler constructs {contract.CLASS_NAME} without {_listed(known - found)}"
        if self._is_patched:
            yield from self._missing_parts_of_the_patch()
            return
        asked = [node for node in self._nodes(_ENGINE) if _is_call_of(node, contract.HASHER_NAME)]
        if not asked:
            yield f"EngineCore does not call {contract.HASHER_NAME}"
        for node in asked:
            if _call_of(node) != contract.HASHER_CALL:
                call = f"{contract.HASHER_NAME}{_call_of(node)}"
                yield f"EngineCore calls {call}, expected {contract.HASHER_NAME}{contract.HASHER_CALL}"

    def _missing_parts_of_the_patch(self) -> Iterator[str]:
        """What a patch that was applied in part lacks: then a chosen manager would serve with vLLM's hashes, say."""
        if not any(_is_call_of(node, relied_on.PATCH_HASHER_CALL) for node in self._nodes(_ENGINE)):
            yield f"EngineCore does not call {relied_on.PATCH_HASHER_CALL}, as the patch has it"
        for file, (name, field) in relied_on.PATCH_FIELDS.items():
            found = _classes_of(self._file(file)).get(name)
            if found is None or field not in _fields_of(found):
                yield f"{name} lacks {field}, which the patch adds"

    # What is wrapped, called and constructed

    def _functions(self) -> Iterator[str]:
        for file, functions in relied_on.FUNCTIONS.items():
            found = _functions_of(self._file(file))
            for name, expected in functions.items():
                parameters = found.get(name)
                if parameters is None:
                    yield f"{name} is missing in vllm/{file}"
                elif parameters[: len(expected)] != expected:
                    yield f"{name}({', '.join(parameters)}), expected ({', '.join(expected)}, ...)"

    def _classes(self) -> Iterator[str]:
        for file, names in relied_on.CLASSES.items():
            found = _classes_of(self._file(file))
            yield from (f"{name} is missing in vllm/{file}" for name in names if name not in found)
        for file, classes in relied_on.FIELDS.items():
            found = _classes_of(self._file(file))
            for name, expected in classes.items():
                if name not in found:
                    yield f"{name} is missing in vllm/{file}"
                    continue
                fields = _fields_of(found[name])
                if fields - set(expected):
                    yield f"{name} has the further fields {', '.join(sorted(fields - set(expected)))}"
                if set(expected) - fields:
                    yield f"{name} lacks {', '.join(sorted(set(expected) - fields))}"

    def _request(self) -> Iterator[str]:
        request = _classes_of(self._file(relied_on.REQUEST_FILE)).get("Request")
        if request is None:
            yield f"Request is missing in vllm/{relied_on.REQUEST_FILE}"
            return
        found = {node.name for node in request.body if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(request):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(target.attr for target in targets if isinstance(target, ast.Attribute))
        missing = [name for name in relied_on.REQUEST_ATTRIBUTES if name not in found]
        if missing:
            yield f"Request lacks {', '.join(missing)}"


def _member(node: ast.AST) -> str | None:
    """The name X of a node `self.kv_cache_manager.X`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == _MANAGER:
        return node.attr
    return None


def _call_of(node: ast.Call) -> Call:
    return Call(len(node.args), tuple(str(keyword.arg) for keyword in node.keywords))


def _is_same(call: Call, known: Call) -> bool:
    return call.num_positional == known.num_positional and set(call.keywords) == set(known.keywords)


def _is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _call_drifts(name: str, call: Call) -> Iterator[str]:
    """Whether a scheduler calls its manager otherwise than the contract says."""
    if name not in contract.CALLS:
        yield f"Scheduler calls {name}{call}, which no manager here has"
    elif not any(_is_same(call, known) for known in contract.CALLS[name]):
        expected = " or ".join(f"{name}{known}" for known in contract.CALLS[name])
        yield f"Scheduler calls {name}{call}, expected {expected}"


def _answer_drifts(node: ast.Assign) -> Iterator[str]:
    """Whether a scheduler takes more or fewer values of an answer than it has."""
    name = _member(node.value.func) if isinstance(node.value, ast.Call) else None
    expected = _NUM_ANSWERED.get(name or "")
    for target in node.targets:
        if expected is not None and isinstance(target, ast.Tuple) and len(target.elts) != expected:
            yield f"Scheduler takes {len(target.elts)} values from {name}, expected {expected}"


def _listed(keywords: set[str]) -> str:
    return ", ".join(f"{keyword}=" for keyword in sorted(keywords))


def _classes_of(tree: ast.Module | None) -> dict[str, ast.ClassDef]:
    return {} if tree is None else {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields_of(node: ast.ClassDef) -> set[str]:
    return {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _functions_of(tree: ast.Module | None) -> dict[str, tuple[str, ...]]:
    """`function` and `Class.function`: their parameters by name."""
    found: dict[str, tuple[str, ...]] = {}
    if tree is None:
        return found
    classes: list[tuple[str, ast.AST]] = [(f"{name}.", node) for name, node in _classes_of(tree).items()]
    owners: list[tuple[str, ast.AST]] = [("", tree), *classes]
    for prefix, owner in owners:
        for node in getattr(owner, "body", ()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found[prefix + node.name] = tuple(argument.arg for argument in arguments)
    return found
