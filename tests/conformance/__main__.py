"""`python -m tests.conformance`: vLLM's own tests, on plain upstream and with kvplug swapped in, side by side.

Exit status 0: every test passes on both sides but for those that open.toml lists for kvplug, each of which fails for
the reason given there, and nothing of upstream's KV cache management was constructed while ours was in force.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conformance import verdict
from tests.conformance.expectations import (
    SUITES,
    listed_tests,
    must_construct_ours,
    must_hash_with_ours,
    node_ids,
)
from tests.conformance.offline_hub import hub_folder
from tests.conformance.sdist import VLLM_VERSION, SuiteError, suite_folder
from tests.conformance.verdict import Results
from tests.processors import ONE_THREAD, num_cpus
from vllm_kvplug.cli.server_process import free_port

OURS = "vllm_kvplug.vllm_glue.upstream_views"
PLUGIN_FOLDER = Path(__file__).parent / "plugin"
TEST_TIMEOUT_S = {"relevant": 300, "fast": 300, "end_to_end": 600, "slow": 3600}


def main(arguments: list[str] | None = None) -> int:
    """Run, print the table and the problems, answer the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default="standard",
        help="standard: fast (relevant is a part of it) and end_to_end; relevant: what uses a class we replace",
    )
    parser.add_argument("--upstream-only", action="store_true", help="plain upstream alone")
    parser.add_argument("--kvplug-only", action="store_true", help="kvplug alone, without the comparison")
    parser.add_argument("--module", default=OURS, help="the module with the replacements (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options, pytest_arguments = parser.parse_known_args(arguments)
    if options.upstream_only and options.kvplug_only:
        parser.error("--upstream-only and --kvplug-only exclude each other")

    try:
        sides = [None] if options.upstream_only else [options.module] if options.kvplug_only else [None, options.module]
        found = run_sides(options.suite, sides, pytest_arguments)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        names = {None: "upstream", options.module: "kvplug"}
        counts = {names[side]: verdict.counts(results, listed_tests()) for side, results in found.items()}
        options.json.write_text(json.dumps(counts))
    return _print_report(options.suite, found.get(None), found.get(options.module))


def run_sides(suite: str, sides: list[str | None], pytest_arguments: list[str]) -> dict[str | None, Results]:
    """Run each side, see `run_suite`; both at once where there are two CPUs. What a side prints comes when it is over.

    Raises:
        SuiteError: one of them could not run.
    """
    # Made before both sides ask for them.
    suite_folder()
    for name in SUITES[suite]:
        hub_folder(_with_weights(name))
    with ThreadPoolExecutor(min(len(sides), num_cpus())) as pool:
        running = {side: pool.submit(run_suite, suite, side, pytest_arguments) for side in sides}
        return {side: future.result() for side, future in running.items()}


def run_suite(suite: str, module: str | None, pytest_arguments: list[str]) -> Results:
    """Run one side, each list of tests in a process of its own. `module`: what is swapped in; None: plain upstream.

    Raises:
        SuiteError: pytest wrote no report (it crashed, or could not collect), or no test was selected.
    """
    all_results = [_run_list(name, module, pytest_arguments) for name in SUITES[suite]]
    results = all_results[0]
    for further in all_results[1:]:
        results += further
    if not results.selected:
        raise SuiteError("no test was selected; pytest's own output is above")
    return results


def _run_list(name: str, module: str | None, pytest_arguments: list[str]) -> Results:
    hub, folder = hub_folder(_with_weights(name)), suite_folder()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        node_file = Path(scratch) / "node_ids.txt"
        node_file.write_text("\n".join(node_ids(name)))
        environment = environment_of(hub, report, module) | {"TMPDIR": scratch}
        if module is not None:
            expected_to_fail = Path(scratch) / "expected_to_fail.txt"
            expected_to_fail.write_text("\n".join(listed_tests()))
            environment["KVPLUG_SWAP_XFAIL"] = str(expected_to_fail)
        command = [sys.executable, "-m", "pytest", "-p", "kvplug_swap", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
        command += [f"--timeout={TEST_TIMEOUT_S[name]}", "--tb=short", *pytest_arguments, f"@{node_file}"]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        heading = f"{name} tests of vLLM {VLLM_VERSION} with {module or 'plain upstream'}:"
        print(f"{heading}\n{done.stdout}({time.monotonic() - started:.0f} s)\n", end="", flush=True)
        if not report.exists():
            raise SuiteError(f"pytest wrote no report (exit status {done.returncode}); its own output is above")
        results = Results.of_report(json.loads(report.read_text()))
    if not pytest_arguments:
        # Nothing was asked to be left out: a test that is not there counts as not run.
        results = Results(node_ids(name), results.outcomes, results.messages, results.swapped)
    return results


def _with_weights(name: str) -> bool:
    return name in ("end_to_end", "slow")


def environment_of(hub: Path, report: Path, module: str | None) -> dict[str, str]:
    """The environment variables of a run of upstream's tests; `module`: what is swapped in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPLUG_SWAP")}
    environment |= {
        "HF_HOME": str(hub),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # No plugin at all: plain upstream must be plain, and the swap does not need the hooks.
        "VLLM_PLUGINS": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(PLUGIN_FOLDER),
        "KVPLUG_SWAP_REPORT": str(report),
        # The sides run at once, each with its own temporary files and port: upstream's tests share some by name.
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        **ONE_THREAD,
    }
    if module is not None:
        environment["KVPLUG_SWAP"] = module
    return environment


def _print_report(suite: str, upstream: Results | None, ours: Results | None) -> int:
    listed = listed_tests()
    problems = verdict.problems_of_upstream(upstream) if upstream else []
    if ours is not None:
        problems += verdict.problems_of_ours(ours, listed, must_construct_ours(), must_hash_with_ours())
    print()
    suites = {name: node_ids(name) for name in dict.fromkeys(("relevant", *SUITES[suite]))}
    print(verdict.table({"upstream": upstream, "kvplug": ours}, listed, suites))
    if ours is not None:
        left_out = verdict.reasons(ours, listed)
        if left_out:
            print(f"\nleft out:\n{left_out}")
        if ours.swapped is not None:
            print(f"\n{verdict.in_force(ours.swapped)}")
    if problems:
        print(f"\n{len(problems)} problems:\n" + "\n".join(problems))
    else:
        print(f"\nconformance ({suite}): as expected")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
