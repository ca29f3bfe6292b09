"""The register, the patches, the code that binds and the lines of vLLM that it binds at are in step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.glue.support import ROOT
from tests.patches.tree import installed_folder
from vllm_kvplug.cli.fork_patches import Binding, Patch, folder, register
from vllm_kvplug.vllm_glue import contract
from vllm_kvplug.vllm_glue.version import SUPPORTED_VLLM_VERSIONS

GLUE = ROOT / "vllm_kvplug" / "vllm_glue"
NEW_FILE = "vllm/v1/core/kv_cache_manager_factory.py"
MAX_ADDED_LINES = 150
PATCHES = [pytest.param(patch, id=patch.vllm) for patch in register().patch]
BINDINGS = [pytest.param(binding, id=binding.name) for binding in register().binding]


def test_every_patch_file_is_registered() -> None:
    assert [patch.file for patch in register().patch] == sorted(path.name for path in folder().glob("*.patch"))
    assert folder().samefile(ROOT / "patches")
    # The last of each series; the versions before it are taken by the same patch or run without one.
    series = {version.rpartition(".")[0]: version for version in SUPPORTED_VLLM_VERSIONS}
    assert {patch.vllm for patch in register().patch} >= set(series.values())


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_is_small_and_touches_what_the_register_says(patch: Patch) -> None:
    text = patch.path.read_text()
    assert patch.file == f"vllm-{patch.vllm}.patch"
    assert re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE) == patch.files
    assert re.findall(r"^ create mode \d+ (.+)$", text, re.MULTILINE) == [NEW_FILE]
    assert not re.search(r"^(rename|copy|deleted) ", text, re.MULTILINE)
    added = [line for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= MAX_ADDED_LINES
    assert text.startswith("From ")
    assert "\nSubject: [PATCH] [Core] " in text


def new_file(patch: Patch) -> str:
    _, _, added = patch.path.read_text().partition(f"\n+++ b/{NEW_FILE}\n")
    body = added.partition("\ndiff --git ")[0]
    return "\n".join(line[1:] for line in body.splitlines() if line.startswith("+"))


def test_the_registry_is_the_same_in_all() -> None:
    (text,) = {new_file(patch) for patch in register().patch}
    compile(text, NEW_FILE, "exec")


def bindings_in_code() -> Iterator[tuple[str, str]]:
    """(name, file:function) of every place in the glue that puts something of ours into vLLM."""
    for path in sorted(GLUE.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            for name in names_bound(node):
                around = [function for function in functions if any(child is node for child in ast.walk(function))]
                innermost = max(around, key=lambda function: function.lineno)
                yield name, f"{path.relative_to(ROOT).as_posix()}:{innermost.name}"


# Variables that stand for a class of vLLM's where the glue binds at it.
OWNERS = {"args_cls": ("EngineArgs", "AsyncEngineArgs"), "type(scheduler)": ("Scheduler",), "scheduler": ("Scheduler",)}


def names_bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "patching.wrap_method":
        owner, name = node.args[:2]
        shown = ast.unparse(owner).removeprefix("module.")
        for cls in OWNERS.get(shown, (shown,)):
            yield f"{cls}.{ast.literal_eval(name)}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and ast.unparse(node.args[0]) == "module":
        constant = ast.unparse(node.args[1]).removeprefix("contract.")
        # What is put back is no binding.
        if ast.unparse(node.args[2]) in ("factory", "answer"):
            yield getattr(contract, constant)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    owner = ast.unparse(part.value)
                    if owner.startswith("module."):
                        yield f"{owner.removeprefix('module.')}.{part.attr}"
                    elif owner == "scheduler":
                        yield f"Scheduler.{part.attr}"


def test_every_binding_is_registered_and_no_other() -> None:
    registered = [(binding.name, binding.by) for binding in register().binding]
    assert sorted(registered) == sorted(set(bindings_in_code()))


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_binding_is_at_its_line(binding: Binding) -> None:
    path, _, line = binding.at.rpartition(":")
    (node,) = [
        node
        for node in named_nodes(ast.parse((installed_folder() / path).read_text()), binding.name)
        if node.lineno == int(line)
    ]
    assert node


def named_nodes(tree: ast.Module, name: str) -> Iterator[ast.stmt | ast.alias]:
    """Where a name of the module stands, or a method; for one that a class does not have, the class."""
    owner, _, member = name.rpartition(".")
    for node in tree.body:
        if not owner and isinstance(node, ast.ImportFrom):
            yield from (alias for alias in node.names if alias.name == member)
        if isinstance(node, ast.ClassDef) and node.name == owner:
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from [child for child in methods if child.name == member] or [node]


def test_the_readme_names_what_there_is() -> None:
    text = (folder() / "README.md").read_text()
    assert all(patch.file in text for patch in register().patch)
