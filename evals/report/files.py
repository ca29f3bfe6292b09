"""A run's folder: what is written into it, and reading results.json again."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic

from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.results import SCHEMA_VERSION, Report

RESULTS_NAME = "results.json"
PAGE_NAME = "report.html"
MARKDOWN_NAME = "report.md"


def write_report(report: Report, folder: Path) -> None:
    """Write results.json, report.html and report.md; the folder is made, files of these names are replaced.

    results.json comes first, so that a failed drawing loses no measurement.

    Raises:
        EvalError: a library of the extra `ab` is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Replaced in one step: results.json may be the file that the report was read from.
    scratch = folder / f".{RESULTS_NAME}.{os.getpid()}"
    try:
        report.write(scratch)
        scratch.replace(folder / RESULTS_NAME)
    finally:
        scratch.unlink(missing_ok=True)
    try:
        from vllm_kvplug.evals.report.markdown import markdown
        from vllm_kvplug.evals.report.page import page

        (folder / MARKDOWN_NAME).write_text(markdown(report), encoding="utf-8")
        (folder / PAGE_NAME).write_text(page(report), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise EvalError(
            f"report: {error.name} is not installed; pip install 'vllm-kvplug[ab]', then kvplug ab report "
            f"{folder / RESULTS_NAME}"
        ) from None


def read_report(path: Path) -> Report:
    """What a run wrote: its results.json, or the folder that holds it.

    Raises:
        EvalUsageError: no such file, no JSON, another schema version, or a field that is not as described.
    """
    if path.is_dir():
        path = path / RESULTS_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise EvalUsageError(
            f"{path}: expected the results.json of a run of kvplug ab, cannot read it: {reason}"
        ) from None
    try:
        head = _Head.model_validate_json(text)
        if head.schema_version != SCHEMA_VERSION:
            raise EvalUsageError(
                f"{path}: schema_version: expected {SCHEMA_VERSION}, found {head.schema_version}; render it with the "
                "version of vllm_kvplug that wrote it"
            )
        return Report.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise EvalUsageError(
            f"{path}: {place}: expected what docs/ab_results.md describes: {first['msg']} "
            f"({error.error_count()} such in all)"
        ) from None


class _Head(pydantic.BaseModel):
    schema_version: int
