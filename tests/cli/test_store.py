"""The cache of models, with a recipe that takes no time: built once, checked, rebuilt, safe for two builders."""

from __future__ import annotations

import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_kvplug.cli.models import catalogue, store
from vllm_kvplug.cli.models.catalogue import ModelError, ModelRecipe, UnknownModelError
from vllm_kvplug.cli.models.checkpoint import parameters_checksum

PARAMETERS = {"a": ([2, 2], bytes(range(16))), "b": ([3], bytes(range(100, 112)))}
BUILDER = f"{__name__}:write_small_checkpoint"


def write_safetensors(path: Path, parameters: dict[str, tuple[list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (shape, content) in parameters.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_small_checkpoint(folder: Path) -> None:
    with open(os.environ["KVPLUG_TEST_BUILDS"], "a") as builds:
        builds.write("built\n")
    time.sleep(0.2)
    write_safetensors(folder / "model.safetensors", PARAMETERS)
    (folder / "config.json").write_text("{}")


def fail_half_way(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    raise ModuleNotFoundError("No module named 'gguf'", name="gguf")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each build; the small recipe is the only one known."""
    path = tmp_path / "builds"
    path.touch()
    monkeypatch.setenv("KVPLUG_TEST_BUILDS", str(path))
    monkeypatch.setenv("KVPLUG_CACHE", str(tmp_path / "cache"))
    write_safetensors(tmp_path / "expected.safetensors", PARAMETERS)
    use_recipe(monkeypatch, BUILDER, parameters_checksum(tmp_path))
    return path


def use_recipe(monkeypatch: pytest.MonkeyPatch, builder: str, checksum: str) -> None:
    recipe = ModelRecipe("small", "for tests", "none", builder, checksum, aliases=("little",))
    monkeypatch.setattr(catalogue, "_RECIPES", (recipe,))


def num_builds(builds: Path) -> int:
    return len(builds.read_text().splitlines())


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVPLUG_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.cache_folder() == tmp_path / "home" / ".cache" / "vllm_kvplug" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.cache_folder() == tmp_path / "home" / ".cache" / "vllm_kvplug" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg" / "vllm_kvplug" / "models"
    monkeypatch.setenv("KVPLUG_CACHE", "~/mine")
    assert store.cache_folder() == tmp_path / "home" / "mine" / "models"
    assert store.cache_folder(tmp_path / "given") == tmp_path / "given" / "models"


def test_built_once_and_found_by_alias(builds: Path, tmp_path: Path) -> None:
    folder = store.build_model("little")
    assert folder == tmp_path / "cache" / "models" / "small"
    inode = folder.stat().st_ino
    assert store.ensure_model("small") == str(folder)
    assert folder.stat().st_ino == inode
    assert num_builds(builds) == 1
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["small"]


def test_any_other_name_or_path_is_left_as_it_is(builds: Path, tmp_path: Path) -> None:
    assert store.ensure_model("Qwen/Qwen2-0.5B-Instruct") == "Qwen/Qwen2-0.5B-Instruct"
    assert store.ensure_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(UnknownModelError, match=r"model \./small: expected a checkpoint's folder, found nothing there"):
        store.ensure_model("./small")
    assert num_builds(builds) == 0
    with pytest.raises(UnknownModelError, match="known models: little, small"):
        store.build_model("nope")


def test_one_changed_bit_is_found_and_the_model_rebuilt(builds: Path) -> None:
    folder = store.build_model("small")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said: list[str] = []
    store.build_model("small", report=said.append)
    assert num_builds(builds) == 2
    assert "is wrong (parameters: expected checksum" in said[0]
    assert store.problem_with(folder, catalogue.recipes()[0]) is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json was changed"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / store.MANIFEST_NAME).unlink(), "kvplug-manifest.json is missing"),
        (lambda folder: (folder / store.MANIFEST_NAME).write_text("null"), "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "damaged: no parameters"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "damaged or cut file"),
        (lambda folder: os.truncate(folder / "model.safetensors", 140), "expected 16 bytes, found 4"),
    ],
)
def test_other_damage_is_named(builds: Path, damage: object, problem: str) -> None:
    folder = store.build_model("small")
    damage(folder)  # type: ignore[operator]
    assert problem in (store.problem_with(folder, catalogue.recipes()[0]) or "")
    assert store.problem_with(store.build_model("small"), catalogue.recipes()[0]) is None


def test_the_checksum_sees_names_dtypes_and_shapes_but_not_the_order(tmp_path: Path) -> None:
    def checksum(parameters: dict[str, tuple[list[int], bytes]]) -> str:
        write_safetensors(tmp_path / "model.safetensors", parameters)
        return parameters_checksum(tmp_path)

    first = checksum(PARAMETERS)
    assert checksum(dict(reversed(PARAMETERS.items()))) == first
    assert checksum({**PARAMETERS, "a": ([4], PARAMETERS["a"][1])}) != first
    assert checksum({"a": PARAMETERS["a"], "c": PARAMETERS["b"]}) != first
    write_safetensors(tmp_path / "second.safetensors", {"a": PARAMETERS["a"]})
    with pytest.raises(ValueError, match=r"parameter 'a' is in two files, model\.safetensors and second\.safetensors"):
        parameters_checksum(tmp_path)


def test_a_result_with_another_checksum_is_refused(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_recipe(monkeypatch, BUILDER, "0" * 64)
    with pytest.raises(ModelError, match=f"model small: expected parameters with checksum {'0' * 64}, built "):
        store.build_model("small")
    assert [path.name for path in store.cache_folder().iterdir()] == [".small.lock"]


def test_a_missing_package_is_named_and_nothing_is_left(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_recipe(monkeypatch, f"{__name__}:fail_half_way", "0" * 64)
    with pytest.raises(ModelError, match="model small: the package gguf is missing; install"):
        store.build_model("small")
    assert [path.name for path in store.cache_folder().iterdir()] == [".small.lock"]


def test_a_cache_that_cannot_be_written_is_named(builds: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"model small: .*file/models/small cannot be written"):
        store.build_model("small", cache=tmp_path / "file")


def test_a_file_in_the_models_place_is_named_before_anything_is_built(builds: Path) -> None:
    folder = store.cache_folder(None) / "small"
    folder.parent.mkdir(parents=True)
    folder.write_text("not a model")
    with pytest.raises(ModelError, match=f"model small: expected a folder or nothing at {folder}, found a file"):
        store.build_model("small")
    folder.unlink()
    folder.symlink_to("nowhere")
    with pytest.raises(ModelError, match="found a file: move it away"):
        store.build_model("small")
    assert builds.read_text() == ""


def test_two_builders_at_once_build_once(builds: Path) -> None:
    # A lock holds between two openings of its file, so threads show what processes do.
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(store.build_model, ["small", "little"]))
    assert folders[0] == folders[1]
    assert num_builds(builds) == 1


def test_a_killed_builder_leaves_nothing_in_the_way(builds: Path) -> None:
    leftover = store.cache_folder() / ".small.build-killed"
    leftover.mkdir(parents=True)
    (leftover / "config.json").touch()
    store.build_model("small")
    assert not leftover.exists()
