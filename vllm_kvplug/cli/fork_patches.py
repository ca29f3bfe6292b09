"""The patches for forks: their register, and what git says of them on a tree. Nothing here imports vLLM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from vllm_kvplug.cli.replacing import replace_files
from vllm_kvplug.errors import KVPlugError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VERSION = re.compile(r"""^(?:__version__ = version = ['"]|Version: )(?P<version>[0-9][\w.]*)""", re.MULTILINE)
_HUNK_FAILED = re.compile(r"error: patch failed: (?P<path>.+):(?P<line>\d+)")
_CREATED = re.compile(r"^ create mode \d+ (.+)$", re.MULTILINE)
_GIT_TIMEOUT_S = 60


class PatchError(KVPlugError, RuntimeError):
    """A patch does not fit a tree, or git could not write: names the hunk or the file. Nothing was changed."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Patch(_Entry):
    """A patch of the register: for which released vLLM, and why, how, and until when it is there."""

    file: str
    vllm: str
    files: list[str]
    why: str
    how: str
    unnecessary_when: str
    can_go: str

    @property
    def path(self) -> Path:
        """The patch file."""
        return folder() / self.file

    def created(self) -> list[str]:
        """Of `files`, those that the patch creates."""
        return _CREATED.findall(self.path.read_text())


class Binding(_Entry):
    """What the plugin binds at run time: `at` is file:line in vLLM 0.17.1, `by` file:function of ours."""

    name: str
    at: str
    by: str
    tree: Literal["any", "released", "patched"]
    when: Literal["installed", "chosen"]
    why: str


class Register(_Entry):
    """All patches, the newest last, and all bindings."""

    patch: list[Patch]
    binding: list[Binding]


def folder() -> Path:
    """Where patches and register lie, in a checkout as in an installed package.

    Raises:
        PatchError: the environment was made before there were patches.
    """
    try:
        return Path(str(files("vllm_kvplug.patches")))
    except ModuleNotFoundError:
        raise PatchError(
            "vllm_kvplug.patches: expected the folder of the patches, found none in this environment, which is older "
            "than the code; in a checkout run `make env`, else install the package again"
        ) from None


@cache
def register() -> Register:
    """The register, read once."""
    return Register.model_validate(tomllib.loads((folder() / "register.toml").read_text()))


@dataclass(frozen=True)
class Tree:
    """Where a vLLM lies. `folder` contains the package `vllm`; `version` is None where the tree does not tell it."""

    folder: Path
    version: str | None

    @classmethod
    def at(cls, given: Path) -> Tree:
        """The tree of a source folder, of site-packages, or of the package itself.

        Raises:
            UsageError: no vLLM there, or its version cannot be read.
        """
        top = given.resolve()
        if not (top / "vllm" / "__init__.py").is_file():
            if top.name == "vllm" and (top / "__init__.py").is_file():
                top = top.parent
            else:
                found = "a folder without vllm/__init__.py" if top.is_dir() else "no such folder"
                raise UsageError(
                    f"DIR: expected a source tree of vLLM, or a site-packages that has it, found {given}: {found}"
                )
        for name in ("vllm/_version.py", "PKG-INFO"):
            path = top / name
            try:
                found_version = _VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
            except (OSError, ValueError) as error:
                raise UsageError(f"DIR: expected to read the version in {path}, found {error}") from None
            if found_version is not None:
                return cls(top, found_version["version"])
        return cls(top, None)


class State(Enum):
    """What a patch is to a tree."""

    FITS = "fits, not applied"
    APPLIED = "applied"
    UNKNOWN = "does not fit"


@dataclass(frozen=True)
class Match:
    """A patch on a tree; `problems` says what does not fit, one hunk or file each.

    `left_over`: where it fits, files of it that are there all the same. pip removes those alone that it has installed.
    """

    patch: Patch
    tree: Tree
    state: State
    problems: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()

    def changes(self) -> list[tuple[str, int, int]]:
        """What applying changes: file, lines added, lines removed."""
        rows = _git(self.tree.folder, self.patch, "--numstat").stdout.splitlines()
        return [(path, int(added), int(removed)) for added, removed, path in (row.split("\t") for row in rows)]

    def apply(self) -> None:
        """Write the patch into the tree: all of it or nothing."""
        self._write()

    def revert(self) -> None:
        """Take the patch, or what is left over of it, out again: the files are as they were, to the byte."""
        if self.state is State.APPLIED:
            self._write("--reverse")
        with _writing(self.tree, self.patch):
            for name in self.left_over:
                (self.tree.folder / name).unlink()

    def _write(self, *options: str) -> None:
        with _writing(self.tree, self.patch), TemporaryDirectory(prefix="kvplug-patch-") as made:
            _copy_files(self.tree, self.patch, Path(made), but=self.left_over)
            done = _git(Path(made), self.patch, *options)
            if done.returncode:
                reason = "; ".join(_lines(done.stderr))
                raise PatchError(f"{self.patch.file} on {self.tree.folder}: git failed: {reason}; nothing was changed")
            replace_files(self.tree.folder, Path(made), self.patch.files)

    def require_known(self) -> Match:
        """Raise a PatchError that names every hunk that does not fit, unless all do or all are there."""
        if self.state is not State.UNKNOWN:
            return self
        known = ", ".join(patch.vllm for patch in register().patch)
        raise PatchError(
            f"{self.tree.folder}: expected vLLM {known}, with the patch or without, found vLLM "
            f"{self.tree.version or 'of an unknown version'} that {self.patch.file} does not fit: "
            f"{'; '.join(self.problems)}"
        )


def match(tree: Tree) -> Match:
    """The patch of the tree's version. Where there is none for it: one that is there, or fits, or comes nearest."""
    patches = [patch for patch in register().patch if patch.vllm == tree.version] or register().patch
    matches = [_match(tree, patch) for patch in reversed(patches)]
    order = [State.APPLIED, State.FITS, State.UNKNOWN]
    return min(matches, key=lambda found: (order.index(found.state), len(found.problems)))


def _match(tree: Tree, patch: Patch) -> Match:
    forwards = _git(tree.folder, patch, "--check")
    if not forwards.returncode:
        return Match(patch, tree, State.FITS)
    backwards = _git(tree.folder, patch, "--check", "--reverse")
    if not backwards.returncode:
        return Match(patch, tree, State.APPLIED)
    if left_over := _left_over(tree, patch):
        return Match(patch, tree, State.FITS, left_over=left_over)
    return Match(patch, tree, State.UNKNOWN, tuple(_problems(forwards.stderr, patch)))


def _left_over(tree: Tree, patch: Patch) -> tuple[str, ...]:
    """The files that the patch creates and that are there already, to the byte, in a tree that it fits otherwise."""
    there = tuple(name for name in patch.created() if (tree.folder / name).is_file())
    if not there:
        return ()
    with _writing(tree, patch), TemporaryDirectory(prefix="kvplug-patch-") as made:
        _copy_files(tree, patch, Path(made), but=there)
        if _git(Path(made), patch).returncode:
            return ()
        same = all((Path(made) / name).read_bytes() == (tree.folder / name).read_bytes() for name in there)
    return there if same else ()


@contextmanager
def _writing(tree: Tree, patch: Patch) -> Iterator[None]:
    """A full disk, or a file that may not be written, as one line."""
    try:
        yield
    except OSError as error:
        raise PatchError(
            f"{patch.file} on {tree.folder}: expected to write its files, found {error}; nothing was changed"
        ) from error


def _copy_files(tree: Tree, patch: Patch, target: Path, *, but: tuple[str, ...]) -> None:
    """What git gets to work on: the tree's files that the patch names."""
    for name in patch.files:
        if name not in but and (tree.folder / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree.folder / name, target / name)


def _problems(stderr: str, patch: Patch) -> list[str]:
    """git's complaints, with a hunk's own first line in the place of its number. git stops at the first in a file."""
    problems = []
    for line in _lines(stderr):
        failed = _HUNK_FAILED.fullmatch(line)
        if failed is not None:
            problems.append(f"{failed['path']}, hunk {_hunk(patch, failed['path'], failed['line'])}")
        elif not line.endswith("patch does not apply"):  # said once more, of the file
            problems.append(line.removeprefix("error: "))
    return problems


def _hunk(patch: Patch, path: str, line: str) -> str:
    _, _, of_file = patch.path.read_text().partition(f"\n--- a/{path}\n")
    header = re.search(rf"^@@ -{line}\b.*", of_file, re.MULTILINE)
    return repr(header[0]) if header is not None else f"at line {line}"


def _lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.strip()]


def _git(directory: Path, patch: Patch, *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply` as outside of any repository: inside one it would skip, silently, what that does not track.

    Raises:
        PatchError: git is not there, was killed, or does not end.
    """
    environment: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_DIR": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch.path)]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise PatchError("expected git on PATH, which applies the patches, found none") from None
    except subprocess.TimeoutExpired:
        raise PatchError(
            f"{patch.file} on {directory}: expected git to end within {_GIT_TIMEOUT_S} s, found it still running"
        ) from None
    if done.returncode < 0:
        name = next((known.name for known in signal.Signals if known == -done.returncode), str(-done.returncode))
        raise PatchError(f"{patch.file} on {directory}: git was killed by signal {name}; nothing was changed")
    return done
