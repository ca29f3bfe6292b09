"""What was run with each vLLM version: kept in docs/versions.json, shown as the table in docs/versions.md."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.matrix.environments import ROOT
from tests.matrix.steps import STEPS
from vllm_kvplug.vllm_glue.version import SUPPORTED_VLLM_VERSIONS

JSON = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
_BEGIN, _END = "<!-- made by make matrix -->", "<!-- end -->"
NOT_RUN = "not run"

# A step's result: {"ok": bool, "told": what the cell says, "date": ..., "commit": ...}.
Results = dict[str, dict[str, Any]]


def load() -> dict[str, Results]:
    """By version and step."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def keep(version: str, step: str, *, ok: bool, told: str, commit: str) -> None:
    """Put one result into the file, and the table into the page."""
    found = load()
    found.setdefault(version, {})[step] = {
        "ok": ok,
        "told": told,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
    }
    JSON.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    write_page(PAGE, table(found))


def commit() -> str:
    """The commit that was run, with a + where files differed from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    # What the matrix itself writes is no difference.
    ours = [f":!{path.relative_to(ROOT)}" for path in (JSON, PAGE)]
    is_changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *ours)
    return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")


def table(found: dict[str, Results]) -> str:
    """The table in Markdown: a row for each supported version, run or not."""
    titles = ["vLLM", *(step.title for step in STEPS.values())]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for version in SUPPORTED_VLLM_VERSIONS:
        cells = [_cell(found.get(version, {}).get(name)) for name in STEPS]
        lines.append(f"| {version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return NOT_RUN
    told = result["told"] if result["ok"] else f"**fails**: {result['told']}"
    return f"{told} ({result['date']}, {result['commit']})"


def write_page(page: Path, text: str) -> None:
    """Replace the table in the page, which stands between two marks.

    Raises:
        ValueError: the page has no such marks.
    """
    found = page.read_text()
    if _BEGIN not in found or _END not in found:
        raise ValueError(f"{page.name}: expected {_BEGIN} and {_END}, found no place for the table")
    head, rest = found.split(_BEGIN, 1)
    page.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{rest.split(_END, 1)[1]}")
