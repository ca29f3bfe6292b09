"""The cache folder of built models: built once, found by name, never half there, checked each time.

A model is built in a folder beside its place and renamed into it, under a lock that a second builder waits for. A model
that is present but wrong (damaged, or of an older recipe) is built again after one warning: the folder is a cache and
its content can be made anew, so a refusal would only make the user delete it by hand. What a recipe makes with
another checksum than the one in the catalogue is refused, since then nothing that was measured with the model holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_kvplug.cli.models.catalogue import ModelError, ModelRecipe, UnknownModelError, find_recipe, recipes
from vllm_kvplug.cli.models.checkpoint import file_checksum, parameters_checksum

MANIFEST_NAME = "kvplug-manifest.json"

Report = Callable[[str], None]


def cache_folder(override: str | Path | None = None) -> Path:
    """Where models are kept: `override`, else KVPLUG_CACHE, else the user's cache directory."""
    chosen = override or os.environ.get("KVPLUG_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute() / "models"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The base directory specification has relative values ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "vllm_kvplug" / "models"


def ensure_model(name_or_path: str, cache: str | Path | None = None, report: Report = lambda text: None) -> str:
    """What vLLM can load: the folder of one of our names, built if it is missing; any other name or path as it is.

    Raises:
        UnknownModelError: a path (absolute, or with ./ or ../ in front) at which nothing is.
        KVPlugError: the model cannot be built.
    """
    if find_recipe(name_or_path) is not None:
        return str(build_model(name_or_path, cache, report))
    if name_or_path.startswith(("/", "./", "../")) and not Path(name_or_path).exists():
        raise UnknownModelError(f"model {name_or_path}: expected a checkpoint's folder, found nothing there")
    return name_or_path


def build_model(name: str, cache: str | Path | None = None, report: Report = lambda text: None) -> Path:
    """The folder of the model `name`, built unless it is present and right. `report` gets a line for what happens.

    Raises:
        UnknownModelError: `name` is none of the catalogue's.
        ModelError: a package is missing, the folder cannot be written, or the result has another checksum than it must.
    """
    recipe = find_recipe(name)
    if recipe is None:
        raise UnknownModelError(f"model {name!r} is unknown; known models: {', '.join(known_names())}")
    folder = cache_folder(cache) / recipe.name
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise ModelError(f"model {recipe.name}: expected a folder or nothing at {folder}, found a file: move it away")
    if folder.exists() and problem_with(folder, recipe) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if folder.exists():
                problem = problem_with(folder, recipe)
                if problem is None:
                    return folder
                report(f"model {recipe.name} in {folder} is wrong ({problem}): building it again")
            report(f"building model {recipe.name} (once, about half a minute)")
            _build_into(folder, recipe)
    except OSError as error:
        raise ModelError(f"model {recipe.name}: {folder} cannot be written: {error}") from error
    return folder


def known_names() -> list[str]:
    """Every name and alias, as a user may give it."""
    return [name for recipe in recipes() for name in (*recipe.aliases, recipe.name)]


def problem_with(folder: Path, recipe: ModelRecipe) -> str | None:
    """What is wrong with a built model, in a few words, or None.

    The parameters are compared with the catalogue, the other files with the folder's own manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        for file_name, expected in manifest["files"].items():
            if file_checksum(folder / file_name) != expected:
                return f"{file_name} was changed"
        found = parameters_checksum(folder)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"damaged: {error}"
    if found != recipe.parameters_sha256:
        return f"parameters: expected checksum {recipe.parameters_sha256[:12]}, found {found[:12]}"
    return None


def _build_into(folder: Path, recipe: ModelRecipe) -> None:
    """Build beside `folder`, check, and rename into place. Leaves nothing behind when it fails."""
    for leftover in folder.parent.glob(f".{recipe.name}.build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.build-", dir=folder.parent))
    try:
        # mkdtemp's mode keeps other users out, who may share the cache.
        building.chmod(0o755)
        try:
            recipe.build(building)
        except ImportError as error:
            raise ModelError(
                f"model {recipe.name}: the package {error.name} is missing; install the builder's packages "
                "with `pip install 'vllm-kvplug[models]'`"
            ) from error
        found = parameters_checksum(building)
        if found != recipe.parameters_sha256:
            raise ModelError(
                f"model {recipe.name}: expected parameters with checksum {recipe.parameters_sha256}, built {found}; "
                "the installed torch, transformers or gguf reads the weights in another way than the locked one"
            )
        others = [path for path in sorted(building.iterdir()) if path.suffix != ".safetensors"]
        manifest = {
            "name": recipe.name,
            "parameters_sha256": found,
            "files": {path.name: file_checksum(path) for path in others},
        }
        (building / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """One builder of a model at a time, over all processes. The lock ends with the process that holds it."""
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"model {folder.name} is being built by another process: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
