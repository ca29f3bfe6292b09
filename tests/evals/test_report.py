"""Reports: self-contained, complete, safe with any text, and the same in every format."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from tests.evals.sample_reports import SAMPLES, accuracy_report, cache_use, throughput_report
from vllm_kvplug.evals.errors import EvalError, EvalUsageError
from vllm_kvplug.evals.report import answers, numbers, print_summary, read_report, schema, tables, write_report
from vllm_kvplug.evals.report.markdown import markdown, plain, table_text
from vllm_kvplug.evals.report.page import page, result_plots
from vllm_kvplug.evals.report.plots_cache import cache_plots
from vllm_kvplug.evals.results import DifferingAnswer, Report, TaskScore

DOCS = Path(__file__).parents[2] / "docs"
NASTY = (
    "<script>alert('1')</script> & \"q\" </pre></details> | `x` ``` \\ $a$ {{ 7 * 7 }} "
    "\x00\x1b[31m\u202e 漢字 \U0001f600 <!-- -->"
)
VOID = {"meta", "wbr", "br", "use", "path", "rect", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would see: text, ids, and that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.svg_labels: list[str] = []
        self.source = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")
        if tag == "svg":
            self.svg_labels.append(dict(attrs).get("aria-label") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def rendered(report: Report) -> Page:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Page(page(report))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {name: make() for name, make in SAMPLES.items()}


@pytest.fixture(scope="module")
def pages(reports: dict[str, Report]) -> dict[str, Page]:
    return {name: rendered(report) for name, report in reports.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_needs_nothing_else(pages: dict[str, Page], name: str) -> None:
    shown = pages[name]
    assert not {"script", "img", "link", "iframe", "object", "base"} & set(shown.tags)
    for tag, attribute, value in shown.attributes:
        assert not attribute.startswith("on"), (tag, attribute)
        if attribute in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#"), (tag, attribute, value)
            assert value[1:] in shown.ids
    text = shown.source
    assert not re.search(r"url\((?!#)|@import|https?:", text)
    assert all(reference in shown.ids for reference in re.findall(r"url\(#([^)]+)\)", text))
    assert len(shown.ids) == len(set(shown.ids))
    assert all(shown.svg_labels)


@pytest.mark.parametrize("name", SAMPLES)
def test_page_and_markdown_hold_every_table(pages: dict[str, Page], reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    result = tables.result_table(report)
    assert result is not None
    told = "".join(block.content for block in markdown_tokens(markdown(report)))
    for table in (result, tables.cache_table(report), tables.sides_table(report), tables.setting_table(report)):
        for cell in (*table.columns, *(cell for row in table.rows for cell in row)):
            assert cell in pages[name].text
            assert cell.replace(tables.NO_BREAK, " ") in told
    for sentence in report.verdict:
        assert sentence in pages[name].text
        assert sentence in told
    for _, command in tables.commands(report):
        assert command in pages[name].text
        assert command in told


def test_numbers_come_from_the_report() -> None:
    report = accuracy_report()
    assert report.accuracy is not None
    table = tables.result_table(report)
    assert table is not None
    assert table.columns == [
        *("task", "metric", "upstream ± error", "kvplug ± error", "difference", "differing samples"),
    ]
    assert table.rows[0] == [
        *("kvplug_rows", f"exact_match{tables.NO_BREAK}↑", "1.0000 ± 0.0000", "0.9933 ± 0.0047", "-0.0067"),
        "5 of 300, p = 0.500",
    ]
    cache = {row[0]: row[1:] for row in tables.cache_table(report).rows}
    assert cache["preemptions"] == [numbers.count(use.num_preemptions) for use in report.cache]
    assert cache["hit tokens"][0].startswith(numbers.count(report.cache[0].num_hit_tokens))

    bench = throughput_report()
    assert bench.throughput is not None
    metric = bench.throughput.metrics[3]
    assert metric.interval is not None
    table = tables.result_table(bench)
    assert table is not None
    first = sorted(metric.values[0])
    assert table.rows[3] == [
        f"TTFT median (ms){tables.NO_BREAK}↓",
        numbers.measured((first[2] + first[3]) / 2),
        numbers.measured(tables.finite_median(metric.values[1])),
        f"{metric.ratio:.3f} [{metric.interval[0]:.3f}, {metric.interval[1]:.3f}]",
        "better",
    ]
    assert table.marked[3]
    assert not table.marked[5]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (412.04, "412.0"),
        (0.001234, "0.001234"),
        (-3.5, "-3.500"),
        (math.nan, "n/a"),
    ],
)
def test_measured_values_keep_four_digits(value: float, text: str) -> None:
    assert numbers.measured(value) == text


def test_small_differences_have_no_negative_zero() -> None:
    assert numbers.score_difference(-0.00001) == "0.0000"
    assert numbers.score_difference(0.25) == "+0.2500"
    assert numbers.p_value(0.0004) == "< 0.001"
    assert numbers.duration(59.99) == "1 min 0 s"
    assert numbers.duration(7260) == "2 h 1 min"


def test_plots_of_accuracy_and_throughput() -> None:
    bench = throughput_report()
    assert [plot.name for plot in result_plots(bench)] == ["ratios", "latency-0", "latency-1", "latency-2"]
    assert [plot.name for plot in cache_plots(bench)] == ["time-usage", "time-hits", "time-preemptions"]
    ratios = result_plots(bench)[0]
    assert f"TTFT p99{tables.NO_BREAK}↓" in ratios.svg
    assert [plot.name for plot in result_plots(accuracy_report())] == ["scores-0"]
    # Both sides by colour and by dash, and no colour that a theme could not change.
    usage = cache_plots(bench)[0].svg
    assert "var(--side-a)" in usage
    assert re.search(r"stroke-dasharray[^\"]*var\(--side-b\)|var\(--side-b\)[^\"]*stroke-dasharray", usage)
    assert "DejaVu" not in usage
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", usage + ratios.svg)) <= {"#ffffff", "#000000"}


def test_equal_managers_are_told_apart_and_it_is_said() -> None:
    report = accuracy_report(manager_a="upstream", manager_b="upstream", num_differing=0, preemptions=False)
    shown = rendered(report)
    assert "upstream (1) ± error" in shown.text
    assert "upstream (2) ± error" in shown.text
    assert "Both sides are the same manager with the same settings" in shown.text
    assert "No preemptions on upstream (1) and upstream (2)" in shown.text
    assert "No sample has another answer" in shown.text
    assert [plot.name for plot in cache_plots(report)] == ["time-usage", "time-hits"]


def test_an_untested_run_looks_like_one() -> None:
    report = accuracy_report().model_copy(update={"exit_status": 3})
    text = page(report)
    assert 'class="verdict status-bad"' in text
    assert "does not test what it should (exit status 3)" in text
    assert 'class="verdict status-ok"' in page(accuracy_report())


def without_numbers(bad: float) -> Report:
    """A throughput report in which much is missing or not finite."""
    report = throughput_report(num_pairs=2)
    assert report.throughput is not None
    metrics = [
        metric.model_copy(
            update={"values": ([bad, bad], [1.0, bad]), "ratios": [bad, None], "ratio": bad, "interval": None}
        )
        if index % 2
        else metric
        for index, metric in enumerate(report.throughput.metrics)
    ]
    metrics[0] = metrics[0].model_copy(update={"ratio": None, "ratios": [], "values": ([], [])})
    metrics[2] = metrics[2].model_copy(update={"interval": (0.0, bad), "ratio": 0.0})
    metrics[4] = metrics[4].model_copy(update={"interval": (9.0, 90.0), "ratio": 30.0})
    throughput = report.throughput.model_copy(
        update={
            "metrics": metrics,
            "latencies_ms": {"ttft": ([bad, 1.0], [0.0, 2.0]), "itl": ([], []), "odd/kind": ([1.0], [1.0])},
        }
    )
    side = cache_use(1, num_samples=0).model_copy(update={"engine_cpu_s": None})
    return report.model_copy(update={"throughput": throughput, "cache": (side, side)})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_missing_or_not_finite_is_shown_as_such(bad: float, tmp_path: Path) -> None:
    report = without_numbers(bad)
    write_report(report, tmp_path)
    text = (tmp_path / "results.json").read_text()
    jsonschema.validate(
        json.loads(text, parse_constant=lambda name: pytest.fail(f"not JSON: {name}")), schema.json_schema()
    )
    assert repr(read_report(tmp_path)) == repr(report)
    shown = rendered(report)
    assert "n/a" in shown.text
    assert not re.search(r"\b(nan|inf)\b", shown.text, re.IGNORECASE)
    print_summary(report, Console(file=io.StringIO(), width=80))


def test_a_report_with_neither_part() -> None:
    report = accuracy_report().model_copy(update={"accuracy": None, "verdict": [], "versions": {}})
    assert "Prefix cache and preemption" in rendered(report).text
    assert "## Sides" in markdown(report)
    print_summary(report, Console(file=io.StringIO()))


def test_runs_stand_in_for_samples_of_the_whole() -> None:
    report = throughput_report(num_pairs=3)
    bare = tuple(use.model_copy(update={"samples": []}) for use in report.cache)
    from vllm_kvplug.evals.report.plots_cache import _samples

    joined = _samples(report.model_copy(update={"cache": bare}), 0)
    assert [s.elapsed_s for s in joined] == sorted(s.elapsed_s for s in joined)
    assert report.throughput is not None
    assert joined[-1].num_hit_tokens == sum(pair[0].samples[-1].num_hit_tokens for pair in report.throughput.runs)


def test_five_hundred_tasks_are_cut_and_all_there() -> None:
    report = accuracy_report(num_tasks=500, num_differing=60)
    assert report.accuracy is not None
    report.accuracy.scores[321] = report.accuracy.scores[321].model_copy(update={"difference": 0.5})
    report.accuracy.scores[322] = report.accuracy.scores[322].model_copy(update={"difference": math.nan})
    result = tables.result_table(report)
    assert result is not None
    cut = tables.cut(report, result)
    assert len(cut.rows) == tables.MAX_ROWS
    assert {"task_000", "task_321"} <= {row[0] for row in cut.rows}
    assert "The 60 of 500 scores with the largest difference" in cut.note
    shown = rendered(report)
    assert "All 500 scores" in shown.text
    assert "The 30 of 500 scores with the largest difference" in shown.text
    (plot,) = result_plots(report)
    assert "task_321" in plot.svg
    terminal = io.StringIO()
    print_summary(report, Console(file=terminal, width=120))
    assert "task_321" in terminal.getvalue()
    assert terminal.getvalue().count("task_") == tables.MAX_ROWS


def test_scores_of_other_scales_have_a_plot_of_their_own() -> None:
    report = accuracy_report()
    assert report.accuracy is not None
    for metric, value, error in (("word_perplexity", 23.4, None), ("bleu", 31.0, 2.0), ("acc", math.nan, math.nan)):
        report.accuracy.scores.append(
            TaskScore(
                task="wiki",
                metric=metric,
                higher_is_better=metric != "word_perplexity",
                num_samples=10,
                values=(value, value + 1),
                standard_errors=(error, error),
                difference=1.0,
            )
        )
    assert [plot.heading for plot in result_plots(report)] == [
        "Scores by task",
        "Scores: word_perplexity",
        "Scores: bleu",
    ]
    text = rendered(report).text
    assert "23.40" in text
    assert "31.00 ± 2.00" in text


# Answers.


def with_answers(first: str, second: str, *, task: str = "t", num: int = 1) -> Report:
    report = accuracy_report(num_differing=0, num_samples=2)
    assert report.accuracy is not None
    report.accuracy.differing[:] = [
        DifferingAnswer(
            task=task,
            sample_id=str(number),
            prompt_end=first,
            target=second,
            answers=(first, second),
            scores=(1.0, 0.0) if number == num - 1 else (None, None),
        )
        for number in range(num)
    ]
    return report


def test_markup_in_answers_and_names_is_text() -> None:
    report = with_answers(NASTY, NASTY[::-1], task=NASTY)
    assert report.accuracy is not None
    report.accuracy.scores[0] = report.accuracy.scores[0].model_copy(update={"task": NASTY, "metric": NASTY})
    report = report.model_copy(update={"model": NASTY, "command": NASTY, "verdict": [NASTY]})
    report = report.model_copy(
        update={"sides": tuple(side.model_copy(update={"label": NASTY, "manager": NASTY}) for side in report.sides)}
    )
    shown = rendered(report)
    assert "script" not in shown.tags
    assert "<script>alert('1')</script>" in shown.text
    assert "{{ 7 * 7 }}" in shown.text
    assert not set("\x00\x1b\u202e") & set(shown.source)
    plain_tokens = markdown_tokens(markdown(report))
    assert not [token for token in plain_tokens if token.type == "html_inline" and "script" in token.content]
    terminal = io.StringIO()
    print_summary(report, Console(file=terminal, force_terminal=False, width=200))
    assert "\x1b[31m" not in terminal.getvalue()


@given(first=st.text(max_size=80), second=st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_an_excerpt_shows_where_answers_part(first: str, second: str) -> None:
    if first == second:
        return
    (sample,) = answers.shown(with_answers(first, second)).samples
    a, b = sample.answers
    assert a.same == b.same
    assert a.same + a.other == answers.visible(first)
    assert b.same + b.other == answers.visible(second)
    assert a.other[:1] != b.other[:1] or a.other[:1] == b.other[:1] == "\\"


@given(cells=st.lists(st.text(max_size=30), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_text_keeps_its_place_in_a_markdown_table(cells: list[str]) -> None:
    table = tables.Table("t", ["a", "b", "c"], [cells], marked=[False])
    tokens = markdown_tokens(table_text(table))
    found = [token for token in tokens if token.type == "inline"]
    assert len(found) == 6
    for cell, token in zip(cells, found[3:], strict=True):
        assert {child.type for child in token.children or []} <= {"text", "text_special"}
        shown = "".join(child.content for child in token.children or [])
        assert shown.replace("\u200b", "") == answers.visible(" ".join(cell.split())).replace("\u200b", "")


def markdown_tokens(text: str) -> list:
    """Every token, inline ones in place of their block; the texts have characters in place of their escapes."""
    flat = []
    for token in MarkdownIt("commonmark").enable("table").enable("strikethrough").parse(text):
        flat.append(token)
        if token.type == "inline":
            token.content = "".join(child.content for child in token.children or [])
            flat += [child for child in token.children or [] if child.type == "html_inline"]
    return flat


def test_plain_text_makes_no_link_and_no_list() -> None:
    assert "https:" not in plain("see https://example.org")
    for text in ("- x", "+ x", "1. x", "1) x", "# x", "> x", "=====", "---", "*a*", "_a_", "~a~"):
        (opened, inline, _) = MarkdownIt("commonmark").enable("strikethrough").parse(plain(text))
        assert opened.type == "paragraph_open", text
        assert "".join(child.content for child in inline.children or []) == text
    assert plain("kvplug_copy_words -0.5") == "kvplug_copy_words -0.5"


def test_long_answers_are_cut_around_the_difference() -> None:
    same = "s" * 5000
    report = with_answers(same + "A" * 100_000, same + "B")
    (sample,) = answers.shown(report).samples
    assert sample.answers[0].same.startswith("…s")
    assert sample.answers[0].other.startswith("AAA")
    assert len(sample.answers[0].same) + len(sample.answers[0].other) < 1000
    assert sample.answers[1].other == "B"
    assert len(page(report)) < 200_000


def test_long_lists_are_cut_and_results_hold_all(tmp_path: Path) -> None:
    report = with_answers("a", "b", num=500)
    write_report(report, tmp_path)
    text = Page((tmp_path / "report.html").read_text()).text
    assert "20 of 500 samples whose answer differs" in text
    # The only one whose score differs is the last.
    assert "sample 499" in text
    assert "sample 300" not in text
    kept = read_report(tmp_path).accuracy
    assert kept is not None
    assert len(kept.differing) == 500


def test_a_prefix_of_the_other_answer_is_told_to_end() -> None:
    assert "same(ends here)" in rendered(with_answers("same", "same and more")).text


# Files.


@pytest.mark.parametrize("name", SAMPLES)
def test_results_come_back_and_fit_the_schema(reports: dict[str, Report], name: str, tmp_path: Path) -> None:
    report = reports[name]
    report.write(tmp_path / "results.json")
    assert read_report(tmp_path) == read_report(tmp_path / "results.json") == report
    jsonschema.validate(json.loads((tmp_path / "results.json").read_text(encoding="utf-8")), schema.json_schema())


def test_the_document_is_of_the_models() -> None:
    assert (DOCS / "ab_results.md").read_text(encoding="utf-8") == schema.document(), (
        "run: python -m vllm_kvplug.evals.report.schema > docs/ab_results.md"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version: expected 1, found 99"),
        ({"kind": "speed"}, "kind: expected what docs/ab_results.md describes"),
        ({"more": 1}, "more: expected what docs/ab_results.md describes"),
    ],
)
def test_other_results_are_refused_in_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(json.loads(accuracy_report().model_dump_json()) | change))
    with pytest.raises(EvalUsageError) as error:
        read_report(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_results_file_is_refused_in_one_line(tmp_path: Path) -> None:
    for path, content in (
        (tmp_path / "a", None),
        (tmp_path / "b", b"{"),
        (tmp_path / "c", b"\xff"),
        (tmp_path / "d", b"[]"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(EvalUsageError) as error:
            read_report(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_failed_drawing_loses_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(report: Report) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("vllm_kvplug.evals.report.page.page", failing)
    report = accuracy_report()
    with pytest.raises(RuntimeError, match="no fonts"):
        write_report(report, tmp_path / "new" / "folder")
    assert read_report(tmp_path / "new" / "folder") == report


def test_a_missing_library_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EvalError, match=r"jinja2 is not installed; pip install 'vllm-kvplug\[ab\]'") as error:
        write_report(accuracy_report(num_samples=2), tmp_path)
    assert "\n" not in str(error.value)
    assert (tmp_path / "results.json").exists()


def test_the_command_renders_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_kvplug.cli.ab_report import command

    write_report(accuracy_report(), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert sorted(before) == ["report.html", "report.md", "results.json"]
    command(tmp_path / "run", None)
    command(tmp_path / "run" / "results.json", tmp_path / "other")
    for folder in ("run", "other"):
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} == before
    assert "No loss of accuracy shown" in capsys.readouterr().out
    with pytest.raises(EvalUsageError, match="--out"):
        command(tmp_path / "run", tmp_path / "run" / "report.md")


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_the_summary_says_the_verdict_first_and_every_number(width: int) -> None:
    for report in (accuracy_report(), throughput_report()):
        terminal = io.StringIO()
        print_summary(report, Console(file=terminal, width=width))
        text = terminal.getvalue()
        words = "".join(text.split())
        assert words.startswith("".join(report.verdict[0].split()))
        assert max(len(line) for line in text.splitlines()) <= width
        result = tables.result_table(report)
        assert result is not None
        for number in re.findall(r"\d[\d,.]*", " ".join(cell for row in result.rows for cell in row[2:])):
            assert width < 80 or number in text
