"""`kvplug patch` where something goes wrong meanwhile: the tree is as it was, and the reason is told in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.glue.support import ROOT
from tests.patches.test_trees import CACHE, FACTORY, kvplug
from tests.patches.tree import contents, released_tree
from vllm_kvplug.cli import fork_patches, replacing
from vllm_kvplug.cli.fork_patches import PatchError, Tree, match, register

SCHEDULER = "vllm/v1/core/sched/scheduler.py"


@pytest.fixture(scope="session")
def released_0_17(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_tree("0.17.1", tmp_path_factory.mktemp("vllm-0.17.1-"))


@pytest.fixture
def tree(released_0_17: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(released_0_17, tmp_path / "tree"))


def modes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_mode for name in contents(folder)}


def fake_git(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """A git that does `then` where it would write, and is git where it only looks."""
    folder.mkdir()
    git = folder / "git"
    git.write_text(f'#!/bin/sh\ncase "$*" in *--check*) exec {shutil.which("git")} "$@";; esac\n{then}\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("max_kib", [8, 40, 95])
def test_a_full_disk(tree: Path, command: str, max_kib: int) -> None:
    """A limit on the size of files, at several sizes, stops it at one or another of the files."""
    if command == "revert":
        assert kvplug("apply", tree) == 0
    before = contents(tree)
    assert max(map(len, before.values())) > 95 * 1024
    limited = f"""
import resource, sys
from vllm_kvplug.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({max_kib} * 1024,) * 2)
main(["patch", "{command}", sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", limited, str(tree)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "expected to write its files, found [Errno 27] File too large" in line
    assert line.endswith("nothing was changed")
    assert contents(tree) == before


@pytest.mark.parametrize("num_replaced", range(5))
@pytest.mark.parametrize("what", ["apply", "revert"])
def test_a_file_that_cannot_be_replaced(
    tree: Path, what: str, num_replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files before it get back what they had, under every name that they have."""
    if what == "revert":
        assert kvplug("apply", tree) == 0
    linked = Path(shutil.copytree(tree, tree.with_name("linked"), copy_function=os.link))
    before = contents(tree)
    swap, swapped = replacing._Swap.swap, []

    def failing(self: replacing._Swap) -> None:
        if len(swapped) == num_replaced:
            raise PermissionError(13, "Permission denied", str(self.target))
        swapped.append(self)
        swap(self)

    monkeypatch.setattr(replacing._Swap, "swap", failing)
    found = match(Tree.at(tree))
    with pytest.raises(PatchError, match=r"Permission denied: .*; nothing was changed$"):
        found.apply() if what == "apply" else found.revert()
    assert len(swapped) == num_replaced
    assert contents(tree) == before
    assert all((tree / name).samefile(linked / name) for name in before)


def test_modes_are_kept(tree: Path) -> None:
    (tree / CACHE).chmod(0o640)
    (tree / SCHEDULER).chmod(0o755)
    before = modes(tree)
    assert kvplug("apply", tree) == 0
    assert {name: mode for name, mode in modes(tree).items() if name != FACTORY} == before
    assert kvplug("revert", tree) == 0
    assert modes(tree) == before


def test_git_is_killed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_git(tmp_path / "bin", monkeypatch, "kill -XFSZ $$")
    before = contents(tree)
    assert kvplug("apply", tree) == 1
    assert "git was killed by signal SIGXFSZ; nothing was changed" in capsys.readouterr().err
    assert contents(tree) == before


def test_git_does_not_end(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_git(tmp_path / "bin", monkeypatch, "exec sleep 600")
    monkeypatch.setattr(fork_patches, "_GIT_TIMEOUT_S", 2)
    before = contents(tree)
    assert kvplug("apply", tree) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected git to end within 2 s, found it still running" in line
    assert contents(tree) == before


def test_what_pip_leaves_behind(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After an update of a patched package the file that the patch had created is alone."""
    before = contents(tree)
    assert kvplug("apply", tree) == 0
    patched = contents(tree)
    leave_behind(tree, before)
    capsys.readouterr()
    assert kvplug("check", tree) == 0
    shown = capsys.readouterr().out
    assert "fits, not applied" in shown
    assert f"{FACTORY} was left over from before, apply replaces it" in shown
    assert kvplug("apply", tree) == 0
    assert contents(tree) == patched

    leave_behind(tree, before)
    capsys.readouterr()
    assert kvplug("revert", tree) == 0
    assert "was not applied; removed what was left over" in capsys.readouterr().out
    assert contents(tree) == before


def leave_behind(tree: Path, released: dict[str, bytes]) -> None:
    for name in register().patch[0].files:
        if name != FACTORY:
            (tree / name).write_bytes(released[name])


def test_another_file_of_that_name_is_not_ours(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / FACTORY).write_text("# the fork's own\n")
    before = contents(tree)
    for command in ("check", "apply", "revert"):
        assert kvplug(command, tree) == 1
        assert f"{FACTORY}: already exists" in capsys.readouterr().err
        assert contents(tree) == before


def test_an_environment_from_before_there_were_patches(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_such_package(name: str) -> Path:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(fork_patches, "files", no_such_package)
    register.cache_clear()
    assert kvplug("check", tree) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "run `make env`" in line
