"""`python -m tests.conformance.survey`: which tests of the installed vLLM belong into the lists, for a version that is
not the baseline. It runs the test files of the lists' folders as they are in this version, new files included, plain
and with kvplug, and writes `lists/changes-SERIES.txt`: what is gone or does not pass on plain upstream here (-), and
what is new (+).

Look at what is gone before you commit it: a test that does not pass on plain upstream says nothing about kvplug.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance import __main__ as runner
from tests.conformance.expectations import LISTS_FOLDER, changes_path
from tests.conformance.offline_hub import hub_folder
from tests.conformance.sdist import VLLM_VERSION, suite_folder
from vllm_kvplug.vllm_glue.version import BASELINE

_TIMEOUT_S = 120
_FOLDERS = ("core", "kv_connector/unit", "kv_offload", "streaming_input")
# Files that need minutes, weights or a device, and tests that leave an engine behind, whose groups the next ones find.
_NOT_HERE = (
    "_e2e.py",
    "core/test_priority_scheduler_random.py",
    "kv_connector/unit/test_example_connector.py",
    "kv_connector/unit/test_moriio_connector.py",
    "kv_offload/test_cpu_gpu.py",
    "kv_offload/test_cpu_offloading.py",
)
_ENGINES = ("test_multi_example_connector_consistency", "test_abort_timeout_on_prefiller", "test_nixl_connector_hma")


def main() -> int:
    """Run both sides, write the changes, print how many there are."""
    path = changes_path(VLLM_VERSION)
    if path == changes_path(BASELINE):
        sys.exit(f"the lists are those of the series of {BASELINE}, found {VLLM_VERSION}: nothing differs")
    baseline = {name: (LISTS_FOLDER / f"{name}.txt").read_text().splitlines() for name in ("fast", "relevant")}
    folder = suite_folder()
    files = [
        str(path.relative_to(folder))
        for name in _FOLDERS
        for path in sorted((folder / "tests" / "v1" / name).rglob("test_*.py"))
        if not str(path).endswith(_NOT_HERE)
    ]
    upstream, ours = (_run(files, side) for side in (None, runner.OURS))
    passed = [node_id for node_id, outcome in upstream["outcomes"].items() if outcome == "passed"]
    made = ours["swap"]["made_by_test"]
    found = {"fast": passed, "relevant": [node_id for node_id in passed if made.get(node_id)]}
    lines = [f"# vLLM {VLLM_VERSION}: where its lists differ from the baseline's. Made by tests/conformance/survey.py."]
    for name, now in found.items():
        lines += [f"- {name} {node_id}" for node_id in baseline[name] if node_id not in set(now)]
        lines += [f"+ {name} {node_id}" for node_id in now if node_id not in set(baseline[name])]
    path.write_text("\n".join(lines) + "\n")
    not_passed = {node_id: message for node_id, message in upstream["messages"].items() if node_id not in set(passed)}
    print(json.dumps(not_passed, indent=1))
    print(f"{path.name}: {len(found['fast'])} fast, {len(found['relevant'])} relevant; {len(lines) - 1} changes")
    return 0


def _run(files: list[str], module: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        environment = runner.environment_of(hub_folder(False), report, module) | {"TMPDIR": scratch}
        command = [sys.executable, "-m", "pytest", "-p", "kvplug_swap", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
        command += [f"--timeout={_TIMEOUT_S}", "--tb=line", "-k", f"not {' and not '.join(_ENGINES)}", *files]
        subprocess.run(command, cwd=suite_folder(), env=environment, check=False)
        return dict(json.loads(report.read_text()))


if __name__ == "__main__":
    sys.exit(main())
