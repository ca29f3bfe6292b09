"""A run's folder and the terminal's table."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.performance import numbers
from vllm_kvplug.evals.performance.results import BenchReport, RowResult
from vllm_kvplug.evals.report import numbers as plain_numbers
from vllm_kvplug.evals.report.files import MARKDOWN_NAME, RESULTS_NAME
from vllm_kvplug.evals.report.markdown import plain, table_text
from vllm_kvplug.evals.report.tables import Table

_STYLES = {"stretch": "bold green", "target": "green", "partly": "yellow", "no": "red"}
_TITLES = {"manager": "KV cache managers: the calls of vLLM's scheduler", "scheduler": "vLLM's scheduler, by manager"}


def write_report(report: BenchReport, folder: Path) -> None:
    """Write results.json, then the plots and report.md.

    Raises:
        EvalError: a library of the extra `ab` is missing.
    """
    report.write(folder / RESULTS_NAME)
    try:
        from vllm_kvplug.evals.performance.plots import write_plots

        plots = write_plots(report, folder)
    except ModuleNotFoundError as error:
        raise EvalError(f"report: {error.name} is not installed; pip install 'vllm-kvplug[ab]'") from None
    (folder / MARKDOWN_NAME).write_text(markdown(report, plots), encoding="utf-8")


def verdict(report: BenchReport) -> str:
    """How many rows with a goal reached it."""
    goals = [row for row in report.rows if row.reached is not None]
    if not goals:
        return "No row of this run has a target."
    reached = [row for row in goals if row.reached in ("target", "stretch")]
    stretch = [row for row in goals if row.reached == "stretch"]
    missed = ", ".join(row.name for row in goals if row not in reached)
    return (
        f"{len(reached)} of {len(goals)} rows with a target reach it, {len(stretch)} of them the stretch"
        + (f"; not: {missed}" if missed else "")
        + "."
    )


def notes(report: BenchReport) -> list[str]:
    """What a reader must know before the table."""
    first, second = (side.label for side in report.sides)
    told = [
        f"Ratios are {first} / {second}, of the minima and of the medians; a row reaches a target where both do.",
        *report.conditions,
    ]
    if report.quick:
        told.insert(0, "--quick: fewer repeats and points than a full run; good for a look, not for a claim.")
    return told


def result_table(report: BenchReport) -> Table:
    """All rows of the table, for Markdown."""
    first, second = (side.label for side in report.sides)
    return Table(
        title="Results",
        num_text_columns=2,
        columns=[
            *("row", "what", f"{first} min", f"{second} min", f"{first} median", f"{second} median"),
            *("ratio, minima", "ratio, medians", "target", "stretch", "reached"),
        ],
        rows=[
            [row.name, row.what, *_costs(row), *_ratios(row), *numbers.goal(row.goal), numbers.reached(row)]
            for row in shown_rows(report)
        ],
    )


def shown_rows(report: BenchReport) -> list[RowResult]:
    """The rows of the table; all, where only others were asked for."""
    return [row for row in report.rows if row.in_table] or report.rows


def _costs(row: RowResult) -> list[str]:
    return [numbers.cost(value, row.unit) for value in (*row.minima, *row.medians)]


def _ratios(row: RowResult) -> list[str]:
    return [numbers.ratio(row.ratio_of_minima), numbers.ratio(row.ratio_of_medians)]


def share_table(report: BenchReport) -> Table | None:
    """The manager's part of a step; None of a run without a scheduler."""
    if not report.shares:
        return None
    labels = [side.label for side in report.sides]
    return Table(
        title="The manager's share of a step",
        columns=[
            "running",
            *(f"{label}, {what}" for label in labels for what in ("manager's calls", "step", "share")),
        ],
        rows=[
            [
                plain_numbers.count(share.num_running),
                *(
                    text
                    for side in (0, 1)
                    for text in (
                        numbers.cost(share.manager_us[side], "us"),
                        numbers.cost(share.step_us[side], "us"),
                        plain_numbers.percent(share.part[side]),
                    )
                ),
            ]
            for share in report.shares
        ],
        note="Medians of a pass of its own, with a timer around each call of the manager: these steps are a little "
        "longer than those above.",
    )


def setting_table(report: BenchReport) -> Table:
    """Machine and versions."""
    machine = report.machine
    sides = [(f"side {number}", _side(report, number - 1)) for number in (1, 2)]
    rows = [
        ("command", report.command),
        *sides,
        ("CPU", f"{machine.cpu_model}, {machine.num_cores} cores"),
        ("memory", f"{machine.memory_gib:g} GiB"),
        ("system", machine.system),
        ("Python", machine.python),
        *report.versions.items(),
        ("created", report.created),
        ("duration", plain_numbers.duration(report.duration_s)),
    ]
    return Table(title="Setting", columns=["", ""], rows=[list(row) for row in rows], num_text_columns=2)


def _side(report: BenchReport, number: int) -> str:
    side = report.sides[number]
    return f"{side.label}" + (f", {side.manager} {side.settings}" if side.settings else "")


def markdown(report: BenchReport, plots: list[tuple[str, str]]) -> str:
    """report.md: the table, the curves, and under what it was measured."""
    share = share_table(report)
    blocks = [
        f"# {plain(_TITLES[report.kind])}",
        f"**{plain(verdict(report))}**",
        "\n".join(f"- {plain(note)}" for note in notes(report)),
        table_text(result_table(report)),
        *([f"## {share.title}", table_text(share), plain(share.note)] if share is not None else []),
        *(f"## {title}\n\n![{title}]({name})" for title, name in plots),
        *(["Lines are medians; the band below reaches down to the minimum."] if plots else []),
        "## Setting",
        table_text(setting_table(report)),
        "All samples are in results.json. docs/performance.md says what each row measures and what it does not show.",
    ]
    return "\n\n".join(blocks) + "\n"


def print_summary(report: BenchReport, console: Console) -> None:
    """The table by the rows' names, with a line between their groups, and the verdict. It fits 80 columns."""
    first, second = (_short_label(side.label) for side in report.sides)
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Minima", title_justify="left")
    shown.add_column("")
    for column in (first, second, "ratio", "median", "goal", "reached"):
        shown.add_column(Text(column), justify="right")
    rows = shown_rows(report)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        style = _STYLES.get(row.reached or "", "")
        shown.add_row(
            Text(row.name),
            *(Text(numbers.cost(value, row.unit)) for value in row.minima),
            *(Text(text, style=style) for text in _ratios(row)),
            Text("/".join(filter(None, numbers.goal(row.goal)))),
            Text(numbers.reached(row), style=style),
            end_section=following is not None and following.group != row.group,
        )
    console.print(shown)
    share = share_table(report)
    if share is not None:
        _print_share(share, console)
    console.print(Text(verdict(report), style="bold"))
    for note in notes(report)[: 1 + report.quick]:
        console.print(Text(note, style="yellow" if report.quick and note.startswith("--quick") else "dim"))


def _print_share(share: Table, console: Console) -> None:
    shown = RichTable(title=share.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in share.columns:
        shown.add_column(Text(column), justify="right")
    for row in share.rows:
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown)


def _short_label(label: str) -> str:
    """A side's label where there is little room: a class without its module."""
    return label.rpartition(":")[2]
