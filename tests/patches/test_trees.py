"""`kvplug patch` on vLLM's released sources: applied, applied twice, taken out to the byte, refused on a stranger."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.tree import contents, released_tree
from vllm_kvplug.cli.fork_patches import register
from vllm_kvplug.cli.main import main

VERSIONS = [patch.vllm for patch in register().patch]
CACHE = "vllm/config/cache.py"
FACTORY = "vllm/v1/core/kv_cache_manager_factory.py"


def kvplug(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["patch", *map(str, args)])
    return int(ended.value.code or 0)


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {version: released_tree(version, tmp_path_factory.mktemp(f"vllm-{version}-")) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def tree(request: pytest.FixtureRequest, released: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(released[request.param], tmp_path / "tree"))


@pytest.fixture
def tree_0_17(released: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(released["0.17.1"], tmp_path / "tree"))


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@localhost"]
    done = subprocess.run(["git", *identity, *args], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_apply_twice_and_revert_twice(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = (tree / "PKG-INFO").read_text().partition("\nVersion: ")[2].partition("\n")[0]
    before = contents(tree)
    assert kvplug("check", tree) == 0
    assert contents(tree) == before
    shown = capsys.readouterr().out
    assert f"vLLM {version}, vllm-{version}.patch fits, not applied" in shown
    assert f"would change {FACTORY} (+" in shown

    assert kvplug("apply", tree) == 0
    patched = contents(tree)
    (patch,) = [patch for patch in register().patch if patch.vllm == version]
    assert {name for name in patched if patched[name] != before.get(name)} == set(patch.files)
    capsys.readouterr()
    assert kvplug("apply", tree) == 0
    assert "was applied already; nothing changed" in capsys.readouterr().out
    assert contents(tree) == patched

    assert kvplug("revert", tree) == 0
    assert contents(tree) == before
    capsys.readouterr()
    assert kvplug("revert", tree) == 0
    assert "was not applied; nothing changed" in capsys.readouterr().out
    assert contents(tree) == before


def test_what_it_makes_compiles_and_leaves_no_name_unused_or_undefined(tree: Path) -> None:
    assert kvplug("apply", tree) == 0
    (patch,) = [patch for patch in register().patch if patch.vllm in (tree / "PKG-INFO").read_text()[:200]]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=88", "--select=E9,E501,F,I001"]
    command += ["--config=lint.isort.known-first-party=['vllm']"]
    done = subprocess.run([*command, *patch.files], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    new = ["ruff", "format", "--isolated", "--check", "--line-length=88", FACTORY]
    done = subprocess.run([sys.executable, "-m", *new], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_inside_a_repository_that_ignores_it(tree_0_17: Path, tmp_path: Path) -> None:
    """Where an environment lies in a project's checkout, `git apply` itself would skip all files and call it done."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("tree\n")
    assert kvplug("apply", tree_0_17) == 0
    assert (tree_0_17 / FACTORY).is_file()
    assert kvplug("revert", tree_0_17) == 0
    assert not (tree_0_17 / FACTORY).exists()


def test_a_hook_of_git_that_calls_it(tree_0_17: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert kvplug("apply", tree_0_17) == 0
    assert (tree_0_17 / FACTORY).is_file()


def test_a_forks_checkout_of_no_known_version(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "PKG-INFO").unlink()
    (tree / "vllm" / "_version.py").unlink()
    with (tree / CACHE).open("a") as file:
        file.write("# the fork's own\n")
    before = contents(tree)
    assert kvplug("apply", tree) == 0
    assert "vLLM of an unknown version, vllm-" in capsys.readouterr().out
    assert kvplug("revert", tree) == 0
    assert contents(tree) == before


def test_git_am_as_the_readme_says(tree: Path) -> None:
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "as released")
    (patch,) = [patch for patch in register().patch if patch.vllm in (tree / "PKG-INFO").read_text()[:200]]
    git(tree, "am", "--quiet", "--keep-non-patch", str(patch.path))
    assert git(tree, "log", "-1", "--format=%s").strip() == "[Core] Choose the KV cache manager by name"
    assert kvplug("check", tree) == 0


def test_an_installed_package_and_its_hard_links(
    tree_0_17: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installers link packages from a cache: patching one environment must not patch the others."""
    (tree_0_17 / "PKG-INFO").unlink()
    other = Path(shutil.copytree(tree_0_17, tmp_path / "other", copy_function=os.link))
    before = contents(other)
    assert kvplug("apply", tree_0_17 / "vllm") == 0
    assert "vLLM 0.17.1, vllm-0.17.1.patch applied now" in capsys.readouterr().out
    assert contents(other) == before


def test_a_tree_that_it_does_not_know_is_refused_and_the_hunk_named(
    tree_0_17: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree_0_17 / CACHE
    path.write_text(path.read_text().replace('            "kv_sharing_fast_prefill",\n', '            "another",\n'))
    before = contents(tree_0_17)
    for command in ("check", "apply", "revert"):
        assert kvplug(command, tree_0_17) == 1
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert "expected vLLM 0.17.1, 0.18.1, 0.19.1, with the patch or without, found vLLM 0.17.1" in line
        assert f"{CACHE}, hunk '@@ -" in line
        assert "class CacheConfig" in line
        assert captured.out == ""
        assert contents(tree_0_17) == before


def test_half_a_patch_is_refused(tree_0_17: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unpatched = (tree_0_17 / CACHE).read_bytes()
    assert kvplug("apply", tree_0_17) == 0
    (tree_0_17 / CACHE).write_bytes(unpatched)
    capsys.readouterr()
    assert kvplug("revert", tree_0_17) == 1
    assert f"{FACTORY}: already exists" in capsys.readouterr().err
    assert (tree_0_17 / FACTORY).is_file()


@pytest.mark.parametrize(
    ("name", "found"), [("empty", "a folder without vllm/__init__.py"), ("none", "no such folder")]
)
def test_no_vllm_there(name: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert kvplug("check", tmp_path / name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvplug: error: DIR: expected a source tree of vLLM")
    assert line.endswith(f"{tmp_path / name}: {found}")


@pytest.mark.parametrize("name", ["check", "apply", "revert"])
def test_a_version_that_cannot_be_read_is_one_line(
    name: str, tree_0_17: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree_0_17 / "vllm" / "_version.py"
    path.write_bytes(b"# \xff\n")
    before = contents(tree_0_17)
    assert kvplug(name, tree_0_17) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"DIR: expected to read the version in {path}, found 'utf-8' codec" in line
    assert contents(tree_0_17) == before


def test_without_git(tree_0_17: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert kvplug("check", tree_0_17) == 1
    assert "expected git on PATH" in capsys.readouterr().err


def test_the_list_shows_the_whole_register(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert kvplug("list") == 0
    shown = capsys.readouterr().out
    for patch in register().patch:
        for text in (patch.vllm, patch.why, patch.how, patch.unnecessary_when, patch.can_go, *patch.files):
            assert text in shown
    for binding in register().binding:
        for text in (binding.name, binding.at, binding.by, binding.why):
            assert text in shown
