"""The bundled tasks as files that lm-eval reads: `write_tasks(folder)`, then lm-eval with `--include_path FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from vllm_kvplug.evals.tasks.generate import GENERATORS

# The group of all of them.
SUITE = "kvplug_suite"
NAMES = (SUITE, *GENERATORS)
DEFAULT_SEED = 1


def write_tasks(folder: Path, seed: int = DEFAULT_SEED, cache_folder: Path | None = None) -> None:
    """Write every task's items as NAME.jsonl and its description as NAME.yaml, which names that file, into `folder`.

    Args:
        seed: equal seeds give equal files.
        cache_folder: where the datasets library puts its converted copies; None: its usual place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, generator in GENERATORS.items():
        data_path = folder.resolve() / f"{name}.jsonl"
        with data_path.open("w") as file:
            file.writelines(json.dumps(item) + "\n" for item in generator(seed))
        description = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
        description["dataset_kwargs"] = {"data_files": {"test": str(data_path)}}
        if cache_folder is not None:
            description["dataset_kwargs"]["cache_dir"] = str(cache_folder)
        description["metadata"]["seed"] = seed
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(description, sort_keys=False))
    (folder / f"{SUITE}.yaml").write_text((Path(__file__).parent / f"{SUITE}.yaml").read_text())
