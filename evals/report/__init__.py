"""Reports of a run: one self-contained HTML page, the same in Markdown, results.json, and tables for the terminal.

    numbers     how values are written
    tables      what the tables hold, for every format
    reading     the sentences that explain them
    answers     samples that the sides answered differently, cut for reading
    drawing     figures as SVG that follows the page's colours
    plots_*     the plots
    page, markdown, terminal   the formats
    files       writing and reading a run's folder
    schema      docs/ab_results.md

Nothing here imports vLLM; matplotlib and jinja2 are imported when a page is written.
"""

from __future__ import annotations

from vllm_kvplug.evals.report.files import read_report, write_report
from vllm_kvplug.evals.report.terminal import print_summary

__all__ = ["print_summary", "read_report", "write_report"]
