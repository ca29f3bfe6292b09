"""`kvplug replay`: drive managers from a trace alone, without a model or a server, and compare their answers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_kvplug.errors import SettingsError

if TYPE_CHECKING:
    from vllm_kvplug.trace.reader import TraceReader
    from vllm_kvplug.trace.replay import Replay, ReplayedManager

# What is told of each manager, in this order.
_COUNTS = ("admissions", "hit_tokens", "preemptions", "refusals", "withdrawals", "readmissions", "skipped")
_TIMES = ("calls", "total ms", "median us", "ratio")


def command(
    trace: Annotated[Path, typer.Argument(help="The trace's first file; PATH.1, PATH.2, ... are read with it.")],
    manager: Annotated[
        str, typer.Option(metavar="NAME,...", help="Managers: names, or classes as module:Class.")
    ] = "upstream,kvplug",
    manager_config: Annotated[
        list[str] | None, typer.Option(metavar="NAME=JSON", help="Settings of one of them; several times.")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=2, help="Another number of blocks than recorded, the null block included.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare the answers of managers of another policy than the recorded, too.")
    ] = False,
    require_compared: Annotated[
        bool, typer.Option("--require-compared", help="Exit status 3 where recorded answers were not compared.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file as well.")] = None,
) -> None:
    """Replay TRACE on managers: compare every answer, time every method. Exit status 1 where they differ."""
    from vllm_kvplug.trace.reader import TraceReader

    names = _names(manager)
    configs = _configs(names, manager_config or [])
    reader = TraceReader(trace)
    with _quiet_log():
        replay, notes = _prepare(reader, names, configs, num_blocks, exact=exact)
        _run(replay, reader)
    if reader.is_cut:
        notes.append(
            f"the trace's end is cut off, as after a crash: read up to operation {reader.num_operations - 1}"
            if reader.num_operations
            else "the trace's end is cut off, and no operation is before it"
        )
    results = results_of(replay, reader, notes)
    _show(replay, results)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(results, indent=2) + "\n")
        except OSError as error:
            raise SettingsError(f"--json {json_file}: expected a file that can be written, found {error}") from None
    if not results["equal"]:
        raise typer.Exit(1)
    if require_compared and (missing := _not_compared(results)):
        message = f"--require-compared: expected recorded answers to be compared, found {missing}"
        print(f"kvplug: error: {message}", file=sys.stderr)
        raise typer.Exit(3)


def _not_compared(results: Mapping[str, Any]) -> str:
    """Whose answers were not compared with recorded ones; empty: everybody's were."""
    if not results["num_operations"]:
        return "a trace without an operation"
    names = [name for name, result in results["managers"].items() if not result["compared"]]
    return f"none compared for {', '.join(names)}; the notes say why" if names else ""


def _names(manager: str) -> list[str]:
    names = [name.strip() for name in manager.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"--manager: expected one or several names, each once, found {manager!r}")
    return names


def _configs(names: list[str], given: list[str]) -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = {}
    for one in given:
        # A class is module:Class, so the first = ends the name.
        name, _, text = one.partition("=")
        try:
            config = json.loads(text)
        except ValueError:
            config = None
        if name not in names or not isinstance(config, dict) or name in configs:
            raise SettingsError(
                f"--manager-config: expected NAME=JSON, once for each of {', '.join(names)}, found {one!r}"
            )
        configs[name] = config
    return configs


def _prepare(
    reader: TraceReader, names: list[str], configs: Mapping[str, Any], num_blocks: int | None, *, exact: bool
) -> tuple[Replay, list[str]]:
    """The managers, and what there is to say of the comparison."""
    from vllm_kvplug.trace.replay import Replay, ReplayedManager

    # Now vLLM is imported: 10 to 20 s.
    from vllm_kvplug.vllm_glue import replay as glue
    from vllm_kvplug.vllm_glue.version import vllm_version

    header = reader.header
    notes = []
    recorded_num_blocks = header.kv_cache_config.get("num_blocks")
    is_other_pool = num_blocks is not None and num_blocks != recorded_num_blocks
    if is_other_pool:
        notes.append(
            f"recorded with {recorded_num_blocks} blocks, replayed with {num_blocks}: answers are not compared"
        )
    if not reader.is_complete:
        notes.append(
            f"the trace begins with operation {header.first_operation}, what came before is gone: "
            "answers are not compared"
        )
    if header.versions.get("vllm") != str(vllm_version()):
        notes.append(f"recorded with vLLM {header.versions.get('vllm')}, replayed with {vllm_version()}")
    managers, classes = [], []
    for name in names:
        config = configs.get(name, {})
        built = glue.build(name, config, header, num_blocks)
        is_alike = glue.is_alike(name, config, header)
        if not (is_alike or exact or is_other_pool) and reader.is_complete:
            notes.append(
                f"{name} has another policy than the recorded {header.manager.get('name')}: its answers are not "
                "compared (--exact compares them)"
            )
        managers.append(
            ReplayedManager(
                name,
                built,
                is_compared=reader.is_complete and not is_other_pool and (is_alike or exact),
                same_class=header.manager.get("class") == f"{type(built).__module__}:{type(built).__qualname__}",
            )
        )
        classes.append(type(built))
    return Replay(managers, classes), notes


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Without vLLM's information, which is none of this command's. Nobody's level is changed."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


def _run(replay: Replay, reader: TraceReader) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[operations]} operations"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("replaying", total=reader.num_bytes, operations=0)
        replay.run(
            reader,
            lambda num_operations: progress.update(task, completed=reader.num_read_bytes, operations=num_operations),
        )


def results_of(replay: Replay, reader: TraceReader, notes: list[str]) -> dict[str, Any]:
    """What `--json` writes. `equal`: no manager that was compared differs, and none raised."""
    return {
        "trace": str(reader.path),
        "recorded_manager": reader.header.manager,
        "num_operations": replay.num_operations,
        "is_cut": reader.is_cut,
        "notes": notes,
        "equal": all(manager.is_equal for manager in replay.managers),
        "managers": {manager.name: _result_of(manager, replay) for manager in replay.managers},
    }


def _result_of(manager: ReplayedManager, replay: Replay) -> dict[str, Any]:
    first_apart = replay.first_apart.get(manager.name)
    return {
        "compared": manager.is_compared,
        "differences": dict(manager.differences),
        "first_difference": None if manager.first_difference is None else str(manager.first_difference),
        "excused": dict(manager.excused),
        "error": manager.error,
        "apart_from_first_manager": replay.num_apart[manager.name],
        "first_apart": None if first_apart is None else str(first_apart),
        "counts": {name: manager.driver.counts[name] for name in _COUNTS},
        "methods": {
            method: {
                "calls": len(times.durations_ns),
                "total_ms": round(times.total_ms, 3),
                "median_us": round(times.median_us, 3),
            }
            for method, times in sorted(manager.times.items())
        },
    }


def _show(replay: Replay, results: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    recorded = results["recorded_manager"].get("name")
    console.print(f"{results['trace']}: {results['num_operations']} operations, recorded of {recorded}", markup=False)
    for note in results["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(_times_table(Table, results["managers"]))
    counts = Table("decisions", *results["managers"])
    for key in _COUNTS:
        counts.add_row(key.replace("_", " "), *(str(result["counts"][key]) for result in results["managers"].values()))
    console.print(counts)
    for name, result in results["managers"].items():
        console.print(f"{name}: {verdict(result)}", markup=False)
    first = replay.managers[0].name
    for manager in replay.managers[1:]:
        if not manager.is_compared or not replay.managers[0].is_compared:
            apart = results["managers"][manager.name]
            said = f"{apart['apart_from_first_manager']} answers differ, the first: {apart['first_apart']}"
            told = said if apart["first_apart"] else "every answer equal"
            console.print(f"{manager.name} beside {first}: {told}", markup=False)


def _times_table(table_cls: Any, managers: Mapping[str, Any]) -> Any:
    """A line for each method and manager; the ratio is that of the medians to the first manager's."""
    from rich.table import Column

    first = next(iter(managers))
    table = table_cls("method", "manager", *(Column(name, justify="right") for name in _TIMES))
    for method in sorted({method for result in managers.values() for method in result["methods"]}):
        reference = managers[first]["methods"].get(method)
        shown = method
        for name, result in managers.items():
            times = result["methods"].get(method)
            if times is None:
                continue
            has_ratio = name != first and reference is not None and reference["median_us"]
            ratio = f"{times['median_us'] / reference['median_us']:.2f}" if has_ratio else ""
            table.add_row(
                shown, name, str(times["calls"]), f"{times['total_ms']:.1f}", f"{times['median_us']:.1f}", ratio
            )
            shown = ""
    return table


def verdict(result: Mapping[str, Any]) -> str:
    """One manager's result in a sentence."""
    excused = ", ".join(f"{number} of {name}" for name, number in sorted(result["excused"].items()))
    known = f" (known differences, see docs/deviations.md: {excused})" if excused else ""
    if result["error"] is not None:
        return f"RAISED: {result['error']}{known}"
    if not result["compared"]:
        return "not compared with the recorded answers"
    if result["first_difference"] is None:
        return f"every answer equal{known}"
    total = sum(result["differences"].values())
    by_method = ", ".join(f"{method} {number}" for method, number in sorted(result["differences"].items()))
    return f"DIFFERENT: {result['first_difference']}; in all {total} answers differ ({by_method}){known}"
