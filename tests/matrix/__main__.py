"""`python -m tests.matrix [--versions "0.18.1 0.19.1"]`: kvplug with every vLLM version that it supports.

For each an environment of its own, and in it the steps of steps.py. Exit status 1 if one failed, 2 if it cannot be run.
docs/versions.md has the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.matrix import environments, results
from tests.matrix.steps import STEPS, Options
from vllm_kvplug.vllm_glue.version import SUPPORTED_VLLM_VERSIONS


def main(arguments: list[str] | None = None) -> int:
    """Run the steps of each version; a failure does not stop the next."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", default=" ".join(SUPPORTED_VLLM_VERSIONS), help="(default: %(default)s)")
    parser.add_argument("--steps", default=" ".join(STEPS), help="some of them (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=Options.num_seeds, help="of lockstep (default: %(default)s)")
    given = parser.parse_args(arguments)
    versions, steps = given.versions.split(), given.steps.split()
    for found, known in ((versions, SUPPORTED_VLLM_VERSIONS), (steps, tuple(STEPS))):
        if unknown := [name for name in found if name not in known]:
            parser.error(f"expected some of {', '.join(known)}, found {unknown[0]!r}")
    try:  # before the first hour
        for version in versions:
            environments.variables(version)
    except environments.MissingLibraryError as error:
        parser.error(str(error))
    # With it every process would compile vLLM and torch again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = Options(num_seeds=given.seeds)
    has_failed = False
    for version in versions:
        try:
            environments.make(version)
        except environments.EnvironmentFailedError as error:
            print(f"error: {error}", file=sys.stderr)
            has_failed = True
            continue
        for name in steps:
            print(f"\n== vLLM {version}: {name} ==", flush=True)
            started, commit = time.monotonic(), results.commit()
            told = STEPS[name].run(version, options)
            results.keep(version, name, ok=told.ok, told=told.text, commit=commit)
            print(f"== vLLM {version}: {name}: {told.text} ({time.monotonic() - started:.0f} s)", flush=True)
            has_failed |= not told.ok
    print(f"\n{results.table(results.load())}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
