"""report.html: one file that needs nothing else, neither network nor scripts."""

from __future__ import annotations

from pathlib import Path

from vllm_kvplug.evals.report import answers, plots_accuracy, plots_cache, plots_throughput, reading, tables
from vllm_kvplug.evals.report.drawing import Plot
from vllm_kvplug.evals.results import Report

_FOLDER = Path(__file__).parent


def page(report: Report) -> str:
    """The page's text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        # Markup is a str too, but a finished one.
        finalize=lambda value: answers.printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: Markup(str(escape(answers.printable(text))).replace("_", "_<wbr>"))
    result = tables.result_table(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        title=tables.title(report),
        ending=reading.ending(report),
        notes=reading.notes(report),
        result=result,
        result_shown=tables.cut(report, result) if result is not None else None,
        cache=tables.cache_table(report),
        counted_note=reading.COUNTED_NOTE,
        result_plots=result_plots(report),
        cache_plots=plots_cache.cache_plots(report),
        shown=answers.shown(report),
        sides=tables.sides_table(report),
        commands=tables.commands(report),
        paragraphs=reading.how_to_read(report),
        setting=tables.setting_table(report),
        # The only texts that are not escaped: our own style sheet, and figures that matplotlib escaped.
        css=Markup((_FOLDER / "report.css").read_text(encoding="utf-8")),
        drawn=Markup,
    )


def result_plots(report: Report) -> list[Plot]:
    """The plots of what the run was for."""
    ratios = plots_throughput.ratio_plot(report)
    return [
        *plots_accuracy.score_plots(report),
        *([ratios] if ratios is not None else []),
        *plots_throughput.latency_plots(report),
    ]
