"""`kvplug patch`: the patches that give a fork of vLLM its own `--kv-cache-manager`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_kvplug.cli.fork_patches import Match, State, Tree, match, register

app = typer.Typer(
    help="Patch a vLLM source tree or installed package with a first-class choice of the KV cache manager.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

DirArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A source tree of vLLM, a site-packages that has it, or its package.")
]


@app.command("list")
def list_patches() -> None:
    """Show the patches, and what the plugin binds at run time where there is none."""
    console = Console()
    table = _table("Patches", "vLLM", "what the register says")
    for patch in register().patch:
        told = {"files": ", ".join(patch.files)} | {
            name.replace("_", " "): getattr(patch, name) for name in ("why", "how", "unnecessary_when", "can_go")
        }
        table.add_row(patch.vllm, "\n".join(f"{name}: {text}" for name, text in told.items()))
    console.print(table)
    table = _table("Bound at run time", "what, where in vLLM 0.17.1, and by what", "in which vLLM", "why")
    for binding in register().binding:
        which = binding.tree if binding.when == "installed" else f"{binding.tree}, if chosen"
        table.add_row(f"{binding.name}\n{binding.at}\n{binding.by}", which, binding.why)
    console.print(table)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


@app.command("check")
def check(directory: DirArgument) -> None:
    """Say which patch is for this tree, whether it is there, and what it changes. Changes nothing."""
    found = match(Tree.at(directory)).require_known()
    _tell(found, found.state.value)
    _tell_left_over(found, "was left over from before, apply replaces it")
    _tell_changes(found, "changes" if found.state is State.APPLIED else "would change")


@app.command("apply")
def apply(directory: DirArgument) -> None:
    """Apply the patch for this tree. Where it is applied already nothing happens."""
    found = match(Tree.at(directory)).require_known()
    if found.state is State.APPLIED:
        _tell(found, "was applied already; nothing changed")
        return
    found.apply()
    _tell(found, "applied now")
    _tell_changes(found, "changed")


@app.command("revert")
def revert(directory: DirArgument) -> None:
    """Take the patch out again, so that all files are as they were. Where it is not applied nothing happens."""
    found = match(Tree.at(directory)).require_known()
    if found.state is State.FITS:
        found.revert()
        _tell(found, f"was not applied; {'nothing changed' if not found.left_over else 'removed what was left over'}")
        _tell_left_over(found, "removed")
        return
    found.revert()
    _tell(found, "reverted now")
    _tell_changes(found, "restored")


def _tell(found: Match, what: str) -> None:
    print(f"{found.tree.folder}: vLLM {found.tree.version or 'of an unknown version'}, {found.patch.file} {what}")


def _tell_left_over(found: Match, what: str) -> None:
    for path in found.left_over:
        print(f"  {path} {what}")


def _tell_changes(found: Match, verb: str) -> None:
    for path, added, removed in found.changes():
        print(f"  {verb} {path} (+{added} -{removed})")
