"""`kvplug model build` and `kvplug model list`: the models that need no hub."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_kvplug.cli.models.catalogue import DEFAULT_NAME, recipes
from vllm_kvplug.cli.models.store import build_model, cache_folder, ensure_model, known_names, problem_with

__all__ = ["app", "ensure_model"]

app = typer.Typer(help="Build and list the models that need no hub.", rich_markup_mode=None)

CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache", metavar="DIR", help="Cache folder (default: KVPLUG_CACHE, else the user's cache directory)."
    ),
]


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(known_names())}.")] = DEFAULT_NAME,
    cache: CacheOption = None,
) -> None:
    """Build a model unless it is there and right, and print its folder on standard output."""
    print(build_model(name, cache, report=lambda text: print(text, file=sys.stderr, flush=True)))


@app.command("list")
def list_models(cache: CacheOption = None) -> None:
    """Show the models, what each is for, and whether it is built."""
    folder = cache_folder(cache)
    table = Table(title=f"Models in {folder}", title_justify="left", box=None)
    for heading in ("name", "architecture", "purpose", "state"):
        table.add_column(heading)
    for recipe in recipes():
        present = folder / recipe.name
        problem = problem_with(present, recipe) if present.exists() else None
        state = "not built" if not present.exists() else problem or "built"
        table.add_row(" = ".join((*recipe.aliases, recipe.name)), recipe.architecture, recipe.purpose, state)
    Console().print(table)
