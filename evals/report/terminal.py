"""The summary for the terminal: the verdict first, then the tables."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vllm_kvplug.evals.report import answers, reading, tables
from vllm_kvplug.evals.report.tables import Table
from vllm_kvplug.evals.results import Report

_MIN_WIDTH = 10


def print_summary(report: Report, console: Console) -> None:
    """Verdict, the run's one table, then what each side's cache did."""
    good = report.exit_status == 0
    console.print()
    for index, sentence in enumerate(report.verdict):
        console.print(_text(sentence, style=("bold green" if good else "bold red") if index == 0 else ""))
    if not good:
        console.print(_text(f"{reading.ending(report)}."))
    for note in reading.notes(report):
        console.print(_text(note, style="yellow"))
    result = tables.result_table(report)
    if result is not None:
        _print_table(tables.cut(report, result), console)
    _print_table(tables.cache_table(report), console)
    console.print(Text(reading.COUNTED_NOTE, style="dim"))


def _print_table(table: Table, console: Console) -> None:
    shown = RichTable(
        title=_text(table.title, style="bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    widths = _number_widths(table, console.width)
    for index, column in enumerate(table.columns):
        right = index >= table.num_text_columns
        shown.add_column(
            _text(column),
            justify="right" if right else "left",
            overflow="fold",
            width=widths.get(index),
            vertical="top",
        )
    for index, row in enumerate(table.rows):
        style = "bold" if table.marked and table.marked[index] else ""
        shown.add_row(*(_text(cell) for cell in row), style=style)
    console.print(shown)
    if table.note:
        console.print(_text(table.note, style="dim"))


def _text(text: str, style: str = "") -> Text:
    """Without markup, and with nothing that the terminal would obey."""
    return Text(answers.visible(text), style=style)


def _number_widths(table: Table, num_columns_wide: int) -> dict[int, int]:
    """Widths at which no number is broken; none where the terminal is too narrow for that."""
    widths = {
        index: max([cell_len(row[index]) for row in table.rows] + [_MIN_WIDTH])
        for index in range(table.num_text_columns, len(table.columns))
    }
    needed = sum(widths.values()) + _MIN_WIDTH * table.num_text_columns + 2 * len(table.columns)
    return widths if needed <= num_columns_wide else {}
