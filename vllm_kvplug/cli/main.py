"""The `kvplug` command. Each subcommand is a module. Only `replay` and `bench` import vLLM, while they run."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from vllm_kvplug import __version__
from vllm_kvplug.cli import ab, bench, demo, model, patch, replay
from vllm_kvplug.cli.models.catalogue import UnknownModelError
from vllm_kvplug.errors import KVPlugError, SettingsError, TraceError, UsageError

# typer carries a click of its own in some versions, so its base class is looked up from what typer exports.
_ClickException: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
# Errors of what the user typed; every other error of ours is one of running it.
_USAGE_ERRORS = (UnknownModelError, SettingsError, TraceError, UsageError)
_INTERRUPTED = 130

app = typer.Typer(
    name="kvplug",
    help="Companion of the vLLM plugin vllm_kvplug: managers compared on real serving, replays of their calls, patches "
    "for forks, models that need no hub, and a demonstration.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(model.app, name="model")
app.add_typer(ab.app, name="ab")
app.add_typer(bench.app, name="bench")
app.add_typer(patch.app, name="patch")
app.command("demo")(demo.command)
app.command("replay")(replay.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvplug {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0, 1 for what failed, 2 for what was typed wrong; an error is one message on stderr."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        # Not standalone: typer would print a usage error as several lines.
        status = app(arguments, standalone_mode=False) or 0
        if status != _INTERRUPTED:  # which is how typer tells of a Ctrl-C
            return int(status)
        message = "interrupted"
    except _ClickException as error:
        message, status = f"{error.format_message()} (see kvplug --help)", error.exit_code
    except KVPlugError as error:
        message, status = str(error), 2 if isinstance(error, _USAGE_ERRORS) else 1
    except (KeyboardInterrupt, typer.Abort):
        message, status = "interrupted", _INTERRUPTED
    print(f"kvplug: error: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    main()
