"""`kvplug ab`: two KV cache managers side by side on real servers. What measures is in `vllm_kvplug.evals`."""

from __future__ import annotations

import typer

from vllm_kvplug.cli import ab_bench, ab_eval, ab_report

app = typer.Typer(help="Compare two KV cache managers on real serving.", rich_markup_mode=None, no_args_is_help=True)
app.command("eval")(ab_eval.command)
app.command("bench")(ab_bench.command)
app.command("report")(ab_report.command)
