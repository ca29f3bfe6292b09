"""report.md: the page's content without plots, as it can be pasted into a pull request."""

from __future__ import annotations

import re

from vllm_kvplug.evals.report import answers, reading, tables
from vllm_kvplug.evals.report.tables import Table
from vllm_kvplug.evals.results import Report

NUM_ANSWERS = 20
NUM_ANSWERS_PER_TASK = 5
# What formats text anywhere, and what does at the start of a line; an underscore within a word does not.
_MARKS = re.compile(r"([\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])|^[-+=](?=[ =-]|$)|(?<=^\d)[.)](?= |$))")
_LINKED = re.compile(r"(@|https?(?=:)|ftp(?=:)|www(?=\.))")


def markdown(report: Report) -> str:
    """The text."""
    result = tables.result_table(report)
    blocks = [
        f"# {plain(tables.title(report))}",
        "\n\n".join(
            f"**{plain(sentence)}**" if i == 0 else plain(sentence) for i, sentence in enumerate(report.verdict)
        ),
        f"{plain(reading.ending(report))}.",
        "\n".join(f"- {plain(note)}" for note in reading.notes(report)),
        *(_result(report, result) if result is not None else []),
        _section(tables.cache_table(report)),
        plain(reading.COUNTED_NOTE),
        *(_answers(report) if report.accuracy is not None else []),
        _section(tables.sides_table(report)),
        "## Commands",
        *(f"{plain(name)}:\n\n{_code(command)}" for name, command in tables.commands(report)),
        "## How to read it",
        *(plain(paragraph) for paragraph in reading.how_to_read(report)),
        _section(tables.setting_table(report)),
        "Plots are in report.html, all numbers in results.json.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _result(report: Report, table: Table) -> list[str]:
    shown = tables.cut(report, table)
    if shown is table:
        return [_section(table)]
    opened = f"<details><summary>All {len(table.rows)} scores</summary>"
    return [_section(shown), opened, table_text(table), "</details>"]


def _section(table: Table) -> str:
    parts = [f"## {plain(table.title)}", table_text(table)]
    if table.note:
        parts.append(plain(table.note))
    return "\n\n".join(parts)


def table_text(table: Table) -> str:
    """A table as GitHub reads it."""
    num_right = len(table.columns) - table.num_text_columns
    lines = [
        _line([plain(column) or " " for column in table.columns]),
        _line(["---"] * table.num_text_columns + ["---:"] * num_right),
    ]
    for index, row in enumerate(table.rows):
        cells = [plain(cell) for cell in row]
        if table.marked and table.marked[index]:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Any text so that it shows as it is, on one line."""
    text = answers.visible(" ".join(text.split()))
    text = _MARKS.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Else an address would become a link, and a name behind an @ be called.
    return _LINKED.sub(r"\1&#8203;", text)


def _code(text: str) -> str:
    """A fenced block whose fence the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _answers(report: Report) -> list[str]:
    shown = answers.shown(report, NUM_ANSWERS, NUM_ANSWERS_PER_TASK)
    blocks = ["## Differing answers", plain(shown.note)]
    for sample in shown.samples:
        blocks += [
            f"<details><summary>{plain(sample.task)}, sample {plain(sample.sample_id)}</summary>",
            f"Prompt ends:\n\n{_code(sample.prompt_end)}",
            f"Target:\n\n{_code(sample.target)}",
            *(
                f"{plain(side.label)}, score {plain(excerpt.score)}:\n\n{_code(excerpt.same + excerpt.other)}"
                for side, excerpt in zip(report.sides, sample.answers, strict=True)
            ),
            "</details>",
        ]
    return blocks
